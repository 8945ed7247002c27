"""From a function's source and the targets in it to a code object that releases its exceptions.

Pure: text and code objects in, code objects out.  Nothing here looks at or changes the process.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import operator
import re
import symtable
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from dynamo_cyclefix._catalogue import LOCALS, Target
from dynamo_cyclefix._errors import Refused

_Node = TypeVar("_Node", bound=ast.AST)

_FUTURE_FLAGS = functools.reduce(
    operator.or_,
    (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names),
)
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


class Rewrite(NamedTuple):
    """An outermost function before and after.

    Attributes:
        original: its code object, compiled from the untouched source.
        replacement: the code object that releases.  The same object as ``original`` where every
            target releases its exceptions already.
        block: its source.  Decorators belong to it, and comments or blank lines after its last
            statement do not.
    """

    original: CodeType
    replacement: CodeType
    block: str

    @property
    def is_fixed(self) -> bool:
        """Whether the source released the exceptions before us."""
        return self.replacement is self.original


def rewrite(source: str, code: CodeType, qualname: str, targets: Sequence[Target]) -> Rewrite:
    """Derive the code of one outermost function that releases the exceptions of ``targets``.

    Args:
        source: the text of the whole module.
        code: the code object that runs.
        qualname: the dotted name of the function in its module.
        targets: the targets in it, ``qualname`` itself or nested functions.

    Raises:
        Refused: the source is not that of ``code``, or its shape is not recognised.
    """
    # The quick unit holds the function alone; the whole module is exact, and some 20 times slower.
    reason = ""
    for make_unit in (_function_unit, _module_unit):
        try:
            text, unit, node = make_unit(source, code, qualname)
            original = _compiled(unit, code, qualname)
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
    replacement = _compiled(unit, code, qualname)
    if part := changes(original, replacement):
        raise Refused(f"the rewrite would change {part}")
    return Rewrite(original, replacement, text)


def changes(original: CodeType, replacement: CodeType) -> str | None:
    """Name what a replacement has to keep and does not; ``None`` if it keeps everything."""
    for part in _KEPT:
        if getattr(replacement, part) != getattr(original, part):
            return part
    if (replacement.co_flags ^ original.co_flags) & ~_NO_CELLS:
        return "co_flags"
    return None


def is_fixed(source: str, code: CodeType, target: Target) -> bool:
    """Whether the source of a function releases the exceptions of a target, as it is.

    Raises:
        Refused: the function, or a name in it, is not found.
    """
    _, _, node = _function_unit(source, code, target.outermost)
    return not apply(node, target.outermost, [target])


def unparsed(
    source: str, code: CodeType, qualname: str, targets: Sequence[Target]
) -> tuple[str, str]:
    """A function's text before and after :func:`rewrite`, without comments.

    Raises:
        Refused: as there.
    """
    _, _, node = _function_unit(source, code, qualname)
    before = ast.unparse(node)
    apply(node, qualname, targets)
    return before, ast.unparse(node)


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


def nested(code: CodeType, outermost: str, function: str) -> CodeType:
    """The code object of ``function`` among the constants of its outermost function's code."""
    for name in _steps(outermost, function):
        found = _code_objects(code, name)
        if len(found) != 1:
            raise Refused(f"found {len(found)} functions {name!r} in {code.co_name}, expected 1")
        (code,) = found
    return code


def _steps(outermost: str, function: str) -> list[str]:
    return function.removeprefix(outermost).split(f".{LOCALS}.")[1:]


def _code_objects(code: CodeType, name: str) -> list[CodeType]:
    return [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]


# Units of compilation


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


def _function_unit(source: str, code: CodeType, qualname: str) -> tuple[str, ast.Module, ast.stmt]:
    """The function alone.

    Of the rest of the module the compiler asks one thing: whether a name is imported at its top
    level, since a call of such a name's attribute compiles differently (``is_import_originated`` in
    CPython's compile.c).
    """
    text, unit, node = _parsed(source, code.co_firstlineno, qualname.split(".")[:-1])
    if names := _imported_names(source):
        place = _place(node)
        unit.body.append(ast.Import([ast.alias(name, None, **place) for name in names], **place))
    return text, unit, node


def _module_unit(source: str, code: CodeType, qualname: str) -> tuple[str, ast.Module, ast.stmt]:
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
    for child in _children(scope):
        if not isinstance(child, ast.expr):
            yield child
            if type(child) not in _SCOPES:
                yield from _statements(child)


def _compiled(unit: ast.Module, live: CodeType, qualname: str) -> CodeType:
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


