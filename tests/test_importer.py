"""The importer on real torch: when it patches, what it costs, what it says, and how it goes away.

Only child processes import torch.
"""

import importlib.util
import textwrap
from typing import Any

import pytest
from conftest import run_child

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

PRELUDE = '''
import gc, importlib, json, logging, sys, threading, weakref

records = []

class Keep(logging.Handler):
    def emit(self, record):
        dynamo = sys.modules.get("torch._dynamo")
        early = dynamo is not None and dynamo.__spec__._initializing
        records.append([record.levelname, record.getMessage(), early])

logging.getLogger("dynamo_cyclefix").addHandler(Keep())
logging.getLogger("dynamo_cyclefix").setLevel("INFO")

TARGET = "torch._dynamo.symbolic_convert"

def code():
    return sys.modules[TARGET].InstructionTranslatorBase.exception_handler.__code__

class Payload: pass

# Dynamo keeps what it learnt with the code object: each function gets one of its own.
FUNCTION = """
def helper(mapping):
    return mapping["key"]
def function(x, mapping):
    return helper(mapping) + x
"""

def compiled():
    import torch
    namespace = {}
    exec(FUNCTION, namespace)
    return torch.compile(namespace["function"], backend="eager")

def pinned(function=None):
    import torch
    function = function or compiled()
    def user():
        payload = Payload()
        try:
            function(torch.ones(1), {})
        except KeyError:
            return weakref.ref(payload)
    gc.collect()
    gc.disable()
    payload = user()
    answer = payload() is not None
    gc.enable()
    gc.collect()
    assert payload() is None
    return answer

def observed():
    import dynamo_cyclefix
    patches = {patch.id: patch for patch in dynamo_cyclefix.status().patches}
    patch = patches["observed-exceptions"]
    return patch.state.value.partition("-unseen")[0], patch.reason

def lines(level):
    return [text for name, text, _ in records if name == level and "observed-exc" in text]
'''


def report(code: str, **env: str) -> Any:
    """Run a program after the prelude, and give what it prints as JSON; nothing goes to stderr."""
    finished = run_child(PRELUDE + textwrap.dedent(code), **env)
    assert finished.stderr == ""
    return finished.json


# ---- what the import costs -----------------------------------------------------------------------


def imported(statement: str, **env: str) -> set[str]:
    stderr = run_child(statement, options=["-X", "importtime"], **env).stderr
    return {line.rpartition("|")[2].strip() for line in stderr.splitlines()}


@pytest.mark.parametrize("mode", [None, "on", "strict", "off", ""])
def test_the_import_is_light(mode: str | None) -> None:
    variables = {} if mode is None else {"DYNAMO_CYCLEFIX": mode}
    ours = imported("import dynamo_cyclefix", **variables)
    theirs = imported("pass")
    judging = {"dynamo_cyclefix._settings"} if variables else set()
    assert ours - theirs == {"dynamo_cyclefix"} | judging


def test_without_torch() -> None:
    result = report("""
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")
        sys.meta_path.insert(0, Blocker())
        import dynamo_cyclefix
        try:
            import torch
        except ModuleNotFoundError as error:
            missing = error.name
        status = dynamo_cyclefix.status()
        dynamo_cyclefix.deactivate()
        states = sorted({patch.state.value for patch in status.patches})
        print(json.dumps([missing, status.torch, status.active, status.error, states, records]))
    """)
    assert result == ["torch", None, True, "", ["pending"], []]


# ---- before, after, twice ------------------------------------------------------------------------


