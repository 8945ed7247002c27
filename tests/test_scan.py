"""The static scan: each rule against CPython itself, the command against the installed torch."""

import argparse
import contextlib
import gc
import json
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import run_child

from dynamo_cyclefix import _installed
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._commands import scan
from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._scanning import package as _scan
from dynamo_cyclefix._scanning.flow import scan_source
from dynamo_cyclefix._scanning.rules import RULES, Finding

# Each example runs: `entry` is called, and may raise. The scan must list exactly the names given,
# as "function name rule", and CPython must agree: what lists something pins its caller's locals.
PINS = {
    "parameter": (
        """
        def reraise(error):
            raise error

        def entry():
            reraise(ValueError())
        """,
        ["reraise error raised-parameter"],
    ),
    "parameter with a cause and a new traceback": (
        """
        def reraise(error, cause):
            raise error.with_traceback(None) from cause

        def entry():
            reraise(ValueError(), KeyError())
        """,
        ["reraise error raised-parameter"],
    ),
    "parameter in a cell": (
        """
        class Tracer:
            def handle(self, error):
                def bubble():
                    return str(error)

                bubble()
                raise error

        def entry():
            Tracer().handle(ValueError())
        """,
        ["Tracer.handle error raised-parameter"],
    ),
    "parameter raised by a nested function": (
        """
        def handle(error):
            def bubble():
                raise error

            bubble()

        def entry():
            handle(ValueError())
        """,
        ["handle error raised-parameter"],
    ),
    "parameter deleted on one path only": (
        """
        def reraise(error, tidy):
            if tidy:
                try:
                    raise error
                finally:
                    del error
            raise error

        def entry():
            reraise(ValueError(), False)
        """,
        ["reraise error raised-parameter"],
    ),
    "local": (
        """
        def entry():
            error = ValueError()
            raise error from None
        """,
        ["entry error raised-local"],
    ),
    "local raised with the traceback of another": (
        """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                error = ValueError()
                raise error.with_traceback(e.__traceback__) from None
        """,
        ["entry error raised-local"],
    ),
    "local that a call returned": (
        """
        def make():
            return ValueError()

        def entry():
            if error := make():
                raise error
        """,
        ["entry error raised-local"],
    ),
    "local that is an item": (
        """
        def entry():
            errors = [ValueError(), KeyError()]
            for error in errors:
                raise error
        """,
        ["entry errors stored", "entry error raised-local"],
    ),
    "local of a tuple": (
        """
        def make():
            return ValueError(), 1

        def entry():
            error, number = make()
            raise error
        """,
        ["entry error raised-local"],
    ),
    "local that a callee raises": (
        """
        def fail(number, error):
            try:
                raise error
            finally:
                del error

        def entry():
            error = ValueError()
            fail(1, error=error)
        """,
        ["entry error raised-local"],
    ),
    "local that is caught again": (
        """
        def entry():
            error = ValueError()
            try:
                raise error
            except ValueError:
                pass
        """,
        ["entry error raised-local"],
    ),
    "alias, the function raises": (
        """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                cause = e
                raise ValueError() from cause
        """,
        ["entry cause except-alias"],
    ),
    "alias, the function returns": (
        """
        def entry():
            error = None
            try:
                {}["key"]
            except KeyError as e:
                error = e
            return str(error)
        """,
        ["entry error except-alias"],
    ),
    "alias of the cause": (
        """
        def inner():
            try:
                {}["key"]
            except KeyError as e:
                raise ValueError() from e

        def entry():
            try:
                inner()
            except ValueError as e:
                current = e.__cause__
                return str(current)
        """,
        ["entry current except-alias"],
    ),
    "alias by an assignment expression": (
        """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                if (same := e).args:
                    raise
        """,
        ["entry same except-alias"],
    ),
    "alias released, but not when a call before that raises": (
        """
        def fail(error):
            raise ValueError()

        def entry():
            try:
                {}["key"]
            except KeyError as e:
                error = e
                fail(error)
                error = None
        """,
        ["entry error except-alias"],
    ),
    "alias that survives a loop": (
        """
        def entry():
            last = None
            for key in ("a", "b"):
                try:
                    {}[key]
                except KeyError as e:
                    last = e
                    continue
            return str(last)
        """,
        ["entry last except-alias"],
    ),
    "alias in a cell": (
        """
        def call(function):
            return function()

        def entry():
            try:
                {}["key"]
            except KeyError as e:
                cause = e
                call(lambda: str(cause))
        """,
        ["entry cause captured"],
    ),
    "alias that a nested function binds": (
        """
        def entry():
            error = None

            def attempt():
                nonlocal error
                try:
                    {}["key"]
                except KeyError as e:
                    error = e

            attempt()
        """,
        ["entry error captured"],
    ),
    "returned by a callee": (
        """
        def attempt():
            try:
                {}["key"]
            except KeyError as e:
                return e

        def entry():
            error = attempt()
            return str(error)
        """,
        ["entry error returned"],
    ),
    "returned by a callee in a tuple": (
        """
        def attempt():
            try:
                return {}["key"], None
            except KeyError as e:
                return None, e

        def entry():
            value, error = attempt()
            return value
        """,
        ["entry error returned"],
    ),
    "returned by a method through another": (
        """
        class Template:
            def attempt(self):
                try:
                    {}["key"]
                except KeyError as e:
                    return e

            def again(self, number):
                return self.attempt()

        def entry():
            error = Template().again(1)
        """,
        ["entry error returned"],
    ),
    "traceback": (
        """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                tb = e.__traceback__
                return tb.tb_lineno
        """,
        ["entry tb traceback"],
    ),
    "exc_info": (
        """
        import sys

        def entry():
            try:
                {}["key"]
            except KeyError:
                kind, value, tb = sys.exc_info()
                del value
                return tb.tb_lineno
        """,
        ["entry tb traceback"],
    ),
    "list": (
        """
        def entry():
            errors = []
            try:
                {}["key"]
            except KeyError as e:
                errors.append(e)
            return len(errors)
        """,
        ["entry errors stored"],
    ),
    "tuple": (
        """
        def entry():
            pair = None
            try:
                {}["key"]
            except KeyError as e:
                pair = (1, e)
            return len(pair)
        """,
        ["entry pair stored"],
    ),
    "dictionary": (
        """
        def entry():
            results = {}
            try:
                {}["key"]
            except KeyError as e:
                results["key"] = e
            return len(results)
        """,
        ["entry results stored"],
    ),
    "attribute": (
        """
        class Job:
            def run(self):
                try:
                    {}["key"]
                except KeyError as e:
                    self.error = e

        def entry():
            Job().run()
        """,
        ["Job.run self.error stored"],
    ),
    "raised attribute": (
        """
        class Job:
            error = ValueError()

            def wait(self):
                raise self.error

        def entry():
            Job().wait()
        """,
        ["Job.wait self.error stored"],
    ),
    "exception that another one keeps": (
        """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                wrapped = ValueError("wrapped", e)
                return str(wrapped.args[0])
        """,
        ["entry wrapped stored"],
    ),
}

