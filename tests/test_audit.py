"""`dynamo_cyclefix.audit`: what it reports, and that it leaves the process as it was."""

import collections
import contextlib
import dataclasses
import functools
import gc
import json
import os
import sched
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dynamo_cyclefix import audit

ROOT = Path(__file__).parent.parent
# Only child processes import torch: with its objects, each collection here would take longer.
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


class Payload:
    """Something that a frame's local keeps alive."""


def raise_error(error: BaseException) -> None:
    raise error


# ---- programs that leave cycles, with the holder that the report must name -----------------------


def bound_to_a_local() -> None:
    try:
        raise_error(ValueError("boom"))
    except ValueError as error:
        err = error  # noqa: F841


def in_a_list() -> None:
    errors = []
    try:
        raise_error(ValueError("boom"))
    except ValueError as error:
        errors.append(error)


def in_a_dict_in_a_tuple() -> None:
    state: tuple[dict[str, Exception]] = ({},)
    try:
        raise_error(ValueError("boom"))
    except ValueError as error:
        state[0]["last"] = error


class Service:
    def handle(self) -> None:
        try:
            raise_error(ValueError("boom"))
        except ValueError as error:
            self.last_error = error


def in_an_attribute() -> None:
    Service().handle()


class Slotted:
    __slots__ = ("last_error",)


def in_a_slot() -> None:
    keeper = Slotted()
    try:
        raise_error(ValueError("boom"))
    except ValueError as error:
        keeper.last_error = error  # type: ignore[attr-defined]


def in_a_cell() -> None:
    kept = None

    def show() -> object:
        return kept

    try:
        raise_error(ValueError("boom"))
    except ValueError as error:
        kept = error


def in_an_enclosing_cell() -> None:
    kept = None

    def inner() -> None:
        nonlocal kept
        try:
            raise_error(ValueError("boom"))
        except ValueError as error:
            kept = error

    inner()
    assert kept


def raised_parameter() -> None:
    with contextlib.suppress(ValueError):
        raise_error(ValueError("boom"))


def in_a_generator() -> None:
    def generate() -> Iterator[int]:
        try:
            raise_error(ValueError("boom"))
        except ValueError as error:
            err = error  # noqa: F841
        yield 1

    list(generate())


def in_a_suspended_generator() -> None:
    def generate() -> Iterator[int]:
        try:
            try:
                raise_error(ValueError("boom"))
            except ValueError as error:
                err = error  # noqa: F841
            yield 1
        finally:
            pass

    generator = generate()
    next(generator)
    # Only the collector closes it, and only then has it a frame that the collector knows.
    ring: list[object] = [generator]
    ring.append(ring)


def exc_info() -> None:
    try:
        raise_error(ValueError("boom"))
    except ValueError:
        info = sys.exc_info()  # noqa: F841


def traceback_only() -> None:
    try:
        int("x")
    except ValueError as error:
        tb = error.__traceback__  # noqa: F841


def returned_to_the_caller() -> None:
    def attempt() -> Exception | None:
        try:
            raise_error(ValueError("boom"))
        except ValueError as error:
            return error
        return None

    outcome = attempt()
    assert outcome


def held_through_its_cause() -> None:
    try:
        try:
            raise_error(ValueError("boom"))
        except ValueError as error:
            raise TypeError("wrong") from error
    except TypeError as error:
        err = error  # noqa: F841


def in_executed_code() -> None:
    exec("try:\n    1/0\nexcept Exception as error:\n    err = error", {"__name__": "x"}, {})


RAISED_PARAMETER = ("local", "error", "raise_error")


