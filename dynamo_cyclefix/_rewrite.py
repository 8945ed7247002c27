"""From a function's source and the targets in it to a code object that releases its exceptions.

Pure: text and code objects in, code objects out.  Nothing here looks at or changes the process.
"""

from __future__ import annotations

import __future__
import ast
import functools
import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from dynamo_cyclefix._catalogue import LOCALS, Target
from dynamo_cyclefix._errors import Refused

Function = ast.FunctionDef | ast.AsyncFunctionDef
Closure = Function | ast.Lambda | ast.GeneratorExp

_FUTURE_FLAGS = functools.reduce(
    operator.or_,
    (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names),
)
# What a code object consists of, as far as this interpreter has it.  `co_lnotab` repeats the line
# table, and constants are compared one by one.
_PARTS = tuple(
    part
    for part in (
        "co_name",
        "co_qualname",
        "co_filename",
        "co_firstlineno",
        "co_flags",
        "co_argcount",
        "co_posonlyargcount",
        "co_kwonlyargcount",
        "co_nlocals",
        "co_varnames",
        "co_names",
        "co_freevars",
        "co_cellvars",
        "co_stacksize",
        "co_code",
        "co_exceptiontable",
        "co_linetable",
    )
    if hasattr(CodeType, part)
)
# What callers, closures and tracebacks can see of a function, and a rewrite has to keep.
_KEPT = tuple(
    part
    for part in (
        "co_name",
        "co_qualname",
        "co_filename",
        "co_firstlineno",
        "co_flags",
        "co_argcount",
        "co_posonlyargcount",
        "co_kwonlyargcount",
        "co_freevars",
    )
    if hasattr(CodeType, part)
)


@dataclass(frozen=True)
class Rewrite:
    """An outermost function before and after.

    Attributes:
        original: its code object, compiled from the untouched source.
        replacement: the code object that releases.  The same object as ``original`` where every
            target releases its exceptions already.
        tree: the syntax tree that ``replacement`` was compiled from.
    """

    original: CodeType
    replacement: CodeType
    tree: ast.FunctionDef

    @property
    def is_fixed(self) -> bool:
        """Whether the source released the exceptions before us."""
        return self.replacement is self.original


def block(source: str, first_line: int) -> str:
    """The source of the function whose ``co_firstlineno`` is ``first_line`` (counted from 1).

    Raises:
        Refused: there is no such line, or no complete block begins there.
    """
    lines = source.splitlines(keepends=True)[first_line - 1 :]
    try:
        return "".join(inspect.getblock(lines))
    except (SyntaxError, IndentationError, IndexError) as error:
        raise Refused(f"no function was found at line {first_line} of its source") from error


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
    difference = None
    for make_unit in (_function_unit, _module_unit):
        try:
            unit = make_unit(source, code, qualname)
            original = _compiled(unit, code, qualname)
        except (SyntaxError, ValueError) as error:
            difference = f"its source does not compile ({error})"
            continue
        difference = differs(original, code)
        if difference is None:
            break
    else:
        raise Refused(f"the source on disk is not what runs: {difference}")
    node = _find(unit, qualname)
    if not apply(node, qualname, targets):
        return Rewrite(original, original, node)
    replacement = _compiled(unit, code, qualname)
    for part in _KEPT:
        if getattr(replacement, part) != getattr(original, part):
            raise Refused(f"the rewrite would change {part}")
    return Rewrite(original, replacement, node)


def is_fixed(source: str, code: CodeType, target: Target) -> bool:
    """Whether the source of a function releases the exceptions of a target, as it is.

    Raises:
        Refused: the function, or a name in it, is not found.
    """
    try:
        node = _find(_function_unit(source, code, target.outermost), target.outermost)
    except SyntaxError as error:
        raise Refused(f"its source does not compile ({error})") from error
    return not apply(node, target.outermost, [target])


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
        return frozenset((type(item), item) for item in constant)
    return type(constant), repr(constant)


def nested(code: CodeType, outermost: str, function: str) -> CodeType:
    """The code object of ``function`` among the constants of its outermost function's code."""
    for name in function.removeprefix(outermost).split(f".{LOCALS}.")[1:]:
        code = _child(code, name)
    return code


def _child(code: CodeType, name: str) -> CodeType:
    found = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
    if len(found) != 1:
        raise Refused(f"found {len(found)} functions {name!r} in {code.co_name}, expected 1")
    return found[0]


