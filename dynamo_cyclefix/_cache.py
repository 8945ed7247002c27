"""Rewritten code, kept from one process to the next.

To derive it costs some hundredths of an import of Dynamo.  What is kept is a rewrite that passed
every check; it counts only for the very source and the very code object that it was derived from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import CodeType

from dynamo_cyclefix import __version__, _rewrite, _store
from dynamo_cyclefix._catalogue import Target
from dynamo_cyclefix._rewrite import Rewrite


class Cache:
    """The rewrites of the functions of one module.

    Args:
        module: the module's name.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._entries: dict[str, tuple[CodeType, CodeType | None, str]]
        self._entries = _store.read(module, _writer()) or {}
        self._changed = False

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
        """Keep what is new."""
        if self._changed:
            _store.write(self._module, self._entries, _writer())


@functools.cache
def _writer() -> bytes:
    """Differs for another version of the rewrite."""
    try:
        with open(_rewrite.__file__, "rb") as file:
            return file.read()
    except OSError:  # installed as byte code only
        return __version__.encode()
