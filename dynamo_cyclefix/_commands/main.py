"""The command line: one sub-command a module, which is imported only when it is asked for."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from dynamo_cyclefix import __version__
from dynamo_cyclefix._errors import CommandError

_COMMANDS = {
    "status": ("status", "tell what is patched on the installed torch, and why the rest is not"),
    "verify": ("verify", "prove on the installed torch that frames are released"),
    "sources": ("sources", "compare a release's functions with the sources seen before"),
    "autostart": ("autostart", "activate in every start of this interpreter, by a .pth file"),
    "sitecustomize-dir": ("sitecustomize_dir", "print the directory that PYTHONPATH activates by"),
    "run": ("run", "run a program, and every Python that it starts, with the patches"),
    "scan": ("scan", "list places in the installed torch that can still hold an exception"),
    "measure": ("measure", "measure memory, live frames and restarts, with and without patches"),
    "upstream": ("upstream", "print what PyTorch's maintainers need to fix what a patch fixes"),
    "diff": ("diff", "show what runs instead of the installed torch's own functions"),
}

# Whoever reads our output has gone, or the disk is full.
_OUTPUT_LOST = {errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code: 0 what was asked holds, 1 it does not, 2 it could not be found out.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if sys.stderr is None:  # closed; `print` would take standard output instead
        sys.stderr = io.StringIO()
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    parser = argparse.ArgumentParser(
        prog="dynamo-cyclefix",
        description="Stop exceptions that leave PyTorch's Dynamo from pinning the Python stack.",
        epilog="Exit codes: 0 holds, 1 does not hold, 2 could not run.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in argv[:1]:
            try:
                chosen = importlib.import_module(f"{__package__}.{module}")
            except Exception as error:
                print(
                    "dynamo-cyclefix: the installation is damaged:"
                    f" {type(error).__name__}: {error}",
                    file=sys.stderr,
                )
                return 2
            chosen.add_arguments(command)
    commands.add_parser("help", help="show this text, or that of a command")
    # What follows `run` belongs to the program; argparse would take a `--` out of it.
    is_run = argv[:1] == ["run"] and argv[1:] not in (["-h"], ["--help"])
    arguments = parser.parse_args(argv[:1] if is_run else argv)
    arguments.rest = argv[1:]
    try:
        try:
            code = int(chosen.run(arguments))
        except CommandError as error:
            print(f"dynamo-cyclefix {arguments.command}: {error}", file=sys.stderr)
            code = error.exit_code
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sys.stdout.flush()
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_LOST:
            # The exit must not try again.
            if sys.stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"dynamo-cyclefix: standard output cannot be written ({error})", file=sys.stderr)
        else:
            traceback.print_exc()
        return 2
    return code
