"""The ``autostart`` command: a ``.pth`` file that activates in every start of an interpreter."""

from __future__ import annotations

import argparse
import contextlib
import json
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from dynamo_cyclefix import _json, _store
from dynamo_cyclefix._errors import CommandError

NAME = "dynamo_cyclefix_autostart.pth"

# `site` executes each line that begins with `import`, and prints why one fails, as when the package
# was uninstalled.  Every interpreter compiles the line, in a virtual environment twice.
_FIRST = "# Written by `dynamo-cyclefix autostart enable`"
CONTENT = f"""\
{_FIRST}; removed by `dynamo-cyclefix autostart disable`.
import dynamo_cyclefix
"""
_MADE = "# Directories made for it: "
_MARK = "dynamo_cyclefix_autostart="

# Must not import the package: that would activate it.
_ASK = f"""
import json, sys
found = sys.modules.get("dynamo_cyclefix")
print("\\n{_MARK}" + json.dumps(found and (found._active.activated_by if found._active else "")))
"""

_INSTEAD = "put what `dynamo-cyclefix sitecustomize-dir` prints on PYTHONPATH"


def _directory(user: bool) -> Path:
    """The site directory of the running interpreter.

    Raises:
        CommandError: no start of this interpreter reads such a directory.
    """
    if sys.flags.no_site:
        raise CommandError("an interpreter with -S reads no .pth file; leave -S out")
    if not user:
        found = sysconfig.get_path("purelib")
        directories = site.getsitepackages()
        return Path(found if found in directories else directories[0])
    if not site.ENABLE_USER_SITE:
        raise CommandError(
            "this interpreter does not read the user site directory (a virtual environment, -s, -I"
            f" or PYTHONNOUSERSITE): leave --user out, or {_INSTEAD}"
        )
    return Path(site.getusersitepackages())


def _ours(file: Path) -> str | None:
    """What is in the file; ``None`` if there is none.

    Raises:
        CommandError: somebody else wrote it.
        OSError: it cannot be read.
    """
    try:
        content = file.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if not content.startswith(_FIRST):
        raise CommandError(f"{file} was not written by this command; remove it yourself")
    return content


def _enable(file: Path) -> str:
    missing = [place for place in file.parents if not place.exists()]
    content = CONTENT + f"{_MADE}{len(missing)}\n" * bool(missing)
    try:
        before = _ours(file)
        if before and CONTENT in before:
            return f"already enabled by {file}"
        if before:  # of another release of ours
            content = CONTENT + "".join(before.partition(_MADE)[1:])
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.touch(0o644)  # nobody else may write what every start runs, whatever the umask
            file.write_text(content, "utf-8")
        except OSError:
            if before is None:
                file.unlink(missing_ok=True)
            raise
    except OSError as error:
        _remove_directories(missing)
        user = ", or use --user" if site.ENABLE_USER_SITE else ""
        raise CommandError(
            f"{file} cannot be written ({error.strerror}); enable it where the image is built, as a"
            f" user who may write there{user}"
        ) from error
    if new_interpreter() is None:
        file.unlink()
        _remove_directories(missing)
        raise CommandError(
            f"a new interpreter is not activated by {file}, which was removed again: this site"
            " ignores .pth files, or finds no package when it reads them; install the package, or"
            f" {_INSTEAD}"
        )
    return f"wrote {file}, {len(content)} bytes:\n{content.rstrip()}"


def _disable(file: Path) -> str:
    try:
        content = _ours(file)
        if content is None:
            return f"not enabled: there is no {file}"
        file.unlink()
    except OSError as error:
        raise CommandError(f"{file} cannot be removed ({error.strerror})") from error
    made = content.partition(_MADE)[2].strip()
    _remove_directories(file.parents[: int(made)] if made.isdecimal() else ())
    return f"removed {file}"


def _remove_directories(made: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):
        for directory in made:
            directory.rmdir()


def new_interpreter() -> str | None:
    """What activates us in a new interpreter that is started as this one was.

    Returns:
        What does; empty if the package is loaded and switched off; ``None`` if it is not loaded.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    child = subprocess.run(
        [sys.executable, *flags, "-c", _ASK],
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    for line in child.stdout.splitlines():
        if line.startswith(_MARK):  # and not what another start-up hook prints
            said: str | None = json.loads(line.removeprefix(_MARK))
            return said
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action",
        choices=("enable", "disable", "status"),
        help="`disable` also removes the rewritten code that is kept on disk, for every way in",
    )
    parser.add_argument("--user", action="store_true", help="in the user site directory")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write or remove the file, or tell whether it is there, and what a new interpreter does."""
    file = _directory(arguments.user) / NAME
    if arguments.action == "enable":
        outcome = _enable(file)
    elif arguments.action == "disable":
        outcome = _disable(file)
        # What was kept to import torch faster, for whatever way in; where it is used still, it is
        # made again.
        kept = _store.clear()
        outcome += f"; removed {kept} files of rewritten code" * bool(kept)
    else:
        outcome = f"{'enabled by' if file.exists() else 'not enabled: there is no'} {file}"
    activated_by = new_interpreter()
    enabled = file.exists()
    if arguments.json:
        found = {
            "outcome": outcome,
            "file": str(file),
            "content": file.read_text("utf-8", errors="replace") if enabled else None,
            "enabled": enabled,
            "new_interpreter": activated_by,
        }
        print(_json.document(found, indent=2))
    else:
        print(outcome)
        print(f"a new interpreter: {_describe(activated_by)}")
    return int(arguments.action == "status" and not (enabled and activated_by))


def _describe(activated_by: str | None) -> str:
    if activated_by is None:
        return "not activated"
    if not activated_by:
        return "loads the package, which is off (DYNAMO_CYCLEFIX=off)"
    return f"activated by {activated_by}"
