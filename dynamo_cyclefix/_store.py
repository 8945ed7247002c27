"""Small files that save work at the next start, kept where Python keeps byte code.

Nothing depends on them: they may be missing, damaged, or impossible to write.  They hold code that
later processes run, so one that somebody else may have written is as good as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import re
import stat
import sys
from functools import partial
from typing import Any


def read(name: str, made_by: bytes = b"") -> Any:
    """What was kept under a name.

    Args:
        name: what :func:`write` was given.
        made_by: what it depends on, besides the interpreter.

    Returns:
        ``None`` if nothing was, it is damaged, something else has made it, or somebody else may
        have.
    """
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        path = _path(name)
        if not _is_safe_directory(os.path.dirname(path)):
            return None
        with open(path, "rb") as file:
            if not _is_ours(os.fstat(file.fileno()), stat.S_IWGRP | stat.S_IWOTH):
                return None
            digest, content = file.read(32), file.read()
        if digest == _digest(content, made_by):
            return marshal.loads(content)
    return None


def write(name: str, kept: Any, made_by: bytes = b"") -> None:
    """Keep what ``marshal`` can write, if byte code may be written."""
    if sys.dont_write_bytecode:
        return
    with contextlib.suppress(OSError, ValueError):
        content = marshal.dumps(kept)
        path = _path(name)
        # Another process may be about to read it, or to write the same: in another container too,
        # where process ids are the same.
        temporary = f"{path}.{os.urandom(8).hex()}"
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o775, exist_ok=True)
        if not _is_safe_directory(directory):
            return
        # No wider than the package's own source, as for byte code.
        mode = 0o644
        with contextlib.suppress(OSError):
            mode &= os.stat(__file__).st_mode | stat.S_IWUSR
        try:
            # "x" follows no link that somebody has put there.
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                file.write(_digest(content, made_by) + content)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def clear() -> int:
    """Remove all that was kept, for whatever interpreter, and tell how many files that were."""
    ours = re.compile(rf"{__package__}\..+\.kept(\.[0-9a-f]+)?")
    removed = 0
    # Beside the package, too, if `PYTHONPYCACHEPREFIX` was not set when it was kept.
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    directories = {os.path.join(beside, "__pycache__")}
    with contextlib.suppress(OSError):  # an interpreter that keeps no byte code
        directories.add(os.path.dirname(_path("")))
    for directory in directories:
        with contextlib.suppress(OSError):
            names = list(filter(ours.fullmatch, os.listdir(directory)))
            for name in names:
                os.unlink(os.path.join(directory, name))
                removed += 1
            if names and not os.listdir(directory):
                os.rmdir(directory)
    return removed


def _is_safe_directory(path: str) -> bool:
    """Whether nobody may exchange the files in it but their owner, this user and root."""
    status = os.stat(path)
    # A group is let in, as Python's own byte code there is open to it: what one of its members puts
    # there is owned by that member.
    sticky = status.st_mode & stat.S_ISVTX
    return _is_ours(status, 0 if sticky else stat.S_IWOTH)


def _is_ours(status: os.stat_result, forbidden: int) -> bool:
    """Whether this user or root owns it, and its mode has none of these bits."""
    if not hasattr(os, "geteuid"):  # Windows, which has neither
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & forbidden


def _path(name: str) -> str:
    # As for a module beside the package: what an uninstallation leaves in the package's directory
    # could still be imported, as an empty namespace package.
    beside = f"{os.path.dirname(os.path.abspath(__file__))}.{name}.py"
    try:
        return importlib.util.cache_from_source(beside).removesuffix("pyc") + "kept"
    except NotImplementedError as error:
        raise OSError("this interpreter keeps no byte code") from error


def _digest(content: bytes, made_by: bytes) -> bytes:
    return hashlib.sha256(importlib.util.MAGIC_NUMBER + made_by + content).digest()
