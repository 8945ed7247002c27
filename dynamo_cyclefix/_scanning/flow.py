"""Follows each function's statements with the set of exceptions that every name may hold.

The frame of a function is on an exception's traceback when the function raised the exception or
caught it, and is reached through ``f_back`` when a function that it called did. Such a frame keeps
its locals and cells for as long as the traceback lives, after a return as well. So a name that
still holds the exception at the end of the function closes a reference cycle. CPython itself
clears only the target of ``except ... as name``.

Pure: `scan_source` takes text and reports what is left at the functions' exits.
"""

from __future__ import annotations

import ast
import copy
import symtable
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamo_cyclefix._scanning.rules import (
    CAPTURED,
    EXCEPT_ALIAS,
    RAISED_LOCAL,
    RAISED_PARAMETER,
    RETURNED,
    RULES,
    STORED,
    TRACEBACK,
    Finding,
)


# What a name may hold. `origin` is the position of the expression, parameter or handler which the
# value came from: names with the same origin hold the same object.
@dataclass(frozen=True)
class _Held:
    origin: tuple[int, int]
    how: str  # a rule, or one of the four below
    line: int
    reaches: int  # line of the handler or `raise` that put the frame on the traceback; 0: none yet


_State = dict[str, frozenset[_Held]]


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Module:
    """What a function needs to know of the others in its module; they go by qualified name."""

    imported: frozenset[str]  # modules, by the names they have in this one
    functions: Mapping[str, _Function]
    # Which results are exceptions that the function, or one that it called, caught: the index in
    # the returned tuple, or None for the value itself.
    returning: dict[str, set[int | None]]
    raising: dict[str, set[str]]  # which parameters the function raises

    def returned(self, call: ast.Call, caller: str) -> set[int | None]:
        """Which results of a call are caught exceptions."""
        called = self._called(call, caller)
        return {item for name in called for item in self.returning.get(name, ())}

    def raised(self, call: ast.Call, caller: str) -> list[ast.expr]:
        """Which arguments the called function raises."""
        arguments = []
        for name in self._called(call, caller):
            parameters = self.raising.get(name, set())
            given = [
                *zip(_positional(self.functions[name]), call.args, strict=False),
                *((keyword.arg, keyword.value) for keyword in call.keywords),
            ]
            arguments += [value for parameter, value in given if parameter in parameters]
        return arguments

    def _called(self, call: ast.Call, caller: str) -> list[str]:
        match call.func:
            case ast.Attribute(value=ast.Name(id=receiver), attr=name):
                if receiver in self.imported:
                    return []
                method = f"{caller.rpartition('.')[0]}.{name}"
                if receiver in ("self", "cls") and method in self.functions:
                    return [method]
            case ast.Attribute(attr=name) | ast.Name(id=name):
                pass
            case _:
                return []
        # Of an object whose class is not known here: whatever has this name and can be called so.
        return [
            function
            for function in self.returning.keys() | self.raising.keys()
            if function.rpartition(".")[2] == name
            and (
                self.functions[function].args.vararg
                or len(call.args) <= len(_positional(self.functions[function]))
            )
        ]


def _positional(function: _Function) -> list[str]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


_NOTHING: frozenset[_Held] = frozenset()
_TARGET = "target"  # `how` of the target of `except ... as`
_PARAMETER = "parameter"
_LOCAL = "local"
_ALIAS = "alias"

_INERT = (ast.Constant, ast.JoinedStr, ast.Compare, ast.UnaryOp, ast.BinOp)
_MAY_RAISE = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.Subscript, ast.Assert, ast.Import)
_CHAIN = ("__cause__", "__context__")
_ADDERS = ("append", "appendleft", "add", "insert", "put", "put_nowait", "extend", "push")
_GETTERS = ("items", "values", "pop", "popleft", "popitem", "get", "copy")


