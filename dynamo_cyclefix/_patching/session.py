"""What the package offers: to activate, to deactivate, and to tell what became of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dynamo_cyclefix import _settings
from dynamo_cyclefix._errors import CatalogueError, PatchError
from dynamo_cyclefix._locking import lock, log
from dynamo_cyclefix._patching.activation import begin, retire_others

if TYPE_CHECKING:
    from dynamo_cyclefix._patching.patcher import Patcher
    from dynamo_cyclefix._patching.status import Status

__all__ = ["CatalogueError", "PatchError", "activate", "deactivate", "status"]


def activate(
    *,
    strict: bool | None = None,
    patches: str | None = None,
    accept_unseen: bool | None = None,
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

    Raises:
        PatchError: in strict mode, if torch is imported already and could not be patched.  Nothing
            is active then, or after an interrupt.
    """
    start("activate()", strict, patches, accept_unseen)


def start(
    activated_by: str,
    strict: bool | None = None,
    patches: str | None = None,
    accept_unseen: bool | None = None,
) -> None:
    """What :func:`activate` does, for whatever activates, which :func:`status` names."""
    import dynamo_cyclefix  # by its name: the package may have been imported anew

    settings = _settings.read()
    if settings.mode == "off":
        log("info", "not activated: DYNAMO_CYCLEFIX=off")
        return
    with lock:
        deactivate()
        finder = dynamo_cyclefix.Finder(
            activated_by,
            settings.mode == "strict" if strict is None else strict,
            settings.patches if patches is None else patches,
            settings.accept_unseen if accept_unseen is None else accept_unseen,
        )
        dynamo_cyclefix._active = finder
        sys.meta_path.insert(0, finder)
        if "torch" in sys.modules:
            try:
                begin(finder).catch_up()
            except BaseException:
                deactivate()
                raise


def deactivate() -> None:
    """Give every patched function its original code object again, and stop waiting for others."""
    import dynamo_cyclefix

    with lock:
        active = dynamo_cyclefix._active
        try:
            retire_others()
            # Another program may have removed it from `sys.meta_path`.
            if active is not None and active.activation is not None:
                active.activation.restore()
        finally:
            # What a signal has interrupted can be asked for again.
            activation = None if active is None else active.activation
            if activation is None or activation.has_restored:
                dynamo_cyclefix._active = None


def status() -> Status:
    """Tell what is patched in this process, and why the rest is not.

    Imports neither torch nor any part of it: a patch whose modules are not imported is "pending".
    """
    import dynamo_cyclefix
    from dynamo_cyclefix._patching import status as _status

    active = dynamo_cyclefix._active
    return _status.status(begin(active) if active else None)


def patcher() -> Patcher | None:
    """What applies the patches in this process; ``None`` where nothing is active.

    Raises:
        PatchError: in strict mode, if it cannot be made.
    """
    import dynamo_cyclefix

    active = dynamo_cyclefix._active
    return begin(active).patcher() if active else None
