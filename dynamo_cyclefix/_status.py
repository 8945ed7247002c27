"""What ``status`` tells: the state of this process, typed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone

import dynamo_cyclefix
from dynamo_cyclefix import _catalogue, _patcher
from dynamo_cyclefix._errors import CatalogueError, PatchError
from dynamo_cyclefix._finder import TargetFinder
from dynamo_cyclefix._patcher import PatchStatus, State


@dataclass(frozen=True)
class Status:
    """The patches of one process.

    Attributes:
        torch: the version of the imported torch; ``None`` if it is not imported.
        python: the version of the interpreter.
        active: whether patches are, or will be, applied.
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
    try:
        if finder:
            finder.catch_up()
            patcher = finder.patcher()
        else:
            patcher = _patcher.Patcher(_catalogue.load(), ())
        if patcher is not None:
            patches = patcher.status()
    except (CatalogueError, PatchError) as failure:
        error = str(failure)
    if finder:
        error = finder.error or error
        if finder not in sys.meta_path and not error:
            error = "our finder was removed from sys.meta_path: later imports are not patched"
    return Status(
        torch=_patcher.torch_version() if "torch" in sys.modules else None,
        python=sys.version.split()[0],
        active=finder is not None,
        way=finder.way if finder else "",
        since=datetime.fromtimestamp(finder.since, timezone.utc).isoformat() if finder else "",
        strict=bool(finder and finder.strict),
        error=error,
        patches=patches,
    )


def load_torch() -> str | None:
    """Import every target module that the installed torch has; say in a line why none could be."""
    try:
        importlib.import_module("torch._dynamo")
    except ImportError as error:
        return f"torch cannot be imported ({error}); install the torch that you deploy"
    failed = sorted(_catalogue.load().modules)
    # Not every release has every module, and some can be imported only after others.
    for _ in range(2):
        modules, failed = failed, []
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError:
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
from dynamo_cyclefix._cli import main
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
    problem = found.error or ("" if found.active else "not active (DYNAMO_CYCLEFIX=off)")
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
    by = f"activated by {found.way} at {found.since}" if found.active else "not active"
    print(f"torch {found.torch}, Python {found.python}, {by}{', strict' * found.strict}")
    width = max((len(patch.id) for patch in found.patches), default=0)
    for patch in found.patches:
        print(f"{patch.id:{width}}  {patch.state.value}{f' ({patch.reason})' * bool(patch.reason)}")
        for target in patch.targets:
            print(f"{'':{width}}    {target.module}:{target.function}: {target.state.value}")