@needs_torch
def test_imported_before_torch() -> None:
    result = report("""
        import dynamo_cyclefix, torch
        steps = {"torch._dynamo with torch": "torch._dynamo" in sys.modules}
        steps["pending"] = observed()[0]
        import torch._dynamo
        steps["loader"] = type(sys.modules[TARGET].__loader__).__name__
        steps["spec"] = type(sys.modules[TARGET].__spec__.loader).__name__
        steps["applied"] = observed()[0]
        steps["pinned"] = pinned()
        infos, warnings = lines("INFO"), lines("WARNING")
        steps["log"] = [len(infos), warnings, [e for _, text, e in records if text in infos]]
        steps["text"] = infos[0]
        patched = code()
        dynamo_cyclefix.deactivate()
        original = code()
        steps["deactivated"] = [original is not patched, pinned(), dynamo_cyclefix.status().active]
        dynamo_cyclefix.activate()
        steps["again"] = [code() is not original, pinned(), observed()[0]]
        dynamo_cyclefix.activate()
        ours = [f for f in sys.meta_path if "dynamo_cyclefix" in type(f).__module__]
        steps["twice"] = [code() is not original, pinned(), observed()[0], len(ours)]
        dynamo_cyclefix.deactivate()
        dynamo_cyclefix.deactivate()
        steps["identical"] = code() is original
        print(json.dumps(steps))
    """)
    text = result.pop("text")
    assert text.startswith("patch observed-exceptions applied to torch._dynamo.symbolic_convert of")
    assert result == {
        "torch._dynamo with torch": False,
        "pending": "pending",
        "loader": "SourceFileLoader",
        "spec": "SourceFileLoader",
        "applied": "applied",
        "pinned": False,
        # One line, and it came before the code that imports the module could go on.
        "log": [1, [], [True]],
        "deactivated": [True, True, False],
        "again": [True, False, "applied"],
        "twice": [True, False, "applied", 1],
        "identical": True,
    }


@needs_torch
def test_imported_after_torch_dynamo() -> None:
    result = report("""
        import torch, torch._dynamo
        original = code()
        earlier = [compiled(), compiled()]
        for function in earlier:
            function(torch.ones(1), {"key": 1})
        control = pinned(earlier[0])
        import dynamo_cyclefix
        steps = [control, code() is original, observed()[0], pinned(earlier[1]), pinned()]
        dynamo_cyclefix.deactivate()
        print(json.dumps([*steps, code() is original, len(lines("INFO")), len(lines("WARNING"))]))
    """)
    assert result == [True, False, "applied", False, False, True, 1, 0]


@needs_torch
def test_every_patched_function_gets_its_own_code_back() -> None:
    result = report("""
        import torch, torch._dynamo
        from types import FunctionType
        def codes():
            functions = [f for f in gc.get_objects() if type(f) is FunctionType]
            return {id(f): f.__code__ for f in functions if str(f.__module__).startswith("torch.")}
        before = codes()
        import dynamo_cyclefix
        during = codes()
        dynamo_cyclefix.deactivate()
        after = codes()
        changed = [i for i, code in before.items() if during.get(i, code) is not code]
        wrong = [i for i, code in before.items() if after.get(i, code) is not code]
        print(json.dumps([len(changed), len(wrong)]))
    """)
    assert result[0] > 5
    assert result[1] == 0


# ---- reload, threads -----------------------------------------------------------------------------


@needs_torch
def test_reload() -> None:
    result = report("""
        import dynamo_cyclefix, torch, torch._dynamo
        first = code()
        importlib.reload(sys.modules[TARGET])
        steps = [code() is not first, observed()[0], len(lines("INFO")), lines("WARNING")]
        dynamo_cyclefix = importlib.reload(dynamo_cyclefix)
        ours = [f for f in sys.meta_path if "dynamo_cyclefix" in type(f).__module__]
        steps += [observed()[0], len(ours)]
        patched = code()
        dynamo_cyclefix.deactivate()
        print(json.dumps([*steps, code() is not patched]))
    """)
    assert result == [True, "applied", 2, [], "applied", 1, True]


@needs_torch
def test_threads() -> None:
    result = report("""
        import dynamo_cyclefix, torch
        start = threading.Barrier(5)
        seen = []
        def work():
            start.wait()
            import torch._dynamo
            seen.append(code())
        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        patched = code()
        # Whoever has imported the module has it patched.
        steps = [[c is patched for c in seen], observed()[0], pinned(), len(lines("INFO"))]
        dynamo_cyclefix.deactivate()
        print(json.dumps([*steps, lines("WARNING"), code() is patched]))
    """)
    assert result == [[True] * 5, "applied", False, 1, [], False]


