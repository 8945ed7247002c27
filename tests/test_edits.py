"""Each kind of edit, as a patch file has it, on plain functions: run for its effect.

``release`` has most of its samples in ``test_rewrite``.
"""

import inspect
import itertools
import sys
import textwrap
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_cyclefix import CatalogueError
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._catalogue.model import Target
from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting import derive

FILE = "/nowhere/sample.py"

PATCH = """
id = "sample"
title = "A sample"
why = "A reason."
affected = ">=2.5"
[[targets]]
module = "sample"
function = "{function}"
edits = [
{edits}
]
"""


class Thing:
    """An object whose attributes are cleared."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


Load = Callable[..., Target]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Read edits as a patch file has them."""

    def loaded(*edits: str, function: str = "f") -> Target:
        text = PATCH.format(function=function, edits=",\n".join(edits))
        (tmp_path / "sample.toml").write_text(text, encoding="utf-8")
        (patch,) = toml.load(tmp_path).patches.values()
        return patch.targets[0]

    return loaded


def execute(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "sample", "Thing": Thing}
    exec(compile(source, FILE, "exec", dont_inherit=True), namespace)
    return namespace


def rewritten(source: str, target: Target) -> dict[str, Any]:
    """The module with the replacement in place; checks what holds of every rewrite."""
    source = textwrap.dedent(source)
    namespace = execute(source)
    function = namespace[target.outermost]
    before = function.__code__
    found = derive.rewrite(source, before, target.outermost, [target])
    assert not found.is_fixed
    after = function.__code__ = found.replacement
    assert after.co_freevars == before.co_freevars
    assert not (after.co_flags ^ before.co_flags) & ~(0x40 if sys.version_info < (3, 11) else 0)
    assert before.co_firstlineno <= min(lines(after)) <= max(lines(after)) <= max(lines(before))
    check_twice(source, target)
    return namespace


