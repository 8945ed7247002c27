"""Each kind of edit, loaded from a patch file and made to a plain function."""

import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest

from dynamo_cyclefix import CatalogueError, _rewriting
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._catalogue.model import Target
from dynamo_cyclefix._errors import Refused

PATCH = """
id = "toy"
title = "A toy"
why = "To test."
affected = ">=2.5"

[[targets]]
module = "toys"
function = "{function}"
edits = [{edit}]
"""


def load(tmp_path: Path, edit: str, function: str = "handle") -> Target:
    """The target of a patch file with one edit."""
    (tmp_path / "toy.toml").write_text(PATCH.format(edit=edit, function=function), "utf-8")
    (target,) = toml.load(tmp_path).patches["toy"].targets
    return target


class Toy:
    """A module with a function ``handle``, and what an edit makes of it."""

    def __init__(self, tmp_path: Path, source: str, edit: str, function: str = "handle") -> None:
        self.source = textwrap.dedent(source)
        self.target = load(tmp_path, edit, function)
        self.before: dict[str, Any] = {}
        exec(compile(self.source, "toys.py", "exec"), self.before)
        self.after: dict[str, Any] = {}
        exec(compile(self.source, "toys.py", "exec"), self.after)
        handle = self.after[self.target.outermost]
        self.rewritten = self.rewrite(handle.__code__)
        handle.__code__ = self.rewritten.replacement

    def rewrite(self, code: Any) -> _rewriting.Rewrite:
        outermost = self.target.outermost
        return _rewriting.rewrite(self.source, code, outermost, [self.target])

    def text(self) -> str:
        code = self.before[self.target.outermost].__code__
        outermost = self.target.outermost
        return _rewriting.unparsed(self.source, code, outermost, [self.target])[1]


class Holder:
    """What a function clears an attribute of."""

    def __init__(self) -> None:
        self.held: Any = ["something"]


TWO_WAYS_OUT = """
    def handle(holder, fail=False, many=False):
        if fail:
            raise ValueError(len(holder.held))
        for _ in range(3):
            if many:
                return len(holder.held)
        try:
            found = [*holder.held]
        finally:
            len(holder.held)
        return found
"""


@pytest.mark.parametrize(
    ("to", "left"),
    [("None", None), ("[]", []), ("{}", {}), ("()", ()), ("clear()", []), ("del", "nothing")],
)
@pytest.mark.parametrize("at", ["exit", "return", "raise"])
def test_clear(tmp_path: Path, to: str, left: object, at: str) -> None:
    toy = Toy(tmp_path, TWO_WAYS_OUT, f'{{ clear = "holder.held", to = "{to}", at = "{at}" }}')
    for options in ({}, {"many": True}, {"fail": True}):
        holder = Holder()
        as_shipped, found = (
            outcome(toy.before["handle"], options),
            outcome(toy.after["handle"], options, holder),
        )
        assert found == as_shipped
        is_cleared = at == "exit" or (at == "raise") == ("fail" in options)
        assert getattr(holder, "held", "nothing") == (left if is_cleared else ["something"])


def outcome(function: Any, options: dict[str, bool], holder: Holder | None = None) -> object:
    """What a call returns or raises, with the lines of its traceback."""
    try:
        return function(holder or Holder(), **options)
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        return repr(error), [(frame.name, frame.lineno) for frame in frames]


def test_clear_before_a_statement(tmp_path: Path) -> None:
    toy = Toy(
        tmp_path,
        """
        def handle(holder):
            first = len(holder.held)
            second = len(holder.held or ())
            return first, second
        """,
        '{ clear = "holder.held", before = "second = len(holder.held or ())" }',
    )
    assert toy.before["handle"](Holder()) == (1, 1)
    assert toy.after["handle"](Holder()) == (1, 0)


@pytest.mark.parametrize("holder", [object(), None, {}])
@pytest.mark.parametrize("what", ["holder.held", "holder['held']"])
def test_clear_makes_nothing_and_raises_nothing(tmp_path: Path, holder: Any, what: str) -> None:
    toy = Toy(tmp_path, "def handle(holder):\n    return 1\n", f'{{ clear = "{what}" }}')
    assert toy.after["handle"](holder) == 1
    assert holder != {"held": None}