@needs_torch
def test_deactivated_while_torch_is_imported() -> None:
    finished = run_child(
        """
        import json, sys
        import dynamo_cyclefix

        class Tool:
            def find_spec(self, name, path=None, target=None):
                if name == "torch._dynamo.bytecode_analysis":
                    dynamo_cyclefix.deactivate()

        sys.meta_path.insert(0, Tool())
        import torch._dynamo.symbolic_convert as module
        code = module.InstructionTranslatorBase.exception_handler.__code__
        off = dynamo_cyclefix.status().active, "raised_exception" in code.co_cellvars
        sys.meta_path.pop(0)
        dynamo_cyclefix.activate()
        states = {patch.state.value for patch in dynamo_cyclefix.status().patches}
        print(json.dumps([off, "refused" in states]))
        """
    )
    assert finished.json == [[False, True], False]
    assert finished.stderr == ""


@needs_torch
def test_threads_that_activate_and_deactivate_at_once() -> None:
    finished = run_child(
        """
        import json, threading
        import dynamo_cyclefix, torch._dynamo.symbolic_convert as module
        dynamo_cyclefix.deactivate()
        function = module.InstructionTranslatorBase.exception_handler
        original = function.__code__

        def flip():
            for _ in range(3):
                dynamo_cyclefix.activate()
                dynamo_cyclefix.deactivate()

        threads = [threading.Thread(target=flip) for _ in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        taken_back = function.__code__ is original
        dynamo_cyclefix.activate()
        states = {patch.state.value for patch in dynamo_cyclefix.status().patches}
        print(json.dumps([taken_back, function.__code__ is original, "refused" in states]))
        """
    )
    assert finished.json == [True, False, False]
    assert finished.stderr == ""


@needs_torch
def test_activated_anew_while_torch_is_imported() -> None:
    result = report("""
        import dynamo_cyclefix, torch._dynamo
        module = "torch._inductor.pattern_matcher"
        class Tool:
            def find_spec(self, name, path=None, target=None):
                if name.startswith("torch.") and module in sys.modules:
                    sys.meta_path.remove(self)
                    dynamo_cyclefix.activate(strict=True)
        sys.meta_path.insert(0, Tool())
        importlib.import_module(module)
        # A status would catch up.
        waiting = module in dynamo_cyclefix._active.activation.patcher().waiting
        print(json.dumps([dynamo_cyclefix._active.strict, waiting, lines("WARNING")]))
    """)
    assert result == [True, False, []]


@needs_torch
def test_a_module_that_is_half_imported_is_left_until_it_is_whole() -> None:
    result = report("""
        import dynamo_cyclefix
        from importlib.machinery import PathFinder
        seen = []
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name != TARGET:
                    return None
                spec = PathFinder.find_spec(name, path, target)
                execute = spec.loader.exec_module
                def exec_module(module):
                    # Another thread imports, and asks for the status, meanwhile.
                    def other():
                        importlib.import_module("torch.utils.bundled_inputs")
                        seen.append(observed()[0])
                    thread = threading.Thread(target=other)
                    thread.start()
                    thread.join()
                    execute(module)
                spec.loader.exec_module = exec_module
                return spec
        import torch
        sys.meta_path.insert(1, Slow())
        import torch._dynamo
        print(json.dumps([seen, observed()[0], pinned(), lines("WARNING"), len(lines("INFO"))]))
    """)
    assert result == [["pending"], "applied", False, [], 1]


# ---- the environment -----------------------------------------------------------------------------


@needs_torch
def test_off() -> None:
    result = report(
        """
        import dynamo_cyclefix, torch, torch._dynamo
        before = [code().co_filename != "", observed()[0], pinned()]
        dynamo_cyclefix.activate()
        print(json.dumps([*before, observed()[0], pinned(), sys.meta_path[0].__class__.__name__,
                          [text for _, text, _ in records]]))
        """,
        DYNAMO_CYCLEFIX="off",
    )
    *states, first_finder, log = result
    assert states == [True, "disabled", True, "disabled", True]
    assert first_finder != "Finder"
    assert log == ["not activated: DYNAMO_CYCLEFIX=off"]


MODE = """
    import dynamo_cyclefix
    status = dynamo_cyclefix.status()
    print(json.dumps([status.active, status.strict, records]))
"""


@pytest.mark.parametrize("mode", ["", "on", "ON", " strict "])
def test_known_values_are_accepted_silently(mode: str) -> None:
    result = report(
        MODE,
        DYNAMO_CYCLEFIX=mode,
    )
    assert result == [True, "strict" in mode, []]


