"""The rewrite on plain functions, without torch.

Each sample is a module whose ``run(new)`` makes the target function raise what ``new`` makes.  It
is loaded twice: as it is, the control, and with the replacement in place.
"""

import ast
import contextlib
import dataclasses
import gc
import inspect
import itertools
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_child
from packaging.specifiers import SpecifierSet

from dynamo_cyclefix import _rewriting
from dynamo_cyclefix._catalogue.model import Target
from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting import units
from dynamo_cyclefix._rewriting.derive import apply
from dynamo_cyclefix._rewriting.edits import Insert, Omit, Release

FILE = "/nowhere/sample.py"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A module, and what is to be rewritten in it.

    Attributes:
        source: of the module; its indentation is taken off.
        function: the qualified name of the target.
        names: what holds the exception.
        helpers: see ``Release``.
        closures: see ``Release``.
        pins: whether the function, as it is, pins the stack below it.
    """

    source: str
    function: str = "handle"
    names: tuple[str, ...] = ("error",)
    helpers: tuple[str, ...] = ()
    closures: tuple[tuple[str, str], ...] = ()
    pins: bool = True

    @property
    def text(self) -> str:
        return textwrap.dedent(self.source)

    @property
    def target(self) -> Target:
        edits = (Release(self.names, self.helpers, self.closures),)
        return Target("sample", self.function, edits, SpecifierSet())

    def load(self) -> dict[str, Any]:
        """Execute the module anew."""
        namespace: dict[str, Any] = {"__name__": "sample"}
        exec(compile(self.text, FILE, "exec", dont_inherit=True), namespace)
        return namespace

    def live(self, namespace: dict[str, Any]) -> types.FunctionType:
        """The outermost function."""
        found: Any = types.SimpleNamespace(**namespace)
        for name in self.target.outermost.split("."):
            found = vars(found)[name]
        while type(found) is not types.FunctionType:
            for attribute in ("__func__", "fget", "__wrapped__"):
                found = getattr(found, attribute, found)
        return inspect.unwrap(found)

    def rewrite(self, code: types.CodeType) -> _rewriting.Rewrite:
        return _rewriting.rewrite(self.text, code, self.target.outermost, [self.target])

    def patched(self) -> dict[str, Any]:
        """Execute the module anew, and put the replacement in place."""
        namespace = self.load()
        function = self.live(namespace)
        function.__code__ = self.rewrite(function.__code__).replacement
        return namespace


SAMPLES = {
    "a parameter": Sample("""
        def handle(error):
            if error.args:
                raise error
            return "nothing"
        run = lambda new: handle(new())
    """),
    "a keyword-only parameter among others": Sample("""
        def handle(first, /, second=(1, 2), *rest, error=None, flag: "bool" = True, **more) -> None:
            '''Docstring.'''
            if error.args:
                raise error
            return first, second, rest, flag, more
        def run(new):
            return handle(0, 1, 2, error=new(), x=3)
    """),
    "a positional-only parameter": Sample("""
        def handle(error, /):
            raise error
        run = lambda new: handle(new())
    """),
    "the parameter for the rest": Sample(
        """
        def handle(*errors):
            raise errors[-1]
        def run(new):
            return handle(None, new())
    """,
        names=("errors",),
    ),
    "two parameters": Sample(
        """
        def handle(error, other):
            def report(x):
                return [error, other, x]
            assert report(1) == [error, other, 1]
            try:
                raise error
            except KeyError:
                raise other
        def run(new):
            return handle(new(), ValueError(1))
    """,
        names=("error", "other"),
        helpers=("report",),
    ),
    "a helper called several times": Sample(
        """
        def handle(error, *, log=()):
            text = "seen"
            def report(prefix="", *rest, key=0, **more):
                if not isinstance(error, BaseException):
                    raise TypeError(text)
                return f"{prefix}{error}{rest}{key}{more}"
            lines = [
                report(),
                report("a", 1, 2),
                report(prefix="b", key=1, other=2),
                report(*log, **{"key": 3}),
            ]
            if error.args:
                report(report(report()))
                raise error
            return lines
        def run(new):
            return handle(new(), log="xy")
    """,
        helpers=("report",),
    ),
    "a helper with a positional-only parameter": Sample(
        """
        def handle(error):
            def report(x, /, y):
                return error, x, y
            assert report(1, y=2) == (error, 1, 2)
            raise error
        run = lambda new: handle(new())
    """,
        helpers=("report",),
    ),
    "a helper that calls itself": Sample(
        """
        def handle(error):
            def report(n):
                return repr(error) if n == 0 else report(n - 1) + str(n)
            if not error.args:
                return report(3)
            raise error
        run = lambda new: handle(new())
    """,
        helpers=("report",),
    ),
    "a helper that binds what it raises": Sample(
        """
        def handle(error):
            text = "seen"
            def report():
                if isinstance(error, KeyError):
                    new = RuntimeError(text, str(error))
                    raise new.with_traceback(error.__traceback__) from None
                return text
            report()
            raise error
        run = lambda new: handle(new())
    """,
        helpers=("report",),
    ),
    "a helper that is not there": Sample(
        """
        def handle(error):
            raise error
        run = lambda new: handle(new())
    """,
        helpers=("report",),
    ),
    "a local": Sample(
        """
        def handle(args):
            if not args:
                return None
            found: Exception = KeyError(*args)
            raise found
        def run(new):
            return handle(new().args)
    """,
        names=("found",),
    ),
    "another local that is raised": Sample(
        """
        def handle(error):
            if isinstance(error, KeyError):
                new = ValueError(*error.args)
                raise new
            raise error
        run = lambda new: handle(new())
    """,
        names=("error", "new"),
    ),
    "a name that may be unbound": Sample(
        """
        def handle(error):
            if not error.args:
                return "nothing"
            found = error
            del error
            raise found
        run = lambda new: handle(new())
    """,
        names=("found", "error"),
    ),
    "a parameter that an except block unbinds": Sample(
        """
        def handle(error):
            try:
                raise error
            except KeyError as error:
                text = repr(error)
            return text
        run = lambda new: handle(new())
    """,
        pins=False,
    ),
    "an alias in an except block": Sample(
        """
        def handle(new):
            try:
                raise new()
            except KeyError as e:
                cause = e
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                raise
            finally:
                str(1)
        run = handle
    """,
        names=("cause",),
    ),
    "aliases in the except blocks of one try": Sample(
        """
        def handle(new):
            try:
                raise new()
            except KeyError as e:
                cause = e
                raise e.with_traceback(None) from None
            except ValueError as e:
                cause = e
                raise
        run = handle
    """,
        names=("cause",),
    ),
    "an alias that a later except block reads": Sample(
        """
        def handle(new):
            try:
                raise new()
            except KeyError as e:
                first = e
            try:
                int("x")
            except ValueError:
                raise first
        run = handle
    """,
        names=("first",),
    ),
    "an alias that lasts from one round of a loop to the next": Sample(
        """
        def handle(new):
            for attempt in range(3):
                try:
                    if attempt < 2:
                        raise new()
                    int("x")
                except KeyError as e:
                    last = e
                except ValueError:
                    raise last
        run = handle
    """,
        names=("last",),
    ),
    "a cell that a lambda closes over": Sample(
        """
        def call(function):
            return function()
        def handle(new):
            try:
                raise new()
            except KeyError as e:
                cause = e
                call(lambda: cause)
                raise
        run = handle
    """,
        names=("cause",),
        closures=(("<lambda>", "call"),),
    ),
    "a cell that a generator expression closes over": Sample(
        """
        def handle(error):
            if any(error is x for x in [error]) and error.args:
                raise error
        run = lambda new: handle(new())
    """,
        closures=(("<genexpr>", "any"),),
    ),
    "comprehensions": Sample("""
        def handle(error):
            texts = [str(error) + c for c in "ab" if error]
            count = len({k: error for k in texts} | {k: error for k in {error, error}})
            names = [other for other in sorted(str(error))]
            if not error.args:
                return names
            raise error
        run = lambda new: handle(new())
    """),
    "a pattern": Sample(
        """
        def handle(error):
            match [error, 1]:
                case [KeyError() as found, *rest]:
                    if found.args:
                        raise found
                    return rest
        run = lambda new: handle(new())
    """,
        names=("found", "error"),
    ),
    "loops, with, else and return": Sample("""
        import contextlib
        def handle(error):
            for i in range(3):
                with contextlib.suppress(ZeroDivisionError):
                    while True:
                        if i == 2:
                            if not error.args:
                                return i
                            raise error
                        1 / 0
                continue
            else:
                raise AssertionError
        run = lambda new: handle(new())
    """),
    "a method with super and private names": Sample(
        """
        class Base:
            def handle(self, error):
                return type(error)
        class _Thing(Base):
            __secret = "s"
            def handle(self, error):
                def report(__private=1):
                    return repr(error), self.__secret, __private, super(_Thing, self).handle(error)
                super().handle(error)
                self.__note = __class__.__secret, report()
                if error.args:
                    raise error
                return sorted(vars(self))
        run = lambda new: _Thing().handle(new())
    """,
        "_Thing.handle",
        helpers=("report",),
    ),
    "a static method": Sample(
        """
        class Thing:
            @staticmethod
            def handle(error):
                raise error
        run = lambda new: Thing.handle(new())
    """,
        "Thing.handle",
    ),
    "a class method": Sample(
        """
        class Thing:
            @classmethod
            def handle(cls, error):
                raise error
        run = lambda new: Thing().handle(new())
    """,
        "Thing.handle",
    ),
    "a property, with a setter of the same name": Sample(
        """
        class Thing:
            @property
            def handle(self):
                found = vars(self).pop("error")
                raise found
            @handle.setter
            def handle(self, value):
                self.error = value
        def run(new):
            thing = Thing()
            thing.handle = new()
            return thing.handle
    """,
        "Thing.handle",
        names=("found",),
    ),
    "a method of a nested class in an if block": Sample(
        """
        if True:
            class Outer:
                class Inner:
                    if str():
                        def handle(self, error):
                            return "never"
                    else:
                        def handle(self, error):
                            self.__private = error
                            del self.__private
                            raise error
        run = lambda new: Outer.Inner().handle(new())
    """,
        "Outer.Inner.handle",
    ),
    "a function in a try block": Sample("""
        try:
            def handle(error):
                raise error
        finally:
            run = lambda new: handle(new())
    """),
    "a decorated function": Sample("""
        def decorate(*texts):
            def deco(function):
                function.texts = texts
                return function
            return deco
        @decorate(
            "a",
            "b",
        )
        @decorate()
        def handle(error):
            raise error
        run = lambda new: handle(new())
    """),
    "a nested function": Sample(
        """
        def make(text):
            count = 0
            def handle(error):
                nonlocal count
                count += 1
                if error.args:
                    raise error
                return text, count
            return handle
        def run(new):
            return make("x")(new())
    """,
        "make.<locals>.handle",
    ),
    "a function nested twice": Sample(
        """
        def make():
            def deco(function):
                def handle(error):
                    new = function(*error.args)
                    raise new
                return handle
            return deco
        def run(new):
            return make()(ValueError)(new())
    """,
        "make.<locals>.deco.<locals>.handle",
        names=("new",),
    ),
    "future annotations and a header of several lines": Sample("""
        from __future__ import annotations
        def handle(
            error: Exception,
            *extra: undefined.name,
            flag: bool = True,
        ) -> undefined[
            0
        ]:
            def inner(x: undefined) -> undefined:
                return x
            if not error.args:
                return inner.__annotations__
            raise error
        run = lambda new: handle(new())
    """),
    "strings over several lines, and text that is not ASCII": Sample(
        '''
        def handle(größe, *, ß="→😀"):
            """Docstring: größe.

                    indented
                  less so
            """
            text = """
        def at_the_margin():
        # no comment
            """
            name = f"{größe!r:>{len(text)}}" \\
        "continued"
            if not größe.args:
                return text, name, ß
            # a comment
        # a comment at the margin
            raise größe
        run = lambda new: handle(new())
    ''',
        names=("größe",),
    ),
    "tabs": Sample(
        """
        class Thing:
        \tdef handle(self, error):
        \t\tif not error.args:
        \t\t\treturn "nothing"
        \t\traise error
        run = lambda new: Thing().handle(new())
    """,
        "Thing.handle",
    ),
    "line ends that are none": Sample("""
        A = '\x0c \x1c \x85 \u2028'
        \x0c
        def handle(error):
            raise error
        run = lambda new: handle(new())
    """),
    "one line": Sample("""
        def handle(error): raise error
        run = lambda new: handle(new())
    """),
    "the last line of the file, without a line end": Sample(
        "run = lambda new: handle(new())\ndef handle(error):\n    raise error"
    ),
    "names that the module imports": Sample("""
        \"\"\"Docstring
        if this line, or
        from that one, does not parse
        \"\"\"
        import os.path, json as js
        from string import (
            capwords as cap,
            ascii_letters,
        )
        TYPE_CHECKING = False
        if TYPE_CHECKING:
            import decimal
        else:
            import fractions as decimal
        try:
            import missing_module as found
        except ImportError:
            import types as found
        with open(os.devnull):
            import textwrap
        def handle(error, fractions=str):
            x = os.getcwd(), js.dumps(1), cap("x"), ascii_letters.upper(), found.new_class("X")
            y = decimal.Fraction(1), textwrap.dedent(""), late.join("a"), fractions.upper("x")
            if not error.args:
                return y
            raise error
        from os import path as late
        run = lambda new: handle(new())
    """),
}
EVERY = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
ERRORS = ((KeyError, "x"), (KeyError,), (ValueError, "x"))


class Payload:
    """What only a local of the user's frame refers to."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