FREE = {
    "parameter deleted in a finally": """
        def reraise(error):
            try:
                raise error
            finally:
                del error

        def entry():
            reraise(ValueError())
        """,
    "parameter in a cell, emptied in a finally": """
        def handle(error):
            def bubble():
                raise error

            try:
                bubble()
            finally:
                error = None

        def entry():
            handle(ValueError())
        """,
    "local emptied in a finally of an outer try": """
        def entry():
            error = None
            try:
                try:
                    error = ValueError()
                    raise error
                except KeyError:
                    return
            finally:
                error = None
        """,
    "local emptied on the way that raises": """
        def entry():
            error = ValueError()
            if str(error):
                return error
            try:
                raise error
            finally:
                error = None
        """,
    "alias emptied in a finally": """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                cause = e
                try:
                    raise ValueError() from cause
                finally:
                    del cause
        """,
    "list cleared in a finally": """
        def entry():
            errors = []
            try:
                {}["key"]
            except KeyError as e:
                errors.append(e)
            finally:
                errors.clear()
        """,
    "alias that a nested function binds, emptied by the owner of the cell": """
        def entry():
            error = None

            def attempt():
                nonlocal error
                try:
                    {}["key"]
                except KeyError as e:
                    error = e

            try:
                attempt()
            finally:
                error = None
        """,
}
"""Something is held, but the function releases it on every path."""

