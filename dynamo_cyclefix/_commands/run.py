"""The ``run`` command: a program, and every Python it starts, with the patches."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from typing import NoReturn

from dynamo_cyclefix import _settings
from dynamo_cyclefix._commands.sitecustomize_dir import directory
from dynamo_cyclefix._errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "%(prog)s SCRIPT [ARG ...] | -m MODULE [ARG ...] | -- PROGRAM [ARG ...]"


def run(arguments: argparse.Namespace) -> NoReturn:
    """Become the program: it has this process, and with it its signals, exit code and terminal."""
    command: list[str] = arguments.rest
    if command[:1] == ["--"]:
        command = command[1:]
    elif command:
        command = _python(*command)
    if not command or arguments.rest == ["-m"]:
        raise CommandError(
            "nothing to run: expected a script, -m and a module, or -- and a program"
        )
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise CommandError(
            "an interpreter with -I, -E or -S ignores PYTHONPATH, by which the program would be"
            " activated; leave the option out, or use `dynamo-cyclefix autostart enable`"
        )
    try:
        _become(command)
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be run ({error.strerror})") from error


def _python(*arguments: str) -> list[str]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *arguments]


def _become(command: list[str]) -> NoReturn:
    environment = {**os.environ, _settings.ACTIVATED_BY: "run"}
    path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([directory(), *([path] if path else [])])
    # Python ignores these two for itself; a program that is not Python expects the default.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvpe(command[0], command, environment)