def scan_source(source: str, module: str, filename: str) -> list[Finding]:
    """List the names in a module's functions that can hold an exception which leads back to them.

    Functions that release the name themselves are listed too (`Finding.released`). Code at module
    and class level is left out: what it binds is global, not a frame's.

    Args:
        source: source text of the module.
        module: dotted module name, for the findings.
        filename: path, for the findings.

    Raises:
        SyntaxError: the running Python cannot parse the source.
    """
    tree = ast.parse(source, filename)
    if not _is_of_interest(tree):
        return []
    functions = list(_functions(tree, ""))
    scopes = _scopes(symtable.symtable(source, filename, "exec"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    imported = (alias.asname or alias.name for node in imports for alias in node.names)
    this = _Module(frozenset(imported), {name: node for node, name in functions}, {}, {})
    known = None
    while known != (this.returning, this.raising):
        known = copy.deepcopy((this.returning, this.raising))
        looked_at = []
        # What a nested function leaves in a cell is for the function that owns the cell to release.
        left: dict[tuple[str, bool], _State] = defaultdict(dict)
        for function, qualname in reversed(functions):
            if not _is_of_interest(function, this.returning.keys() | this.raising.keys()):
                continue
            scope = scopes[function.name, function.lineno]
            found = {}
            for keep in (True, False):
                found[keep] = _held_at_exit(
                    function, qualname, scope, this, left[qualname, keep], keep
                )
                for name in found[keep].keys() & scope.get_frees():
                    owner = qualname.rpartition(".<locals>.")[0]
                    left[owner, keep][name] = found[keep].pop(name)
            looked_at.append((qualname, scope, found[True], found[False]))
    findings = []
    for qualname, scope, kept, held in looked_at:
        captured = {name for child in scope.get_children() for name in _free_names(child)}
        for name, values in kept.items():
            released = name not in held
            rule, value = _rule(values if released else held[name], name in captured)
            findings.append(
                Finding(
                    module=module,
                    function=qualname,
                    name=name,
                    file=filename,
                    line=value.reaches if rule in (RAISED_PARAMETER, RAISED_LOCAL) else value.line,
                    rule=rule,
                    detail=_detail(rule, value, name in captured),
                    released=released,
                )
            )
    return sorted(findings, key=lambda finding: (finding.line, finding.name))


def _is_of_interest(tree: ast.AST, called: Iterable[str] = ()) -> bool:
    """Whether a function can have a finding, or return a caught exception (most cannot).

    Args:
        tree: the function, or the module.
        called: functions whose callers can.
    """
    names = {"exc_info", "exception", *(function.rpartition(".")[2] for function in called)}
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(name=str()):
                return True
            case ast.Name(id=name) | ast.Attribute(attr=name):
                if name in names:
                    return True
            case ast.Raise(exc=ast.expr() as raised):
                if not isinstance(raised, ast.Call) or _base(raised) is not raised:
                    return True
    return False


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[_Function, str]]:
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, _Function):
                yield child, prefix + child.name
                yield from _functions(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                yield from _functions(child, f"{prefix}{child.name}.")
            else:
                yield from _functions(child, prefix)


def _scopes(table: symtable.SymbolTable) -> dict[tuple[str, int], symtable.Function]:
    found: dict[tuple[str, int], symtable.Function] = {}
    for child in table.get_children():
        found.update(_scopes(child))
        # Other kinds (annotation and type parameter scopes of 3.12 on) can have the same name.
        if isinstance(child, symtable.Function):
            found[child.get_name(), child.get_lineno()] = child
    return found


def _free_names(table: symtable.SymbolTable) -> set[str]:
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_free()}
    # A comprehension's frame ends with it, so it holds nothing on its own.
    return set() if table.get_name() in ("listcomp", "setcomp", "dictcomp") else names