def test_clear_of_a_name_that_is_not_bound(tmp_path: Path) -> None:
    source = """
    def handle(fail):
        if fail:
            raise ValueError
        made = type("Made", (), {"held": 1})
        return made
    """
    toy = Toy(tmp_path, source, '{ clear = "made.held" }')
    with pytest.raises(ValueError, match=r"^$"):
        toy.after["handle"](True)
    assert toy.after["handle"](False).held is None


def test_release(tmp_path: Path) -> None:
    source = """
    import sys
    def handle(error):
        held = error
        raise held
    def locals_of(error):
        try:
            handle(error)
        except ValueError as raised:
            return raised.__traceback__.tb_next.tb_frame.f_locals
    """
    toy = Toy(tmp_path, source, '{ release = ["held", "error"] }')
    assert set(toy.before["locals_of"](ValueError())) == {"held", "error"}
    left = toy.after["locals_of"](ValueError())
    assert [value for value in left.values() if value is not None] == []


def test_release_of_a_function_that_calls_itself(tmp_path: Path) -> None:
    source = """
    import weakref
    def handle(values, held):
        def flatten(value):
            held
            return sum((flatten(item) for item in value), []) if type(value) is list else [value]
        return flatten(values), weakref.ref(flatten)
    """
    edit = '{ release = ["flatten"], closures = { flatten = "ref", "<genexpr>" = "sum" } }'
    toy = Toy(tmp_path, source, edit)
    import gc

    gc.disable()
    try:
        for namespace, dies in ((toy.before, False), (toy.after, True)):
            found, reference = namespace["handle"]([[1], [2, [3]]], object())
            assert found == [1, 2, 3]
            assert (reference() is None) is dies
    finally:
        gc.enable()


def test_omit(tmp_path: Path) -> None:
    source = """
    class Base:
        def __init__(self, *args):
            self.args = args
    def handle(self, text):
        return make(self, text, flag=1)
    def make(*args, **options):
        return args, options
    """
    toy = Toy(tmp_path, source, '{ omit = "self", from = "make" }')
    assert toy.before["handle"](1, "x") == ((1, "x"), {"flag": 1})
    assert toy.after["handle"](1, "x") == (("x",), {"flag": 1})


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ('before = "seen.append(1)"', [0, 1, 2]),
        ('after = "seen.append(1)"', [1, 0, 2]),
        ("", [0, 1, 2]),
    ],
)
def test_insert(tmp_path: Path, place: str, expected: list[int]) -> None:
    source = """
    def handle(seen):
        '''Docstring.'''
        if not seen:
            seen.append(1)
        seen.append(2)
        return seen
    """
    edit = f'{{ insert = "if len(seen) < 9: seen.append(0)"{", " if place else ""}{place} }}'
    toy = Toy(tmp_path, source, edit)
    assert toy.before["handle"]([]) == [1, 2]
    found = toy.after["handle"]([])
    assert found == (expected if place else [0, 2])
    assert toy.after["handle"].__doc__ == "Docstring."


