"""The meta-path finder that knows the targets, and has them patched before anyone can use them.

Loaded before torch's first submodule is executed, and with it what does the work
(:mod:`dynamo_cyclefix._patching.patcher`).
"""

from __future__ import annotations

import logging
import os
import sys
from _thread import RLock
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING

from dynamo_cyclefix import Waiting, patching_loader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from dynamo_cyclefix._errors import PatchError
    from dynamo_cyclefix._patching.patcher import Patcher

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


def say(level: str, message: str, *arguments: object) -> None:
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


def wake(waiting: Waiting) -> TargetFinder:
    """Make the finder that waits one that knows the targets.

    The same object, since other programs may hold it where no one would find it.
    """
    with lock:
        if not isinstance(waiting, TargetFinder):
            # In this order: another thread may have it in hand.
            TargetFinder._prepare(waiting)  # type: ignore[arg-type]
            waiting.__class__ = TargetFinder
            retire_others(waiting)
    return waiting  # type: ignore[return-value]


def retire_others(but: Waiting | None = None) -> None:
    """Stop every finder on ``sys.meta_path`` that a reload, or a second copy of the package, left.

    Args:
        but: the finder that stays.
    """
    for finder in list(sys.meta_path):
        home = str(type(finder).__module__)
        if home.partition(".")[0] == "dynamo_cyclefix" and finder is not but:
            sys.meta_path.remove(finder)
            # Without it, it has patched nothing yet.
            if hasattr(finder, "take_back"):
                finder.take_back()


class TargetFinder(Waiting):
    """A finder that has the patches at hand."""

    def _prepare(self) -> None:
        self._patcher: Patcher | None = None
        self._hidden = False
        self._retired = False

    def patcher(self) -> Patcher | None:
        """What applies the patches; ``None`` if it cannot be made, which is said once.

        Raises:
            PatchError: in strict mode, if it cannot be made.
        """
        # Of two threads that import torch at once, each would make one.
        with lock:
            if self.error and self.strict:
                raise self._strict_error()
            if self._retired:
                return None
            if self._patcher is None and not self.error:
                try:
                    from dynamo_cyclefix._patching import patcher as _patcher

                    self._patcher = _patcher.make(self.strict, self.patches, self.accept_unseen)
                except Exception as error:
                    self.give_up(error)
            return self._patcher

    def give_up(self, error: Exception) -> None:
        """After a fault of our own: leave torch alone from here on, and say so.

        Raises:
            PatchError: in strict mode.
        """
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"
            try:
                if self._patcher is not None:
                    self._patcher.take_back()
                    self._patcher = None
            finally:
                say("warning", "no patch is applied: %s", self.error)
        if self.strict:
            raise self._strict_error() from error

    def _strict_error(self) -> PatchError:
        from dynamo_cyclefix._errors import PatchError

        return PatchError(
            f"no patch can be applied ({self.error}); set DYNAMO_CYCLEFIX=on to go on without"
        )

    def catch_up(self, executed: Sequence[ModuleType] = ()) -> None:
        """Patch modules that have just been executed, and all that were imported past this finder.

        Raises:
            PatchError: in strict mode, if an affected torch cannot be patched.
        """
        patcher = self.patcher()
        if patcher is None:
            return
        # An import inside a compiled call: Dynamo must neither trace nor count our own frames.
        eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
        callback = eval_frame and eval_frame.set_eval_frame(None)
        try:
            patcher.catch_up(executed)
            self._hide()
        except Exception as error:
            from dynamo_cyclefix._errors import PatchError

            if isinstance(error, PatchError):
                raise
            self.give_up(error)
        finally:
            if eval_frame:
                eval_frame.set_eval_frame(callback)

    def _hide(self) -> None:
        """Have Dynamo skip the finder's frames, as it skips those of the import system."""
        skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip_code is not None and not self._hidden:
            self._hidden = True
            ours = type(patching_loader(None, self)), type(self._patcher)
            for owner in (*TargetFinder.__mro__, *ours):
                for method in vars(owner).values():
                    if hasattr(method, "__code__"):
                        skip_code(method.__code__)

    def take_back(self) -> None:
        """Give every function its original code object again, for good.

        An import that is under way has this finder in hand, and patches nothing from here on.
        """
        with lock:
            self._retired = True
            if self._patcher is not None:
                self._patcher.take_back()

    @property
    def has_taken_back(self) -> bool:
        """Whether nothing that it patched is left."""
        return self._patcher is None or not self._patcher.swaps()

    def wants(self, name: str) -> bool:
        """See :meth:`Waiting.wants`; called under CPython's global import lock."""
        patcher = self._patcher
        if patcher is None or self._retired:
            return self.strict and bool(self.error)  # which is raised when it is executed
        if name in patcher.modules:
            return True
        return bool(patcher.overdue())

    def wake(self) -> None:
        """See :meth:`Waiting.wake`.

        Raises:
            PatchError: in strict mode, if no patch can be applied.
        """
        self.patcher()