# Units of compilation


def _function_unit(source: str, code: CodeType, qualname: str) -> ast.Module:
    """Parse the function alone, at its own place, in classes of the same names.

    Columns are in the line table, so the text keeps its indentation.  Of the rest of the module the
    compiler asks one thing: whether a name is imported at its top level, since a call of such a
    name's attribute compiles differently (``is_import_originated`` in CPython's compile.c).
    """
    text = block(source, code.co_firstlineno)
    indent = text[: len(text) - len(text.lstrip(" \t"))]
    classes = qualname.split(".")[:-1]
    headers = [f"class {name}:" for name in classes] or (["if 1:"] if indent else [])
    if len(headers) > len(indent):
        raise SyntaxError(f"{qualname} is not indented")
    head = "".join(f"{indent[:1] * i}{header}\n" for i, header in enumerate(headers))
    unit = ast.parse(head + text)
    ast.increment_lineno(unit, code.co_firstlineno - 1 - len(headers))
    if names := _imported_names(source):
        aliases = [ast.alias(name, None) for name in names]
        unit.body.insert(0, ast.fix_missing_locations(ast.Import(aliases)))
    return unit


def _module_unit(source: str, code: CodeType, qualname: str) -> ast.Module:
    return ast.parse(source)


@functools.lru_cache(maxsize=1)
def _imported_names(source: str) -> tuple[str, ...]:
    """The names that a module's top level imports, without parsing the rest of the module."""
    kept: list[str] = []
    keep = False
    for line in source.splitlines(keepends=True):
        if line[:1].isalpha() or line[:1] in "@_":
            keep = line.startswith(_MAY_IMPORT)
        if keep:
            kept.append(line)
    try:
        tree = ast.parse("".join(kept))
    except SyntaxError:
        return ()  # the comparison decides whether that matters
    return tuple(dict.fromkeys(_imports(tree.body)))


_MAY_IMPORT = ("import ", "from ", "if ", "elif ", "else:", "try:", "except", "finally:", "with ")


def _imports(body: Iterable[ast.AST]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0]
        elif not isinstance(node, Function | ast.ClassDef):
            yield from _imports(_children(node))


def _compiled(unit: ast.Module, live: CodeType, qualname: str) -> CodeType:
    code: CodeType = compile(
        unit,
        live.co_filename,
        "exec",
        flags=live.co_flags & _FUTURE_FLAGS,
        dont_inherit=True,
    )
    for name in qualname.split("."):
        # Of several definitions (overloads, branches) the live one is known by its line.
        found = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
        last = [c for c in found if c.co_firstlineno <= live.co_firstlineno][-1:]
        if not last:
            raise ValueError(f"{qualname} is not at line {live.co_firstlineno}")
        code = last[0]
    return code


# Shapes


def _find(unit: ast.Module, qualname: str) -> ast.FunctionDef:
    """The node of a function that ``_compiled`` found in the same unit."""
    nodes: list[ast.AST] = [unit]
    for name in qualname.split("."):
        nodes = [
            node
            for parent in nodes
            for node in _definitions(parent)
            if isinstance(node, Function | ast.ClassDef) and node.name == name
        ]
    return _plain(nodes, qualname)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """``ast.iter_child_nodes``, at a third of its cost."""
    for value in vars(node).values():
        if type(value) is list:
            for item in value:
                if isinstance(item, ast.AST):
                    yield item
        elif isinstance(value, ast.AST):
            yield value


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += _children(node)


def _definitions(node: ast.AST) -> Iterator[Closure | ast.ClassDef]:
    """The functions and classes defined in a scope, not those defined deeper."""
    for child in _children(node):
        if isinstance(child, Closure | ast.ClassDef):
            yield child
        else:
            yield from _definitions(child)


