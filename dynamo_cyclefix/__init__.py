"""Backport of PyTorch's fix for exceptions that leave Dynamo and pin the Python stack.

Importing the package activates it, unless ``DYNAMO_CYCLEFIX=off``.  That places one light finder
and imports nothing else: the patches are applied when torch's own modules are imported.
"""

import os
import sys
from _thread import RLock

from dynamo_cyclefix._finder import TargetFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dynamo_cyclefix._errors import CatalogueError, PatchError
    from dynamo_cyclefix._status import Status

__all__ = ["CatalogueError", "PatchError", "activate", "deactivate", "status"]
__version__ = "0.1.0"

_active: "TargetFinder | None" = None
# Activation and deactivation come one at a time, whatever threads ask for them.
_lock = RLock()


def activate(
    *,
    strict: "bool | None" = None,
    patches: "str | None" = None,
    accept_unseen: "bool | None" = None,
    way: str = "activate()",
) -> None:
    """Patch torch: at once what is imported already, the rest when it is imported.

    Does nothing, and says so in the log, where ``DYNAMO_CYCLEFIX=off``: that is the operator's
    switch.  Called again, it starts anew with the options given.

    Args:
        strict: raise where an affected torch cannot be patched; by default whether
            ``DYNAMO_CYCLEFIX=strict``.
        patches: the ids of the patches to apply, separated by commas, or, each with a ``-`` before
            it, of those not to apply; by default ``DYNAMO_CYCLEFIX_PATCHES``; all if that is empty.
        accept_unseen: whether strict mode accepts a source that no known release has, if it passes
            every structural check; by default whether ``DYNAMO_CYCLEFIX_UNSEEN=accept``.
        way: what activates, for :func:`status`.

    Raises:
        PatchError: in strict mode, if torch is imported already and could not be patched.  Nothing
            is active then.
    """
    global _active
    mode = _mode()
    if mode == "off":
        _log("INFO", "not activated: DYNAMO_CYCLEFIX=off")
        return
    with _lock:
        deactivate()
        _active = TargetFinder(
            strict=mode == "strict" if strict is None else strict,
            patches=os.environ.get("DYNAMO_CYCLEFIX_PATCHES", "") if patches is None else patches,
            accept_unseen=os.environ.get("DYNAMO_CYCLEFIX_UNSEEN") == "accept"
            if accept_unseen is None
            else accept_unseen,
            way=way,
        )
        sys.meta_path.insert(0, _active)
        if "torch" in sys.modules:
            try:
                _active.catch_up()
            except RuntimeError:
                deactivate()
                raise


def deactivate() -> None:
    """Give every patched function its original code object again, and stop waiting for others."""
    global _active
    with _lock:
        # A reload of this package, or a second copy of it, leaves a finder that `_active` is not.
        finders = [f for f in sys.meta_path if type(f).__module__ == TargetFinder.__module__]
        for finder in finders:
            sys.meta_path.remove(finder)
        if _active is not None and _active not in finders:
            finders.append(_active)
        _active = None
        for finder in finders:
            finder.take_back()  # type: ignore[attr-defined]


def status() -> "Status":
    """Tell what is patched in this process, and why the rest is not.

    Imports neither torch nor any part of it: a patch whose modules are not imported is "pending".
    """
    from dynamo_cyclefix import _status

    return _status.status(_active)


def __getattr__(name: str) -> object:
    # The errors are loaded on demand: most starts of an interpreter see none.
    if name in ("CatalogueError", "PatchError"):
        from dynamo_cyclefix import _errors

        return getattr(_errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _activated_by(way: str) -> None:
    """Name what imported us, for the files that do so when an interpreter starts."""
    if _active is not None:
        _active.way = way


def _mode() -> str:
    mode = os.environ.get("DYNAMO_CYCLEFIX", "").strip().lower() or "on"
    if mode in ("off", "on", "strict"):
        return mode
    _log(
        "WARNING",
        f"DYNAMO_CYCLEFIX={mode!r} is unknown, expected off, on or strict; it counts as on",
    )
    return "on"


def _log(level: str, message: str) -> None:
    import logging

    logging.getLogger(__name__).log(getattr(logging, level), message)


if os.environ.get("DYNAMO_CYCLEFIX", "").strip().lower() != "off":
    activate(way="import")
if os.environ.get("DYNAMO_CYCLEFIX_REPORT") == "1":
    from dynamo_cyclefix import _report  # noqa: F401 - it writes when the process exits
