"""The lock under which torch is changed, which forks respect, and a log call that cannot raise."""

from __future__ import annotations

import logging
import os
import sys
from _thread import RLock
from contextlib import suppress
from functools import partial
from operator import methodcaller

# What changes torch, or tells of it, does so one thread at a time.
lock = RLock()


def _after_fork_in_child() -> None:
    try:
        lock.release()
    except RuntimeError:  # a thread that the child lacks has it
        lock._at_fork_reinit()  # type: ignore[attr-defined]


# A child must find neither the lock of a thread that it lacks nor half of a patch.  Registered
# after what logging registers, since the last comes first, and to patch is to log.  No Python code
# in the parent, which a signal could interrupt.
if hasattr(os, "register_at_fork"):
    # Patching takes less than these 5 seconds, unless a log handler is slow: then the fork goes on
    # without the lock, and has none to release.  So each `next` releases, of these two, the lock if
    # this thread has it, or else the view, which does nothing.
    owned = iter(lock._is_owned, None)  # type: ignore[attr-defined]
    to_release = map((memoryview(b""), lock).__getitem__, owned)
    os.register_at_fork(
        before=partial(lock.acquire, timeout=5),
        after_in_parent=partial(next, map(methodcaller("release"), to_release)),
        after_in_child=_after_fork_in_child,
    )


def log(level: str, message: str, *arguments: object) -> None:
    """Log, whatever somebody's handler or filter raises: torch is being imported.

    Args:
        level: ``"info"`` or ``"warning"``.
        message: a format.
        *arguments: what is to be put into it.
    """
    try:
        getattr(logging.getLogger("dynamo_cyclefix"), level)(message, *arguments, stacklevel=2)
    except Exception as error:
        with suppress(Exception):  # closed, say; `print` would take standard output
            text = message % arguments
            sys.stderr.write(f"dynamo-cyclefix: {text} (logging it raised {error!r})\n")