Run = Callable[[Callable[[], Exception]], object]


def user(run: Run, kind: type[Exception]) -> weakref.ref[Payload]:
    payload = Payload()
    with contextlib.suppress(Exception):
        run(lambda: kind("x"))
    return weakref.ref(payload)


def pins(run: Run, kind: type[Exception] = KeyError) -> bool:
    """Whether the user's frame outlives its call, until the collector comes."""
    payload = user(run, kind)
    pinned = payload() is not None
    gc.collect()
    assert payload() is None
    return pinned


def outcome(run: Run, kind: type[Exception], *args: object) -> object:
    """Everything that a caller sees."""
    try:
        return run(lambda: kind(*args))
    except Exception as raised:
        chain: list[object] = []
        seen: BaseException | None = raised
        while seen is not None:
            places = [
                (tb.tb_frame.f_code.co_name, tb.tb_lineno, *positions(tb))
                for tb in tracebacks(seen)
                if tb.tb_frame.f_code.co_filename == FILE
            ]
            chain.append((type(seen), seen.args, seen.__suppress_context__, places))
            chain.append(seen.__cause__ is seen.__context__)
            seen = seen.__cause__ or seen.__context__
        assert chain[0][-1], "the exception did not come through the sample"  # type: ignore[index]
        return chain