def _plain(nodes: Sequence[ast.AST], what: str) -> ast.FunctionDef:
    if len(nodes) != 1:
        raise Refused(f"found {len(nodes)} functions {what}, expected 1")
    (node,) = nodes
    if isinstance(node, ast.FunctionDef) and not any(
        isinstance(inner, ast.Yield | ast.YieldFrom) for inner in _own(node)
    ):
        return node
    raise Refused(f"{what} is a generator, a coroutine or a class, expected a plain function")


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run in a function's own frame, or, for a comprehension, at once."""
    body = function.body if isinstance(function, Function | ast.Lambda) else [function]
    stack: list[ast.AST] = list(body) if isinstance(body, list) else [body]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Function):
            stack += [*node.decorator_list, *node.args.defaults]
            stack += [default for default in node.args.kw_defaults if default]
        elif isinstance(node, ast.Lambda):
            stack += [d for d in (*node.args.defaults, *node.args.kw_defaults) if d]
        elif isinstance(node, ast.GeneratorExp):
            stack.append(node.generators[0].iter)
        elif isinstance(node, ast.ClassDef):
            stack += [*node.decorator_list, *node.bases]
        else:
            stack += _children(node)


def _parameters(function: Closure) -> list[str]:
    if isinstance(function, ast.GeneratorExp):
        return []
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [arg.arg for arg in (*named, arguments.vararg, arguments.kwarg) if arg]


def _binds(function: Closure, name: str) -> bool:
    """Whether ``name`` is a parameter or local (a cell too) of the function."""
    if name in _parameters(function):
        return True
    bound = False
    for node in _own(function):
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return False
        bound |= _stores(node, name)
    return bound


