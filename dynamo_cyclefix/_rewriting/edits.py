"""The kinds of edit that a patch can make to a function.

Each kind is one class: what it reads from a patch file, whether the function has it already, the
change to the function's tree, and which names it stops from holding something.  A new kind is a
class here, and an entry in :data:`KINDS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting.scopes import Scope, is_within, place_of, require_plain

ANY_NAME = "*"
# What says that there is nothing to clear; `None` has no items, which is a `TypeError`.
_MISSING = "(NameError, AttributeError, LookupError, TypeError)"


class Table(Protocol):
    """One inline table of a patch file; each method reads a key and says what is wrong with it."""

    def text(self, key: str, required: bool = True) -> str: ...
    def texts(self, key: str, required: bool = True) -> tuple[str, ...]: ...
    def pairs(self, key: str) -> tuple[tuple[str, str], ...]: ...
    def choice(self, key: str, choices: Sequence[str]) -> str: ...
    def statement(self, key: str, required: bool = True) -> str: ...
    def place(self, key: str) -> str: ...


class Edit(Protocol):
    """What every kind of edit offers."""

    @property
    def works_without_source(self) -> bool:
        """Whether a wrapper that clears the frames of an exception does the same."""

    def holders(self) -> tuple[tuple[str, str], ...]:
        """What no longer holds anything: a nested function (or none) and a name in it."""

    def in_words(self) -> str:
        """What is changed, as a report says it."""

    def apply(self, scope: Scope) -> bool:
        """Change the function's tree in place.

        Returns:
            Whether anything was to be changed.

        Raises:
            Refused: a shape is not recognised.
        """


class Release(NamedTuple):
    """Names that the function lets go of on its way out.

    Attributes:
        names: parameters and locals (cells too).
        helpers: nested functions that close over one of them and get it as a parameter instead.
        closures: nested functions that may go on closing over one of them, since they do not
            outlive the function; and the call, beside their own, that may take each as an argument.
    """

    names: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    closures: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, table: Table) -> Release:
        return cls(
            table.texts("release"), table.texts("helpers", required=False), table.pairs("closures")
        )

    @property
    def works_without_source(self) -> bool:
        return True

    def holders(self) -> tuple[tuple[str, str], ...]:
        own = tuple(("", name) for name in self.names)
        # Of a helper, whatever it binds and raises is released too.
        return own + tuple((helper, ANY_NAME) for helper in self.helpers)

    def in_words(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.names)
        passed = "".join(
            f"; `{helper}` takes it as a parameter, where it closed over it"
            for helper in self.helpers
        )
        return f"let go of {names} on every way out, in a `finally`{passed}"

    def apply(self, scope: Scope) -> bool:
        for name in self.names:
            if name not in scope.bound:
                raise Refused(f"{scope.name} has no parameter or local {name!r}")
        held = [name for name in self.names if not scope.is_released(name)]
        if not held:
            return False
        helpers: dict[str, Scope] = {}
        for name in held:
            for inner in scope.capturers(name):
                if inner.name in self.helpers:
                    self._pass(scope, inner, name)
                    helpers[inner.name] = inner
                else:
                    _check_use(scope, inner, name, dict(self.closures))
        for helper in helpers.values():
            raised = list(_raised_locals(helper))
            for name in raised:
                _require_no_closures(helper, name)
            _release(helper, raised)
        _release(scope, held)
        return True

    def _pass(self, scope: Scope, helper: Scope, name: str) -> None:
        """Make ``name``, which ``helper`` closes over, its first parameter."""
        what = f"helper {helper.name} of {scope.name}"
        require_plain(helper, what)
        if helper.node.decorator_list:
            raise Refused(f"{what} has a decorator")
        if not scope.always_bound(name):
            raise Refused(f"{what} may be called where {name!r} is not bound")
        _require_no_closures(helper, name)
        calls = [
            node
            for node in (*scope.find(ast.Call), *helper.find(ast.Call))
            if isinstance(node.func, ast.Name) and node.func.id == helper.name
        ]
        # Its definition is one mention.  Who gets it as a value does not know of the new parameter.
        if len(scope.mentions(helper.name)) != len(calls) + 1:
            raise Refused(f"{what} is used other than by calling it there")
        parameters = helper.node.args.posonlyargs or helper.node.args.args
        parameters.insert(0, ast.arg(name, **place_of(helper.node)))
        for call in calls:
            call.args.insert(0, ast.Name(name, ast.Load(), **place_of(call)))


class Omit(NamedTuple):
    """An argument that is left out of a call.

    Attributes:
        argument: the name that is handed on.
        call: what is called, as it stands in the source.
    """

    argument: str
    call: str

    @classmethod
    def read(cls, table: Table) -> Omit:
        return cls(table.text("omit"), table.text("from"))

    @property
    def works_without_source(self) -> bool:
        return False

    def holders(self) -> tuple[tuple[str, str], ...]:
        return (("", self.argument),)

    def in_words(self) -> str:
        return f"leave `{self.argument}` out of the call of `{self.call}`"

    def apply(self, scope: Scope) -> bool:
        if self.argument not in scope.bound:
            raise Refused(f"{scope.name} has no parameter or local {self.argument!r}")
        calls = [call for call in scope.find(ast.Call) if ast.unparse(call.func) == self.call]
        if not calls:
            raise Refused(f"{scope.name} does not call {self.call}")
        changed = False
        for call in calls:
            kept = [a for a in call.args if getattr(a, "id", None) != self.argument]
            changed |= kept != call.args
            call.args = kept
        return changed


class Clear(NamedTuple):
    """An attribute or item that is emptied; nothing happens where it does not exist.

    Attributes:
        what: the attribute or item, as an expression.
        to: what becomes of it.
        at: on which way out: ``"exit"``, which is any, ``"return"`` or ``"raise"``; or empty.
        before: the statement before which it is done instead, which occurs exactly once; or empty.
    """

    what: str
    to: str = "None"
    at: str = "exit"
    before: str = ""

    @classmethod
    def read(cls, table: Table) -> Clear:
        before = table.statement("before", required=False)
        return cls(
            table.place("clear"),
            table.choice("to", ("None", "[]", "{}", "()", "clear()", "del")),
            "" if before else table.choice("at", ("exit", "return", "raise")),
            before,
        )

    @property
    def works_without_source(self) -> bool:
        return False

    def holders(self) -> tuple[tuple[str, str], ...]:
        return (("", self.what),)

    def in_words(self) -> str:
        done = f"set `{self.what}` to `{self.to}`"
        if self.to in ("del", "clear()"):
            done = f"{'delete' if self.to == 'del' else 'empty'} `{self.what}`"
        when = {
            "exit": "on every way out, in a `finally`",
            "return": "before the function returns",
            "raise": "when an exception leaves the function",
        }
        return f"{done} {f'before `{self.before}`' if self.before else when[self.at]}"

    def apply(self, scope: Scope) -> bool:
        for node in ast.walk(ast.parse(self.what)):
            if isinstance(node, ast.Name) and node.id not in scope.bound | scope.uses.keys():
                raise Refused(f"{scope.name} has no parameter or local {node.id!r}")
        if self.before:
            block, place = _anchor(scope, self.before)
            if any(map(self._is_done, _clearing(block[:place]))):
                return False
            block.insert(place, self._statement(block[place]))
            return True
        return getattr(self, f"_at_{self.at}")(scope)  # type: ignore[no-any-return]

    def _at_exit(self, scope: Scope) -> bool:
        if any(self._is_done(done) for last in _last_tries(scope) for done in last.finalbody):
            return False
        root = _root(self.what)
        if scope.is_released(root):
            raise Refused(f"{scope.name} lets go of {root!r} before {self.what} could be cleared")
        head, body = _head_and_body(scope)
        scope.node.body = head + _guarded(body, [self._statement(body[-1])])
        return True

    def _at_return(self, scope: Scope) -> bool:
        changed = False
        for node in list(scope.find(ast.Return)):
            block = _block_of(scope, node)
            place = block.index(node)
            if any(map(self._is_done, _clearing(block[:place]))):
                continue
            if node.value is not None and not isinstance(node.value, ast.Name | ast.Constant):
                # It is cleared after its last use.
                name = _new_name(scope)
                target = ast.Name(name, ast.Store(), **place_of(node))
                block.insert(place, ast.Assign([target], node.value, **place_of(node)))
                node.value = ast.Name(name, ast.Load(), **place_of(node))
                place += 1
            block.insert(place, self._statement(node))
            changed = True
        blocks = [scope.node.body, *(last.body for last in _last_tries(scope))]
        last = scope.node.body[-1]
        if not isinstance(last, ast.Return | ast.Raise) and not any(
            self._is_done(done) for block in blocks for done in _clearing(block)
        ):
            scope.node.body.append(self._statement(last))
            changed = True
        return changed

    def _at_raise(self, scope: Scope) -> bool:
        handlers = [
            handler
            for last in _last_tries(scope)
            for handler in last.handlers
            if handler.type is None or ast.unparse(handler.type) == "BaseException"
        ]
        if any(self._is_done(done) for handler in handlers for done in handler.body):
            return False
        head, body = _head_and_body(scope)
        place = place_of(body[-1])
        handler = ast.ExceptHandler(
            ast.Name("BaseException", ast.Load(), **place),
            None,
            [self._statement(body[-1]), ast.Raise(**place)],
            **place,
        )
        scope.node.body = [*head, ast.Try(body, [handler], [], [], **_span(body))]
        return True

    def _code(self) -> str:
        if self.to == "del":
            return f"del {self.what}"
        return f"{self.what}.clear()" if self.to == "clear()" else f"{self.what} = {self.to}"

    def _is_done(self, statement: ast.stmt) -> bool:
        return ast.dump(statement) in (_dumped(self._code()), _dumped(self._text()))

    def _statement(self, near: ast.stmt) -> ast.stmt:
        """What clears it, on the line of ``near``."""
        return _placed(self._text(), near)

    def _text(self) -> str:
        # Looked at first: an attribute that is not there is not made.
        return f"try:\n {self.what}\n {self._code()}\nexcept {_MISSING}:\n pass"


class Insert(NamedTuple):
    """A statement of our own, where no other kind of edit will do.

    Attributes:
        statement: what is inserted.
        before: the statement before which it goes, which occurs exactly once; or empty.
        after: the statement after which it goes; or empty.  Without either, the function begins
            with it.
    """

    statement: str
    before: str = ""
    after: str = ""

    @classmethod
    def read(cls, table: Table) -> Insert:
        before = table.statement("before", required=False)
        after = "" if before else table.statement("after", required=False)
        return cls(table.statement("insert"), before, after)

    @property
    def works_without_source(self) -> bool:
        return False

    def holders(self) -> tuple[tuple[str, str], ...]:
        return ()

    def in_words(self) -> str:
        anchor = " ".join((self.before or self.after).split())
        place = f"{'before' if self.before else 'after'} `{anchor}`" if anchor else "first"
        return f"add `{self.statement}` {place}"

    def apply(self, scope: Scope) -> bool:
        if self.before or self.after:
            anchor = self.before or self.after
            block, place = _anchor(scope, anchor, may_be_docstring=not self.before)
        else:
            head, _ = _head_and_body(scope)
            block, place = scope.node.body, len(head)
            if ast.dump(block[place]) == _dumped(self.statement):
                return False
        neighbours = block[:place][-1:] if self.before else block[place + 1 :][:1]
        if any(ast.dump(found) == _dumped(self.statement) for found in neighbours):
            return False
        block.insert(place + bool(self.after), _placed(self.statement, block[place]))
        return True


KINDS: dict[str, Any] = {"release": Release, "omit": Omit, "clear": Clear, "insert": Insert}
"""The kinds of edit, by the key that stands for each in a patch file."""


# What the kinds share


def _require_no_closures(scope: Scope, name: str) -> None:
    for inner in scope.capturers(name):
        raise Refused(f"{inner.name} in {scope.name} closes over {name!r} too")


def _check_use(scope: Scope, inner: Scope, name: str, takers: Mapping[str, str]) -> list[Scope]:
    """Check that a nested function is only called there, or handed to a call that may take it.

    What closes over ``name`` inside of it, or calls it later, could outlive it, so the same holds
    there.  ``return`` is a taker too: the patch says why nobody calls what is returned.

    Returns:
        The scopes that were checked.
    """
    if inner.name not in takers:
        raise Refused(f"{inner.name} in {scope.name} closes over {name!r} too")
    if getattr(inner.node, "decorator_list", ()):
        raise Refused(f"{inner.name} in {scope.name} has a decorator")
    is_class = isinstance(inner.node, ast.ClassDef)
    checked = [inner]
    for deeper in () if is_class else inner.capturers(name):
        checked += _check_use(inner, deeper, name, takers)
    taker = takers[inner.name]
    called: set[Any] = set()
    for call in (c for where in (scope, *checked) for c in where.find(ast.Call)):
        function = call.func
        if isinstance(function, ast.Attribute) and is_class:
            function = function.value  # a method of the class
        if isinstance(function, ast.Name) and function.id == inner.name:
            called.add(function)
        if taker != inner.name and f".{ast.unparse(call.func)}".endswith(f".{taker}"):
            called.update(a.value if isinstance(a, ast.Starred) else a for a in call.args)
            called.update(keyword.value for keyword in call.keywords)
    if taker == "return":
        called.update(node.value for node in scope.find(ast.Return))
    uses = [inner.node]
    if not inner.is_nameless:
        uses = [use for use in scope.mentions(inner.name) if use is not inner.node]
    if not called.issuperset(uses):
        only = f"handing it to {taker}" if taker != inner.name else "calling it"
        raise Refused(f"{inner.name} in {scope.name} is used other than by {only}")
    return checked


def _raised_locals(scope: Scope) -> Iterator[str]:
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


def _release(scope: Scope, names: Sequence[str]) -> None:
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
    if everywhere:
        head, body = _head_and_body(scope)
        # `del` fails on a name that is not bound.
        finals = [_let_go(name, body[-1], delete=scope.always_bound(name)) for name in everywhere]
        scope.node.body = head + _guarded(body, finals)


def _handlers_that_hold(scope: Scope, name: str) -> list[ast.ExceptHandler]:
    """The ``except`` blocks of one ``try`` that hold every mention of ``name``, if there are such.

    Two blocks of one ``try`` never run after each other, so none leaves the name to the other;
    unless there is a loop around them.
    """
    if name in scope.parameters:
        return []
    mentions = scope.mentions(name)
    loops = list(scope.find((ast.For, ast.While)))
    for node in scope.find(ast.Try):
        handlers = [h for h in node.handlers if any(is_within(m, h.body) for m in mentions)]
        if all(any(is_within(m, h.body) for h in handlers) for m in mentions):
            return [] if any(is_within(node, [loop]) for loop in loops) else handlers
    return []


def _let_go(name: str, near: ast.stmt, delete: bool = False) -> ast.stmt:
    # On the line of the last statement: nothing that runs is outside the function's own lines.
    return _placed(f"del {name}" if delete else f"{name} = None", near)


def _head_and_body(scope: Scope) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The docstring, if there is one, and what follows."""
    node = scope.node
    start = 1 if ast.get_docstring(node, clean=False) is not None else 0
    if not node.body[start:]:
        raise Refused(f"{scope.name} has no body")
    return node.body[:start], node.body[start:]