def _base(raised: ast.expr) -> ast.expr:
    """The expression whose value `raised` is, or is taken from."""
    match raised:
        case ast.Call(func=ast.Attribute(value=value, attr="with_traceback")):
            return _base(value)
        case ast.Call(func=ast.Name(id="cast") | ast.Attribute(attr="cast"), args=[_, value]):
            return _base(value)
        case ast.Await(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
            return _base(value)
    return raised


def _raised_in_nested(function: _Function) -> dict[str, int]:
    """Names that functions nested in this one raise, and the line."""
    return {
        base.id: node.lineno
        for nested, _ in _functions(function, "")
        for node in ast.walk(nested)
        if isinstance(node, ast.Raise)
        and node.exc
        and isinstance(base := _base(node.exc), ast.Name)
    }


def _held_at_exit(
    function: _Function,
    qualname: str,
    scope: symtable.Function,
    module: _Module,
    left: _State,
    keep: bool,
) -> dict[str, frozenset[_Held]]:
    """Names that hold an exception that leads to the frame, at any exit of the function.

    Args:
        function: the function.
        qualname: its qualified name.
        scope: its symbol table.
        module: its module, which is told what the function returns and raises.
        left: what its nested functions leave in its cells.
        keep: do as if ``del name`` and ``name = None`` did nothing.
    """
    arguments = function.args
    state: _State = {
        argument.arg: frozenset({_Held(_position(argument), _PARAMETER, argument.lineno, 0)})
        for argument in (
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *filter(None, (arguments.vararg, arguments.kwarg)),
        )
        if not _is_class_annotation(argument.annotation)
    }
    flow = _Flow(function, qualname, scope, module, left, keep)
    exits = flow.block(function.body, state)
    if flow.returned:
        module.returning.setdefault(qualname, set()).update(flow.returned)
    nested = {}
    for name, line in _raised_in_nested(function).items():
        if any(name in _free_names(child) for child in scope.get_children()):
            nested[name] = line
    found: dict[str, frozenset[_Held]] = {}
    for name, values in (_join(_join(exits.next, exits.returned), exits.raised) or {}).items():
        if name in nested:
            values = frozenset(replace(v, reaches=v.reaches or nested[name]) for v in values)
        if hot := frozenset(value for value in values if value.reaches):
            found[name] = hot
            if any(value.how == _PARAMETER for value in hot):
                module.raising.setdefault(qualname, set()).add(name)
    return found


def _rule(values: Iterable[_Held], captured: bool) -> tuple[str, _Held]:
    rules = {
        _PARAMETER: RAISED_PARAMETER,
        _LOCAL: RAISED_LOCAL,
        _ALIAS: CAPTURED if captured else EXCEPT_ALIAS,
    }
    ordered = sorted(
        ((rules.get(value.how, value.how), value) for value in values),
        key=lambda pair: (list(RULES).index(pair[0]), pair[1].reaches, pair[1].line),
    )
    return ordered[0]


def _detail(rule: str, value: _Held, captured: bool) -> str:
    source = f"the exception caught or raised at line {value.reaches}"
    detail = {
        RAISED_PARAMETER: "raises its own parameter",
        RAISED_LOCAL: f"raises the exception bound at line {value.line}",
        EXCEPT_ALIAS: f"alias of {source}",
        CAPTURED: f"alias of {source}",
        RETURNED: "an exception that the called function caught and returned",
        TRACEBACK: f"traceback of {source}",
        STORED: f"keeps {source}",
    }[rule]
    return f"{detail}; in a cell that nested code closes over" if captured else detail


def _is_class_annotation(annotation: ast.expr | None) -> bool:
    """Whether a parameter is annotated as ``type[...]``: raising it makes a new exception."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="type" | "Type") | ast.Attribute(attr="Type")):
            return True
    return False


def _position(node: ast.expr | ast.stmt | ast.arg | ast.excepthandler) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _join(one: _State | None, other: _State | None) -> _State | None:
    if one is None or other is None:
        return other if one is None else one
    return {
        name: one.get(name, _NOTHING) | other.get(name, _NOTHING)
        for name in one.keys() | other.keys()
    }


@dataclass
class _Exits:
    """The states in which a block can be left; None: it cannot be left so."""

    next: _State | None = None
    raised: _State | None = None
    returned: _State | None = None
    broken: _State | None = None
    continued: _State | None = None

    def merge(self, other: _Exits) -> None:
        for field in vars(self):
            setattr(self, field, _join(getattr(self, field), getattr(other, field)))


class _Flow:
    """Follows the statements of one function with what each name may hold."""

    def __init__(
        self,
        function: _Function,
        qualname: str,
        scope: symtable.Function,
        module: _Module,
        left: _State,
        keep: bool,
    ) -> None:
        self.returned: set[int | None] = set()
        self._globals = scope.get_globals()
        self._left = left
        self._qualname = qualname
        self._module = module
        # `raise name(...)` beside `raise name`: a class.
        self._classes = {
            node.exc.func.id
            for node in ast.walk(function)
            if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
        }
        self._keep = keep
        self._handlers = 0

    def block(self, statements: Sequence[ast.stmt], state: _State) -> _Exits:
        exits = _Exits(next=dict(state))
        for statement in statements:
            if exits.next is None:
                break
            step = self._statement(statement, dict(exits.next))
            exits.next = None
            exits.merge(step)
        return exits

    def _statement(self, statement: ast.stmt, state: _State) -> _Exits:
        match statement:
            case ast.If():
                return self._if(statement, state)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(statement, state)
            case ast.With() | ast.AsyncWith():
                exits = _Exits(raised=dict(state))
                for item in statement.items:
                    values = self._value(item.context_expr, state)
                    if item.optional_vars:
                        self._bind(item.optional_vars, values, state)
                body = self.block(statement.body, state)
                exits.merge(body)
                if any("suppress" in ast.unparse(item.context_expr) for item in statement.items):
                    exits.next = _join(exits.next, body.raised)
                return exits
            case ast.Match():
                exits = _Exits(next=state, raised=state)
                for case in statement.cases:
                    exits.merge(self.block(case.body, state))
                return exits
            case ast.Raise():
                values = self._value(statement.exc, state) if statement.exc else _NOTHING
                return _Exits(raised=self._raise(statement, values, state))
            case ast.Return():
                before = dict(state)
                if statement.value:
                    self._return(statement.value, state)
                return _Exits(returned=state, raised=before if _may_raise(statement) else None)
            case ast.Break():
                return _Exits(broken=state)
            case ast.Continue():
                return _Exits(continued=state)
            case ast.Try():
                return self._try(statement, state)
        if type(statement).__name__ == "TryStar":  # except*, Python 3.11 on
            return self._try(statement, state)  # type: ignore[arg-type]
        exits = _Exits(next=state, raised=dict(state) if _may_raise(statement) else None)
        self._simple(statement, state)
        return exits

    def _simple(self, statement: ast.stmt, state: _State) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value, state)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign([target], value, state)
            case ast.AugAssign(target=target, value=value):
                self._store(target, self._value(value, state), state)
            case ast.Delete(targets=targets) if not self._keep:
                for deleted in targets:
                    state.pop(ast.unparse(deleted), None)
            case ast.Expr(value=value):
                self._value(value, state)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                state[statement.name] = _NOTHING
                for name, values in self._left.items():
                    state[name] = state.get(name, _NOTHING) | values
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    state.pop(alias.asname or alias.name.partition(".")[0], None)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, state: _State) -> None:
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple):
            self._unpack(targets[0].elts, value, state)
            return
        held = self._value(value, state)
        if self._keep and isinstance(value, ast.Constant):
            return
        for target in targets:
            self._bind(target, held, state)

    def _unpack(self, targets: Sequence[ast.expr], value: ast.expr, state: _State) -> None:
        if isinstance(value, ast.Tuple) and len(value.elts) == len(targets):
            values = [self._value(element, state) for element in value.elts]
            for target, held in zip(targets, values, strict=True):
                self._bind(target, held, state)
            return
        held = _taken_out(self._value(value, state))
        items: set[int | None] = {1, 2} if self._is_exc_info(value) else set()
        if isinstance(value, ast.Call):
            items |= self._module.returned(value, self._qualname)
        for index, target in enumerate(targets):
            # Each item is an object of its own.
            one = {v for v in held if v.origin != _position(value)}
            one.add(_Held(_position(target), _LOCAL, target.lineno, 0))
            if index in items:
                one |= held
            self._bind(target, frozenset(one), state)

    def _return(self, value: ast.expr, state: _State) -> None:
        items = value.elts if isinstance(value, ast.Tuple) else [value]
        for index, item in enumerate(items):
            if any(held.reaches for held in self._value(item, state)):
                self.returned.add(index if isinstance(value, ast.Tuple) else None)

    def _bind(self, target: ast.expr, values: frozenset[_Held], state: _State) -> None:
        match target:
            case ast.Name(id=name):
                if name in self._globals:
                    values = _as(STORED, values)
                state[name] = frozenset(replace(v, line=target.lineno) for v in values)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self._bind(element, values, state)
            case ast.Starred(value=value):
                self._bind(value, values, state)
            case ast.Attribute():
                state.pop(ast.unparse(target), None)
                self._store(target, values, state)
            case ast.Subscript():
                self._store(target, values, state)

    def _store(self, into: ast.expr, values: frozenset[_Held], state: _State) -> None:
        """`into` (a name, an attribute, an item) now holds the values beside what it held."""
        root: ast.expr = into
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not values or not isinstance(root, ast.Name):
            return
        holder: ast.expr = into
        while isinstance(holder, ast.Subscript | ast.Call):
            holder = holder.func if isinstance(holder, ast.Call) else holder.value
        # Letting go of a local that was made here is enough; of `self` it is not.
        local = any(value.how != _PARAMETER for value in state.get(root.id, _NOTHING))
        name = root.id if local else ast.unparse(holder)
        stored = frozenset(replace(v, line=into.lineno) for v in _as(STORED, values))
        state[name] = state.get(name, _NOTHING) | stored

    def _raise(self, statement: ast.Raise, values: frozenset[_Held], state: _State) -> _State:
        line = statement.lineno
        raised = _base(statement.exc) if statement.exc else None
        if isinstance(raised, ast.Name) and raised.id in self._classes:
            return state
        state = _leaving(values, line, state)
        if isinstance(raised, ast.Attribute) and raised.attr.islower():
            held = frozenset({_Held(_position(raised), STORED, line, line)})
            if isinstance(raised.value, ast.Name) and raised.value.id in state:
                self._store(raised, held, state)
        return state

    def _if(self, statement: ast.If, state: _State) -> _Exits:
        exits = _Exits(raised=dict(state) if _may_raise(statement.test) else None)
        self._value(statement.test, state)
        for body, truth in ((statement.body, True), (statement.orelse, False)):
            exits.merge(self.block(body, _where(statement.test, truth, state)))
        return exits

    def _loop(self, statement: ast.For | ast.AsyncFor | ast.While, state: _State) -> _Exits:
        exits = _Exits()
        test = statement.test if isinstance(statement, ast.While) else None
        if not isinstance(statement, ast.While):
            exits.raised = dict(state)
            values = self._value(statement.iter, state) or frozenset(
                {_Held(_position(statement), _LOCAL, statement.lineno, 0)}
            )
        while True:
            exits.raised = _join(exits.raised, state)
            start = dict(state)
            if isinstance(statement, ast.While):
                self._value(statement.test, start)
                end = _where(statement.test, False, start)
                start = _where(statement.test, True, start)
            else:
                end = dict(start)
                self._bind(statement.target, _taken_out(values), start)
            body = self.block(statement.body, start)
            exits.merge(replace(body, next=None, broken=None, continued=None))
            again = _join(state, _join(body.next, body.continued)) or state
            if again == state:
                break
            state = again
        if not (isinstance(test, ast.Constant) and test.value):
            exits.merge(self.block(statement.orelse, end))
        exits.next = _join(exits.next, body.broken)
        return exits

    def _try(self, statement: ast.Try, state: _State) -> _Exits:
        body = self.block(statement.body, state)
        exits = replace(body, next=None)
        caught = _join(state, body.raised) or state
        if any(_catches_all(handler) for handler in statement.handlers):
            exits.raised = None
        if body.next is not None:
            exits.merge(self.block(statement.orelse, body.next))
        self._handlers += 1
        for handler in statement.handlers:
            start = dict(caught)
            if handler.name:
                value = _Held(_position(handler), _TARGET, handler.lineno, handler.lineno)
                start[handler.name] = frozenset({value})
            step = self.block(handler.body, start)
            for left in vars(step).values():
                if left is not None and handler.name:
                    left.pop(handler.name, None)
            exits.merge(step)
        self._handlers -= 1
        if not statement.finalbody:
            return exits
        final = _Exits()
        for way, left in vars(exits).items():
            if left is not None:
                step = self.block(statement.finalbody, left)
                final.merge(replace(step, next=None))
                setattr(final, way, _join(getattr(final, way), step.next))
        return final

    def _value(self, node: ast.expr, state: _State) -> frozenset[_Held]:
        """What the expression may be, or hold, as seen by a name that is bound to it."""
        match node:
            case ast.Name(id=name):
                values = _as(_ALIAS, state.get(name, _NOTHING), only=_TARGET)
                return _as(_LOCAL, values, only=_PARAMETER)
            case ast.NamedExpr(target=target, value=value):
                values = self._value(value, state)
                self._bind(target, values, state)
                return values
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._value(test, state)
                return self._value(body, state) | self._value(orelse, state)
            case ast.BoolOp(values=operands):
                return self._all(operands, state)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return _as(STORED, self._all(elements, state))
            case ast.Dict(values=elements):
                return _as(STORED, self._all(elements, state))
            case ast.Starred(value=value) | ast.Await(value=value):
                return self._value(value, state)
            case ast.Attribute(value=value, attr=attribute):
                values = self._value(value, state)
                if attribute in _CHAIN:
                    return values
                if attribute == "__traceback__":
                    return _as(TRACEBACK, values)
            case ast.Subscript(value=value, slice=index):
                if self._is_exc_info(value):
                    if isinstance(index, ast.Constant) and index.value == 0:
                        return _NOTHING
                    return self._value(value, state)
                values = self._value(value, state)
                if any(held.how == STORED for held in values):
                    return _taken_out(values)
            case ast.Call():
                return self._call(node, state)
            case ast.Lambda():
                return _NOTHING
            case _ if isinstance(node, _INERT):
                for child in ast.walk(node):
                    if isinstance(child, ast.NamedExpr):
                        self._value(child, state)
                return _NOTHING
        return frozenset({_Held(_position(node), _LOCAL, node.lineno, 0)})

    def _call(self, node: ast.Call, state: _State) -> frozenset[_Held]:
        if self._is_exc_info(node):
            line = node.lineno
            return frozenset({_Held(_position(node), TRACEBACK, line, line)})
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        base = _base(node)
        if base is not node:
            return self._value(base, state)
        given = self._all(arguments, state)
        for argument in self._module.raised(node, self._qualname):
            state.update(_leaving(self._value(argument, state), node.lineno, state))
        if self._module.returned(node, self._qualname):
            line = node.lineno
            return frozenset({_Held(_position(node), RETURNED, line, line)})
        made = frozenset({_Held(_position(node), _LOCAL, node.lineno, 0)})
        match node.func:
            case ast.Attribute(value=receiver, attr=method) if method in _ADDERS:
                self._store(receiver, given, state)
            case ast.Attribute(value=receiver, attr="clear") if not self._keep:
                state.pop(ast.unparse(receiver), None)
            case ast.Attribute(value=receiver, attr=method):
                values = self._value(receiver, state)
                if method in _GETTERS:
                    return made | frozenset(held for held in values if held.how == STORED)
            case ast.Name(id="setattr") if len(node.args) == 3:
                self._store(node.args[0], self._value(node.args[2], state), state)
        function = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = node.func.id if isinstance(node.func, ast.Name) else function
        if function[:1].isupper() or function == "partial":
            # An instance keeps what its class was given: exceptions do so in `args`.
            return made | _as(STORED, given)
        return made

    def _all(self, nodes: Iterable[ast.expr], state: _State) -> frozenset[_Held]:
        return frozenset(held for node in nodes for held in self._value(node, state))

    def _is_exc_info(self, node: ast.expr) -> bool:
        """Whether this asks for the exception that a handler of this very function handles."""
        match node:
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id="sys"), attr="exc_info" | "exception")
                )
                | ast.Call(func=ast.Name(id="exc_info"))
            ):
                return self._handlers > 0
        return False


def _as(how: str, values: frozenset[_Held], only: str | None = None) -> frozenset[_Held]:
    return frozenset(
        replace(value, how=how) if only in (None, value.how) else value for value in values
    )


def _leaving(values: frozenset[_Held], line: int, state: _State) -> _State:
    """The state when an exception that may be one of the values is raised."""
    # Not what the exception itself holds: that is not on its way out.
    origins = {value.origin for value in values if value.how != STORED}
    return {
        name: frozenset(
            replace(v, reaches=line) if v.origin in origins and not v.reaches else v for v in held
        )
        for name, held in state.items()
    }


def _taken_out(values: frozenset[_Held]) -> frozenset[_Held]:
    """What an item of a container with these values may be."""
    return frozenset(
        replace(value, how=_ALIAS if value.reaches else _LOCAL) if value.how == STORED else value
        for value in values
    )


def _may_raise(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear"), args=[])):
            return False
    return any(isinstance(child, _MAY_RAISE) for child in ast.walk(node))


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) == "BaseException"


def _where(test: ast.expr, truth: bool, state: _State) -> _State:
    """What the names hold where the test came out as `truth`."""
    empty = _empty_name(test, truth)
    return {name: values for name, values in state.items() if name != empty}


def _empty_name(test: ast.expr, truth: bool) -> str | None:
    """The name that cannot hold an exception then."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _empty_name(operand, not truth)
        case ast.Name(id=name) if not truth:
            return name
        case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=None)]):
            left = left.target if isinstance(left, ast.NamedExpr) else left
            if isinstance(left, ast.Name) and isinstance(operator, ast.Is if truth else ast.IsNot):
                return left.id
        case ast.Call(
            func=ast.Name(id="isinstance"),
            args=[ast.Name(id=name), ast.Name(id="BaseException" | "Exception")],
        ) if not truth:
            return name
    return None