@pytest.mark.parametrize(
    ("program", "kind", "name", "function"),
    [
        (bound_to_a_local, "local", "err", "bound_to_a_local"),
        (in_a_list, "local", "errors", "in_a_list"),
        (in_a_dict_in_a_tuple, "local", "state", "in_a_dict_in_a_tuple"),
        (in_an_attribute, "local", "self", "Service.handle"),
        (in_a_slot, "local", "keeper", "in_a_slot"),
        (in_a_cell, "cell", "kept", "in_a_cell"),
        (in_an_enclosing_cell, "cell", "kept", "in_an_enclosing_cell.<locals>.inner"),
        (in_a_generator, "local", "err", "in_a_generator.<locals>.generate"),
        (exc_info, "local", "info", "exc_info"),
        (returned_to_the_caller, "local", "outcome", "returned_to_the_caller"),
        (held_through_its_cause, "local", "err", "held_through_its_cause"),
        (in_executed_code, "local", "err", "<module>"),
        (raised_parameter, *RAISED_PARAMETER),
    ],
)
def test_names_the_holder(program: Callable[[], None], kind: str, name: str, function: str) -> None:
    report = audit.run(program)
    found = {(cycle.kind, cycle.name, cycle.function) for cycle in report.cycles}
    if sys.version_info < (3, 11):
        function = function.rpartition(".")[2]
    # `raise_error` is a second holder wherever it is used, as its parameter is never released.
    expected = {(kind, name, function)}
    if program is not in_executed_code:
        expected.add(RAISED_PARAMETER)
    assert found == expected
    cycle = next(cycle for cycle in report.cycles if cycle.name == name)
    assert cycle.owner == "user"
    assert cycle.patch is None
    assert cycle.count == 1
    assert cycle.frames >= 1
    assert cycle.tensor_bytes == 0
    if program is not in_executed_code:
        assert cycle.file == __file__
        assert cycle.module == __name__
        assert "boom" in cycle.exception or "wrong" in cycle.exception
    assert f"{kind} '{name}'" in " ".join(cycle.path)
    assert report.raised is None
    assert report.alive == ()


def test_a_generator_that_only_the_collector_closes() -> None:
    report = audit.run(in_a_suspended_generator)
    assert "err" in {cycle.name for cycle in report.cycles}


def test_the_line_is_the_one_that_the_exception_passed() -> None:
    first = bound_to_a_local.__code__.co_firstlineno
    (cycle,) = (c for c in audit.run(bound_to_a_local).cycles if c.name == "err")
    assert cycle.line == first + 2


def test_the_path_in_words() -> None:
    def program() -> None:
        service = Service()
        try:
            int("x")
        except ValueError as error:
            service.last_error = error

    (cycle,) = audit.run(program).cycles
    text = "exception ValueError: invalid literal for int() with base 10: 'x'"
    line = program.__code__.co_firstlineno + 3
    function = program.__qualname__ if sys.version_info >= (3, 11) else program.__name__
    assert cycle.path == (
        text,
        f"__traceback__: traceback, line {line}",
        f"tb_frame: frame of {function}, {__file__}",
        "local 'service': Service object",
        f"attribute 'last_error': {text}",
    )
    assert f"held by local 'service' of {function}, {__file__}:{line} (your own code)" in str(cycle)


def test_a_traceback_alone() -> None:
    cycles = audit.run(traceback_only).cycles
    assert [(c.exception, c.kind, c.name) for c in cycles] == [("traceback", "local", "tb")]


def test_two_names_and_two_exceptions() -> None:
    def program() -> None:
        try:
            int("x")
        except ValueError as error:
            first = second = error  # noqa: F841
        try:
            os.environ["NO SUCH VARIABLE"]
        except KeyError as error:
            third = error  # noqa: F841

    found = {(c.name, c.exception.partition(":")[0]) for c in audit.run(program).cycles}
    assert found == {("first", "ValueError"), ("second", "ValueError"), ("third", "KeyError")}


def test_equal_cycles_are_counted() -> None:
    def once() -> None:
        try:
            int("x")
        except ValueError as error:
            err = error  # noqa: F841

    def program() -> None:
        for _ in range(7):
            once()

    report = audit.run(program)
    (cycle,) = report.cycles
    assert cycle.count == 7
    assert report.frames == cycle.frames
    assert "7 exception cycles left" in str(report)
    assert "7 times: ValueError" in str(report)


def test_many_exceptions_in_one_list_are_one_cycle() -> None:
    def program() -> None:
        errors = []
        for _ in range(3000):
            try:
                int("x")
            except ValueError as error:
                errors.append(error)

    assert [(c.name, c.count) for c in audit.run(program).cycles] == [("errors", 1)]


def test_a_cycle_without_a_frame() -> None:
    def program() -> None:
        one, other = ValueError("one"), ValueError("other")
        one.__cause__, other.__cause__ = other, one

    (cycle,) = audit.run(program).cycles
    assert (cycle.kind, cycle.name, cycle.function, cycle.owner) == (
        "reference",
        "__cause__",
        "",
        "unknown",
    )
    assert "__cause__" in str(cycle)