def test_an_unknown_value_is_a_warning_and_means_on() -> None:
    active, strict, log = report(MODE, DYNAMO_CYCLEFIX="maybe")
    assert (active, strict) == (True, False)
    (line,) = log
    assert line[:2] == [
        "WARNING",
        "DYNAMO_CYCLEFIX='maybe' is unknown, expected on, off or strict; it counts as on",
    ]


def test_an_unknown_patch_is_a_warning() -> None:
    code = "import dynamo_cyclefix as d; d.status(); print(json.dumps(records))"
    ((level, text, _),) = report(code, DYNAMO_CYCLEFIX_PATCHES="observed-exceptions,nonsense")
    assert level == "WARNING"
    assert "'nonsense'" in text
    assert "observed-exceptions" in text


@needs_torch
def test_a_patch_that_is_switched_off_is_not_applied() -> None:
    result = report(
        """
        import dynamo_cyclefix, torch._dynamo
        print(json.dumps([observed(), pinned(), records != []]))
        """,
        DYNAMO_CYCLEFIX_PATCHES="-observed-exceptions",
    )
    assert result == [["disabled", "switched off"], True, True]


@needs_torch
def test_nothing_is_printed_by_default() -> None:
    finished = run_child("import dynamo_cyclefix, torch._dynamo")
    assert (finished.stdout, finished.stderr) == ("", "")


# ---- an affected function that cannot be patched -------------------------------------------------

# Another program's finder that exchanges the handler as soon as its module has been executed.
MEDDLER = """
class Meddler:
    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        from importlib.machinery import PathFinder
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            base = module.InstructionTranslatorBase
            genuine = base.exception_handler
            def exception_handler(self, raised_exception):
                genuine(self, raised_exception)
            base.exception_handler = exception_handler
        spec.loader.exec_module = exec_module
        return spec

"""
FAILED = "InstructionTranslatorBase.exception_handler was replaced by __main__"


@needs_torch
@pytest.mark.parametrize("place", ["before ours", "after ours"])
def test_a_replaced_function_is_left_alone(place: str) -> None:
    insert = "import dynamo_cyclefix\nsys.meta_path.insert({}, Meddler())\n".format(
        0 if place == "before ours" else 1
    )
    state, reason, warnings, infos, name = report(
        MEDDLER
        + insert
        + "import torch, torch._dynamo\n"
        + "pinned()\n"
        + "print(json.dumps([*observed(), lines('WARNING'), lines('INFO'), code().co_filename]))"
    )
    assert state == "refused"
    assert reason.startswith(FAILED)
    (warning,) = warnings
    assert warning.startswith("patch observed-exceptions not applied to torch ")
    assert FAILED in warning
    assert infos == []
    assert name == "<string>"


@needs_torch
@pytest.mark.parametrize("strict", ["strict", "on"])
def test_strict_mode_fails_the_import_of_the_target(strict: str) -> None:
    result = report(
        MEDDLER
        + "import dynamo_cyclefix\nsys.meta_path.insert(1, Meddler())\n"
        + "import torch\n"
        + "try:\n    import torch._dynamo\nexcept dynamo_cyclefix.PatchError as error:\n"
        + "    result = [True, not isinstance(error, ImportError), str(error)]\n"
        + "else:\n    result = [False, False, '']\n"
        + "print(json.dumps(result))",
        DYNAMO_CYCLEFIX=strict,
        DYNAMO_CYCLEFIX_UNSEEN="accept",
    )
    raised, not_import_error, text = result
    assert raised is (strict == "strict")
    if raised:
        assert not_import_error
        assert text.startswith("torch 2.")
        assert "is affected and could not be patched (observed-exceptions: " in text
        assert FAILED in text
        assert "DYNAMO_CYCLEFIX=on" in text
        assert "\n" not in text


