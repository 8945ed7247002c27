"""What ``status`` tells: the state of this process, typed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from types import ModuleType

import dynamo_cyclefix
from dynamo_cyclefix import _rewriting, _settings
from dynamo_cyclefix._catalogue import gate as _gate
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._catalogue.model import Patch, Target
from dynamo_cyclefix._errors import CatalogueError, PatchError, Refused
from dynamo_cyclefix._locking import lock
from dynamo_cyclefix._patching import patcher as _patcher
from dynamo_cyclefix._patching.finder import TargetFinder
from dynamo_cyclefix._patching.patcher import HIDDEN, IN_PLACE, Patcher, State, source_of
from dynamo_cyclefix._patching.replacement import decorators, live_function, overrides


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
        way: what activated us; empty if nothing did.
        since: when, ISO 8601 in UTC; empty if nothing did.
        strict: whether strict mode is on.
        error: why no patch can be applied at all; empty if they can.
        patches: one entry for each patch of the catalogue.
    """

    torch: str | None
    python: str
    active: bool
    way: str
    since: str
    strict: bool
    error: str
    patches: tuple[PatchStatus, ...]


def status(finder: TargetFinder | None) -> Status:
    """The status of the process under ``finder``; ``None`` where nothing is active."""
    error = ""
    patches: tuple[PatchStatus, ...] = ()
    patcher: Patcher | None = None
    if finder:
        try:
            finder.catch_up()
        except PatchError as failure:
            error = str(failure)
        with contextlib.suppress(PatchError):
            patcher = finder.patcher()
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
        way=finder.way if finder else "",
        since=datetime.fromtimestamp(finder.since, timezone.utc).isoformat() if finder else "",
        strict=bool(finder and finder.strict),
        error=error,
        patches=patches,
    )


def _of_patch(patcher: Patcher, patch: Patch, finder: TargetFinder | None) -> PatchStatus:
    """The state of a patch, as it is at this moment."""
    if finder is None:
        states = [(State.DISABLED, "not active")] * len(patch.targets)
    elif finder.error:
        states = [(State.REFUSED, finder.error)] * len(patch.targets)
    elif patch.id not in patcher.enabled:
        states = [(State.DISABLED, "switched off")] * len(patch.targets)
    else:
        states = [_of_target(patcher, target) for target in patch.targets]
    # The worst news first; a target that is not loaded yet cannot do harm.
    order = (
        State.DISABLED,
        State.REFUSED,
        State.WRAPPED,
        State.UNSEEN,
        State.APPLIED,
        State.PENDING,
        State.FIXED,
        State.UNAFFECTED,
    )
    state, reason = min(states, key=lambda found: order.index(found[0]))
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
    if state in IN_PLACE:
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
        swaps = (swap for _, swap in patcher.swaps() if target in swap.targets)
        reasons += [HIDDEN for swap in swaps if swap.hidden]
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


def load_torch() -> str | None:
    """Import every target module that the installed torch has; say in a line why none could be."""
    try:
        importlib.import_module("torch._dynamo")
    except PatchError:
        raise
    except Exception as error:
        return f"torch cannot be imported ({error}); install the torch that you deploy"
    failed = sorted(_catalogue.load().modules)
    # Not every release has every module, and some can be imported only after others.
    for _ in range(2):
        modules, failed = failed, []
        for module in modules:
            try:
                importlib.import_module(module)
            except PatchError:
                raise
            except Exception:
                failed.append(module)
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the whole status as JSON")
    parser.add_argument(
        "--require",
        choices=("applied",),
        help="ask a new interpreter instead, started as this one was: it must activate by itself",
    )


# Must not import the package where nothing has: that would activate it.
_IN_NEW_INTERPRETER = """
import sys
if "dynamo_cyclefix" not in sys.modules:
    sys.exit(3)
from dynamo_cyclefix._commands.main import main
sys.exit(main(["status", *sys.argv[1:]]))
"""


def run(arguments: argparse.Namespace) -> int:
    """Import torch's target modules, print the status, and tell whether all is patched."""
    if arguments.require:
        return _require(arguments.json)
    try:
        failure = load_torch()
    except PatchError as error:
        print(f"dynamo-cyclefix status: {error}", file=sys.stderr)
        return 1
    except CatalogueError as error:
        failure = str(error)
    if failure is not None:
        print(f"dynamo-cyclefix status: {failure}", file=sys.stderr)
        return 2
    found = dynamo_cyclefix.status()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        _print(found)
    problem = found.error or ("" if found.active else _settings.not_active())
    if not problem and all(patch.state is State.DISABLED for patch in found.patches):
        problem = "every patch is switched off (DYNAMO_CYCLEFIX_PATCHES)"
    for patch in found.patches:
        if patch.state in (State.REFUSED, State.PENDING) and not problem:
            problem = f"{patch.id}: {patch.state.value}: {patch.reason}"
    if problem:
        print(f"dynamo-cyclefix status: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _require(as_json: bool) -> int:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", _IN_NEW_INTERPRETER, *["--json"] * as_json]
    code = subprocess.call(command)
    if code == 3:
        problem = (
            "a new interpreter is not activated; run `dynamo-cyclefix autostart enable`, or put"
            " what `dynamo-cyclefix sitecustomize-dir` prints on PYTHONPATH"
        )
        if as_json:
            print(json.dumps(dataclasses.asdict(dataclasses.replace(status(None), error=problem))))
        print(f"dynamo-cyclefix status: {problem}", file=sys.stderr)
        return 1
    if code not in (0, 1, 2):
        print(f"dynamo-cyclefix status: a new interpreter ended with {code}", file=sys.stderr)
        return 2
    return code


def _print(found: Status) -> None:
    by = f"activated by {found.way} at {found.since}" if found.way else "not active"
    print(f"torch {found.torch}, Python {found.python}, {by}{', strict' * found.strict}")
    width = max((len(patch.id) for patch in found.patches), default=0)
    for patch in found.patches:
        print(f"{patch.id:{width}}  {patch.state.value}{f' ({patch.reason})' * bool(patch.reason)}")
        for target in patch.targets:
            print(f"{'':{width}}    {target.module}:{target.function}: {target.state.value}")