NOTHING = {
    "exception that has no name": """
        def entry():
            raise ValueError()
        """,
    "class": """
        def entry(kind=ValueError, other: type[Exception] = ValueError):
            if kind is None:
                raise kind("text")
            if kind is other:
                raise kind
            raise other
        """,
    "target of the handler": """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                if e.args:
                    raise ValueError(str(e)) from e
                raise e.with_traceback(None)
        """,
    "target of the handler in a cell": """
        def call(function):
            return function()

        def entry():
            try:
                {}["key"]
            except KeyError as e:
                call(lambda: str(e))
                raise ValueError() from e
        """,
    "argument of a helper that raises another exception from it": """
        def helper(error):
            raise ValueError(str(error)) from error

        def entry():
            try:
                {}["key"]
            except KeyError as e:
                helper(e)
        """,
    "argument that a callee does not raise": """
        def fail(error, message):
            try:
                raise error
            finally:
                del error

        def entry():
            message = ValueError()
            fail(KeyError(), message)
        """,
    "what is taken from the exception": """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                text, kind, lines = str(e), type(e), [f"{e}"]
                message = e.args[0]
                failed = e is not None and isinstance(e, KeyError)
            return text
        """,
    "alias bound anew before anything else can happen": """
        def entry():
            try:
                {}["key"]
            except KeyError as e:
                error = e
                error = "text"
            return error
        """,
    "name that is empty where the function is left": """
        def attempt(key):
            try:
                {}[key]
            except KeyError as e:
                return e

        def entry():
            while (error := attempt(())) is None:
                pass
            error = None
            if error is not None:
                raise error
        """,
    "traceback of an exception that did not come this way": """
        def frames(error):
            tb = error.__traceback__
            while tb is not None:
                tb = tb.tb_next
            return tb

        def entry():
            try:
                {}["key"]
            except KeyError as e:
                frames(e)
        """,
    "exception that is made and handed on": """
        def entry(queue=[]):
            error = ValueError()
            queue.append(error)
            return error
        """,
    "argument of an exception that is raised": """
        def entry(key="key"):
            error = KeyError
            message = key.upper()
            raise ValueError(message, key)
        """,
    "method of another class of the same name": """
        class Other:
            def attempt(self):
                try:
                    {}["key"]
                except KeyError as e:
                    return e

        class Template:
            def attempt(self):
                return None

            def run(self):
                error = self.attempt()
                return error

        def entry():
            Template().run()
        """,
    "function of a module of the same name": """
        import re

        def match(pattern, text):
            try:
                raise ValueError()
            except ValueError as e:
                return e

        def entry():
            found = re.match("a", "a")
            return found
        """,
    "item of a tuple that is not the exception": """
        def attempt():
            try:
                return {}["key"], None
            except KeyError as e:
                return None, e

        def entry():
            try:
                value, error = attempt()
            finally:
                error = None
            return value
        """,
    "assignment of a class body": """
        class Status:
            try:
                {}["key"]
            except KeyError as e:
                text = str(e)

        def entry():
            return Status.text
        """,
}
"""Nothing is held, or not by a name of the frame."""


class Canary:
    """What only the caller's frame refers to."""


