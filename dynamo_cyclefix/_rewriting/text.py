"""A module's own text with the edits made, as a patch wants it: comments and layout stay."""

from __future__ import annotations

import ast
import copy
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting.derive import Edited, apply
from dynamo_cyclefix._rewriting.units import LOCALS

_BLOCKS = ("body", "handlers", "orelse", "finalbody")


def edited(source: str, functions: Mapping[str, Sequence[Edited]]) -> str:
    """Make the edits to the text of a module.

    Args:
        source: the text of the whole module.
        functions: by the qualified name of each outermost function, the edits to it.

    Returns:
        The new text; equal to ``source`` where it has every edit already.

    Raises:
        Refused: a function is not found, or its shape is not recognised.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise Refused(f"the source does not parse ({error})") from error
    lines = source.split("\n")
    in_strings = _lines_in_strings(source)
    changed = []
    for qualname, targets in functions.items():
        node = definition(tree, qualname)
        writer = _Writer(lines, in_strings, node)
        first, last = _first_line(node), node.end_lineno
        if apply(node, qualname, targets):
            text = list(writer.statement(node, node.col_offset))
            if not _says(text, node):
                text = list(_indented(ast.unparse(node), node.col_offset))
            changed.append((first, last, text))
    for first, last, text in sorted(changed, key=lambda change: change[0], reverse=True):
        lines[first - 1 : last] = text
    return "\n".join(lines)


def definition(tree: ast.Module, qualname: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function of a qualified name; the last of several, which overloads come before.

    Raises:
        Refused: there is none.
    """
    found: list[ast.AST] = [tree]
    for name in qualname.replace(f"{LOCALS}.", "").split("."):
        found = [n for scope in found for n in _defined(scope) if n.name == name]
    for node in reversed(found):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return node
    raise Refused(f"found no function {qualname}")


def _defined(scope: ast.AST) -> Iterator[Any]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _defined(child)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _lines_in_strings(source: str) -> set[int]:
    """The numbers of the lines that begin inside of a string: their indentation is part of it."""
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):  # f-strings, from Python 3.12 on
            starts.append(token.start[0])
        elif kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif kind.endswith("STRING_END"):
            inside.update(range(starts.pop() + 1, token.end[0] + 1))
    return inside


def _indented(text: str, column: int) -> Iterator[str]:
    return (" " * column + line for line in text.split("\n"))


def _says(text: Sequence[str], node: ast.stmt) -> bool:
    """Whether the text is that of the tree."""
    try:
        (parsed,) = ast.parse("\n".join([*["if 1:"] * bool(node.col_offset), *text])).body
    except (SyntaxError, ValueError):
        return False
    if node.col_offset:
        (parsed,) = parsed.body  # type: ignore[attr-defined]
    return ast.dump(parsed) == ast.dump(node)


def _header(node: ast.AST) -> Any:
    """A copy without the blocks of statements."""
    made = copy.copy(node)
    for field in _BLOCKS:
        if isinstance(getattr(node, field, None), list):
            setattr(made, field, [])
    return made


class _Writer:
    """Writes a tree that is being changed: what is left of the original, as its lines stand.

    Args:
        lines: of the module.
        in_strings: the numbers of those that are not to be indented anew.
        node: the function, before the change.
    """

    def __init__(self, lines: Sequence[str], in_strings: set[int], node: ast.stmt) -> None:
        self._lines, self._in_strings = list(lines), in_strings
        self._known = {
            id(n): (n, ast.dump(n), ast.dump(_header(n)))
            for n in ast.walk(node)
            if isinstance(n, ast.stmt)
        }

    def statement(self, node: Any, column: int) -> Iterator[str]:
        """The lines of a statement that is to stand at a column."""
        _, whole, header = self._known.get(id(node), (None, "", ""))
        if whole and whole == ast.dump(node):
            first = _first_line(node)
            yield from self._moved(first, node.end_lineno + 1, column - node.col_offset)
        elif header and header == ast.dump(_header(node)):
            yield from self._with_header(node, column)
        elif isinstance(node, ast.FunctionDef) or (not whole and isinstance(node, ast.Try)):
            yield from self._with_new_header(node, column)
        else:
            yield from _indented(ast.unparse(node), column)

    def _with_header(self, node: Any, column: int) -> Iterator[str]:
        """A compound statement of which something inside has changed."""
        line = _first_line(node)
        for field in _BLOCKS:
            for part in getattr(node, field, ()):
                block = part.body if field == "handlers" else getattr(node, field)
                # A header, `else:`, comments: whatever is before the block.
                originals = list(self._originals(block))
                if not originals:
                    continue
                begin = self._leading(originals[0])
                yield from self._moved(line, begin, column - node.col_offset)
                yield from self._block(block, column + originals[0].col_offset - node.col_offset)
                line = originals[-1].end_lineno + 1
                if field != "handlers":
                    break

    def _with_new_header(self, node: Any, column: int) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef):
            yield from _indented(ast.unparse(_header(node)), column)
        else:
            yield from _indented("try:", column)
        yield from self._block(node.body, column + 4)
        for handler in getattr(node, "handlers", ()):
            yield from _indented(ast.unparse(handler), column)
        if getattr(node, "finalbody", ()):
            yield from _indented("finally:", column)
            yield from self._block(node.finalbody, column + 4)

    def _block(self, block: Sequence[ast.stmt], column: int) -> Iterator[str]:
        for node in block:
            if id(node) in self._known:
                leading = self._leading(node)
                yield from self._moved(leading, _first_line(node), column - node.col_offset)
            yield from self.statement(node, column)

    def _originals(self, block: Sequence[ast.stmt]) -> Iterator[Any]:
        for node in block:
            if id(node) in self._known:
                yield node
            elif isinstance(node, ast.Try):
                yield from self._originals(node.body)

    def _leading(self, node: ast.stmt) -> int:
        """The first of the comments and blank lines right above a statement."""
        line = _first_line(node)
        while line - 1 not in self._in_strings:
            above = self._lines[line - 2].strip()
            if above and not above.startswith("#"):
                break
            line -= 1
        return line

    def _moved(self, begin: int, end: int, columns: int) -> Iterator[str]:
        """Lines, up to ``end``, moved to the right."""
        for number in range(begin, end):
            line = self._lines[number - 1]
            if line.strip() and number not in self._in_strings:
                line = " " * columns + line if columns >= 0 else line[-columns:]
            yield line