def _guarded(body: list[ast.stmt], finals: list[ast.stmt]) -> list[ast.stmt]:
    return [ast.Try(body=body, handlers=[], orelse=[], finalbody=finals, **_span(body))]


def _span(body: Sequence[ast.stmt]) -> dict[str, Any]:
    return {**place_of(body[0]), **place_of(body[-1], "end_lineno", "end_col_offset")}


def _placed(text: str, near: ast.stmt) -> ast.stmt:
    """A statement, on the line of another."""
    (statement,) = ast.parse(text).body
    for node in ast.walk(statement):
        if "lineno" in node._attributes:
            for name, value in place_of(near).items():
                setattr(node, name, value)
    return statement


def _dumped(text: str) -> str:
    (statement,) = ast.parse(text).body
    return ast.dump(statement)


def _anchor(scope: Scope, text: str, may_be_docstring: bool = False) -> tuple[list[ast.stmt], int]:
    """The block and the index in it of the one statement of the function that is ``text``."""
    (wanted,) = ast.parse(text).body
    kind, dump = type(wanted), ast.dump(wanted)
    found = [node for node in scope.own if type(node) is kind and ast.dump(node) == dump]
    if len(found) != 1:
        raise Refused(f"found {len(found)} statements {text!r} in {scope.name}, expected 1")
    block = _block_of(scope, found[0])
    head, _ = _head_and_body(scope)
    if found[0] in head and not may_be_docstring:
        raise Refused(f"{text!r} in {scope.name} is its docstring, which stays first")
    return block, block.index(found[0])