@pytest.fixture
def collection_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pins(source: str) -> bool:
    """Whether `entry` of the source leaves its caller's locals to the cyclic collector."""
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(textwrap.dedent(source), "example.py", "exec"), namespace)

    def caller(entry: Callable[[], object]) -> "weakref.ref[Canary]":
        canary = Canary()
        reference = weakref.ref(canary)
        with contextlib.suppress(Exception):
            entry()
        return reference

    reference = caller(namespace["entry"])
    alive = reference() is not None
    namespace.clear()
    gc.collect()
    assert reference() is None
    return alive


def listed(source: str) -> list[Finding]:
    return scan_source(textwrap.dedent(source), "example", "example.py")


@pytest.mark.usefixtures("collection_off")
@pytest.mark.parametrize(("source", "expected"), PINS.values(), ids=PINS)
def test_lists_what_pins(source: str, expected: list[str]) -> None:
    findings = [finding for finding in listed(source) if not finding.released]
    assert [f"{f.function} {f.name} {f.rule}" for f in findings] == expected
    assert pins(source)


@pytest.mark.usefixtures("collection_off")
@pytest.mark.parametrize("source", FREE.values(), ids=FREE)
def test_tells_what_is_released(source: str) -> None:
    findings = listed(source)
    assert findings
    assert all(finding.released for finding in findings)
    assert not pins(source)


@pytest.mark.usefixtures("collection_off")
@pytest.mark.parametrize("source", NOTHING.values(), ids=NOTHING)
def test_lists_nothing_else(source: str) -> None:
    assert [finding for finding in listed(source) if not finding.released] == []
    assert not pins(source)


def test_every_rule_has_an_example() -> None:
    assert {line.split()[-1] for _, lines in PINS.values() for line in lines} == set(RULES)


def test_finding_names_line_and_nested_function() -> None:
    (finding,) = listed(
        """
        class Outer:
            def method(self):
                async def inner(error):
                    raise error
        """
    )
    assert finding == Finding(
        module="example",
        function="Outer.method.<locals>.inner",
        name="error",
        file="example.py",
        line=5,
        rule="raised-parameter",
        detail="raises its own parameter",
        released=False,
    )


def test_names_a_cell() -> None:
    source, _ = PINS["parameter in a cell"]
    assert "cell" in listed(source)[0].detail
    source, _ = PINS["parameter"]
    assert "cell" not in listed(source)[0].detail


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* is syntax of Python 3.11")
def test_except_star() -> None:
    (finding,) = listed(
        """
        def entry():
            try:
                call()
            except* ValueError as group:
                error = group
        """
    )
    assert (finding.name, finding.rule) == ("error", "except-alias")


# The sites that were found by measuring, and the names which hold the exception there.
KNOWN_2_13_0 = {
    ("torch._dynamo.symbolic_convert", "InstructionTranslatorBase.exception_handler"): (
        "raised_exception"
    ),
    ("torch._dynamo.utils", "_get_fake_value_impl"): "cause",
    ("torch._dynamo.utils", "_wrap_graph_break_with_torch_runtime_err"): "exc",
    ("torch._dynamo.utils", "get_real_value"): "exn",
    ("torch._dynamo.eval_frame", "_TorchDynamoContext.__call__.<locals>.compile_wrapper"): (
        "cur_exn"
    ),
    ("torch._dynamo.convert_frame", "_fullgraph_capture_frame"): "cur_exn",
    (
        "torch._dynamo.variables.higher_order_ops",
        "add_hop_context.<locals>.wrapped_call_function",
    ): ("exc"),
    ("torch._dynamo.eval_frame", "export.<locals>.inner"): "constraint_violation_error",
    ("torch._dynamo.functional_export", "_suggest_or_raise_constraint_violation"): (
        "constraint_violation_error"
    ),
    ("torch._export.non_strict_utils", "produce_guards_and_solve_constraints"): (
        "constraint_violation_error"
    ),
    ("torch._dynamo.repro.after_dynamo", "WrapBackendDebug.__call__"): "exc",
}