# Shapes

_SCOPES = frozenset(
    (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)
)
_BINDERS: dict[type[ast.AST], Callable[[Any], list[str]]] = {
    ast.FunctionDef: lambda node: [node.name],
    ast.AsyncFunctionDef: lambda node: [node.name],
    ast.ClassDef: lambda node: [node.name],
    ast.ExceptHandler: lambda node: [node.name] if node.name else [],
    ast.Import: lambda node: [(a.asname or a.name).partition(".")[0] for a in node.names],
    ast.ImportFrom: lambda node: [a.asname or a.name for a in node.names],
    ast.MatchAs: lambda node: [node.name] if node.name else [],
    ast.MatchStar: lambda node: [node.name] if node.name else [],
    ast.MatchMapping: lambda node: [node.rest] if node.rest else [],
}


# What a field may hold that has no name in it and no statement.
_LEAVES = {int, str, type(None), ast.Constant}
for _base in (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop):
    _LEAVES.update(_base.__subclasses__())


def _children(node: ast.AST) -> list[Any]:
    """``ast.iter_child_nodes`` without leaves, at a fraction of its cost."""
    children: list[Any] = []
    for value in vars(node).values():
        kind = type(value)
        if kind is list:
            children += [item for item in value if type(item) not in _LEAVES]
        elif kind not in _LEAVES:
            children.append(value)
    return children


class _Scope:
    """What one walk tells of a function: the nodes that run in its frame, and its names.

    A list, set or dictionary comprehension counts as part of the frame: it is over before the next
    statement.  A class body counts as a scope of its own, since its methods outlive it.

    Attributes:
        node: the function, lambda, generator expression or class.
        name: its name, as a code object would have it.
        parameters: the names of its parameters.
        own: the nodes of its frame, in the order of the source.
        inner: the scopes defined in it, not those defined deeper.
        uses: for each name, the nodes of its frame that read, bind or declare it.
        bound: the parameters and locals (cells too).
        unbound: the names that it may delete.
    """

    def __init__(self, node: Any) -> None:
        self.node = node
        self.name: str = getattr(node, "name", _NAMELESS.get(type(node), ""))
        self.parameters = _parameters(node)
        self.own: list[Any] = []
        self.inner: list[_Scope] = []
        self.uses: dict[str, list[ast.AST]] = {}
        self.bound = set(self.parameters)
        self.unbound: set[str] = set()
        declared: set[str] = set()
        stack = _inside(node)[::-1]
        while stack:
            node = stack.pop()
            kind = type(node)
            self.own.append(node)
            if kind is ast.Name:
                self.uses.setdefault(node.id, []).append(node)
                if not isinstance(node.ctx, ast.Load):
                    self.bound.add(node.id)
                    if isinstance(node.ctx, ast.Del):
                        self.unbound.add(node.id)
                continue
            if kind in _BINDERS:
                for name in _BINDERS[kind](node):
                    self.uses.setdefault(name, []).append(node)
                    self.bound.add(name)
                    if kind is ast.ExceptHandler:
                        self.unbound.add(name)
            if kind in _SCOPES:
                self.inner.append(_Scope(node))
                stack += _at_definition(node)[::-1]
            elif kind is ast.Global or kind is ast.Nonlocal:
                for name in node.names:
                    self.uses.setdefault(name, []).append(node)
                    declared.add(name)
            elif kind is ast.comprehension:  # its target is no local of the function
                stack += [*node.ifs, node.iter]
            else:
                stack += _children(node)[::-1]
        self.bound -= declared

    def find(self, kind: type[_Node] | tuple[type[_Node], ...]) -> Iterator[_Node]:
        """The nodes of these kinds in the frame."""
        return (node for node in self.own if isinstance(node, kind))

    def mentions(self, name: str) -> list[Any]:
        """Every place that reads, binds or declares this very ``name``, closures included."""
        found = list(self.uses.get(name, ()))
        for scope in self.inner:
            # The functions of a class do not see the names that its body binds.
            if name not in scope.bound or isinstance(scope.node, ast.ClassDef):
                found += scope.mentions(name)
        return found

    def capturers(self, name: str) -> list[_Scope]:
        """The nested scopes that close over ``name``."""
        return [s for s in self.inner if name not in s.bound and s.mentions(name)]

    def always_bound(self, name: str) -> bool:
        """Whether ``name`` has a value wherever the function is."""
        if any(isinstance(node, ast.Nonlocal) for node in self.mentions(name)):
            return False
        return name in self.parameters and name not in self.unbound

    def is_released(self, name: str) -> bool:
        """Whether the function lets go of ``name`` on every way out.

        That is: every mention of it is inside a ``try`` whose ``finally`` deletes or rebinds it.
        """
        guards = [
            node for node in self.find(ast.Try) if any(_lets_go(s, name) for s in node.finalbody)
        ]
        mentions = self.mentions(name) if guards else []
        return bool(mentions) and all(
            any(_is_within(node, [guard]) for guard in guards) for node in mentions
        )


