"""The ``status`` command: what is patched, and why the rest is not."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import dynamo_cyclefix
from dynamo_cyclefix import _json, _settings
from dynamo_cyclefix._commands.loading import load_torch
from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._patching import status as _status
from dynamo_cyclefix._patching.state import State


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
    load_torch()
    found = dynamo_cyclefix.status()
    if arguments.json:
        print(_json.document(dataclasses.asdict(found), indent=2))
    else:
        _print(found)
    problem = found.error or ("" if found.active else _settings.not_active())
    if not problem and all(patch.state is State.DISABLED for patch in found.patches):
        problem = "every patch is switched off (DYNAMO_CYCLEFIX_PATCHES)"
    for patch in found.patches:
        if patch.state in (State.REFUSED, State.PENDING) and not problem:
            problem = f"{patch.id}: {patch.state.words}: {patch.reason}"
    if problem:
        raise CommandError(problem, 1)
    return 0


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
            found = dataclasses.replace(_status.status(None), error=problem)
            print(_json.document(dataclasses.asdict(found), indent=2))
        raise CommandError(problem, 1)
    if code not in (0, 1, 2):
        raise CommandError(f"a new interpreter ended with {code}")
    return code


def _print(found: _status.Status) -> None:
    by = f"activated by {found.activated_by} at {found.since}"
    by = by if found.activated_by else "not active"
    print(f"torch {found.torch}, Python {found.python}, {by}{', strict' * found.strict}")
    width = max((len(patch.id) for patch in found.patches), default=0)
    for patch in found.patches:
        print(f"{patch.id:{width}}  {patch.state.words}{f' ({patch.reason})' * bool(patch.reason)}")
        for target in patch.targets:
            print(f"{'':{width}}    {target.module}:{target.function}: {target.state.words}")