@needs_torch
def test_strict_activation_after_torch_raises_and_leaves_nothing_behind() -> None:
    result = report("""
        import torch, torch._dynamo
        base = sys.modules[TARGET].InstructionTranslatorBase
        genuine = base.exception_handler
        base.exception_handler = lambda self, raised_exception: genuine(self, raised_exception)
        utils = sys.modules["torch._dynamo.eval_frame"]
        original = utils._TorchDynamoContext.__call__.__code__
        import dynamo_cyclefix
        dynamo_cyclefix.deactivate()
        records.clear()
        try:
            dynamo_cyclefix.activate(strict=True, accept_unseen=True)
        except dynamo_cyclefix.PatchError as error:
            text = str(error)
        ours = [f for f in sys.meta_path if "dynamo_cyclefix" in type(f).__module__]
        untouched = utils._TorchDynamoContext.__call__.__code__ is original
        print(json.dumps([text, len(ours), untouched, dynamo_cyclefix.status().active]))
    """)
    assert FAILED in result[0]
    assert result[1:] == [0, True, False]


@needs_torch
def test_strict_mode_on_a_torch_that_can_be_patched() -> None:
    result = report(
        "import dynamo_cyclefix, torch._dynamo; print(json.dumps([observed()[0], pinned()]))",
        DYNAMO_CYCLEFIX="strict",
        DYNAMO_CYCLEFIX_UNSEEN="accept",
    )
    assert result == ["applied", False]


# ---- other finders -------------------------------------------------------------------------------


@needs_torch
def test_a_finder_that_takes_the_module_before_us() -> None:
    result = report("""
        import dynamo_cyclefix
        from importlib.machinery import PathFinder
        class Greedy:
            asked = 0
            def find_spec(self, name, path=None, target=None):
                if name == TARGET:
                    self.asked += 1
                    return PathFinder.find_spec(name, path, target)
        greedy = Greedy()
        sys.meta_path.insert(0, greedy)
        import torch, torch._dynamo
        print(json.dumps([greedy.asked, pinned(), observed()[0], lines("WARNING")]))
    """)
    assert result == [1, False, "applied", []]


@needs_torch
def test_a_finder_that_asks_all_others() -> None:
    result = report("""
        import dynamo_cyclefix
        class Curious:
            busy = False
            asked = 0
            def find_spec(self, name, path=None, target=None):
                if self.busy or not name.startswith("torch._dynamo"):
                    return None
                self.busy = True
                self.asked += 1
                try:
                    for finder in sys.meta_path:
                        spec = finder is not self and finder.find_spec(name, path, target)
                        if spec:
                            return spec
                finally:
                    self.busy = False
        for place in (0, 2):
            sys.meta_path.insert(place, Curious())
        import torch, torch._dynamo
        print(json.dumps([pinned(), observed()[0], lines("WARNING"), len(lines("INFO"))]))
    """)
    assert result == [False, "applied", [], 1]


@needs_torch
def test_the_finder_imports_nothing() -> None:
    """CPython asks it under the global import lock, which another thread may need to go on."""
    result = report("""
        import dynamo_cyclefix
        asked = []
        class Spy:
            def find_spec(self, name, path=None, target=None):
                frame = sys._getframe()
                while frame := frame.f_back:
                    code = frame.f_code
                    if code.co_name == "find_spec" and "cyclefix" in code.co_filename:
                        asked.append(name)
        sys.meta_path.insert(0, Spy())
        sys.meta_path.insert(2, Spy())
        import torch, torch._dynamo
        print(json.dumps([sorted({n.partition(".")[0] for n in asked}), observed()[0]]))
    """)
    # The second one is asked for torch's modules, on its way, and nobody for anything else.
    assert result == [["torch"], "applied"]


@needs_torch
@pytest.mark.parametrize("other", ["import packaging.specifiers, symtable", "d.status()"])
def test_another_thread_imports_too(other: str) -> None:
    for _ in range(3):
        result = report(f"""
            import faulthandler
            faulthandler.dump_traceback_later(120, exit=True)
            import dynamo_cyclefix as d
            def other(): {other}
            threads = [threading.Thread(target=other) for _ in range(3)]
            for thread in threads: thread.start()
            import torch, torch._dynamo
            for thread in threads: thread.join()
            print(json.dumps(observed()[0]))
        """)
        assert result == "applied"


@needs_torch
@pytest.mark.parametrize(
    "again",
    [
        "d = importlib.reload(d)",
        "d.deactivate(); d = importlib.reload(d)",
        "d.deactivate(); del sys.modules['dynamo_cyclefix']; import dynamo_cyclefix as d",
        "d.status(); del sys.modules['dynamo_cyclefix']; import dynamo_cyclefix as d",
    ],
)
def test_imported_anew_before_torch(again: str) -> None:
    result = report(f"""
        import dynamo_cyclefix as d
        {again}
        import torch, torch._dynamo
        applied = len(lines("INFO"))
        free = not pinned()
        d.deactivate()
        print(json.dumps([applied, free, pinned(), lines("WARNING")]))
    """)
    assert result == [1, True, True, []]