def test_clean_code_leaves_nothing() -> None:
    def program() -> None:
        try:
            int("x")
        except ValueError as error:
            err = error
            try:
                str(err)
            finally:
                del err
        ring: list[object] = []
        ring.append(ring)  # a cycle, but not an exception's

    report = audit.run(program)
    assert report == audit.Report((), None, (), 0, 0)
    assert str(report) == "0 exception cycles left"


def test_garbage_from_before_is_not_reported() -> None:
    gc.disable()
    try:
        bound_to_a_local()
        assert audit.run(lambda: None).cycles == ()
    finally:
        gc.enable()


def test_a_frame_that_only_the_cycle_keeps_is_pinned() -> None:
    def program() -> None:
        payload = Payload()
        refs.append(weakref.ref(payload))
        bound_to_a_local()

    refs: list[weakref.ref[Payload]] = []
    gc.disable()
    try:
        program()
        assert refs[0]() is not None  # the control: the frame of `program` is pinned
        report = audit.run(program)
    finally:
        gc.enable()
    assert refs[1]() is None  # collected
    assert report.frames >= 2
    with audit.watch() as watched:
        bound_to_a_local()
    # Of three frames on the path (this one, the function's, the helper's) this one still runs.
    assert watched.report.frames < report.frames


def test_the_standard_librarys_frame() -> None:
    @contextlib.contextmanager
    def swallow() -> Iterator[None]:
        with contextlib.suppress(KeyError):
            yield

    def program() -> None:
        with swallow():
            raise KeyError("x")

    gc.disable()
    try:
        program()
        gc.collect()
        program()
        if gc.collect() == 0:
            pytest.skip("this release of contextlib leaves no cycle")
        (cycle,) = audit.run(program).cycles
    finally:
        gc.enable()
    assert cycle.owner == "standard library"
    assert (cycle.kind, cycle.name, cycle.module) == ("local", "value", "contextlib")
    assert cycle.function.rpartition(".")[2] == "__exit__"
    assert cycle.patch is None
    assert "(standard library)" in str(cycle)