def tracebacks(error: BaseException) -> Iterator[types.TracebackType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def positions(traceback: types.TracebackType) -> tuple[int | None, ...]:
    """What Python 3.11 and up underlines."""
    if sys.version_info < (3, 11):
        return ()
    code = traceback.tb_frame.f_code
    return next(itertools.islice(code.co_positions(), traceback.tb_lasti // 2, None))


# ---- the cycle is cut, and nothing else changes --------------------------------------------------


@EVERY
@pytest.mark.usefixtures("no_collection")
def test_frames_are_released(sample: Sample) -> None:
    assert pins(sample.load()["run"]) is sample.pins
    assert not pins(sample.patched()["run"])


@EVERY
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_behaviour_is_the_same(sample: Sample, error: tuple[Any, ...]) -> None:
    assert outcome(sample.patched()["run"], *error) == outcome(sample.load()["run"], *error)


@EVERY
def test_what_others_see_of_the_function_is_kept(sample: Sample) -> None:
    before, after = sample.live(sample.load()), sample.live(sample.patched())
    assert before.__code__ != after.__code__
    assert inspect.signature(before) == inspect.signature(after)
    for name in FUNCTION_ATTRIBUTES:
        assert getattr(before, name) == getattr(after, name)
    for name in CODE_ATTRIBUTES:
        assert getattr(before.__code__, name) == getattr(after.__code__, name)
    flags = before.__code__.co_flags ^ after.__code__.co_flags
    # Python 3.10 has a flag that says whether there are cells.
    assert not flags & ~(0x40 if sys.version_info < (3, 11) else 0)
    lines = {line for *_, line in before.__code__.co_lines() if line}
    assert {line for *_, line in after.__code__.co_lines() if line} <= lines


FUNCTION_ATTRIBUTES = (
    *("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__"),
    *("__annotations__", "__dict__"),
)
CODE_ATTRIBUTES = (
    *("co_name", "co_filename", "co_firstlineno", "co_argcount", "co_freevars"),
    *("co_posonlyargcount", "co_kwonlyargcount"),
    *(("co_qualname",) if sys.version_info >= (3, 11) else ()),
)


@EVERY
def test_a_second_time_changes_nothing(sample: Sample) -> None:
    code = sample.live(sample.load()).__code__
    rewritten = sample.rewrite(code)
    assert not rewritten.is_fixed
    _, _, node = units.function_unit(sample.text, code, sample.target.outermost)
    assert apply(node, sample.target.outermost, [sample.target])
    assert not apply(node, sample.target.outermost, [sample.target])
    # What runs is not what the source says any more.
    with pytest.raises(Refused, match="the source on disk is not what runs"):
        sample.rewrite(rewritten.replacement)


@EVERY
def test_a_source_that_releases_is_left_alone(sample: Sample) -> None:
    code = sample.live(sample.load()).__code__
    _, text = _rewriting.unparsed(sample.text, code, sample.target.outermost, [sample.target])
    *classes, _ = sample.target.outermost.split(".")
    for name in reversed(classes):
        text = f"class {name}:\n{textwrap.indent(text, '    ')}"
    text = f"from __future__ import annotations\ndef decorate(*_): return lambda f: f\n{text}\n"
    fixed = dataclasses.replace(sample, source=text)
    code = fixed.live(fixed.load()).__code__
    rewritten = fixed.rewrite(code)
    assert rewritten.is_fixed
    assert rewritten.replacement is rewritten.original
    assert _rewriting.is_fixed(fixed.text, code, fixed.target.outermost, fixed.target)
    assert not _rewriting.is_fixed(
        sample.text, sample.live(sample.load()).__code__, sample.target.outermost, sample.target
    )


# ---- the two units of compilation ----------------------------------------------------------------


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def forbidden(*_: object) -> None:
        raise SyntaxError(f"{name} is not to be used")

    monkeypatch.setattr(units, name, forbidden)


@EVERY
def test_both_units_give_the_same_code(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    code = sample.live(sample.load()).__code__
    with monkeypatch.context() as patch:
        forbid(patch, "module_unit")
        quick = sample.rewrite(code)
    forbid(monkeypatch, "function_unit")
    slow = sample.rewrite(code)
    assert _rewriting.differs(quick.original, code) is None
    assert _rewriting.differs(quick.original, slow.original) is None
    assert _rewriting.differs(quick.replacement, slow.replacement) is None
    assert quick.block == slow.block


def test_imports_matter_to_the_quick_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the sample above: the names are found for a reason, where there is one."""
    sample = SAMPLES["names that the module imports"]
    code = sample.live(sample.load()).__code__
    names = units._imported_names(sample.text)
    assert set(names) == {
        *("os", "js", "cap", "ascii_letters", "decimal", "found", "textwrap", "late")
    }
    monkeypatch.setattr(units, "_imported_names", lambda source: ())
    with monkeypatch.context() as patch:
        forbid(patch, "module_unit")
        if sys.version_info >= (3, 12):
            with pytest.raises(Refused, match="the source on disk is not what runs"):
                sample.rewrite(code)
    assert not sample.rewrite(code).is_fixed


@pytest.mark.parametrize(
    "source",
    [
        # An import that only the whole module shows.
        "for _ in range(1):\n    import os\ndef handle(error):\n    os.getcwd()\n    raise error\n",
        # A place from which no function can be cut.
        "x = 1\n\x0cdef handle(error):\n    raise error\n",
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_the_whole_module_is_the_last_resort(source: str) -> None:
    sample = Sample(source + "run = lambda new: handle(new())\n")
    assert pins(sample.load()["run"])
    assert not pins(sample.patched()["run"])


def test_of_several_definitions_the_live_one_is_rewritten() -> None:
    sample = Sample("""
        def handle(error):
            return "first"
        first = handle
        def handle(error):
            raise error
        second = handle
        def handle(error):
            return "third"
    """)
    second = sample.load()["second"]
    rewritten = sample.rewrite(second.__code__)
    assert rewritten.replacement.co_firstlineno == second.__code__.co_firstlineno == 5
    second.__code__ = rewritten.replacement
    with pytest.raises(KeyError):
        second(KeyError())


# ---- interpreter options -------------------------------------------------------------------------

WITH_OPTIONS = """
    import contextlib, gc, json, weakref
    import optimised
    from packaging.specifiers import SpecifierSet
    from dynamo_cyclefix import _rewriting
    from dynamo_cyclefix._catalogue.model import Target
    from dynamo_cyclefix._rewriting.edits import Release

    class Payload: pass

    def pins():
        payload = Payload()
        with contextlib.suppress(KeyError):
            optimised.run(lambda: KeyError("x"))
        return weakref.ref(payload)

    gc.disable()
    function = optimised.Thing.handle
    before = pins()() is not None
    with open(optimised.__file__, encoding="utf-8") as file:
        source = file.read()
    edits = (Release(("error",), ("report",)),)
    target = Target("optimised", "Thing.handle", edits, SpecifierSet())
    rewritten = _rewriting.rewrite(source, function.__code__, "Thing.handle", [target])
    function.__code__ = rewritten.replacement
    after = pins()() is not None
    try:
        optimised.run(lambda: KeyError("x"), check=False)
    except (AssertionError, KeyError) as error:
        raised = type(error).__name__
    print(json.dumps([before, after, raised, function.__doc__, function.__code__.co_consts[0]]))
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["AssertionError", "Docstring.", "Docstring."]),
        (("-O",), ["KeyError", "Docstring.", "Docstring."]),
        (("-OO",), ["KeyError", None, None]),
        (("-X", "no_debug_ranges"), ["AssertionError", "Docstring.", "Docstring."]),
    ],
    ids=["plain", "-O", "-OO", "-X no_debug_ranges"],
)
def test_interpreter_options_are_kept(
    options: tuple[str, ...], expected: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "optimised.py").write_text(
        textwrap.dedent('''
            class Thing:
                """Docstring of the class."""
                def handle(self, error, check):
                    """Docstring."""
                    def report():
                        """Docstring."""
                        assert check, "not checked"
                        return error
                    if __debug__:
                        report()
                    raise error

            def run(new, check=True):
                Thing().handle(new(), check)
        ''')
    )
    for _ in range(2):  # compiled from the source, then loaded from the cache
        finished = run_child(WITH_OPTIONS, options=options, path=[tmp_path])
        assert finished.json == [True, False, *expected]


# ---- refused -------------------------------------------------------------------------------------

REFUSED = {
    "a generator": (
        Sample("def handle(error):\n    yield\n    raise error\n"),
        "generator",
    ),
    "yield from": (
        Sample("def handle(error):\n    x = yield from ()\n    raise error\n"),
        "generator",
    ),
    "a coroutine": (
        Sample("async def handle(error):\n    raise error\n"),
        "coroutine",
    ),
    "an asynchronous generator": (
        Sample("async def handle(error):\n    yield\n    raise error\n"),
        "coroutine",
    ),
    "a lambda": (
        Sample("handle = lambda error: error\nhandle.__name__ = 'handle'\n"),
        "the source on disk is not what runs",
    ),
    "no such name": (
        Sample("def handle(other):\n    raise other\n"),
        "handle has no parameter or local 'error'",
    ),
    "a name that is only read": (
        Sample("error = 1\ndef handle():\n    raise error\n"),
        "has no parameter or local 'error'",
    ),
    "a global": (
        Sample("def handle(x):\n    global error\n    error = x\n    raise error\n"),
        "has no parameter or local 'error'",
    ),
    "the variable of a comprehension": (
        Sample("def handle(x):\n    return [error for error in x]\n"),
        "has no parameter or local 'error'",
    ),
    "a name of the function around": (
        Sample(
            "def make(error):\n    def handle():\n        nonlocal error\n        error = 1\n",
            "make.<locals>.handle",
        ),
        "has no parameter or local 'error'",
    ),
    "no such nested function": (
        Sample("def make():\n    pass\n", "make.<locals>.handle"),
        "found 0 functions make.<locals>.handle, expected 1",
    ),
    "two such nested functions": (
        Sample(
            "def make(x):\n    if x:\n        def handle(error): raise error\n"
            "    else:\n        def handle(error): raise error\n",
            "make.<locals>.handle",
        ),
        "found 2 functions make.<locals>.handle, expected 1",
    ),
    "a function nested in a generator": (
        Sample(
            "def make():\n    def handle(error):\n        raise error\n    yield handle\n",
            "make.<locals>.handle",
        ),
        "generator",
    ),
    "a second closure": (
        Sample(
            """
            def handle(error):
                def report(): return error
                def another(): return error
                report(), another()
                raise error
        """,
            helpers=("report",),
        ),
        "another in handle closes over 'error' too",
    ),
    "a lambda that closes over it": (
        Sample("def handle(error):\n    call(lambda: error)\n    raise error\n"),
        "<lambda> in handle closes over 'error' too",
    ),
    "a generator expression that closes over it": (
        Sample("def handle(error):\n    x = (error for _ in '')\n    raise error\n"),
        "<genexpr> in handle closes over 'error' too",
    ),
    "a method that closes over it": (
        Sample("""
            def handle(error):
                class Report:
                    def text(self): return error
                Report().text()
                raise error
        """),
        "Report in handle closes over 'error' too",
    ),
    "a closure over a local that is raised": (
        Sample(
            """
            def handle(error):
                new = ValueError(error)
                call(lambda: new)
                raise new
        """,
            names=("error", "new"),
        ),
        "<lambda> in handle closes over 'new' too",
    ),
    "a closure within the helper": (
        Sample(
            """
            def handle(error):
                def report(): return lambda: error
                report()
                raise error
        """,
            helpers=("report",),
        ),
        "<lambda> in report closes over 'error' too",
    ),
    "a helper used as a value": (
        Sample(
            """
            def handle(error):
                def report(): return error
                register(report)
                report()
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle is used other than by calling it there",
    ),
    "a helper returned": (
        Sample(
            """
            def handle(error):
                def report(): return error
                if report(): return report
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle is used other than by calling it there",
    ),
    "a helper that another nested function calls": (
        Sample(
            """
            def handle(error):
                def report(): return error
                def another(): return report()
                another()
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle is used other than by calling it there",
    ),
    "two helpers of one name": (
        Sample(
            """
            def handle(error):
                if error:
                    def report(): return error
                else:
                    def report(): return error, 1
                report()
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle is used other than by calling it there",
    ),
    "a helper with a decorator": (
        Sample(
            """
            def handle(error):
                @decorate
                def report(): return error
                report()
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle has a decorator",
    ),
    "a helper that is a generator": (
        Sample(
            """
            def handle(error):
                def report(): yield error
                report()
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle is a generator",
    ),
    "a helper that is a coroutine": (
        Sample(
            """
            def handle(error):
                async def report(): return error
                report()
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle is a generator, a coroutine",
    ),
    "a helper that rebinds it": (
        Sample(
            """
            def handle(error):
                def report():
                    nonlocal error
                    error = None
                report()
                raise error
        """,
            helpers=("report",),
        ),
        "helper report of handle may be called where 'error' is not bound",
    ),
    "a helper over a local that may be unbound": (
        Sample(
            """
            def handle(x):
                def report(): return found
                if x: report()
                found = x
                raise found
        """,
            names=("found",),
            helpers=("report",),
        ),
        "helper report of handle may be called where 'found' is not bound",
    ),
    "a docstring alone": (
        Sample("def handle(error):\n    '''Docstring.'''\n"),
        "handle has no body",
    ),
}


@pytest.mark.parametrize(("sample", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(sample: Sample, reason: str) -> None:
    code = sample.live(sample.load()).__code__
    with pytest.raises(Refused) as refused:
        sample.rewrite(code)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


SOURCE = SAMPLES["a helper called several times"].text


@pytest.mark.parametrize(
    "source",
    [
        SOURCE.replace('"seen"', '"SEEN"'),
        SOURCE.replace("key=0", "key=0.0"),
        SOURCE.replace("key=1", "key=True"),
        SOURCE.replace("def handle", "\ndef handle"),
        SOURCE.replace("raise error", "raise  error") if sys.version_info >= (3, 11) else "",
        SOURCE.replace("handle", "handle2"),
        SOURCE.replace("(error, *, log=())", "(error, *, log=(), more=1)"),
        SOURCE.replace("*, log=()", "log=()"),
        SOURCE[: SOURCE.index("raise error")] + "(",
        SOURCE[: SOURCE.index("if error.args")],
        SOURCE.replace("report()", "report(] "),
        "from __future__ import annotations;" + SOURCE.lstrip("\n"),
        "",
        "\n" * 100,
        "x" * 100,
    ],
)
def test_a_source_that_differs_is_refused(source: str) -> None:
    sample = SAMPLES["a helper called several times"]
    code = sample.live(sample.load()).__code__
    with pytest.raises(Refused, match=r"^the source on disk is not what runs: .") as refused:
        _rewriting.rewrite(source, code, "handle", [sample.target])
    assert "\n" not in str(refused.value)


# ---- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "fixed"),
    [
        ("    try:\n        raise error\n    finally:\n        del error", True),
        ("    try:\n        raise error\n    finally:\n        error = None", True),
        (
            "    '''Doc.'''\n    try:\n        raise error\n    finally:\n        del x, error",
            True,
        ),
        ("    x = 1\n    try:\n        raise error\n    finally:\n        del error", True),
        # The name is let go of too early, too seldom, or is another one.
        ("    e = error\n    del error\n    raise e", False),
        ("    try:\n        raise error\n    finally:\n        del x", False),
        ("    try:\n        raise error\n    finally:\n        error.x = None", False),
        ("    try:\n        raise error\n    except KeyError:\n        del error", False),
        ("    print(error)\n    try:\n        raise error\n    finally:\n        del error", False),
        ("    try:\n        pass\n    finally:\n        del error\n    raise error", False),
        # What it is set to may be the exception again, or one that leads to it.
        (
            "    try:\n        raise error\n    finally:\n        error = error.__cause__ or error",
            False,
        ),
        ("    try:\n        raise error\n    finally:\n        error = x", False),
        ("    raise ValueError", False),
    ],
)
def test_is_fixed(body: str, fixed: bool) -> None:
    sample = Sample(f"def handle(error, x=1):\n{body}\n")
    code = sample.live(sample.load()).__code__
    assert _rewriting.is_fixed(sample.text, code, sample.target.outermost, sample.target) is fixed
    assert sample.rewrite(code).is_fixed is fixed


@pytest.mark.parametrize(
    ("source", "function", "reason"),
    [
        ("def handle(x):\n    raise x\n", "handle", "no parameter or local 'error'"),
        ("def handle(error):\n    raise error\n", "handle.<locals>.inner", "found 0 functions"),
        ("\n\ndef handle(error):\n    raise error\n", "handle", "no function begins at line 1"),
        ("def handle(error):\n    raise (error\n", "handle", "no complete function begins"),
        ("", "handle", "no function begins at line 1"),
    ],
)
def test_is_fixed_of_another_source_is_refused(source: str, function: str, reason: str) -> None:
    sample = Sample("def handle(error):\n    raise error\n")
    code = sample.live(sample.load()).__code__
    target = sample.target._replace(function=function)
    with pytest.raises(Refused, match=reason):
        _rewriting.is_fixed(source, code, target.outermost, target)


def code_of(expression: str) -> types.CodeType:
    return compile(f"def f():\n    return {expression}\n", FILE, "exec").co_consts[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("1", "1.0"), ("1", "True"), ("0.0", "-0.0"), ("1j", "-1j"), ("'a'", "b'a'")),
        *(("(1, 2)", "(1, 2.0)"), ("((0.0,),)", "((-0.0,),)"), ("(1, 2)", "(1, 3)")),
        ("x in {1}", "x in {1.0}"),
        *(("x", "y"), ("x.a", "x.b"), ("x + y", "x - y"), ("x", "x if 1 else y")),
        *(("lambda: 1", "lambda: 2"), ("lambda: (lambda: 0)", "lambda: (lambda: 0.0)")),
        *(("[a for a in x]", "[b for b in x]"), ("f(x)", "f (x)"), ("x and  y", "x and y")),
    ],
)
def test_differs(one: str, other: str) -> None:
    if sys.version_info < (3, 11) and one.replace(" ", "") == other.replace(" ", ""):
        pytest.skip("Python 3.10 records no columns")
    assert _rewriting.differs(code_of(one), code_of(one)) is None
    assert _rewriting.differs(code_of(one), code_of(other)) is not None


def test_differs_says_where() -> None:
    difference = _rewriting.differs(code_of("lambda: (lambda: 0)"), code_of("lambda: (lambda: 1)"))
    assert difference == "co_consts of f.<lambda>.<lambda> differs"


def test_nested() -> None:
    namespace = Sample("""
        def make():
            def one():
                def two(): pass
                return two
            def one_more(): pass
            if one:
                def twice(): pass
            else:
                def twice(): pass
            return one
    """).load()
    code = namespace["make"].__code__
    two = _rewriting.nested(code, "make", "make.<locals>.one.<locals>.two")
    assert two is namespace["make"]()().__code__
    assert _rewriting.nested(code, "make", "make") is code
    for name, count in (("twice", 2), ("three", 0)):
        with pytest.raises(Refused, match=f"found {count} functions '{name}' in make, expected 1"):
            _rewriting.nested(code, "make", f"make.<locals>.{name}")


@EVERY
def test_block_is_the_function_as_it_is_written(sample: Sample) -> None:
    function = sample.live(sample.load())
    block = sample.rewrite(function.__code__).block
    lines = sample.text.split("\n")
    start = function.__code__.co_firstlineno - 1
    count = block.count("\n")
    assert block == "\n".join(lines[start : start + count]) + "\n"
    (node,) = ast.parse(("if 1:\n" if block[0] in " \t" else "") + block).body
    node = node.body[0] if isinstance(node, ast.If) else node
    assert isinstance(node, ast.FunctionDef)
    assert node.name == function.__name__
    last = block.rstrip("\n").split("\n")[-1]
    assert last.strip()
    assert not last.strip().startswith("#")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        *(("def f(): pass\n", 0), ("def f(): pass\n", 2), ("x = 1\n", 1), ("", 1)),
        *(("def f(\n", 1), ("@decorate\n", 1), ("@decorate\nx = 1\n", 1), ("def f():\n", 1)),
    ],
)
def test_no_function_at_the_line(source: str, line: int) -> None:
    with pytest.raises(Refused, match=f"function begins at line {line} of the source"):
        units._parsed(source, line)


def test_an_exception_among_its_own_args() -> None:
    source = textwrap.dedent("""
        class Unsupported(NotImplementedError):
            def __init__(self, value):
                super().__init__(self, f"{value} is not supported")
                self.value = value
    """)
    edits = (Omit("self", "super().__init__"),)
    target = Target("sample", "Unsupported.__init__", edits, SpecifierSet())
    namespace: dict[str, Any] = {"__name__": "sample"}
    exec(compile(source, FILE, "exec", dont_inherit=True), namespace)
    kind = namespace["Unsupported"]

    def is_freed() -> bool:
        error = kind(3)
        error.token = token = Token()
        seen = weakref.ref(token)
        del error, token
        return seen() is None

    class Token:
        pass

    gc.collect()
    gc.disable()
    try:
        assert not is_freed()
        code = kind.__init__.__code__
        rewritten = _rewriting.rewrite(source, code, target.outermost, [target])
        kind.__init__.__code__ = rewritten.replacement
        assert is_freed()
        assert kind(3).args == ("3 is not supported",)
    finally:
        gc.enable()
    _, fixed = _rewriting.unparsed(source, code, target.outermost, [target])
    assert "super().__init__(f'{value} is not supported')" in fixed


@pytest.mark.usefixtures("no_collection")
def test_methods_of_a_class_that_a_call_makes() -> None:
    source = textwrap.dedent("""
        def call(held):
            class Node:
                def keep(self):
                    return 0

                def read(self):
                    return held
            node = Node()
            node.keep()
            return node
    """)
    inner = "call.<locals>.Node."
    targets = [
        Target("module", "call", (Release(("held",), (), (("Node", "Node"),)),), SpecifierSet()),
        Target(
            "module",
            inner + "keep",
            (Insert("self.kept = held", before="return 0"),),
            SpecifierSet(),
        ),
        Target(
            "module", inner + "read", (Insert("return self.kept", "return held"),), SpecifierSet()
        ),
    ]
    namespace: dict[str, Any] = {}
    exec(compile(source, "module.py", "exec"), namespace)
    call = namespace["call"]
    earlier = call("earlier")
    call.__code__ = _rewriting.rewrite(source, call.__code__, "call", targets).replacement
    value = Payload()
    node, alive = call(value), weakref.ref(value)
    assert node.read() is value
    del node, value
    assert alive() is None
    assert earlier.read() == "earlier"
    assert _rewriting.is_method("call", inner + "keep")