@needs_torch
def test_our_finder_is_removed() -> None:
    result = report("""
        import dynamo_cyclefix
        sys.meta_path[:] = [f for f in sys.meta_path if "dynamo_cyclefix" not in type(f).__module__]
        import torch, torch._dynamo
        before = pinned()
        error = dynamo_cyclefix.status().error
        dynamo_cyclefix.activate()
        print(json.dumps([before, error, pinned(), observed()[0], dynamo_cyclefix.status().error]))
    """)
    before, error, after, state, no_error = result
    assert before is True
    assert "removed from sys.meta_path" in error
    assert (after, state, no_error) == (False, "applied", "")


def test_a_fork_waits_for_us_before_it_locks_logging() -> None:
    """What was registered last comes first; the other way round, each would wait for the other."""
    order = run_child("""
import json, os, sys
order = []
os.register_at_fork = lambda **hooks: order.append(sys._getframe(1).f_globals["__name__"])
import dynamo_cyclefix._locking
print(json.dumps(order))
""").json
    assert "logging" in order
    assert order[-1] == "dynamo_cyclefix._locking"


def test_a_fork_that_cannot_wait_any_longer() -> None:
    """Another thread keeps the lock for longer than the fork waits: nothing is printed."""
    finished = run_child(
        """
        import functools, json, logging, os, signal, threading

        register = os.register_at_fork
        def impatient(*, before, **others):
            register(before=functools.partial(before.func, timeout=0.1), **others)
        os.register_at_fork = impatient
        from dynamo_cyclefix._patching.activation import lock
        os.register_at_fork = register
        import dynamo_cyclefix

        def is_free():
            found = []
            def ask():
                found.append(lock.acquire(timeout=10))
                lock.release()
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return found == [True]

        def forked(release=lambda: None):
            pid = os.fork()
            if not pid:
                signal.alarm(60)
                release()
                os._exit(0 if is_free() and dynamo_cyclefix.status().active else 1)
            return os.waitpid(pid, 0)[1]

        held, done = threading.Event(), threading.Event()
        def hold():
            with lock:
                held.set()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        children = [forked(), forked()]
        kept = not lock.acquire(blocking=False)
        done.set()
        thread.join()
        children.append(forked())
        with lock:  # a fork by the thread that has it leaves it that
            children.append(forked(lock.release))
            still = lock._is_owned()
        print(json.dumps([children, kept, still, is_free()]))
        """,
        options=["-Wignore::DeprecationWarning"],  # of a fork where there are threads
    )
    assert finished.stderr == ""
    assert finished.json == [[0, 0, 0, 0], True, True, True]


LAZY = """
import dynamo_cyclefix, importlib.util, torch
{imported}
name = "torch.fx._graph_pickler"
spec = {spec}
spec.loader = importlib.util.LazyLoader(spec.loader)
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import torch.utils.cpp_extension
dynamo_cyclefix.status()
lazy = type(module).__name__
module.GraphPickler
import torch._dynamo
status = dynamo_cyclefix.status()
states = {{(p.id, t.module): t.state.value for p in status.patches for t in p.targets}}
(patch,) = (p for p, module in states if module == name)
warnings = [text for level, text, _ in records if level == "WARNING"]
rest = [state for (p, _), state in states.items() if p == patch]
others = {{p.state.value for p in status.patches if p.id != patch}}
print(json.dumps([lazy, states[patch, name], rest, sorted(others), warnings]))
"""
OURS = "importlib.util.find_spec(name)"
NOT_OURS = (
    "importlib.util.spec_from_file_location(name, torch.fx.__path__[0] + '/_graph_pickler.py')"
)


@needs_torch
@pytest.mark.parametrize("imported", ["import torch._dynamo", ""], ids=["after Dynamo", "before"])
def test_a_module_that_is_executed_at_its_first_use(imported: str) -> None:
    """By the recipe in the documentation of ``importlib``; it stays lazy, and is patched then."""
    result = report(LAZY.format(imported=imported, spec=OURS))
    lazy, state, _, _, warnings = result
    assert lazy == "_LazyModule"
    assert state == "applied"
    assert warnings == []