_NAMELESS = {ast.Lambda: "<lambda>", ast.GeneratorExp: "<genexpr>"}


def _inside(node: Any) -> list[ast.AST]:
    """What runs when the scope itself is run."""
    if isinstance(node, ast.Lambda):
        return [node.body]
    if isinstance(node, ast.GeneratorExp):
        first, *others = node.generators
        return [node.elt, *first.ifs, *others]
    return list(node.body)


def _at_definition(node: Any) -> list[ast.AST]:
    """What runs where the scope is defined: decorators, defaults, annotations, bases."""
    if isinstance(node, ast.GeneratorExp):
        return [node.generators[0].iter]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    returns = getattr(node, "returns", None)
    return [*getattr(node, "decorator_list", ()), node.args, *([returns] if returns else ())]


def _parameters(node: Any) -> list[str]:
    arguments = getattr(node, "args", None)
    if arguments is None:
        return []
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [arg.arg for arg in (*named, arguments.vararg, arguments.kwarg) if arg]


def _is_within(node: Any, statements: Sequence[Any]) -> bool:
    first, last = statements[0], statements[-1]
    start = first.lineno, first.col_offset
    return start <= (node.lineno, node.col_offset) < (last.end_lineno, last.end_col_offset)


def _lets_go(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.Delete | ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)
    return False


def _require_plain(scope: _Scope, what: str) -> None:
    if not isinstance(scope.node, ast.FunctionDef) or any(scope.find((ast.Yield, ast.YieldFrom))):
        raise Refused(f"{what} is a generator, a coroutine or a class, expected a plain function")


# The change


def apply(node: ast.stmt, qualname: str, targets: Sequence[Target]) -> bool:
    """Rewrite an outermost function's tree in place.

    Returns:
        Whether anything changed; if not, every target releases its exceptions already.

    Raises:
        Refused: a shape is not recognised.
    """
    changed = False
    outermost = None
    for target in targets:
        scope = outermost = outermost or _Scope(node)
        for name in _steps(qualname, target.function):
            _require_plain(scope, f"{scope.name} around {target.function}")
            found = [inner for inner in scope.inner if inner.name == name]
            if len(found) != 1:
                raise Refused(f"found {len(found)} functions {target.function}, expected 1")
            (scope,) = found
        if _apply_one(scope, target):
            changed, outermost = True, None
    return changed


def _apply_one(scope: _Scope, target: Target) -> bool:
    _require_plain(scope, target.function)
    held = []
    for name in target.names:
        if name not in scope.bound:
            raise Refused(f"{target.function} has no parameter or local {name!r}")
        if not scope.is_released(name):
            held.append(name)
    if target.own_args:
        return _leave_out(scope, target)
    if not held:
        return False
    held += (name for name in _raised_locals(scope) if name not in held)
    helpers: dict[str, _Scope] = {}
    for name in held:
        for inner in _closures(scope, name, target):
            if inner.name not in target.helpers:
                raise Refused(f"{inner.name} in {target.function} closes over {name!r} too")
            _pass_exception(scope, inner, name, target)
            helpers[inner.name] = inner
    for helper in helpers.values():
        raised = list(_raised_locals(helper))
        for name in raised:
            for inner in _closures(helper, name, target):
                raise Refused(f"{inner.name} in {helper.name} closes over {name!r}")
        _release(helper, raised)
    _release(scope, held)
    return True


def _leave_out(scope: _Scope, target: Target) -> bool:
    """Take ``names`` out of what the function hands to the constructor of its exception."""
    found = False
    for node in ast.walk(scope.node):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name("super")), attr="__init__")
            ):
                kept = [a for a in node.args if getattr(a, "id", None) not in target.names]
                found |= kept != node.args
                node.args = kept
    return found


def _closures(scope: _Scope, name: str, target: Target) -> list[_Scope]:
    """The nested functions that must not go on closing over ``name``."""
    return [inner for inner in scope.capturers(name) if inner.name not in target.closures]