def _last_tries(scope: Scope) -> Iterator[ast.Try]:
    """The ``try`` statement that ends the function, then that which ends its body, and so on."""
    body = scope.node.body
    while body:
        body = body[: len(body) - len(_clearing(body))]
        if not body or not isinstance(body[-1], ast.Try):
            return
        yield body[-1]
        body = body[-1].body


def _clearing(block: list[ast.stmt]) -> list[ast.stmt]:
    """The run of statements at the end of a block that do nothing but to clear something."""
    start = len(block)
    while start and _clears(block[start - 1]):
        start -= 1
    return block[start:]


def _clears(statement: ast.stmt) -> bool:
    match statement:
        case ast.Delete():
            return True
        case ast.Assign(value=value):
            return ast.unparse(value) in ("None", "[]", "{}", "()")
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear"))):
            return True
        case ast.Try(handlers=[ast.ExceptHandler(type=ast.Tuple() as kinds)]):
            return ast.unparse(kinds) == _MISSING
    return False


def _root(place: str) -> str:
    """The name that an attribute or item is reached from; empty if that is no name."""
    node: Any = ast.parse(place, mode="eval").body
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def _block_of(scope: Scope, statement: ast.stmt) -> list[ast.stmt]:
    for owner in (scope.node, *scope.own):
        for block in vars(owner).values():
            if type(block) is list and any(found is statement for found in block):
                return block
    raise Refused(f"{scope.name} has a statement outside of any block")


def _new_name(scope: Scope) -> str:
    name = "returned"
    while name in scope.uses or name in scope.bound or scope.mentions(name):
        name += "_"
    return name