@needs_torch
def test_a_lazy_module_that_no_finder_found() -> None:
    """Older Pythons do not tell that it is half executed: then its patch is off as a whole."""
    result = report(LAZY.format(imported="", spec=NOT_OURS))
    lazy, state, rest, others, warnings = result
    assert lazy == "_LazyModule"
    assert "refused" not in others
    getter: Any = vars(importlib.util._LazyModule)["__getattribute__"]  # type: ignore[attr-defined]
    if "is_loading" in getter.__code__.co_consts:
        assert state == "applied"
        assert warnings == []
    else:
        assert state == "refused"
        assert "applied" not in rest
        (warning,) = warnings
        assert "not applied" in warning


# ---- closures made earlier -----------------------------------------------------------------------


@needs_torch
def test_closures_are_looked_for_once_for_all_patches() -> None:
    """Each time is a walk over all objects, which stops the program."""
    result = report("""
        import torch, torch._dynamo, torch._inductor.compile_fx
        walks = []
        get_referrers = gc.get_referrers
        gc.get_referrers = lambda *codes: walks.append(codes) or get_referrers(*codes)
        import dynamo_cyclefix
        on = len(walks)
        dynamo_cyclefix.status()
        again = len(walks) - on, len(dynamo_cyclefix._active.activation.patcher().overdue())
        dynamo_cyclefix.deactivate()
        print(json.dumps([on, again, len(walks) - on]))
    """)
    assert result == [1, [0, 0], 1]


@needs_torch
def test_closures_made_while_their_module_is_imported() -> None:
    """Also one that no namespace leads to: all run the new code when the import is over."""
    applied, walks, new = report("""
        held = []
        class Tool:
            def find_spec(self, name, path=None, target=None):
                if name != TARGET:
                    return None
                from importlib.machinery import PathFinder
                spec = PathFinder.find_spec(name, path, target)
                execute = spec.loader.exec_module
                def exec_module(module):
                    execute(module)
                    cells = module.generic_jump(lambda value: True, False).__closure__
                    held.append(iter([cell.cell_contents for cell in cells]))
                spec.loader.exec_module = exec_module
                return spec
        import dynamo_cyclefix, torch
        sys.meta_path.insert(1, Tool())
        walks = []
        get_referrers = gc.get_referrers
        gc.get_referrers = lambda *codes: walks.append(codes) or get_referrers(*codes)
        import torch._dynamo
        targets = [t for p in dynamo_cyclefix.status().patches for t in p.targets]
        applied = any(t.function.startswith("generic_jump.") and t.state.value.startswith("applied")
                      for t in targets)
        closures = [c for c in held[0] if getattr(c, "__name__", "") == "jump_graph_break"]
        outer = sys.modules[TARGET].generic_jump.__code__
        new = [any(c.__code__ is constant for constant in outer.co_consts) for c in closures]
        print(json.dumps([applied, len(walks), new]))
    """)
    if applied:
        assert new == [True]
    # What one import brings in is looked for once, at its end.
    assert walks <= 2


@needs_torch
def test_a_module_that_is_imported_a_second_time_inside_of_another_import() -> None:
    states, warnings = report("""
        import dynamo_cyclefix, torch, torch._dynamo
        name = "torch.fx._graph_pickler"
        importlib.import_module(name)
        class Tool:
            def find_spec(self, asked, path=None, target=None):
                if asked != "torch._export.non_strict_utils":
                    return None
                from importlib.machinery import PathFinder
                spec = PathFinder.find_spec(asked, path, target)
                execute = spec.loader.exec_module
                def exec_module(module):
                    importlib.import_module(name)
                    execute(module)
                spec.loader.exec_module = exec_module
                return spec
        sys.meta_path.insert(1, Tool())
        del sys.modules[name]
        import torch._export.non_strict_utils
        targets = [t for p in dynamo_cyclefix.status().patches for t in p.targets]
        states = sorted({t.state.value for t in targets if t.module == name})
        print(json.dumps([states, lines("WARNING")]))
    """)
    assert states
    assert "not applied" not in states
    assert warnings == []