EVERY_KIND = {
    "release": ("def handle(error):\n    raise error\n", '{ release = ["error"] }'),
    "omit": (
        "def handle(self, x):\n    return print(self, x)\n",
        '{ omit = "self", from = "print" }',
    ),
    "clear at exit": (TWO_WAYS_OUT, '{ clear = "holder.held" }'),
    "clear at return": (TWO_WAYS_OUT, '{ clear = "holder.held", at = "return" }'),
    "clear at raise": (TWO_WAYS_OUT, '{ clear = "holder.held", at = "raise" }'),
    "clear before": (TWO_WAYS_OUT, '{ clear = "holder.held", before = "return found" }'),
    "insert before": (TWO_WAYS_OUT, '{ insert = "holder.x = 1", before = "return found" }'),
    "insert after": (
        TWO_WAYS_OUT,
        '{ insert = "holder.x = 1", after = "found = [*holder.held]" }',
    ),
    "insert first": (TWO_WAYS_OUT, '{ insert = "holder.x = 1" }'),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_made_twice_it_changes_nothing(tmp_path: Path, kind: str) -> None:
    source, edit = EVERY_KIND[kind]
    toy = Toy(tmp_path, source, edit)
    assert not toy.rewritten.is_fixed
    fixed = toy.text() + "\n"
    namespace: dict[str, Any] = {}
    exec(compile(fixed, "toys.py", "exec"), namespace)
    code = namespace["handle"].__code__
    assert _rewriting.rewrite(fixed, code, "handle", [toy.target]).is_fixed


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_what_others_see_stays(tmp_path: Path, kind: str) -> None:
    source, edit = EVERY_KIND[kind]
    toy = Toy(tmp_path, source, edit)
    before, after = toy.rewritten.original, toy.rewritten.replacement
    for part in ("co_name", "co_filename", "co_firstlineno", "co_argcount", "co_freevars"):
        assert getattr(before, part) == getattr(after, part)
    lines = {line for *_, line in before.co_lines() if line}
    assert {line for *_, line in after.co_lines() if line} <= lines


@pytest.mark.parametrize(
    ("source", "edit", "reason"),
    [
        ("def handle(x):\n    pass\n", '{ release = ["y"] }', "no parameter or local 'y'"),
        ("def handle(x):\n    pass\n", '{ clear = "y.z" }', "no parameter or local 'y'"),
        ("def handle(x):\n    pass\n", '{ omit = "y", from = "f" }', "no parameter or local 'y'"),
        ("def handle(x):\n    pass\n", '{ omit = "x", from = "f" }', "does not call f"),
        (
            "def handle(x):\n    x()\n    x()\n",
            '{ insert = "x.y = 1", after = "x()" }',
            "found 2 statements 'x()' in handle, expected 1",
        ),
        (
            "def handle(x):\n    x()\n",
            '{ clear = "x.y", before = "y()" }',
            "found 0 statements 'y()' in handle, expected 1",
        ),
        (
            "def handle(x):\n    return lambda: x\n",
            '{ release = ["x"] }',
            "<lambda> in handle closes over 'x' too",
        ),
        (
            "def handle(x):\n    return log(lambda: x)\n",
            '{ release = ["x"], closures = { "<lambda>" = "trace" } }',
            "<lambda> in handle is used other than by handing it to trace",
        ),
        (
            "def handle(x):\n    def f():\n        return x\n    keep(f)\n    return f()\n",
            '{ release = ["x"], closures = { f = "f" } }',
            "f in handle is used other than by calling it",
        ),
        ("def handle(x):\n    yield x\n", '{ clear = "x.y" }', "is a generator"),
        ("async def handle(x):\n    pass\n", '{ insert = "x.y = 1" }', "a coroutine"),
    ],
)
def test_what_is_not_recognised_is_refused(
    tmp_path: Path, source: str, edit: str, reason: str
) -> None:
    with pytest.raises(Refused) as error:
        Toy(tmp_path, source, edit)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        ('{ relase = ["x"] }', ["[[edits]] 1", "'relase'", "release, omit, clear, insert"]),
        ('{ release = "x" }', ["key 'release'", "found 'x'", "a list of non-empty strings"]),
        ('{ release = ["x"], helper = ["y"] }', ["key 'helper'", "unknown", "helpers"]),
        ('{ release = ["x"], closures = ["y"] }', ["key 'closures'", "a table of non-empty"]),
        ('{ omit = "x" }', ["key 'from'", "missing"]),
        ('{ clear = "x" }', ["key 'clear'", "found 'x'", "an attribute or an item"]),
        ('{ clear = "x.y", to = "0" }', ["key 'to'", "found '0'", "'None'"]),
        ('{ clear = "x.y", at = "end" }', ["key 'at'", "found 'end'", "'exit'"]),
        ('{ insert = "x y" }', ["key 'insert'", "found 'x y'", "one statement of Python"]),
        ('{ insert = "a; b" }', ["key 'insert'", "found 'a; b'", "one statement of Python"]),
    ],
)
def test_a_malformed_edit_is_told_what_and_where(
    tmp_path: Path, edit: str, parts: list[str]
) -> None:
    with pytest.raises(CatalogueError) as error:
        load(tmp_path, edit)
    for part in ("toy.toml [[targets]] 1", *parts):
        assert part in str(error.value)


def test_what_each_kind_covers(tmp_path: Path) -> None:
    edits = ", ".join(
        [
            '{ release = ["error"], helpers = ["report"] }',
            '{ omit = "self", from = "f" }',
            '{ clear = "x.y" }',
            '{ insert = "a = 1" }',
        ]
    )
    target = load(tmp_path, edits)
    report = "handle.<locals>.report"
    expected = [("handle", "error"), (report, "*"), ("handle", "self"), ("handle", "x.y")]
    assert list(target.holders()) == expected
    works = [edit.works_without_source for edit in target.edits]
    assert works == [True, False, False, False]
