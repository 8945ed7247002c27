"""Rewritten code, kept on disk as Python keeps the byte code that it compiled.

Without it, every process that imports Dynamo would spend some hundredths of that import on deriving
the same code again.  An entry is a rewrite that passed every check; it counts only for the very
source and the very code object that it was derived from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Sequence
from types import CodeType

from dynamo_cyclefix import _rewrite
from dynamo_cyclefix._catalogue import Target
from dynamo_cyclefix._rewrite import Rewrite


class Cache:
    """The rewrites of the functions of one module.

    Args:
        module: the module's name.
    """

    def __init__(self, module: str) -> None:
        self._path = _path(module)
        self._entries: dict[str, tuple[CodeType, CodeType | None, str]] = {}
        self._changed = False
        with contextlib.suppress(OSError):
            with open(self._path, "rb") as file:
                digest, content = file.read(32), file.read()
            if digest == _digest(content):
                self._entries = marshal.loads(content)

    def rewrite(
        self, source: str, code: CodeType, qualname: str, targets: Sequence[Target]
    ) -> Rewrite:
        """As :func:`_rewrite.rewrite`."""
        key = repr((qualname, targets))
        if key in self._entries:
            original, replacement, block = self._entries[key]
            start = source.find(block)
            if (
                source.count("\n", 0, start) == code.co_firstlineno - 1
                and source[:start][-1:] in ("", "\n")
                and _rewrite.differs(original, code) is None
            ):
                return Rewrite(original, replacement or original, block)
        new = _rewrite.rewrite(source, code, qualname, targets)
        self._entries[key] = new.original, None if new.is_fixed else new.replacement, new.block
        self._changed = True
        return new

    def save(self) -> None:
        """Write what is new, where byte code is written; nothing depends on it."""
        if not self._changed or not self._path or sys.dont_write_bytecode:
            return
        content = marshal.dumps(self._entries)
        # Another process may be about to read it, or to write the same.
        temporary = f"{self._path}.{os.getpid()}"
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    file.write(_digest(content) + content)
                os.replace(temporary, self._path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)


def _path(module: str) -> str:
    # As for a module beside the package: what an uninstallation leaves in the package's directory
    # could still be imported, as an empty namespace package.
    beside = f"{os.path.dirname(os.path.abspath(__file__))}.{module}.py"
    try:
        return importlib.util.cache_from_source(beside).removesuffix(".pyc") + ".rewrites"
    except NotImplementedError:  # an interpreter that keeps no byte code
        return ""


def _digest(content: bytes) -> bytes:
    """Differs where the content is damaged, and where something else than this has written it."""
    return hashlib.sha256(_writer() + content).digest()


@functools.cache
def _writer() -> bytes:
    with open(_rewrite.__file__, "rb") as file:
        return importlib.util.MAGIC_NUMBER + file.read()
