"""Rewritten code, kept from one process to the next.

To derive it costs some hundredths of an import of Dynamo.  What is kept is a rewrite that passed
every check; it counts only for the very source and the very code object that it was derived from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import CodeType

from dynamo_cyclefix import __version__, _rewrite, _store
from dynamo_cyclefix._catalogue import Target
from dynamo_cyclefix._rewrite import Rewrite


def _made_by() -> bytes:
    """Differs for another version of the rewrite, and where the compiler leaves columns out."""
    columns = getattr(compile("a", "", "eval"), "co_positions", list)
    try:
        with open(_rewrite.__file__, "rb") as file:
            return repr([*columns()]).encode() + file.read()
    except OSError:  # installed as byte code only
        return __version__.encode()


# Now, as long as the file is what was loaded.
_MADE_BY = _made_by()


class Cache:
    """The rewrites of the functions of one module.

    Args:
        module: the module's name.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._entries: dict[str, tuple[bytes, CodeType, CodeType | None, str]]
        self._entries = _store.read(module, _MADE_BY) or {}
        self._changed = False

    def rewrite(
        self, source: str, code: CodeType, qualname: str, targets: Sequence[Target]
    ) -> Rewrite:
        """As :func:`_rewrite.rewrite`."""
        key = repr((qualname, targets))
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        seen, original, replacement, block = self._entries.get(key, (b"", code, None, ""))
        if seen == digest and _rewrite.differs(original, code) is None:
            return Rewrite(original, replacement or original, block)
        new = _rewrite.rewrite(source, code, qualname, targets)
        replacement = None if new.is_fixed else new.replacement
        self._entries[key] = digest, new.original, replacement, new.block
        self._changed = True
        return new

    def save(self) -> None:
        """Keep what is new."""
        if self._changed:
            _store.write(self._module, self._entries, _MADE_BY)
