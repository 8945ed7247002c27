"""The kinds of edit that a patch can make to a function.

Each kind is one class: what it reads from a patch file, whether the function has it already, the
change to the function's tree, and which names it stops from holding something.  A new kind is a
class here, and an entry in :data:`KINDS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting.scopes import Scope, is_within, place_of, require_plain

ANY_NAME = "*"
_LAMBDA = "<lambda>"


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
                elif inner.name in dict(self.closures):
                    _check_use(scope, inner, dict(self.closures)[inner.name])
                else:
                    raise Refused(f"{inner.name} in {scope.name} closes over {name!r} too")
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
        at: on which way out: ``"exit"``, which is any, ``"return"`` or ``"raise"``.
        before: the statement before which it is done instead; empty for ``at``.
    """

    what: str
    to: str = "None"
    at: str = "exit"
    before: str = ""

    @classmethod
    def read(cls, table: Table) -> Clear:
        return cls(
            table.place("clear"),
            table.choice("to", ("None", "[]", "{}", "()", "clear()", "del")),
            table.choice("at", ("exit", "return", "raise")),
            table.statement("before", required=False),
        )

    @property
    def works_without_source(self) -> bool:
        return False

    def holders(self) -> tuple[tuple[str, str], ...]:
        return (("", self.what),)

    def apply(self, scope: Scope) -> bool:
        root = next(n for n in ast.walk(ast.parse(self.what)) if isinstance(n, ast.Name)).id
        if root not in scope.bound and root not in scope.uses:
            raise Refused(f"{scope.name} has no parameter or local {root!r}")
        if self.before:
            anchor, block = _anchor(scope, self.before)
            place = block.index(anchor)
            if place and self._is_done(block[place - 1]):
                return False
            block.insert(place, self._statement(anchor))
            return True
        return getattr(self, f"_at_{self.at}")(scope)  # type: ignore[no-any-return]

    def _at_exit(self, scope: Scope) -> bool:
        last = scope.node.body[-1]
        if isinstance(last, ast.Try) and any(map(self._is_done, last.finalbody)):
            return False
        head, body = _head_and_body(scope)
        scope.node.body = head + _guarded(body, [self._statement(body[-1])])
        return True

    def _at_return(self, scope: Scope) -> bool:
        changed = False
        for node in list(scope.find(ast.Return)):
            block = _block_of(scope, node)
            place = block.index(node)
            if place and self._is_done(block[place - 1]):
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
        last = scope.node.body[-1]
        if not isinstance(last, ast.Return | ast.Raise) and not self._is_done(last):
            scope.node.body.append(self._statement(last))
            changed = True
        return changed

    def _at_raise(self, scope: Scope) -> bool:
        last = scope.node.body[-1]
        if isinstance(last, ast.Try) and any(
            self._is_done(statement) for h in last.handlers for statement in h.body
        ):
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
        done = _dumped(self._code())
        inside = statement.body if isinstance(statement, ast.Try) else [statement]
        return any(ast.dump(found) == done for found in inside)

    def _statement(self, near: ast.stmt) -> ast.stmt:
        """What clears it, on the line of ``near``."""
        # Looked at first: an attribute that is not there is not made.
        return _placed(
            f"try:\n {self.what}\n {self._code()}\n"
            "except (NameError, AttributeError, LookupError, TypeError):\n pass",
            near,
        )


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
        return cls(
            table.statement("insert"),
            table.statement("before", required=False),
            table.statement("after", required=False),
        )

    @property
    def works_without_source(self) -> bool:
        return False

    def holders(self) -> tuple[tuple[str, str], ...]:
        return ()

    def apply(self, scope: Scope) -> bool:
        if self.before or self.after:
            anchor, block = _anchor(scope, self.before or self.after)
        else:
            _, body = _head_and_body(scope)
            anchor, block = body[0], scope.node.body
        place = block.index(anchor)
        if not self.before and not self.after and ast.dump(anchor) == _dumped(self.statement):
            return False
        neighbours = block[:place][-1:] if self.before else block[place + 1 :][:1]
        if any(ast.dump(found) == _dumped(self.statement) for found in neighbours):
            return False
        block.insert(place + bool(self.after), _placed(self.statement, anchor))
        return True


KINDS: dict[str, Any] = {"release": Release, "omit": Omit, "clear": Clear, "insert": Insert}
"""The kinds of edit, by the key that stands for each in a patch file."""


# What the kinds share


def _require_no_closures(scope: Scope, name: str) -> None:
    for inner in scope.capturers(name):
        raise Refused(f"{inner.name} in {scope.name} closes over {name!r} too")


def _check_use(scope: Scope, inner: Scope, taker: str) -> None:
    """Check that a nested function is only called there, or handed to a call of ``taker``."""
    called: set[ast.AST] = set()
    for call in (n for n in ast.walk(scope.node) if isinstance(n, ast.Call)):
        function = call.func
        if isinstance(function, ast.Attribute) and isinstance(inner.node, ast.ClassDef):
            function = function.value  # a method of the class
        if isinstance(function, ast.Name) and function.id == inner.name:
            called.add(function)
        if taker != inner.name and f".{ast.unparse(call.func)}".endswith(f".{taker}"):
            for argument in (*call.args, *call.keywords):
                called.update(ast.walk(argument))
    uses = [inner.node]
    if inner.name != _LAMBDA:
        uses = [use for use in scope.mentions(inner.name) if use is not inner.node]
    if not called.issuperset(uses):
        only = f"handing it to {taker}" if taker != inner.name else "calling it"
        raise Refused(f"{inner.name} in {scope.name} is used other than by {only}")


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


def _anchor(scope: Scope, text: str) -> tuple[ast.stmt, list[ast.stmt]]:
    """The one statement of the function that is ``text``, and the block that it stands in."""
    wanted = _dumped(text)
    found = [n for n in scope.own if isinstance(n, ast.stmt) and ast.dump(n) == wanted]
    if len(found) != 1:
        raise Refused(f"found {len(found)} statements {text!r} in {scope.name}, expected 1")
    return found[0], _block_of(scope, found[0])


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
