"""Tells whether two code objects are the same, and what a rewrite may not change of one."""

from __future__ import annotations

import sys
from types import CodeType

# What callers, closures and tracebacks can see of a function, and a rewrite has to keep.
_KEPT = tuple(
    part
    for part in (
        "co_name",
        "co_qualname",
        "co_filename",
        "co_firstlineno",
        "co_argcount",
        "co_posonlyargcount",
        "co_kwonlyargcount",
        "co_freevars",
    )
    if hasattr(CodeType, part)
)
# What a code object consists of, as far as this interpreter has it.  `co_lnotab` repeats the line
# table, and constants are compared one by one.
_PARTS = _KEPT + tuple(
    part
    for part in (
        "co_flags",
        "co_nlocals",
        "co_varnames",
        "co_names",
        "co_cellvars",
        "co_stacksize",
        "co_code",
        "co_exceptiontable",
        "co_linetable",
    )
    if hasattr(CodeType, part)
)
# `CO_NOFREE`, which Python 3.11 dropped: set where a function has no cells, as when it loses them.
_NO_CELLS = 0x40 if sys.version_info < (3, 11) else 0


def differs(one: CodeType, other: CodeType, path: str = "") -> str | None:
    """Say in what two code objects differ, constants included; ``None`` if in nothing."""
    path = f"{path}.{one.co_name}" if path else one.co_name
    for part in _PARTS:
        if getattr(one, part) != getattr(other, part):
            return f"{part} of {path} differs"
    if len(one.co_consts) != len(other.co_consts):
        return f"co_consts of {path} differs"
    for ours, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(ours, CodeType) and isinstance(theirs, CodeType):
            if difference := differs(ours, theirs, path):
                return difference
        # Equal is not the same: 1 == True == 1.0, and 0.0 == -0.0; sets have no order.
        elif ours != theirs or _exact(ours) != _exact(theirs):
            return f"co_consts of {path} differs"
    return None


def _exact(constant: object) -> object:
    if isinstance(constant, tuple):
        return tuple(map(_exact, constant))
    if isinstance(constant, frozenset):
        return frozenset(map(_exact, constant))
    return type(constant), repr(constant)


def changes(original: CodeType, replacement: CodeType) -> str | None:
    """Name what a replacement has to keep and does not; ``None`` if it keeps everything."""
    for part in _KEPT:
        if getattr(replacement, part) != getattr(original, part):
            return part
    if (replacement.co_flags ^ original.co_flags) & ~_NO_CELLS:
        return "co_flags"
    return None
