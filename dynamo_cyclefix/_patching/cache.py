"""Rewritten code, kept from one process to the next.

To derive it costs some hundredths of an import of Dynamo.  What is kept is a rewrite that passed
every check; it counts only for the very source and the very code object that it was derived from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

from dynamo_cyclefix import __version__, _rewriting, _store
from dynamo_cyclefix._catalogue.model import Target
from dynamo_cyclefix._rewriting import Rewrite


def _made_by() -> bytes:
    """Differs for another version of the rewrite, and where the compiler leaves columns out."""
    columns = getattr(compile("a", "", "eval"), "co_positions", list)
    try:
        # The rewrite, and the form of what is kept.
        rewriting = sorted(Path(_rewriting.__file__).parent.glob("*.py"))
        sources = [path.read_bytes() for path in (*rewriting, Path(__file__))]
    except OSError:  # installed as byte code only
        sources = [__version__.encode()]
    return repr([*columns()]).encode() + b"".join(sources)


# Now, as long as the file is what was loaded.
_MADE_BY = _made_by()


class Cache:
    """The rewrites of the functions of one module.

    Args:
        module: the module's name.
        source: its text.
    """

    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source
        self._digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        digest, entries = _store.read(module, _MADE_BY) or (b"", {})
        self._entries: dict[str, tuple[CodeType, CodeType | None, str]]
        self._entries = entries if digest == self._digest else {}
        self._changed = False

    def rewrite(self, code: CodeType, qualname: str, targets: Sequence[Target]) -> Rewrite:
        """As :func:`_rewriting.rewrite`."""
        key = repr((qualname, targets))
        if key in self._entries:
            original, replacement, block = self._entries[key]
            new = Rewrite(original, replacement or original, block)
            if not _rewriting.differs(original, code) and not _rewriting.changes(*new[:2]):
                return new
        new = _rewriting.rewrite(self._source, code, qualname, targets)
        self._entries[key] = new.original, None if new.is_fixed else new.replacement, new.block
        self._changed = True
        return new

    def save(self) -> None:
        """Keep what is new."""
        if self._changed:
            _store.write(self._module, (self._digest, self._entries), _MADE_BY)