def lines(code: types.CodeType) -> set[int]:
    nested = (lines(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {line for *_, line in code.co_lines() if line}.union(*nested)


def check_twice(source: str, target: Target) -> None:
    """Written out, what was rewritten is a source that needs no edit."""
    code = execute(source)[target.outermost].__code__
    assert not derive.is_fixed(source, code, target.outermost, target)
    _, text = derive.unparsed(source, code, target.outermost, [target])
    code = execute(text)[target.outermost].__code__
    assert derive.is_fixed(text, code, target.outermost, target), text
    assert derive.rewrite(text, code, target.outermost, [target]).is_fixed


def refusal(source: str, target: Target) -> str:
    source = textwrap.dedent(source)
    with pytest.raises(Refused) as refused:
        derive.rewrite(
            source, execute(source)[target.outermost].__code__, target.outermost, [target]
        )
    assert "\n" not in str(refused.value)
    return str(refused.value)


def outcome(function: Callable[..., object], *args: object) -> object:
    """What it returns, or raises and where; with all that a traceback underlines."""
    try:
        return function(*args)
    except BaseException as error:
        places = []
        seen = error.__traceback__
        while seen is not None:
            code = seen.tb_frame.f_code
            if code.co_filename == FILE:
                columns = getattr(code, "co_positions", lambda: iter(lambda: None, 0))()
                column = next(itertools.islice(columns, seen.tb_lasti // 2, None))
                places.append((code.co_name, seen.tb_lineno, column))
            seen = seen.tb_next
        return type(error), error.args, error.__context__, places


# ---- clear ---------------------------------------------------------------------------------------

EVERY_WAY = """
    import contextlib
    def f(thing, way):
        '''Docstring.'''
        if way == "return":
            return thing.x
        for _ in range(2):
            with contextlib.nullcontext():
                try:
                    if way == "return from a loop":
                        return [thing.x, len(thing.x)]
                    if way == "raise from a loop":
                        raise KeyError(
                            thing.x
                        )
                    if way == "caught":
                        int("x")
                except ValueError:
                    if way == "raise anew":
                        raise
                finally:
                    way = way
        if way == "divide":
            1 / 0
        if way == "nothing":
            return
        def inner(thing):
            return thing.x
        inner(thing)
"""
RETURNS = ("return", "return from a loop", "nothing", "the end", "caught")
RAISES = ("raise from a loop", "divide")
WAYS = (*RETURNS, *RAISES)
VALUES = {
    "None": None,
    "[]": [],
    "{}": {},
    "()": (),
    "clear()": [],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", ["exit", "return", "raise"])
def test_clear_on_a_way_out(load: Load, way: str, at: str) -> None:
    target = load(f'{{ clear = "thing.x", at = "{at}" }}')
    plain, other = Thing(x=[1]), Thing(x=[1])
    expected = outcome(execute(textwrap.dedent(EVERY_WAY))["f"], plain, way)
    assert outcome(rewritten(EVERY_WAY, target)["f"], other, way) == expected
    assert plain.x == [1]
    cleared = at == "exit" or (way in RAISES) is (at == "raise")
    assert other.x == (None if cleared else [1])


@pytest.mark.parametrize("to", [*VALUES, "del"])
@pytest.mark.parametrize(
    "place", ['at = "exit"', 'at = "return"', 'at = "raise"', 'before = "x = 1"']
)
@pytest.mark.parametrize("what", ["thing.x", "thing.x['y']", "thing['x'].y"])
def test_clear_to(load: Load, to: str, place: str, what: str) -> None:
    source = "def f(thing, fails):\n    x = 1\n    if fails: raise KeyError\n    return x\n"
    target = load(f'{{ clear = "{what}", to = "{to}", {place} }}')
    held = [1]

    class Items(Thing, dict):  # type: ignore[type-arg]
        pass

    thing: Any = {
        "thing.x": Thing(x=held),
        "thing.x['y']": Thing(x={"y": held}),
        "thing['x'].y": Items(),
    }[what]
    if what == "thing['x'].y":
        thing["x"] = Thing(y=held)
    function = rewritten(source, target)["f"]
    assert isinstance(outcome(function, thing, "raise" in place), tuple) is ("raise" in place)
    if to == "del":
        with pytest.raises(LookupError if what.endswith("]") else AttributeError):
            eval(what, {"thing": thing})
    else:
        found = eval(what, {"thing": thing})
        assert found == VALUES[to]
        assert type(found) is type(VALUES[to])
        assert (found is held) is (to == "clear()")


@pytest.mark.parametrize("to", [*VALUES, "del"])
@pytest.mark.parametrize(
    "place", ['at = "exit"', 'at = "return"', 'at = "raise"', 'before = "y = 1"']
)
@pytest.mark.parametrize(
    "thing",
    [None, Thing(), Thing(x=None), Thing(x={}), "unbound"],
    ids=["None", "", "x", "{}", "-"],
)
def test_nothing_to_clear(load: Load, to: str, place: str, thing: object) -> None:
    source = """
        def f(given, fails):
            if given != "unbound":
                thing = given
            y = 1
            if fails: raise KeyError
            return y
    """
    target = load(f'{{ clear = "thing.x[0]", to = "{to}", {place} }}')
    before = repr(getattr(thing, "__dict__", None))
    for fails in (False, True):
        function = rewritten(source, target)["f"]
        expected = outcome(execute(textwrap.dedent(source))["f"], thing, fails)
        assert outcome(function, thing, fails) == expected
    assert repr(getattr(thing, "__dict__", None)) == before


def test_another_failure_to_clear_is_seen(load: Load) -> None:
    class Stubborn:
        @property
        def x(self) -> int:
            return 1

        @x.setter
        def x(self, value: object) -> None:
            raise RuntimeError("no")

    target = load('{ clear = "thing.x" }')
    function = rewritten("def f(thing):\n    return 1\n", target)["f"]
    with pytest.raises(RuntimeError, match="no"):
        function(Stubborn())


def test_clear_before_a_statement(load: Load) -> None:
    source = """
        def f(thing, kind):
            match kind:
                case 1:
                    seen = thing.x
                    return seen
                case _:
                    try:
                        int(kind)
                    except ValueError:
                        thing.y = thing.x
                        return "failed"
    """
    inside = '{ clear = "thing.x", before = "return seen" }'
    handler = '{ clear = "thing.y", before = "return \'failed\'" }'
    function = rewritten(source, load(inside, handler))["f"]
    thing = Thing(x=3)
    assert function(thing, 1) == 3
    assert thing.x is None
    thing = Thing(x=3)
    assert function(thing, "x") == "failed"
    assert vars(thing) == {"x": 3, "y": None}


def test_the_value_that_is_returned_is_worked_out_first(load: Load) -> None:
    # The names that the edit might take are taken: of a parameter, and of a global.
    source = """
        returned_ = 4
        def f(thing, returned):
            add = lambda value: value + returned_
            return add(sum(thing.x)) + returned
    """
    for at in ("exit", "return"):
        target = load(f'{{ clear = "thing.x", to = "clear()", at = "{at}" }}')
        assert rewritten(source, target)["f"](Thing(x=[1, 2]), 4) == 11


def test_a_nested_function_is_cleared_in(load: Load) -> None:
    source = """
        def f(thing):
            x = 1
            def g(other=2):
                def deep():
                    return thing.x
                return deep(), x, other
            return g
    """
    target = load('{ clear = "thing.x" }', function="f.<locals>.g")
    thing = Thing(x=3)
    with pytest.raises(Refused, match="has no parameter or local 'thing'"):  # only `deep` has it
        rewritten(source, target)
    source = source.replace("x = 1", "x = 1; thing").replace("return deep", "thing; return deep")
    g = rewritten(source, target)["f"](thing)
    assert g() == (3, 1, 2)
    assert thing.x is None


COMBINED = {
    "exits": ('{ clear = "thing.x" }', '{ clear = "thing.y", to = "[]" }'),
    "returns": ('{ clear = "thing.x", at = "return" }', '{ clear = "thing.y", at = "return" }'),
    "raises": ('{ clear = "thing.x", at = "raise" }', '{ clear = "thing.y", at = "raise" }'),
    "raise and return": (
        '{ clear = "thing.x", at = "raise" }',
        '{ clear = "thing.x", at = "return" }',
    ),
    "return and exit": ('{ clear = "thing.x", at = "return" }', '{ clear = "thing.y" }'),
    "return and raise": (
        '{ clear = "thing.x", at = "return" }',
        '{ clear = "thing.y", at = "raise" }',
    ),
    "before": (
        '{ clear = "thing.x", before = "way = way" }',
        '{ clear = "thing.y", before = "way = way" }',
    ),
    "release last": ('{ clear = "thing.x" }', '{ release = ["thing"] }'),
    "release another": (
        '{ release = ["way"] }',
        '{ clear = "thing.x" }',
        '{ clear = "thing.y", at = "return" }',
    ),
}


@pytest.mark.parametrize("edits", COMBINED.values(), ids=COMBINED.keys())
def test_several_edits_of_a_function(load: Load, edits: tuple[str, ...]) -> None:
    target = load(*edits)
    for way in WAYS:
        thing = Thing(x=[1], y=[1])
        expected = outcome(execute(textwrap.dedent(EVERY_WAY))["f"], Thing(x=[1]), way)
        if "before" not in edits[0]:  # there it is cleared while it is used
            assert outcome(rewritten(EVERY_WAY, target)["f"], thing, way) == expected
            continue
        outcome(rewritten(EVERY_WAY, target)["f"], thing, way)
        assert (thing.x, thing.y) == (([1], [1]) if way == "return" else (None, None))


@pytest.mark.parametrize(
    ("edit", "body", "fixed"),
    [
        ('clear = "thing.x"', "try: return 1\nfinally: thing.x = None", True),
        ('clear = "thing.x"', "y = 1\ntry: return y\nfinally:\n del y\n thing.x = None", True),
        ('clear = "thing.x"', "try: return 1\nfinally: thing.x = []", False),
        ('clear = "thing.x"', "try: return 1\nfinally: thing.y = None", False),
        ('clear = "thing.x"', "try: return 1\nfinally: thing.x = None\nreturn 2", False),
        ('clear = "thing.x"', "thing.x = None\nreturn 1", False),
        ('clear = "thing.x", to = "del"', "try: return 1\nfinally: del thing.x", True),
        ('clear = "thing.x", to = "clear()"', "try: return 1\nfinally: thing.x.clear()", True),
        (
            'clear = "thing.x", at = "return"',
            "if thing:\n thing.x = None\n return 1\nthing.x = None",
            True,
        ),
        ('clear = "thing.x", at = "return"', "if thing: return 1\nthing.x = None", False),
        ('clear = "thing.x", at = "return"', "thing.x = None\nthing.y = None\nreturn 1", True),
        # It may be something else again by then.
        ('clear = "thing.x", at = "return"', "thing.x = None\nthing.fill()\nreturn 1", False),
        ('clear = "thing.x", at = "raise"', "raise KeyError", False),
        (
            'clear = "thing.x", at = "raise"',
            "try: return 1\nexcept BaseException:\n thing.x = None\n raise",
            True,
        ),
        (
            'clear = "thing.x", at = "raise"',
            "try: return 1\nexcept:\n thing.x = None\n raise",
            True,
        ),
        (
            'clear = "thing.x", at = "raise"',
            "try: return 1\nexcept KeyError:\n thing.x = None",
            False,
        ),
        ('clear = "thing.x", before = "return 1"', "thing.x = None\nreturn 1", True),
        ('clear = "thing.x", before = "return 1"', "thing.x = None\nthing.fill()\nreturn 1", False),
        ('insert = "thing = 1", before = "return 1"', "thing = 1\nreturn 1", True),
        ('insert = "thing = 1", before = "return 1"', "thing = 1\nthing.fill()\nreturn 1", False),
        ('insert = "thing = 1", after = "y = 2"', "y = 2\nthing = 1", True),
        ('insert = "thing = 1", after = "y = 2"', "thing = 1\ny = 2", False),
        ('insert = "thing = 1", before = "return 1"', "y = 2\nreturn 1\nthing = 1", False),
        ('omit = "thing", from = "g"', "g(y)", True),
        ('omit = "thing", from = "g"', "g(y)\ng(y, thing)", False),
    ],
)
def test_a_source_that_does_it_already_is_fixed(
    load: Load, edit: str, body: str, fixed: bool
) -> None:
    source = f"def f(thing, y=0):\n{textwrap.indent(body, '    ')}\n"
    target = load(f"{{ {edit} }}")
    code = execute(source)["f"].__code__
    assert derive.is_fixed(source, code, "f", target) is fixed
    assert derive.rewrite(source, code, "f", [target]).is_fixed is fixed


# ---- insert --------------------------------------------------------------------------------------


def test_insert(load: Load) -> None:
    source = """
        def f(log, n):
            '''Docstring.'''
            while n:
                n -= 1
                if n == 1:
                    continue
                log.append(n)
            else:
                log.append("else")
            return log
    """
    for place, expected in {
        'before = "n -= 1"': [[3], 2, [2], [1], 0, "else"],
        'after = "log.append(n)"': [2, [2], 0, [0], "else"],
        'before = "return log"': [2, 0, "else", [0]],
        '''after = "log.append('else')"''': [2, 0, "else", [0]],
        "after = \"'Docstring.'\"": [[3], 2, 0, "else"],
    }.items():
        target = load(f'{{ insert = "log.append( [n] )", {place} }}')
        function = rewritten(source, target)["f"]
        assert function([], 3) == expected
        assert function.__doc__ == "Docstring."
        assert inspect.getdoc(types.FunctionType(function.__code__, {})) == "Docstring."


def test_insert_a_compound_statement(load: Load) -> None:
    source = """
        def f(things):
            total = sum(things)
            return total
    """
    target = load(
        '{ insert = """\nfor i in range(len(things)):\n    things[i] = None\n""", '
        'after = "total = sum(things)" }'
    )
    things = [1, 2]
    assert rewritten(source, target)["f"](things) == 3
    assert things == [None, None]


def test_a_failure_in_what_is_inserted_is_on_the_line_of_its_place(load: Load) -> None:
    source = "def f(x):\n    y = x\n\n    return (\n        y\n    )\n"
    target = load('{ insert = "1 / x", before = "return y" }')
    function = rewritten(source, target)["f"]
    with pytest.raises(ZeroDivisionError) as info:
        function(0)
    assert traceback.extract_tb(info.value.__traceback__)[-1].lineno == 4


# ---- omit and release ----------------------------------------------------------------------------


def test_omit(load: Load) -> None:
    source = """
        def g(*args, **kwargs):
            return args, kwargs
        def f(self, x):
            def inner():
                return g(self)
            return g(x, self, *[self], key=self), g.__call__(self), inner()
    """
    found = rewritten(source, load('{ omit = "self", from = "g" }'))["f"](1, 2)
    assert found == (((2, 1), {"key": 1}), ((1,), {}), ((1,), {}))


def test_release_lets_go_on_every_way_out(load: Load) -> None:
    function = rewritten(EVERY_WAY, load('{ release = ["thing", "_", "thing"] }'))["f"]
    for way in WAYS:
        thing = Thing(x=[1])
        before = sys.getrefcount(thing)
        try:
            function(thing, way)
        except (KeyError, ZeroDivisionError) as error:
            frame = error.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
            assert "thing" not in frame.f_locals
            assert frame.f_locals["_"] is None
            assert sys.getrefcount(thing) == before


HANDED = """
    def take(function, *more, key=None): return function()
    class Takers: take = staticmethod(take)
    def f(error, keep=[]):
        def report(): return error
        {use}
        raise error
"""


@pytest.mark.parametrize(
    ("closures", "use"),
    [
        ('{ report = "report" }', "report()"),
        ('{ report = "take" }', "take(report); report()"),
        ('{ report = "take" }', "report(); Takers.take(report, key=report)"),
        ('{ report = "report", "<lambda>" = "take" }', "take(lambda: error)"),
        (
            '{ report = "report", "<lambda>" = "Takers.take" }',
            "Takers.take(str, key=lambda: error)",
        ),
        ('{ report = "report", "<genexpr>" = "list" }', "list(error for _ in keep)"),
    ],
)
def test_a_closure_that_does_not_outlive_the_call(load: Load, closures: str, use: str) -> None:
    target = load(f'{{ release = ["error"], closures = {closures} }}')
    function = rewritten(HANDED.format(use=use), target)["f"]
    with pytest.raises(KeyError) as info:
        function(KeyError("x"))
    assert info.traceback[-1].frame.f_locals.get("error") is None


LAMBDA = '{ report = "report", "<lambda>" = "take" }'
OUTLIVES = {
    "stored": (
        '{ report = "report" }',
        "keep.append(report)",
        "report in f is used other than by calling it",
    ),
    "returned": (
        '{ report = "take" }',
        "return report",
        "report in f is used other than by handing it to take",
    ),
    "renamed": (
        '{ report = "take" }',
        "other = report",
        "report in f is used other than by handing",
    ),
    "handed elsewhere": (
        '{ report = "take" }',
        "keep.append(report)",
        "report in f is used other than by",
    ),
    "called later": (
        '{ report = "report", g = "g" }',
        "g = lambda: report()",
        "report in f is used other than",
    ),
    "a lambda that is stored": (
        LAMBDA,
        "keep.append(lambda: error)",
        "<lambda> in f is used other than by handing it to take",
    ),
    "a lambda that is returned": (LAMBDA, "return lambda: error", "<lambda> in f is used"),
    "a lambda that is bound": (LAMBDA, "take(str); g = lambda: error", "<lambda> in f is used"),
    "a lambda handed on within the call": (
        LAMBDA,
        "take(keep.append(lambda: error))",
        "<lambda> in f is used",
    ),
    "a lambda handed to a name that ends so": (
        LAMBDA,
        "mistake(lambda: error)",
        "<lambda> in f is used",
    ),
    "one of two lambdas": (
        LAMBDA,
        "take(lambda: error); keep.append(lambda: error)",
        "<lambda> in f is used",
    ),
    "a lambda in a lambda": (
        LAMBDA,
        "take(lambda: lambda: error)",
        "<lambda> in <lambda> is used other than by handing it to take",
    ),
    "a generator that is stored": (
        '{ report = "report", "<genexpr>" = "list" }',
        "g = (error for _ in keep)",
        "<genexpr> in f is used other than by handing it to list",
    ),
    "not named": ('{ other = "other" }', "report()", "report in f closes over 'error' too"),
    "decorated": (
        '{ report = "report", g = "g" }',
        "@keep.append\n        def g(): return error",
        "g in f has a decorator",
    ),
}


@pytest.mark.parametrize(("closures", "use", "reason"), OUTLIVES.values(), ids=OUTLIVES.keys())
def test_a_closure_that_may_outlive_the_call_is_refused(
    load: Load, closures: str, use: str, reason: str
) -> None:
    target = load(f'{{ release = ["error"], closures = {closures} }}')
    assert reason in refusal(HANDED.format(use=use), target)


# ---- refused -------------------------------------------------------------------------------------

SOURCE = """
    def f(thing, y=0):
        '''Docstring.'''
        x = 1
        if y:
            g(thing)
            g(thing)
        class C:
            z = 2
        return x
"""
REFUSED = {
    'clear = "things.x"': "f has no parameter or local 'things'",
    'clear = "thing.x[key]"': "f has no parameter or local 'key'",
    'clear = "thing.x", before = "y = 2"': "found 0 statements 'y = 2' in f, expected 1",
    'clear = "thing.x", before = "g(thing)"': "found 2 statements 'g(thing)' in f, expected 1",
    'clear = "thing.x", before = "\'Docstring.\'"': "\"'Docstring.'\" in f is its docstring",
    'insert = "y = 1", before = "\'Docstring.\'"': "\"'Docstring.'\" in f is its docstring",
    'insert = "y = 1", before = "z = 2"': "found 0 statements 'z = 2' in f, expected 1",
    'insert = "y = 1", after = "g(thing)"': "found 2 statements 'g(thing)' in f, expected 1",
    'insert = "yield", after = "x = 1"': "the rewrite would change co_flags",
    'insert = "continue", after = "x = 1"': "the rewrite does not compile",
    'omit = "things", from = "g"': "f has no parameter or local 'things'",
    'omit = "thing", from = "h"': "f does not call h",
    'release = ["thing", "things"]': "f has no parameter or local 'things'",
}


@pytest.mark.parametrize("edit", REFUSED)
def test_refused(load: Load, edit: str) -> None:
    assert REFUSED[edit] in refusal(SOURCE, load(f"{{ {edit} }}"))


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        (('{ release = ["thing"] }', '{ clear = "thing.x" }'), "lets go of 'thing' before thing.x"),
        (('{ clear = "thing.x" }', '{ clear = "nothing.x" }'), "no parameter or local 'nothing'"),
    ],
)
def test_edits_that_do_not_go_together(load: Load, edits: tuple[str, ...], reason: str) -> None:
    assert reason in refusal(SOURCE, load(*edits))


def test_no_place_for_anything(load: Load) -> None:
    for at in ("exit", "raise"):
        reason = refusal(
            "def f(thing):\n    '''Docstring.'''\n", load(f'{{ clear = "thing.x", at = "{at}" }}')
        )
        assert reason == "f has no body"


# ---- malformed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        ("{}", ["found '' first", "release, omit, clear, insert"]),
        ('{ helpers = ["x"], release = ["x"] }', ["found 'helpers' first", "a kind of edit"]),
        (
            '{ release = "error" }',
            ["key 'release'", "found 'error'", "a list of non-empty strings"],
        ),
        ("{ release = [] }", ["key 'release'", "found []", "a list of"]),
        ("{ release = [1] }", ["key 'release'", "found [1]", "a list of"]),
        ('{ release = ["e"], closures = ["x"] }', ["key 'closures'", "found ['x']", "a table of"]),
        (
            '{ release = ["e"], closures = { x = 1 } }',
            ["key 'closures'", "found {'x': 1}", "a table"],
        ),
        ('{ release = ["e"], helper = ["x"] }', ["key 'helper'", "unknown", "helpers"]),
        ('{ omit = "self" }', ["key 'from'", "missing", "a non-empty string"]),
        ('{ omit = " ", from = "g" }', ["key 'omit'", "found ' '", "a non-empty string"]),
        ('{ clear = "self" }', ["key 'clear'", "found 'self'", "an attribute or an item"]),
        (
            '{ clear = "self.x = 1" }',
            ["key 'clear'", "found 'self.x = 1'", "an attribute or an item"],
        ),
        ('{ clear = "self." }', ["key 'clear'", "found 'self.'", "Python"]),
        ('{ clear = "self.x", to = "0" }', ["key 'to'", "found '0'", "'None', '[]'", "'del'"]),
        (
            '{ clear = "self.x", at = "end" }',
            ["key 'at'", "found 'end'", "'exit', 'return', 'raise'"],
        ),
        (
            '{ clear = "self.x", before = "a; b" }',
            ["key 'before'", "found 'a; b'", "one statement"],
        ),
        ('{ clear = "self.x", before = "a", at = "exit" }', ["key 'at'", "unknown", "before"]),
        ('{ insert = "x = 1", before = "a", after = "b" }', ["key 'after'", "unknown", "before"]),
        ('{ insert = "x =", before = "a" }', ["key 'insert'", "found 'x ='", "one statement"]),
        ('{ insert = "  ", before = "a" }', ["key 'insert'", "found '  '", "a non-empty string"]),
        (
            '{ insert = "# nothing", before = "a" }',
            ["key 'insert'", "found '# nothing'", "one statement"],
        ),
    ],
)
def test_a_malformed_edit_is_told_what_and_where(load: Load, edit: str, parts: list[str]) -> None:
    with pytest.raises(CatalogueError) as error:
        load('{ release = ["fine"] }', edit)
    message = str(error.value)
    assert message.startswith("patches/sample.toml [[targets]] 1 [[edits]] 2: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_what_each_kind_covers(load: Load) -> None:
    target = load(
        '{ release = ["error"], helpers = ["report"] }',
        '{ omit = "self", from = "f" }',
        '{ clear = "x.y" }',
        '{ insert = "a = 1" }',
    )
    expected = [("f", "error"), ("f.<locals>.report", "*"), ("f", "self"), ("f", "x.y")]
    assert list(target.holders()) == expected
    works = [edit.works_without_source for edit in target.edits]
    assert works == [True, False, False, False]


def test_where_a_statement_is_inserted_in_words(load: Load) -> None:
    target = load(
        '{ insert = "a = 1" }',
        '{ insert = "a = 1", before = "b = 2" }',
        '{ insert = "a = 1", after = "b = 2" }',
    )
    first, before, after = (edit.in_words() for edit in target.edits)
    assert first == "add `a = 1` first"
    assert before == "add `a = 1` before `b = 2`"
    assert after == "add `a = 1` after `b = 2`"


def test_insert_without_a_place_is_first_but_for_the_docstring(load: Load) -> None:
    source = """
        def f(seen):
            'Docstring.'
            seen.append(1)
            return seen
    """
    found = rewritten(source, load('{ insert = "seen.append(0)" }'))["f"]
    assert found([]) == [0, 1]
    assert found.__doc__ == "Docstring."
