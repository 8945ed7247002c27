"""What one walk over a function's tree tells of it: its names, and where they are used."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dynamo_cyclefix._errors import Refused

_Node = TypeVar("_Node", bound=ast.AST)

SCOPES = frozenset(
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


def children(node: ast.AST) -> list[Any]:
    """``ast.iter_child_nodes`` without leaves, at a fraction of its cost."""
    found: list[Any] = []
    for value in vars(node).values():
        kind = type(value)
        if kind is list:
            found += [item for item in value if type(item) not in _LEAVES]
        elif kind not in _LEAVES:
            found.append(value)
    return found


class Scope:
    """What one walk tells of a function: the nodes that run in its frame, and its names.

    A list, set or dictionary comprehension counts as part of the frame: it is over before the next
    statement.  A class body counts as a scope of its own, since its methods outlive it.

    Attributes:
        node: the function, lambda, generator expression or class.
        name: its name, as a code object would have it.
        is_nameless: whether it is an expression, so that no name in the source is its own.
        parameters: the names of its parameters.
        own: the nodes of its frame, in the order of the source.
        inner: the scopes defined in it, not those defined deeper.
        uses: for each name, the nodes of its frame that read, bind or declare it.
        bound: the parameters and locals (cells too).
        unbound: the names that it may delete.
    """

    def __init__(self, node: Any) -> None:
        self.node = node
        self.is_nameless = type(node) in _NAMELESS
        self.name: str = _NAMELESS[type(node)] if self.is_nameless else node.name
        self.parameters = _parameters(node)
        self.own: list[Any] = []
        self.inner: list[Scope] = []
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
            if kind in SCOPES:
                self.inner.append(Scope(node))
                stack += _at_definition(node)[::-1]
            elif kind is ast.Global or kind is ast.Nonlocal:
                for name in node.names:
                    self.uses.setdefault(name, []).append(node)
                    declared.add(name)
            elif kind is ast.comprehension:  # its target is no local of the function
                stack += [*node.ifs, node.iter]
            else:
                stack += children(node)[::-1]
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

    def capturers(self, name: str) -> list[Scope]:
        """The nested scopes that close over ``name``."""
        return [s for s in self.inner if name not in s.bound and s.mentions(name)]

    def always_bound(self, name: str) -> bool:
        """Whether ``name`` has a value wherever the function is."""
        if any(isinstance(node, ast.Nonlocal) for node in self.mentions(name)):
            return False
        return name in self.parameters and name not in self.unbound

    def is_released(self, name: str) -> bool:
        """Whether the function lets go of ``name`` on every way out.

        That is: every mention of it is inside a ``try`` whose ``finally`` deletes it, or sets it to
        ``None``.
        """
        guards = [
            node for node in self.find(ast.Try) if any(_lets_go(s, name) for s in node.finalbody)
        ]
        mentions = self.mentions(name) if guards else []
        return bool(mentions) and all(
            any(is_within(node, [guard]) for guard in guards) for node in mentions
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


def is_within(node: Any, statements: Sequence[Any]) -> bool:
    """Whether a node is part of a run of statements, by its place in the source."""
    first, last = statements[0], statements[-1]
    start = first.lineno, first.col_offset
    return start <= (node.lineno, node.col_offset) < (last.end_lineno, last.end_col_offset)


def _lets_go(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.Assign):
        # Anything else than `None` may be the exception again, or another that leads to it.
        if not isinstance(statement.value, ast.Constant) or statement.value.value is not None:
            return False
    elif not isinstance(statement, ast.Delete):
        return False
    return any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)


def require_plain(scope: Scope, what: str) -> None:
    """Check that a scope is a function that runs from its call to its end.

    Raises:
        Refused: it is something else.
    """
    if not isinstance(scope.node, ast.FunctionDef) or any(scope.find((ast.Yield, ast.YieldFrom))):
        raise Refused(f"{what} is a generator, a coroutine or a class, expected a plain function")


def place_of(node: ast.AST, *of: str) -> dict[str, Any]:
    """Where a node is in the source, to put another there."""
    return {name: getattr(node, name) for name in of or node._attributes}