def run_scan(*arguments: str, **known: Any) -> int:
    parser = argparse.ArgumentParser()
    scan.add_arguments(parser)
    mappings = known.get("patched", {}), known.get("explained", {})
    with mock.patch.object(scan, "catalogued", return_value=mappings):
        return scan.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def release() -> str:
    return _installed.version(_installed.find()).partition("+")[0]


def test_lists_every_known_site(release: str, capsys: pytest.CaptureFixture[str]) -> None:
    if release != "2.13.0":
        pytest.skip(f"the sites are those of torch 2.13.0, not {release}")
    modules = sorted({module for module, _ in KNOWN_2_13_0})
    assert run_scan("--json", *modules) == 1
    document = json.loads(capsys.readouterr().out)
    verdicts = {(f["module"], f["function"], f["name"]): f["verdict"] for f in document["findings"]}
    for (module, function), name in KNOWN_2_13_0.items():
        assert verdicts[module, function, name] == "open"


def test_torch_is_not_imported() -> None:
    finished = run_child(
        """
        import argparse, sys
        from dynamo_cyclefix._commands import scan
        from dynamo_cyclefix._scanning import package as _scan
        parser = argparse.ArgumentParser()
        scan.add_arguments(parser)
        code = scan.run(parser.parse_args(["torch.fx.node"]))
        print(code, "torch" in sys.modules)
        """
    )
    assert finished.stdout.splitlines()[-1] == "0 False"
    assert "0 open" in finished.stdout


def test_no_torch() -> None:
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(CommandError, match=r"^found no torch: "),
    ):
        run_scan()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree of one package with an open name and one that is released."""
    package = tmp_path / "torch" / "fx"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.8.7'\n", encoding="utf-8")
    for name, source in (
        ("__init__", "def reraise(error):\n    raise error\n"),
        ("tidy", FREE["parameter deleted in a finally"]),
    ):
        (package / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    return tmp_path


KEY = ("torch.fx", "reraise", "error")


def test_table(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_scan("--root", str(tree), "fx") == 1
    assert capsys.readouterr().out.splitlines() == [
        "torch/fx/__init__.py:2 reraise error raised-parameter: open: raises its own parameter",
        f"torch 9.8.7 in {tree}: 1 open, 0 patched, 1 released, 0 explained",
    ]
    assert run_scan("--root", str(tree), "--all", "torch.fx.tidy") == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "torch/fx/tidy.py:4 reraise error raised-parameter: released by torch: "
        "raises its own parameter"
    )


def test_patched(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_scan("--root", str(tree), "fx", patched={KEY: "some-errors"}) == 0
    assert ": patched by some-errors: " in capsys.readouterr().out


def test_explained(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_scan("--root", str(tree), "fx", "--json", explained={KEY: "never called"}) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["torch"] == "9.8.7"
    assert document["counts"] == {"open": 0, "patched": 0, "released": 1, "explained": 1}
    first = document["findings"][0]
    assert (first["verdict"], first["reason"]) == ("explained", "never called")


def test_unknown_module(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError) as error:
        run_scan("--root", str(tree), "torch.fx", "torch.nope")
    assert capsys.readouterr().out == ""
    found = f"found no module torch.nope below {tree}: give a dotted name of torch"
    assert str(error.value) == found


def test_unreadable_source(tree: Path) -> None:
    broken = tree / "torch" / "fx" / "broken.py"
    broken.write_text("def (:\n", encoding="utf-8")
    with pytest.raises(CommandError) as error:
        run_scan("--root", str(tree), "fx")
    assert str(error.value).startswith(f"could not read {broken}: ")
    assert "\n" not in str(error.value)


def test_the_catalogue_leaves_nothing_open_on_the_installed_torch() -> None:
    root = _installed.find()
    catalogue = _catalogue.load()
    patched, explained = scan.catalogued(catalogue, _installed.version(root), catalogue.patches)
    verdicts = _scan.scan_package(root, patched=patched, explained=explained)
    assert [v.finding.key for v in verdicts if v.verdict == "open"] == []
