"""The state of this process, typed: what ``dynamo_cyclefix.status()`` returns."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from types import ModuleType

from dynamo_cyclefix import Finder, _rewriting
from dynamo_cyclefix._catalogue import gate as _gate
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._catalogue.model import Patch, Target
from dynamo_cyclefix._errors import PatchError, Refused
from dynamo_cyclefix._locking import lock
from dynamo_cyclefix._patching import patcher as _patcher
from dynamo_cyclefix._patching.activation import Activation
from dynamo_cyclefix._patching.functions import decorators, live_function, overrides
from dynamo_cyclefix._patching.patcher import HIDDEN, Patcher, source_of
from dynamo_cyclefix._patching.state import State


@dataclass(frozen=True)
class TargetStatus:
    """The state of one function, and why it is that."""

    module: str
    function: str
    state: State
    reason: str


@dataclass(frozen=True)
class PatchStatus:
    """The state of a patch: that of its targets, taken together."""

    id: str
    title: str
    state: State
    reason: str
    targets: tuple[TargetStatus, ...]


@dataclass(frozen=True)
class Status:
    """The patches of one process.

    Attributes:
        torch: the version of the imported torch; ``None`` if it is not imported.
        python: the version of the interpreter.
        active: whether patches are, or will be, applied; not so after a fault of our own.
        activated_by: what activated us; empty if nothing did.
        since: when, ISO 8601 in UTC; empty if nothing did.
        strict: whether strict mode is on.
        error: why no patch can be applied at all; empty if they can.
        patches: one entry for each patch of the catalogue.
    """

    torch: str | None
    python: str
    active: bool
    activated_by: str
    since: str
    strict: bool
    error: str
    patches: tuple[PatchStatus, ...]


def status(activation: Activation | None) -> Status:
    """The status of the process; ``None`` where nothing is active."""
    finder = None if activation is None else activation.finder
    error = ""
    patches: tuple[PatchStatus, ...] = ()
    patcher: Patcher | None = None
    if activation:
        try:
            activation.catch_up()
        except PatchError as failure:
            error = str(failure)
        with contextlib.suppress(PatchError):
            patcher = activation.patcher()
    try:
        if patcher is None:
            patcher = Patcher(_catalogue.load(), ())
        with lock:
            patches = tuple(
                _of_patch(patcher, p, finder) for p in patcher.catalogue.patches.values()
            )
    except Exception as failure:  # whatever it was, this is where it is told
        error = error or f"{type(failure).__name__}: {failure}"
    if finder:
        error = finder.error or error
        if finder not in sys.meta_path and not error:
            error = (
                "our finder was removed from sys.meta_path, or wrapped there by another program:"
                " later imports may not be patched"
            )
    return Status(
        torch=_patcher.torch_version() if "torch" in sys.modules else None,
        python=sys.version.split()[0],
        active=finder is not None and not finder.error,
        activated_by=finder.activated_by if finder else "",
        since=datetime.fromtimestamp(finder.since, timezone.utc).isoformat() if finder else "",
        strict=bool(finder and finder.strict),
        error=error,
        patches=patches,
    )


def _of_patch(patcher: Patcher, patch: Patch, finder: Finder | None) -> PatchStatus:
    """The state of a patch, as it is at this moment."""
    if finder is None:
        states = [(State.DISABLED, "not active")] * len(patch.targets)
    elif finder.error:
        states = [(State.REFUSED, finder.error)] * len(patch.targets)
    elif patch.id not in patcher.enabled:
        states = [(State.DISABLED, "switched off")] * len(patch.targets)
    else:
        states = [_of_target(patcher, target) for target in patch.targets]
    state, reason = min(states, key=lambda found: found[0].rank)
    targets = tuple(
        TargetStatus(target.module, target.function, *found)
        for target, found in zip(patch.targets, states, strict=True)
    )
    return PatchStatus(patch.id, patch.title, state, reason, targets)


def _of_target(patcher: Patcher, target: Target) -> tuple[State, str]:
    state, reason = patcher.states.get(target) or _unprepared(target)
    module = sys.modules.get(target.module)
    if state is State.UNAFFECTED and module is not None and _is_fixed(module, target):
        return State.FIXED, reason
    if state.in_place:
        try:
            if module is None:
                raise Refused(f"{target.module} was removed from sys.modules")
            if not patcher.runs_replacement(live_function(module, target.outermost)):
                raise Refused("its code was exchanged")
        except Refused as error:
            return State.REFUSED, f"applied, but replaced since by another program: {error}"
        reasons = [reason, *overrides(module, target.function)]
        if state is not State.WRAPPED:  # where the wrapper around it is our own
            reasons += decorators(module, target.outermost)
        changes = (change for _, change in patcher.changes() if target in change.targets)
        reasons += [HIDDEN for change in changes if change.hidden]
        reason = "; ".join(filter(None, reasons))
    return state, reason


def _unprepared(target: Target) -> tuple[State, str]:
    if "torch" in sys.modules and target.module not in sys.modules:
        version = _patcher.torch_version()
        with contextlib.suppress(Refused):
            if not _gate.is_affected(version, target.affected):
                return State.UNAFFECTED, f"torch {version} is not in {target.affected}"
    return State.PENDING, f"{target.module} is not imported yet"


def _is_fixed(module: ModuleType, target: Target) -> bool:
    """Of a version outside the affected ones, tell whether that is because it has the fix."""
    try:
        function = live_function(module, target.outermost)
        return _rewriting.is_fixed(source_of(module), function.__code__, target.outermost, target)
    except Refused:
        return False