def test_another_librarys_frame(tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "somelib" / "core.py"
    namespace: dict[str, Any] = {"__name__": "somelib.core"}
    source = "def f():\n  try: 1/0\n  except Exception as e: err = e\n"
    exec(compile(source, str(file), "exec"), namespace)
    (cycle,) = audit.run(namespace["f"]).cycles
    assert cycle.owner == "library"
    assert "(library somelib)" in str(cycle)


def test_the_report_is_json() -> None:
    report = audit.run(bound_to_a_local)
    assert report.cycles
    data = json.loads(json.dumps(dataclasses.asdict(report)))
    assert data["cycles"][0]["file"] == __file__
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.raised = "x"  # type: ignore[misc]


# ---- exceptions that leave the audited code ------------------------------------------------------


def test_run_reports_an_exception_instead_of_raising_it() -> None:
    def program(text: str, *, err: object) -> None:
        bound_to_a_local()
        int(text)

    report = audit.run(program, "x", err=None)
    assert report.raised == "ValueError: invalid literal for int() with base 10: 'x'"
    assert {cycle.name for cycle in report.cycles} == {"err", "error"}
    assert report.alive == ()
    assert f"the audited code raised {report.raised}" in str(report)


def test_run_reports_the_cycle_of_the_exception_that_was_raised() -> None:
    def program() -> None:
        try:
            int("x")
        except ValueError as error:
            err = error
            raise err from None

    report = audit.run(program)
    assert [cycle.name for cycle in report.cycles] == ["err"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_run_lets_other_exceptions_pass(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        audit.run(raise_error, kind())
    assert gc.isenabled()


def test_an_exception_in_flight_is_not_called_a_cycle() -> None:
    watched = audit.watch()
    with pytest.raises(ValueError, match="boom"), watched:
        raise_error(ValueError("boom"))
    assert watched.report.raised == "ValueError: boom"
    assert watched.report.alive == ("ValueError: boom",)
    assert watched.report.cycles == ()
    assert watched.report.frames == 0


def test_an_exception_that_is_kept_is_not_judged() -> None:
    kept = []

    def program() -> None:
        try:
            int("x")
        except ValueError as error:
            kept.append(error)

    report = audit.run(program)
    assert report.cycles == ()
    assert len(report.alive) == 1
    assert "not judged, since something still refers to it: ValueError: inv" in str(report)
    assert audit.run(lambda: None).alive == ()  # not new any more


def test_there_is_no_report_before_the_end() -> None:
    with audit.watch() as watched:
        with pytest.raises(RuntimeError, match="after the block has ended"):
            _ = watched.report
        gc.collect()
    assert watched.report.raised is None
    with pytest.raises(RuntimeError, match=r"make a new one with watch\(\)"), watched:
        pass
    assert gc.isenabled()


# ---- the process is left as it was ---------------------------------------------------------------


def gc_state() -> tuple[object, ...]:
    gc.collect()  # CPython 3.12 counts immortal objects as frozen, once a collection has seen them
    return (
        gc.isenabled(),
        gc.get_threshold(),
        gc.get_debug(),
        [id(obj) for obj in gc.garbage],
        [id(obj) for obj in gc.callbacks],
        gc.get_freeze_count(),
    )


def nested() -> None:
    audit.run(bound_to_a_local)
    with audit.watch():
        bound_to_a_local()


def toggles() -> None:
    gc.disable()
    gc.enable()


def raises() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("debug", [0, gc.DEBUG_SAVEALL])
@pytest.mark.parametrize("program", [bound_to_a_local, nested, toggles, raises])
def test_the_collectors_state_is_kept(
    program: Callable[[], None], debug: int, enabled: bool
) -> None:
    thresholds = gc.get_threshold()
    mark = Payload()
    callback = lambda phase, info: None  # noqa: E731
    gc.collect()
    try:
        gc.set_threshold(701, 11, 9)
        gc.callbacks.append(callback)
        gc.garbage.append(mark)
        gc.freeze()
        gc.set_debug(debug)
        (gc.enable if enabled else gc.disable)()
        before = gc_state()
        audit.run(program)
        after = gc_state()
        with contextlib.suppress(ValueError), audit.watch():
            program()
        last = gc_state()
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.unfreeze()
        gc.garbage.clear()
        gc.callbacks.remove(callback)
        gc.set_threshold(*thresholds)
    assert before == after == last


def test_collection_is_off_inside() -> None:
    states = []

    def inner() -> None:
        states.append(gc.isenabled())

    def outer() -> None:
        audit.run(inner)
        states.append(gc.isenabled())

    audit.run(outer)
    assert states == [False, False]
    assert gc.isenabled()


def test_nested_audits_both_report() -> None:
    inner: list[audit.Report] = []

    def program() -> None:
        traceback_only()
        inner.append(audit.run(bound_to_a_local))

    outer = audit.run(program)
    assert {cycle.name for cycle in inner[0].cycles} == {"err", "error"}
    assert {cycle.name for cycle in outer.cycles} == {"tb", "err", "error"}


def test_nothing_of_the_users_is_kept() -> None:
    refs: list[weakref.ref[Payload]] = []

    def program(argument: Payload) -> Payload:
        payload = Payload()
        refs.append(weakref.ref(payload))
        bound_to_a_local()
        result = Payload()
        refs.append(weakref.ref(result))
        return result

    gc.disable()
    try:
        report = audit.run(program, Payload())
        assert [ref() for ref in refs] == [None, None]
        assert report.cycles
        assert gc.collect() == 0  # and no cycle of its own
        assert audit.run(lambda: None).cycles == ()
        with contextlib.suppress(ValueError), audit.watch():
            raises()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_garbage_that_bites() -> None:
    class Hostile(Exception):  # noqa: N818
        def __getattribute__(self, name: str) -> Any:
            raise SystemError("called a method of garbage")

        def __eq__(self, other: object) -> bool:
            raise SystemError("compared garbage")

        __hash__ = None  # type: ignore[assignment]
        __str__ = __repr__ = __eq__  # type: ignore[assignment]

    kept: list[Hostile] = []

    def keep() -> None:
        try:
            raise Hostile
        except Hostile as error:
            kept.append(error)

    def program() -> None:
        payload = Payload()
        dead = weakref.proxy(payload)
        del payload
        ring: list[object] = [dead, weakref.proxy(Payload), Hostile(), types.SimpleNamespace()]
        ring.append(ring)
        try:
            raise_error(Hostile(object()))
        except Hostile as error:
            proxies = {"dead": dead, "error": error, "ring": ring}  # noqa: F841

    with pytest.raises(ReferenceError):
        isinstance(weakref.proxy(Payload()), int)  # the control: a dead proxy bites
    assert {cycle.name for cycle in audit.run(program).cycles} == {"proxies", "error"}
    assert [text.rpartition(".")[2] for text in audit.run(keep).alive] == ["Hostile"]


def test_threads_that_audit_at_once() -> None:
    inside, reports = threading.Barrier(2, timeout=60), {}

    def audit_in_thread(key: str, program: Callable[[], None]) -> None:
        def both_at_once() -> None:
            inside.wait()
            program()
            inside.wait()

        reports[key] = audit.run(both_at_once)

    before = gc_state()
    threads = [
        threading.Thread(target=audit_in_thread, args=("one", bound_to_a_local)),
        threading.Thread(target=audit_in_thread, args=("two", traceback_only)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert gc_state() == before
    # Garbage belongs to the process: each audit reports what was left while it was open.
    for report in reports.values():
        assert {cycle.name for cycle in report.cycles} == {"err", "error", "tb"}


def test_an_audit_may_wait_for_a_thread_that_audits() -> None:
    reports = []

    def program() -> None:
        thread = threading.Thread(target=lambda: reports.append(audit.run(bound_to_a_local)))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    outer = audit.run(program)
    assert outer.raised is None
    assert reports[0].cycles == outer.cycles != ()


def test_threads_under_load() -> None:
    def work() -> None:
        try:
            for _ in range(4):
                found = {cycle.name for cycle in audit.run(bound_to_a_local).cycles}
                assert found == {"err", "error"}, found
        except BaseException as error:
            failures.append(repr(error))

    failures: list[str] = []
    before = gc_state()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert gc_state() == before


def test_inside_a_collection_it_says_so_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    failures = []

    def callback(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(callback)
        try:
            audit.run(bound_to_a_local)
        except RuntimeError as error:
            failures.append(str(error))

    gc.callbacks.append(callback)
    before = gc_state()[:3]
    gc.collect()
    assert "start the audit outside finalisers" in failures[0]
    assert gc_state()[:3] == before


# ---- torch ---------------------------------------------------------------------------------------

INLINED = """
import dataclasses, gc, json, sys, weakref
import torch, torch._dynamo
from dynamo_cyclefix import audit

class Payload: pass
refs = []

def helper(x):
    raise KeyError("missing")

def program():
    payload, big = Payload(), torch.empty(250_000, dtype=torch.float32)
    refs.append(weakref.ref(payload))
    compiled = torch.compile(lambda x: helper(x), backend="eager")
    try:
        compiled(torch.ones(3))
    except KeyError:
        pass

gc.disable()
program()
pinned = refs[0]() is not None
torch._dynamo.reset()
print(json.dumps([pinned, dataclasses.asdict(audit.run(program))]))
"""

MISMATCHED = """
import dataclasses, json, sys
import torch
from dynamo_cyclefix import audit

def helper(x):
    return x @ x

def program():
    for _ in range(2):
        try:
            torch.compile(lambda x: helper(x), backend="eager")(torch.ones(2, 3))
        except Exception:
            pass
        torch._dynamo.reset()

program()
read = 0
def profile(frame, event, _):
    global read
    code = frame.f_code
    read += event == "call" and code.co_name == "load" and "_catalogue" in code.co_filename
reports = []
for _ in range(2):
    watched = audit.watch()
    with watched:
        program()
        sys.setprofile(profile)
    sys.setprofile(None)
    reports.append(dataclasses.asdict(watched.report))
print(json.dumps([torch.__version__, read, *reports]))
"""

BYTES = """
import dataclasses, json
import torch
from dynamo_cyclefix import audit

def program():
    big = torch.empty(1000, dtype=torch.float64)
    view, slice = big.view(10, 100), big[5:]   # one storage, three tensors
    meta = torch.empty(1000, device="meta")    # no memory
    sparse = torch.eye(3).to_sparse()          # no storage of its own
    subclass = torch.nn.Parameter(torch.zeros(10))
    for _ in range(2):
        try:
            raise ValueError("boom")
        except ValueError as error:
            err = error

print(json.dumps(dataclasses.asdict(audit.run(program))))
"""


def child(source: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def torch_as_shipped() -> Any:
    return child(INLINED, DYNAMO_CYCLEFIX="off")


@needs_torch
def test_torchs_frame(torch_as_shipped: Any) -> None:
    pinned, report = torch_as_shipped
    assert pinned
    assert report["raised"] is None
    assert report["alive"] == []
    (cycle,) = (c for c in report["cycles"] if c["name"] == "raised_exception")
    assert cycle["function"].rpartition(".")[2] == "exception_handler"
    assert cycle["module"] == "torch._dynamo.symbolic_convert"
    assert cycle["owner"] == "torch"
    assert cycle["kind"] in ("local", "cell")
    assert "KeyError" in cycle["exception"]
    assert cycle["patch"] == "observed-exceptions"
    assert cycle["frames"] > 2
    # Dynamo's own frames hold a few small tensors too (the random number generators' state).
    assert 1_000_000 <= cycle["tensor_bytes"] <= report["tensor_bytes"] < 1_100_000


@needs_torch
def test_torchs_frame_patched(torch_as_shipped: Any) -> None:
    assert torch_as_shipped[0]  # the control
    pinned, report = child(
        INLINED, DYNAMO_CYCLEFIX="on", DYNAMO_CYCLEFIX_PATCHES="observed-exceptions"
    )
    assert not pinned
    assert "raised_exception" not in {cycle["name"] for cycle in report["cycles"]}


TWO_COMPILES = """
import json
import torch, torch._dynamo
from dynamo_cyclefix import audit

config = torch._dynamo.config

def compile(function):
    torch.compile(function, backend="eager")(torch.ones(1))

def first():
    compile(lambda x: x + 1)
    try:
        raise ValueError("boom")
    except ValueError as error:
        err = error

def program():
    first()
    compile(lambda x: x + 2)

def collects():
    return getattr(config, "run_gc_after_compile", None)

before = collects()
names = [cycle.name for cycle in audit.run(program).cycles]
outer, inner = audit.watch(), audit.watch()
outer.__enter__()
inner.__enter__()
outer.__exit__(None, None, None)
inside = collects()
inner.__exit__(None, None, None)
after = collects()
if before:
    config.run_gc_after_compile = False
with audit.watch():
    pass
print(json.dumps([names, before, inside, after, collects()]))
"""


@needs_torch
def test_dynamo_does_not_collect_what_an_earlier_compile_left() -> None:
    names, before, inside, after, kept = child(
        TWO_COMPILES, DYNAMO_CYCLEFIX="off", TORCH_DYNAMO_RUN_GC_AFTER_COMPILE="1"
    )
    assert names == ["err"]
    assert after is before
    assert before in (True, None)  # None: up to 2.6
    if before:
        assert inside is False
        assert kept is False


@needs_torch
def test_the_tests_keep_dynamo_from_collecting() -> None:
    """What is pinned, and young, would look released after the next compile."""
    assert not child("""
        import json, torch, torch._dynamo
        print(json.dumps(getattr(torch._dynamo.config, "run_gc_after_compile", False)))
    """)


@needs_torch
def test_the_patch_is_named_for_helpers_too_and_the_catalogue_is_read_once() -> None:
    version, read, *reports = child(MISMATCHED, DYNAMO_CYCLEFIX="off")
    assert read == 1
    for report in reports:
        patches = {
            (cycle["function"].rpartition(".")[2], cycle["name"]): cycle["patch"]
            for cycle in report["cycles"]
            if cycle["owner"] == "torch"
        }
        assert patches
        assert None not in patches.values()
        if version.startswith("2.14."):
            assert patches["bubble_exception_to_interpreter", "e"] == "observed-exceptions"


@needs_torch
def test_tensor_bytes_are_counted_once_per_storage() -> None:
    report = child(BYTES, DYNAMO_CYCLEFIX="off")
    assert [cycle["name"] for cycle in report["cycles"]] == ["err"]
    assert report["tensor_bytes"] == report["cycles"][0]["tensor_bytes"] == 8000 + 40


def test_torch_is_not_imported() -> None:
    source = """
    import json, sys
    from dynamo_cyclefix import audit
    audit.run(int, "x")
    print(json.dumps([m for m in ("torch", "wrapt", "packaging") if m in sys.modules]))
    """
    assert child(source) == []


# ---- pytest --------------------------------------------------------------------------------------

SUITE = """
import logging
import pytest
import torch

def leave():
    try:
        int("x")
    except ValueError as error:
        err = error

def test_clean(no_exception_cycles):
    with no_exception_cycles() as watched:
        with pytest.raises(ValueError):
            int("x")
    assert watched.report.cycles == ()

def test_compiled(no_exception_cycles):
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    with no_exception_cycles():
        with pytest.raises(RuntimeError):
            compiled(torch.ones(3, 7))

def test_logs(no_exception_cycles, caplog):
    with no_exception_cycles():
        try:
            int("x")
        except ValueError as error:
            logging.exception("it says: %s", error)
    assert "it says: invalid literal" in caplog.text and "Traceback" in caplog.text
    assert caplog.records[0].getMessage().startswith("it says: invalid literal")

def test_logs_nonsense(no_exception_cycles, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with no_exception_cycles():
        logging.warning("%d", "nonsense")

def test_leaves(no_exception_cycles):
    with no_exception_cycles():
        leave()

class Request:
    pass

def test_lets_go(no_exception_cycles):
    request = Request()
    with no_exception_cycles(objects=[request]):
        del request

def test_holds(no_exception_cycles):
    request = Request()
    with no_exception_cycles(objects=[request]):
        request.ring = request
        del request

def test_keeps(no_exception_cycles):
    with no_exception_cycles():
        with pytest.raises(ValueError) as info:
            int("x")

def test_raises(no_exception_cycles):
    with no_exception_cycles():
        leave()
        raise LookupError("the test's own failure")
"""


def test_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "dynamo_cyclefix.pytest_plugin", "-q", "-rA"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    out = done.stdout
    assert done.returncode == 1, out + done.stderr
    for name in "clean", "logs", "compiled", "logs_nonsense", "lets_go":
        assert f"PASSED test_suite.py::test_{name}" in out
    assert "FAILED test_suite.py::test_leaves - Failed: 1 exception cycle left" in out
    assert "held by local 'err' of leave" in out
    assert "FAILED test_suite.py::test_holds - Failed: 0 exception cycles left" in out
    assert "objects[0]: Request object is kept alive until a collection" in out
    assert "FAILED test_suite.py::test_keeps - Failed: 0 exception cycles left" in out
    assert "not judged, since something still refers to it: ValueError: invalid literal" in out
    assert "FAILED test_suite.py::test_raises - LookupError: the test's own failure" in out
    assert "pytest_plugin.py" not in out  # the failure points at the test's own line


def test_the_plugin_loads_nothing_until_it_is_used() -> None:
    source = """
    import json, sys
    import pytest
    before = set(sys.modules)
    import dynamo_cyclefix.pytest_plugin
    print(json.dumps(sorted(set(sys.modules) - before)))
    """
    loaded = child(source, DYNAMO_CYCLEFIX="off")
    assert "dynamo_cyclefix.pytest_plugin" in loaded
    assert [name for name in loaded if not name.startswith("dynamo_cyclefix")] == []
    assert "dynamo_cyclefix.audit" not in loaded


# ---- what of the user's is still alive -----------------------------------------------------------


class Kept:
    """Stands for an input."""


def test_an_input_in_a_cycle_is_held_until_a_collection() -> None:
    class Holder:
        pass

    def call(value: object) -> None:
        holder = Holder()
        holder.ring, holder.value = holder, value

    (held,) = audit.run(call, Kept()).held
    assert held.object == "args[0]: Kept object"
    assert held.freed_by_collection
    assert (held.kind, held.name) == ("attribute", "ring")
    assert held.function.endswith("Holder")
    assert held.path[-1] == "attribute 'value': Kept object"
    assert "until a collection" in str(held)


def test_an_input_that_torch_keeps_is_held_after_a_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo.utils as keeper

    monkeypatch.setattr(keeper, "kept_by_a_test", None, raising=False)

    def call(values: list[object]) -> None:
        keeper.kept_by_a_test = {"first": values[0]}

    (held,) = audit.run(call, [Kept()]).held
    assert held.object == "args[0][0]: Kept object"
    assert not held.freed_by_collection
    assert (held.kind, held.name) == ("global", "kept_by_a_test")
    assert (held.module, held.owner) == ("torch._dynamo.utils", "torch")
    assert "after a collection too" in str(held)


@needs_torch
@pytest.mark.parametrize(
    ("call", "patch"),
    [
        ("torch.export.export(model, (x,), strict=True)", "strict-export"),
        ("torch._dynamo.export(model)(x)", "export-errors"),
        ("torch.compile(set_attribute, backend='eager')(model, x)", "side-effect-tables"),
        ("torch.compile(generate, backend='eager')(x)", "translator-state"),
    ],
)
def test_the_patch_for_what_a_successful_call_leaves_is_named(call: str, patch: str) -> None:
    source = f"""
    import json
    import torch, torch._dynamo, torch.export
    from dynamo_cyclefix import audit

    def set_attribute(model, x):
        model.seen = x + 1
        return model(x)

    def generate(x):
        def parts():
            yield x + 1
            yield x + 2
        for part in parts():
            torch._dynamo.graph_break()
        return part

    def call(model, x):
        {call}

    report = audit.run(call, torch.nn.Linear(3, 3), torch.ones(3))
    print(json.dumps([[held.patch, str(held)] for held in report.held]))
    """
    held = child(source, DYNAMO_CYCLEFIX="off")
    assert patch in [named for named, _ in held], held


def test_what_the_user_still_refers_to_is_not_held() -> None:
    local, in_list, in_global = Kept(), [Kept()], Kept()
    globals()["kept_global"] = in_global
    try:
        assert not audit.run(lambda *values: None, local, in_list, in_global).held
        with audit.watch(objects=[local, in_list]) as watched:
            pass
        assert not watched.report.held
    finally:
        del globals()["kept_global"]


@pytest.mark.parametrize(
    "container",
    [
        lambda value: collections.OrderedDict(key=value),
        lambda value: collections.deque([value]),
        lambda value: functools.partial(print, value),
        lambda value: types.SimpleNamespace(value=value),
        lambda value: sched.Event(value, 0, 0, print, (), {}),
    ],
)
def test_what_the_user_has_in_a_container_is_not_held(container: Callable[[Any], Any]) -> None:
    kept: list[object] = []
    report = audit.run(lambda value: kept.append(container(value)), Kept())
    assert not report.held


def test_an_input_that_dies_is_not_held() -> None:
    # Inside of an `assert`, pytest would keep them.
    report = audit.run(lambda *values: None, Kept(), [Kept()], {"a": Kept()})
    assert not report.held


@needs_torch
def test_of_a_module_that_is_held_the_parts_are_not_listed() -> None:
    source = """
    import json, torch
    from dynamo_cyclefix import audit

    def call(whole, part):
        for value in whole, part.weight:
            ring = [value]
            ring.append(ring)

    report = audit.run(call, torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    print(json.dumps([held.object for held in report.held]))
    """
    expected = ["args[0]: Linear object", "args[1].weight: Parameter of shape (3, 3)"]
    assert child(source, DYNAMO_CYCLEFIX="off") == expected


@needs_torch
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # Its parameters have no shape yet; nor has a nested tensor.
        ("torch.nn.LazyLinear(3).weight", "UninitializedParameter object"),
        ("torch.nn.LazyLinear(3)", "LazyLinear object"),
        ("torch.nested.nested_tensor([torch.ones(2)])", "Tensor object"),
        ("Listed()", "Listed object"),
        ("Refusing()", "Refusing object"),
    ],
)
def test_an_unusual_input_is_watched(value: str, expected: str) -> None:
    source = f"""
    import json, torch
    from dynamo_cyclefix import audit

    class Listed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            vars(self).update(_parameters=[], _buffers=torch.ones(2), _modules=3)

    class Refusing(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            Refusing.__getattribute__ = lambda self, name: 1 / 0

    def call(value):
        ring = [value]
        ring.append(ring)

    report = audit.run(call, {value})
    print(json.dumps([held.object for held in report.held]))
    """
    assert child(source, DYNAMO_CYCLEFIX="off") == [f"args[0]: {expected}"]


@needs_torch
def test_the_parts_of_a_scripted_module_that_the_user_has_are_not_held() -> None:
    source = """
    import json, torch
    from dynamo_cyclefix import audit

    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    print(json.dumps([held.object for held in audit.run(lambda model: None, model).held]))
    """
    assert child(source, DYNAMO_CYCLEFIX="off") == []


def test_objects_may_be_given() -> None:
    kept = Kept()
    with audit.watch(objects=[kept]) as watched:
        ring: list[object] = [kept]
        ring.append(ring)
        del ring, kept
    (held,) = watched.report.held
    assert held.object == "objects[0]: Kept object"
    assert held.freed_by_collection


def test_the_watch_itself_keeps_nothing_alive() -> None:
    kept = Kept()
    reference = weakref.ref(kept)
    with audit.watch(objects=[kept]):
        del kept
        assert reference() is None
