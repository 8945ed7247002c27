"""Small files that save work at the next start, kept where Python keeps byte code.

Nothing depends on them: they may be missing, damaged, or impossible to write.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import re
import sys
from typing import Any


def read(name: str, made_by: bytes = b"") -> Any:
    """What was kept under a name.

    Args:
        name: what :func:`write` was given.
        made_by: what it depends on, besides the interpreter.

    Returns:
        ``None`` if nothing was, it is damaged, or something else has made it.
    """
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        with open(_path(name), "rb") as file:
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
        # Another process may be about to read it, or to write the same.
        temporary = f"{path}.{os.getpid()}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(temporary, "xb") as file:  # and follow no link that somebody has put there
                file.write(_digest(content, made_by) + content)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def clear() -> int:
    """Remove all that was kept, for whatever interpreter, and tell how many files that were."""
    ours = re.compile(rf"{__package__}\..+\.kept(\.\d+)?")
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