def _stores(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.ExceptHandler | Function | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return isinstance(node, ast.MatchAs | ast.MatchStar) and node.name == name


def _mentions(nodes: Iterable[ast.AST], name: str) -> Iterator[ast.AST]:
    """Every place that reads or binds ``name``, closures included."""
    for root in nodes:
        for node in _walk(root):
            if _stores(node, name) or (isinstance(node, ast.Name) and node.id == name):
                yield node
            elif isinstance(node, ast.Nonlocal) and name in node.names:
                yield node


def _capturers(function: Closure, name: str) -> list[Closure]:
    """The nested functions that close over ``name``."""
    return [
        inner
        for inner in _definitions(function)
        if not isinstance(inner, ast.ClassDef)
        and not _binds(inner, name)
        and any(True for _ in _mentions([inner], name))
    ]


def is_released(function: Function, name: str) -> bool:
    """Whether the function lets go of ``name`` on every way out.

    That is: every mention of it is inside a ``try`` whose ``finally`` deletes or rebinds it.
    """
    covered: set[int] = set()
    for node in _own(function):
        if isinstance(node, ast.Try) and any(_lets_go(item, name) for item in node.finalbody):
            covered.update(id(inner) for inner in _walk(node))
    return all(id(node) in covered for node in _mentions(function.body, name))


def _lets_go(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.Delete | ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)
    return False


# The change


def apply(node: ast.FunctionDef, qualname: str, targets: Sequence[Target]) -> bool:
    """Rewrite an outermost function's tree in place.

    Returns:
        Whether anything changed; if not, every target releases its exceptions already.

    Raises:
        Refused: a shape is not recognised.
    """
    changed = False
    for target in targets:
        function = node
        for name in target.function.removeprefix(qualname).split(f".{LOCALS}.")[1:]:
            inner = [d for d in _definitions(function) if getattr(d, "name", None) == name]
            function = _plain(inner, f"{target.function} (at {name})")
        changed |= _apply_one(function, target)
    ast.fix_missing_locations(node)
    return changed


def _apply_one(function: ast.FunctionDef, target: Target) -> bool:
    _plain([function], target.function)
    held = []
    for name in target.names:
        if not _binds(function, name):
            raise Refused(f"{target.function} has no parameter or local {name!r}")
        if not is_released(function, name):
            held.append(name)
    if not held:
        return False
    for name in held:
        allowed = set(target.closures)
        for inner in _capturers(function, name):
            label = getattr(inner, "name", f"<{type(inner).__name__.lower()}>")
            if label in target.helpers:
                helper = _plain([inner], label)
                _pass_exception(function, helper, name)
                _release(helper, [*_raised_locals(helper)])
            elif label not in allowed:
                raise Refused(f"{label} in {target.function} closes over {name!r} too")
    _release(function, [*held, *(n for n in _raised_locals(function) if n not in held)])
    return True


def _raised_locals(function: ast.FunctionDef) -> Iterator[str]:
    """Locals that are bound by plain assignment and raised by name."""
    assigned = {
        t.id
        for node in _own(function)
        if isinstance(node, ast.Assign)
        for t in node.targets
        if isinstance(t, ast.Name)
    }
    for node in _own(function):
        if isinstance(node, ast.Raise):
            raised = node.exc
            # `raise error.with_traceback(...)` raises the same object.
            if (
                isinstance(raised, ast.Call)
                and isinstance(raised.func, ast.Attribute)
                and raised.func.attr == "with_traceback"
            ):
                raised = raised.func.value
            if (
                isinstance(raised, ast.Name)
                and raised.id in assigned
                and _binds(function, raised.id)
                and not is_released(function, raised.id)
            ):
                assigned.remove(raised.id)
                yield raised.id


def _pass_exception(function: ast.FunctionDef, helper: ast.FunctionDef, name: str) -> None:
    """Make ``name``, which ``helper`` closes over, its first parameter."""
    if helper.decorator_list:
        raise Refused(f"helper {helper.name} has a decorator")
    if any(isinstance(n, ast.Nonlocal) and name in n.names for n in _walk(helper)):
        raise Refused(f"helper {helper.name} rebinds {name!r}")
    calls = [
        node
        for node in _walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == helper.name
    ]
    mentions = list(_mentions(function.body, helper.name))
    # One mention is its definition; a helper that is passed on as a value cannot get an argument.
    if len(mentions) != len(calls) + 1:
        raise Refused(f"helper {helper.name} is used other than by calling it")
    own_calls = {id(node) for scope in (function, helper) for node in _own(scope)}
    if not all(id(call) in own_calls for call in calls):
        raise Refused(f"helper {helper.name} is called by another nested function")
    parameters = helper.args.posonlyargs or helper.args.args
    parameters.insert(0, ast.copy_location(ast.arg(name), helper))
    for call in calls:
        call.args.insert(0, ast.copy_location(ast.Name(name, ast.Load()), call))


def _release(function: ast.FunctionDef, names: Sequence[str]) -> None:
    """Put the code that uses ``names`` into ``try``/``finally`` that lets go of them."""
    everywhere = []
    for name in names:
        # The narrowest place: where only `except` blocks know the name, the way through the
        # function costs nothing more than before.
        handlers = _handlers_that_hold(function, name)
        for handler in handlers:
            handler.body = _guarded(handler.body, [_let_go(name, handler.body[-1])])
        if not handlers:
            everywhere.append(name)
    if not everywhere:
        return
    start = 1 if ast.get_docstring(function, clean=False) is not None else 0
    head, body = function.body[:start], function.body[start:]
    deleted = {
        node.id for node in _own(function) if isinstance(node, ast.Name) and not _reads(node)
    }
    finals = []
    for name in everywhere:
        # A parameter that the body leaves alone is bound on every way out; other names may not be.
        always_bound = name in _parameters(function) and name not in deleted
        finals.append(_let_go(name, body[-1], delete=always_bound))
    function.body = head + _guarded(body, finals)


def _reads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _handlers_that_hold(function: ast.FunctionDef, name: str) -> list[ast.ExceptHandler]:
    """The ``except`` blocks that hold every mention of ``name``; none if it lives outside them."""
    if name in _parameters(function):
        return []
    handlers: list[ast.ExceptHandler] = []
    inside: set[int] = set()
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.ExceptHandler) and node.name != name:
            mentions = list(_mentions(node.body, name))
            if mentions:
                handlers.append(node)
                inside.update(map(id, mentions))
            continue
        # In a loop a name may carry something from one round to the next.
        if not isinstance(node, Closure | ast.ClassDef | ast.For | ast.While):
            stack += _children(node)
    if all(id(node) in inside for node in _mentions(function.body, name)):
        return handlers
    return []


def _let_go(name: str, near: ast.stmt, delete: bool = False) -> ast.stmt:
    if delete:
        statement: ast.stmt = ast.Delete([ast.Name(name, ast.Del())])
    else:
        statement = ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None))
    # On the line of the last statement: nothing that runs is outside the function's own lines.
    for node in _walk(statement):
        if isinstance(node, ast.expr | ast.stmt):
            ast.copy_location(node, near)
    return statement


def _guarded(body: list[ast.stmt], finals: list[ast.stmt]) -> list[ast.stmt]:
    if not body:
        raise Refused("the function has no body")
    guard = ast.Try(body=body, handlers=[], orelse=[], finalbody=finals)
    return [ast.copy_location(guard, body[0])]
