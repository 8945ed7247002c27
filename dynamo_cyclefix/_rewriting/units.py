"""Units of compilation: a function cut out of its module so that it compiles to what runs.

Of two units the quick one holds the function alone; the whole module is exact, and some 20 times
slower.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import operator
import re
import symtable
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting.scopes import SCOPES, children, place_of

LOCALS = "<locals>"

_FUTURE_FLAGS = functools.reduce(
    operator.or_,
    (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names),
)


def nested(code: CodeType, outermost: str, function: str) -> CodeType:
    """The code object of ``function`` among the constants of its outermost function's code."""
    for name in steps(outermost, function):
        found = _code_objects(code, name)
        if len(found) != 1:
            raise Refused(f"found {len(found)} functions {name!r} in {code.co_name}, expected 1")
        (code,) = found
    return code


def steps(outermost: str, function: str) -> list[str]:
    return function.removeprefix(outermost).split(f".{LOCALS}.")[1:]


def is_method(outermost: str, function: str) -> bool:
    """Whether ``function`` is defined by a class inside of the outermost function."""
    return any("." in step for step in steps(outermost, function))


def _code_objects(code: CodeType, name: str) -> list[CodeType]:
    return [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]


def _parsed(
    source: str, first_line: int, classes: Sequence[str] = ()
) -> tuple[str, ast.Module, ast.stmt]:
    """Cut a function out of its module, and parse it at its own place in classes of these names."""
    lines = _lines(source)
    start = first_line - 1
    first = lines[start] if 0 <= start < len(lines) else ""
    indent = first[: len(first) - len(first.lstrip(" \t"))]
    if not first.startswith(("def ", "async def ", "@"), len(indent)):
        raise Refused(f"no function begins at line {first_line} of the source")
    # Columns are in the line table, so the text keeps its indentation: something must hold it.
    headers = [f"class {name}:" for name in classes] or ["if 1:"] * bool(indent)
    if len(headers) > min(start, len(indent)):
        raise Refused(f"line {first_line} of the source is not inside of {'.'.join(classes)}")
    head = "\n" * (start - len(headers)) + "".join(
        f"{indent[:i]}{header}\n" for i, header in enumerate(headers)
    )
    # The function ends before a line that is indented no deeper, unless a bracket or a string is
    # open there: then the text does not parse.
    ends = re.compile(rf"[ \t]{{0,{len(indent)}}}[^\s#]")
    for end in range(start + 1, len(lines) + 1):
        if end < len(lines) and not ends.match(lines[end]):
            continue
        try:
            unit = ast.parse(head + "\n".join(lines[start:end]) + "\n")
        except SyntaxError:
            continue
        node = unit.body[0]
        for _ in headers:
            node = node.body[0]  # type: ignore[attr-defined]
        return _text(source, first_line, node), unit, node
    raise Refused(f"no complete function begins at line {first_line} of the source")


def _text(source: str, first_line: int, node: ast.stmt) -> str:
    return "\n".join(_lines(source)[first_line - 1 : node.end_lineno]) + "\n"


@functools.lru_cache(maxsize=1)
def _lines(source: str) -> list[str]:
    return source.split("\n")  # `splitlines` knows more line ends than the compiler does


def function_unit(source: str, code: CodeType, qualname: str) -> tuple[str, ast.Module, ast.stmt]:
    """The function alone.

    Of the rest of the module the compiler asks one thing: whether a name is imported at its top
    level, since a call of such a name's attribute compiles differently (``is_import_originated`` in
    CPython's compile.c).
    """
    text, unit, node = _parsed(source, code.co_firstlineno, qualname.split(".")[:-1])
    if names := _imported_names(source):
        place = place_of(node)
        unit.body.append(ast.Import([ast.alias(name, None, **place) for name in names], **place))
    return text, unit, node


def module_unit(source: str, code: CodeType, qualname: str) -> tuple[str, ast.Module, ast.stmt]:
    unit = ast.parse(source)
    found: list[ast.AST] = [unit]
    for name in qualname.split("."):
        found = [n for scope in found for n in _statements(scope) if getattr(n, "name", "") == name]
    for node in found:
        # Of several definitions (overloads, branches) the live one is known by its line.
        lines = [part.lineno for part in (node, *getattr(node, "decorator_list", ()))]
        if isinstance(node, ast.stmt) and min(lines) == code.co_firstlineno:
            return _text(source, min(lines), node), unit, node
    raise Refused(f"{qualname} is not at line {code.co_firstlineno} of the source")


# A statement at the left margin that may import, up to the next that is not a part of it.
_MAY_IMPORT = re.compile(
    r"\n(?=(?:import|from|if|try|with)\b).*"
    r"(?:\n(?:(?=(?:elif|else|except|finally)\b)|(?![\w@])).*)*"
)


@functools.lru_cache(maxsize=1)
def _imported_names(source: str) -> tuple[str, ...]:
    """The names that a module's top level imports, without parsing the rest of the module."""
    texts = _MAY_IMPORT.findall("\n" + source)
    try:
        return _imported_by("".join(texts))
    except SyntaxError:
        pass
    names: list[str] = []
    for text in texts:
        # What does not parse is none of the module's code, but, say, a line of a docstring.
        with contextlib.suppress(SyntaxError):
            names += _imported_by(text)
    return tuple(dict.fromkeys(names))


def _imported_by(text: str) -> tuple[str, ...]:
    table = symtable.symtable(text, "<imports>", "exec")
    return tuple(symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported())


def _statements(scope: ast.AST) -> Iterator[Any]:
    """The statements of a scope, those in compound statements too."""
    for child in children(scope):
        if not isinstance(child, ast.expr):
            yield child
            if type(child) not in SCOPES:
                yield from _statements(child)


def compiled(unit: ast.Module, live: CodeType, qualname: str) -> CodeType:
    code: CodeType = compile(
        unit,
        live.co_filename,
        "exec",
        flags=live.co_flags & _FUTURE_FLAGS,
        dont_inherit=True,
    )
    for name in qualname.split("."):
        found = [c for c in _code_objects(code, name) if c.co_firstlineno <= live.co_firstlineno]
        if not found:
            raise ValueError(f"{qualname} is not at line {live.co_firstlineno}")
        code = found[-1]
    return code
