"""From a function's source and the edits to it to the code object that runs instead."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import CodeType
from typing import NamedTuple, Protocol

from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting import units
from dynamo_cyclefix._rewriting.compare import changes, differs
from dynamo_cyclefix._rewriting.edits import Edit
from dynamo_cyclefix._rewriting.scopes import Scope, require_plain


class Edited(Protocol):
    """A function, outermost or nested, and the edits to it; a target of the catalogue is one."""

    @property
    def function(self) -> str: ...
    @property
    def edits(self) -> Sequence[Edit]: ...


class Rewrite(NamedTuple):
    """An outermost function before and after.

    Attributes:
        original: its code object, compiled from the untouched source.
        replacement: the code object with all edits.  The same object as ``original`` where the
            source has every edit already.
        block: its source.  Decorators belong to it, and comments or blank lines after its last
            statement do not.
    """

    original: CodeType
    replacement: CodeType
    block: str

    @property
    def is_fixed(self) -> bool:
        """Whether the source had every edit before us."""
        return self.replacement is self.original


def rewrite(source: str, code: CodeType, qualname: str, targets: Sequence[Edited]) -> Rewrite:
    """Derive the code of one outermost function with the edits of ``targets``.

    Args:
        source: the text of the whole module.
        code: the code object that runs.
        qualname: the dotted name of the function in its module.
        targets: the edits to it and to functions nested in it.

    Raises:
        Refused: the source is not that of ``code``, or its shape is not recognised.
    """
    reason = ""
    for make_unit in (units.function_unit, units.module_unit):
        try:
            text, unit, node = make_unit(source, code, qualname)
            original = units.compiled(unit, code, qualname)
        except (SyntaxError, ValueError, Refused) as error:
            reason = f"it does not compile ({error})"
            continue
        difference = differs(original, code)
        if difference is None:
            break
        reason = difference
    else:
        raise Refused(f"the source on disk is not what runs: {reason}")
    if not apply(node, qualname, targets):
        return Rewrite(original, original, text)
    try:
        replacement = units.compiled(unit, code, qualname)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"the rewrite does not compile ({error})") from error
    if part := changes(original, replacement):
        raise Refused(f"the rewrite would change {part}")
    return Rewrite(original, replacement, text)


def is_fixed(source: str, code: CodeType, qualname: str, target: Edited) -> bool:
    """Whether the source of a function has the edits of a target, as it is.

    Raises:
        Refused: the function, or a name in it, is not found.
    """
    _, _, node = units.function_unit(source, code, qualname)
    return not apply(node, qualname, [target])


def unparsed(
    source: str, code: CodeType, qualname: str, targets: Sequence[Edited]
) -> tuple[str, str]:
    """A function's text before and after :func:`rewrite`, without comments.

    Raises:
        Refused: as there.
    """
    _, _, node = units.function_unit(source, code, qualname)
    before = ast.unparse(node)
    apply(node, qualname, targets)
    return before, ast.unparse(node)


def apply(node: ast.stmt, qualname: str, targets: Sequence[Edited]) -> bool:
    """Make the edits to an outermost function's tree, in place.

    Returns:
        Whether anything changed; if not, the function has every edit already.

    Raises:
        Refused: a shape is not recognised.
    """
    changed = False
    outermost = None
    for target in targets:
        for edit in target.edits:
            outermost = outermost or Scope(node)
            if edit.apply(_find(outermost, qualname, target.function)):
                changed, outermost = True, None
    return changed


def _find(scope: Scope, qualname: str, function: str) -> Scope:
    for name in (part for step in units.steps(qualname, function) for part in step.split(".")):
        if not isinstance(scope.node, ast.ClassDef):
            require_plain(scope, f"{scope.name} around {function}")
        found = [inner for inner in scope.inner if inner.name == name]
        if len(found) != 1:
            raise Refused(f"found {len(found)} functions {function}, expected 1")
        (scope,) = found
    require_plain(scope, function)
    return scope