def _raised_locals(scope: _Scope) -> Iterator[str]:
    """Locals that are bound by plain assignment and raised by name."""
    bindings = [node.targets for node in scope.find(ast.Assign)]
    bindings += ([node.target] for node in scope.find(ast.AnnAssign))
    assigned = {t.id for targets in bindings for t in targets if isinstance(t, ast.Name)}
    for node in scope.find(ast.Raise):
        raised = node.exc
        # `raise error.with_traceback(...)` raises the same object.
        if (
            isinstance(raised, ast.Call)
            and isinstance(raised.func, ast.Attribute)
            and raised.func.attr == "with_traceback"
        ):
            raised = raised.func.value
        if isinstance(raised, ast.Name) and raised.id in assigned & scope.bound:
            assigned.remove(raised.id)
            if not scope.is_released(raised.id):
                yield raised.id


def _pass_exception(scope: _Scope, helper: _Scope, name: str, target: Target) -> None:
    """Make ``name``, which ``helper`` closes over, its first parameter."""
    what = f"helper {helper.name} of {target.function}"
    _require_plain(helper, what)
    if helper.node.decorator_list:
        raise Refused(f"{what} has a decorator")
    if not scope.always_bound(name):
        raise Refused(f"{what} may be called where {name!r} is not bound")
    for inner in _closures(helper, name, target):
        raise Refused(f"{inner.name} in {what} closes over {name!r} too")
    calls = [
        node
        for node in (*scope.find(ast.Call), *helper.find(ast.Call))
        if isinstance(node.func, ast.Name) and node.func.id == helper.name
    ]
    # Its definition is one mention.  Who gets it as a value does not know of the new parameter.
    if len(scope.mentions(helper.name)) != len(calls) + 1:
        raise Refused(f"{what} is used other than by calling it there")
    parameters = helper.node.args.posonlyargs or helper.node.args.args
    parameters.insert(0, ast.arg(name, **_place(helper.node)))
    for call in calls:
        call.args.insert(0, ast.Name(name, ast.Load(), **_place(call)))


def _release(scope: _Scope, names: Sequence[str]) -> None:
    """Put the code that uses ``names`` into ``try``/``finally`` that lets go of them."""
    everywhere = []
    for name in names:
        # The narrowest place: where only `except` blocks know the name, the way through the
        # function costs nothing more than before.
        handlers = _handlers_that_hold(scope, name)
        for handler in handlers:
            handler.body = _guarded(handler.body, [_let_go(name, handler.body[-1])])
        if not handlers:
            everywhere.append(name)
    if not everywhere:
        return
    function = scope.node
    start = 1 if ast.get_docstring(function, clean=False) is not None else 0
    head, body = function.body[:start], function.body[start:]
    if not body:
        raise Refused(f"{scope.name} has no body")
    # `del` fails on a name that is not bound.
    finals = [_let_go(name, body[-1], delete=scope.always_bound(name)) for name in everywhere]
    function.body = head + _guarded(body, finals)


def _handlers_that_hold(scope: _Scope, name: str) -> list[ast.ExceptHandler]:
    """The ``except`` blocks of one ``try`` that hold every mention of ``name``, if there are such.

    Two blocks of one ``try`` never run after each other, so none leaves the name to the other;
    unless there is a loop around them.
    """
    if name in scope.parameters:
        return []
    mentions = scope.mentions(name)
    loops = list(scope.find((ast.For, ast.While)))
    for node in scope.find(ast.Try):
        handlers = [h for h in node.handlers if any(_is_within(m, h.body) for m in mentions)]
        if all(any(_is_within(m, h.body) for h in handlers) for m in mentions):
            return [] if any(_is_within(node, [loop]) for loop in loops) else handlers
    return []


def _let_go(name: str, near: ast.stmt, delete: bool = False) -> ast.stmt:
    # On the line of the last statement: nothing that runs is outside the function's own lines.
    place = _place(near)
    if delete:
        return ast.Delete([ast.Name(name, ast.Del(), **place)], **place)
    return ast.Assign([ast.Name(name, ast.Store(), **place)], ast.Constant(None, **place), **place)


def _guarded(body: list[ast.stmt], finals: list[ast.stmt]) -> list[ast.stmt]:
    place = {**_place(body[0]), **_place(body[-1], "end_lineno", "end_col_offset")}
    return [ast.Try(body=body, handlers=[], orelse=[], finalbody=finals, **place)]


def _place(node: ast.AST, *of: str) -> dict[str, Any]:
    """Where a node is in the source, to put another there."""
    return {name: getattr(node, name) for name in of or node._attributes}
