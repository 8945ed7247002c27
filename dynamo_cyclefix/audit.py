"""Find the exception reference cycles that a piece of your own code leaves behind.

Two forms, both with automatic garbage collection off while your code runs::

    from dynamo_cyclefix import audit

    report = audit.run(compiled_model, malformed_batch)  # an exception is part of the report

    with audit.watch() as watched:  # an exception passes through
        service.handle(malformed_batch)
    report = watched.report

    print(report)  # or json.dumps(dataclasses.asdict(report))

A cycle is *left* when the code has dropped its exception and only the cyclic garbage collector can
free it. The frames on the exception's traceback, with all their locals, wait for that collection:
they are *pinned*. An exception that something still refers to can't be judged, so it is listed
under `Report.alive` instead, and its frames are not called pinned. A cycle that the code collects
itself (``gc.collect()``) is not left.

Garbage is a property of the process: a cycle that another thread leaves during an audit is reported
too, and audits that overlap or nest all report what is found while they are open.

Importing this module imports `dynamo_cyclefix`, which activates its patches unless
``DYNAMO_CYCLEFIX=off`` is set: set it to see what torch as shipped leaves behind.

Dynamo itself collects young garbage after each compile, from torch 2.7 on, which would hide what an
earlier compile left. An audit switches that off (``torch._dynamo.config.run_gc_after_compile``),
until it ends, if ``torch._dynamo`` is imported when it begins: in a program that compiles for the
first time inside the audit, import it before. From torch 2.12 on, settings are those of a thread:
if other threads compile, set ``TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0`` in the environment.

An audit costs four full collections: the garbage from before must not be reported.

The graph is walked here, on indices into the garbage, because neither library tried fits.
`refcycle` 0.3.1 raises `ReferenceError` when it annotates a dead weak proxy, names no cell of a
frame and on CPython 3.13 no local either, and its graphs hold the objects. `objgraph` 3.7.0 draws
chains of references and has no search for cycles.
"""

import collections
import dataclasses
import gc
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Cycle", "Report", "run", "watch"]


@dataclasses.dataclass(frozen=True)
class Cycle:
    """One reference cycle, as text and numbers.

    The holder is the last frame on the cycle. A cycle without a frame (two exceptions that are each
    other's cause, an object that is an attribute of the exception it stores) has an empty
    `function`, `module` and `file`, line 0, kind ``"reference"`` and owner ``"unknown"``.
    """

    exception: str
    """Type and first line of the exception; ``"traceback"`` where only that is left."""
    path: tuple[str, ...]
    """The shortest way round, from the exception to itself, one step an item."""
    kind: str
    """``"local"``, ``"cell"`` or ``"reference"``: how the holder refers to what it holds."""
    name: str
    """Name of that local or cell (or of the reference, such as ``__cause__``)."""
    function: str
    """Qualified name of the holder's function; its plain name on Python 3.10."""
    module: str
    file: str
    line: int
    """Line of the holder's frame which the exception passed."""
    owner: str
    """Whose frame it is: ``"torch"``, ``"standard library"``, ``"library"``, ``"user"``."""
    patch: str | None
    """Id of the patch in this package that removes the cycle; None if there is none."""
    count: int = 0
    """How many cycles with this same description were left."""
    frames: int = 0
    """Finished frames that the cycle keeps alive. Cycles may share them."""
    tensor_bytes: int = 0
    """Bytes of tensor storage that the cycle keeps alive. Cycles may share them."""

    def __str__(self) -> str:
        holder = f"{self.kind} '{self.name}'"
        if self.function:
            holder += f" of {self.function}, {self.file}:{self.line} ({_owner_in_words(self)})"
        times = f"{self.count} times: " if self.count > 1 else ""
        patch = f"covered by patch {self.patch}" if self.patch else "no patch covers it"
        return (
            f"{times}{self.exception}\n"
            f"  held by {holder}\n"
            f"  pins {_amount(self.frames, self.tensor_bytes)}; {patch}\n"
            + "\n".join(f"    {'-> ' if i else ''}{step}" for i, step in enumerate(self.path))
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """What an audit found. Holds text and numbers only; `dataclasses.asdict` of it is JSON."""

    cycles: tuple[Cycle, ...]
    raised: str | None
    """Type and first line of the exception that left the audited code; None if none did."""
    alive: tuple[str, ...]
    """Exceptions with a traceback that are new and still referred to, so they were not judged."""
    frames: int
    """Finished frames that the cycles keep alive, each counted once."""
    tensor_bytes: int
    """Bytes of tensor storage that the cycles keep alive, each storage counted once.

    A storage counts in full, whoever else uses it. What only C++ holds (tensors that autograd saved
    for backward) is not seen.
    """

    def __str__(self) -> str:
        count = sum(cycle.count for cycle in self.cycles)
        lines = [f"{_plural(count, 'exception cycle')} left"]
        if count:
            lines[0] += f", pinning {_amount(self.frames, self.tensor_bytes)}"
        if self.raised:
            lines.append(f"the audited code raised {self.raised}")
        lines += [f"not judged, since something still refers to it: {text}" for text in self.alive]
        lines += [f"{i}. {cycle}" for i, cycle in enumerate(self.cycles, 1)]
        return "\n".join(lines)


def run(function: Callable[..., object], /, *args: Any, **kwargs: Any) -> Report:
    """Call `function` and report the exception cycles that the call left.

    The result of the call is dropped. An `Exception` that it raises is what one audits, so it is
    not raised again: it is kept as text in `Report.raised`, dropped, and its cycles are then looked
    for. Other exceptions (`KeyboardInterrupt`, `SystemExit`) pass.

    Raises:
        RuntimeError: no collection could be run, see `watch`.
    """
    watched = watch()
    with watched:
        try:
            function(*args, **kwargs)
        except Exception as error:
            watched._raised = _exception_text(error)
    return watched.report


class watch:  # noqa: N801 - used like a function, as contextlib's own context managers are
    """Context manager: audit the code in the block; `report` has the result when it has ended.

    An exception passes through the block. It is alive then, so it is listed under `Report.alive`
    and not judged: catch it inside the block, or use `run`, to have its cycles reported. Beware of
    ``with pytest.raises(...) as info`` inside the block, since `info` keeps the exception alive.

    Once the outermost audit has ended, automatic collection, and Dynamo's after each compile, is on
    or off as it was before; the thresholds, debug flags, callbacks, frozen objects and `gc.garbage`
    are never changed. The garbage itself is collected, as it would be without an audit.

    Raises:
        RuntimeError: used twice; or no collection could be run, because one was going on all the
            time (the audit is inside a finaliser or a callback of the collector).
    """

    # A class, not a generator: contextlib makes an exception cycle itself on CPython 3.13.0.
    def __init__(self) -> None:
        self._cycles: list[Cycle] = []
        self._frames = 0
        self._tensor_bytes = 0
        self._raised: str | None = None
        self._known: set[int] | None = None
        self._report: Report | None = None
        self._restores_dynamo = False

    @property
    def report(self) -> Report:
        """The result. RuntimeError while the block has not ended."""
        if self._report is None:
            raise RuntimeError("the audit has no report yet: read it after the block has ended")
        return self._report

    def __enter__(self) -> "watch":
        global _was_enabled
        if self._known is not None:
            raise RuntimeError("this audit was used before: make a new one with watch()")
        with _lock:
            _sweep()
            self._known = set(_live_exceptions())
            if not _open:
                _was_enabled = gc.isenabled()
            self._restores_dynamo = _switch_dynamo(True, False)
            gc.disable()
            _open.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with _lock:
            try:
                if error is not None:
                    self._raised = _exception_text(error)
                _sweep()
                alive = _live_exceptions()
                for known in self._known or ():
                    alive.pop(known, None)
                self._report = Report(
                    cycles=tuple(self._cycles),
                    raised=self._raised,
                    alive=tuple(alive.values()),
                    frames=self._frames,
                    tensor_bytes=self._tensor_bytes,
                )
            finally:
                _open.remove(self)
                self._restore_dynamo()
                (gc.enable if _was_enabled and not _open else gc.disable)()

    def _restore_dynamo(self) -> None:
        """Have Dynamo collect again, at the end of the last audit that relies on it not to."""
        if self._restores_dynamo:
            for other in _open:
                if not other._restores_dynamo:
                    other._restores_dynamo = True
                    return
            _switch_dynamo(False, True)


# ---- the collector: everything that touches process-wide state -----------------------------------

# Re-entrant, since a collection runs finalisers, which may audit. It is not held while the audited
# code runs, so that code may wait for a thread that audits as well.
_lock = threading.RLock()
_open: list[watch] = []
_was_enabled = True


def _switch_dynamo(before: bool, after: bool) -> bool:
    """Set whether Dynamo collects after a compile; False if it did not do as `before`."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if getattr(config, "run_gc_after_compile", None) is not before:  # up to 2.6 there is none
        return False
    config.run_gc_after_compile = after
    return True


def _sweep() -> None:
    """Free all garbage, once every audit that is open has a description of the cycles in it."""
    flags = gc.get_debug()
    try:
        if _open:
            # The first pass is for finalisers: closing a suspended generator hands its locals to a
            # frame object that the collector did not track before.
            _garbage()
            objects = _garbage()
            try:
                cycles, frames, tensor_bytes = _describe(objects)
            finally:
                objects.clear()
            for audit in _open:
                audit._cycles += cycles
                audit._frames += frames
                audit._tensor_bytes += tensor_bytes
        gc.set_debug(0)
        _collect()
    finally:
        gc.set_debug(flags)


def _garbage() -> list[object]:
    """Everything that is unreachable now, not freed. Leaves no debug flag set."""
    known = len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        _collect()
    finally:
        gc.set_debug(0)
        objects = gc.garbage[known:]
        del gc.garbage[known:]
    return objects


class _Ring:
    """A cycle of ours: it dies only in a full collection that began after it was made."""

    def __init__(self) -> None:
        self.ring = self


def _collect() -> None:
    """One full collection. `gc.collect` does nothing while another thread is inside one: wait."""
    for _ in range(1000):
        ring = weakref.ref(_Ring())
        gc.collect()
        if ring() is None:
            return
        time.sleep(0.005)
    raise RuntimeError(
        "no garbage collection could be run, one was going on for 5 seconds: "
        "start the audit outside finalisers and callbacks of gc"
    )


def _live_exceptions() -> dict[int, str]:
    """Id and text of each exception with a traceback that something refers to."""
    return {
        id(obj): _exception_text(obj)
        for obj in gc.get_objects()
        if _is_exception(obj) and _LINKS["__traceback__"].__get__(obj) is not None
    }


# ---- the graph: nodes are indices into the list of garbage ---------------------------------------

_Edges = list[list[int]]


def _references(objects: list[object]) -> _Edges:
    index = {id(obj): i for i, obj in enumerate(objects)}
    return [
        [index[id(target)] for target in gc.get_referents(obj) if id(target) in index]
        for obj in objects
    ]


def _reachable(edges: _Edges, start: int) -> set[int]:
    reached, todo = {start}, [start]
    while todo:
        new = set(edges[todo.pop()]) - reached
        reached |= new
        todo += new
    return reached


def _components(edges: _Edges, nodes: set[int]) -> list[set[int]]:
    """The strongly connected components that have a cycle (Tarjan 1972, without recursion)."""
    found: list[set[int]] = []
    order: dict[int, int] = {}  # when each node was first seen
    low: dict[int, int] = {}  # the earliest node on the stack that it leads back to
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in nodes:
        path: list[tuple[int, Iterator[int]]] = []
        entered = None if root in order else root
        while entered is not None or path:
            if entered is not None:
                order[entered] = low[entered] = len(order)
                stack.append(entered)
                on_stack.add(entered)
                path.append((entered, iter(edges[entered])))
                entered = None
            node, targets = path[-1]
            for target in targets:
                if target in nodes and target not in order:
                    entered = target
                    break
                if target in on_stack:
                    low[node] = min(low[node], order[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    component: set[int] = set()
                    while node not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    if len(component) > 1 or node in edges[node]:
                        found.append(component)
    return found


def _shortest_cycle(edges: _Edges, start: int, nodes: set[int]) -> list[int]:
    """The nodes of a shortest cycle inside `nodes`, from `start` to `start`."""
    came_from: dict[int, int] = {}
    todo = collections.deque([start])
    while start not in came_from:
        node = todo.popleft()
        for target in edges[node]:
            if target in nodes and target not in came_from:
                came_from[target] = node
                todo.append(target)
    path = [start, came_from[start]]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def _describe(objects: list[object]) -> tuple[list[Cycle], int, int]:
    """The exception cycles in garbage, and the frames and tensor bytes that they pin together.

    Takes the shortest cycle through an exception (or a traceback, where no exception is left), cuts
    it where the holder refers to what it holds, and looks again until no such cycle is left.
    """
    exceptions = {i for i, obj in enumerate(objects) if _is_exception(obj)}
    tracebacks = {i for i, obj in enumerate(objects) if type(obj) is types.TracebackType}
    frames = {i for i, obj in enumerate(objects) if type(obj) is types.FrameType}
    if not exceptions and not tracebacks:
        return [], 0, 0
    edges = _references(objects)
    kept = [list(targets) for targets in edges]
    nodes = set(range(len(objects)))
    pinned: dict[Cycle, set[int]] = {}
    counts: collections.Counter[Cycle] = collections.Counter()
    named: set[tuple[int, str]] = set()
    while components := [
        c for c in _components(kept, nodes) if not c.isdisjoint(exceptions | tracebacks)
    ]:
        nodes = set().union(*components)
        for component in components:
            # A loop may have stored thousands of exceptions in one list: a few of them will do.
            seeds = sorted(component & exceptions or component & tracebacks)[:32]
            path = min((_shortest_cycle(kept, seed, component) for seed in seeds), key=len)
            holder = max(
                (i for i, node in enumerate(path) if node in frames), default=len(path) - 2
            )
            held = next(
                i
                for i, node in enumerate(path)
                if i > holder and (node in exceptions or node in tracebacks)
            )
            # Two cuts: many frames may refer to one container, and it to many exceptions.
            for i in (holder, held - 1):
                kept[path[i]] = [target for target in kept[path[i]] if target != path[i + 1]]
            reached = _reachable(edges, path[0])
            for cycle in _in_words([objects[node] for node in path], holder):
                if (path[holder], cycle.name) not in named:
                    named.add((path[holder], cycle.name))
                    pinned.setdefault(cycle, set()).update(reached)
                    counts[cycle] += 1
    storages = _storages(objects)
    together = set().union(*pinned.values())
    return (
        [
            dataclasses.replace(
                cycle,
                count=counts[cycle],
                frames=len(reached & frames),
                tensor_bytes=_bytes(storages, reached),
            )
            for cycle, reached in pinned.items()
        ],
        len(together & frames),
        _bytes(storages, together),
    )


# ---- words. What is described is garbage: no method of it is called, only its type is asked ------

_LINKS: dict[str, Any] = {  # past any override in a subclass
    name: vars(BaseException)[name]
    for name in ("__traceback__", "__cause__", "__context__", "args")
}
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.TracebackType: ("tb_frame", "tb_next"),
    types.FrameType: ("f_back", "f_trace"),
    types.CellType: ("cell_contents",),
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__dict__"),
    types.MethodType: ("__self__", "__func__"),
}
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OPTIMIZED = 1  # inspect.CO_OPTIMIZED


def _is_exception(obj: object) -> bool:
    return issubclass(type(obj), BaseException)


def _exception_text(error: object) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    args = _LINKS["args"].__get__(error)
    lines = args[0].splitlines() if args and type(args[0]) is str else []
    return f"{name}: {lines[0][:120]}" if lines else name


def _in_words(path: list[Any], holder: int) -> list[Cycle]:
    """The cycle along `path`, once for each name by which the frame at `holder` refers on."""
    source, held = path[holder], path[holder + 1]
    exception = _exception_text(path[0]) if _is_exception(path[0]) else "traceback"
    if type(source) is not types.FrameType:
        name = _edge(source, held)
        steps = _steps(path, {})
        return [Cycle(exception, steps, "reference", name, "", "", "", 0, "unknown", None)]
    code = source.f_code
    module = source.f_globals.get("__name__")
    module = module if type(module) is str else ""
    owner = _owner(code, module)
    line = (path[holder - 1].tb_lineno if _is_tb(path[holder - 1]) else source.f_lineno) or 0
    return [
        Cycle(
            exception=exception,
            path=_steps(path, {holder: f"{kind} '{name}'"}),
            kind=kind,
            name=name,
            function=_qualname(code),
            module=module,
            file=code.co_filename,
            line=line,
            owner=owner,
            patch=_covering_patch(code, module, name) if owner == "torch" else None,
        )
        for kind, name in _names(source, held, path[holder + 2] if holder + 2 < len(path) else None)
    ]


def _names(frame: types.FrameType, held: object, beyond: object) -> list[tuple[str, str]]:
    """Kind and name of each local or cell by which `frame` refers to `held`."""
    code = frame.f_code
    cells = {*code.co_cellvars, *code.co_freevars}
    values = (
        frame.f_locals
    )  # a snapshot or a proxy, unless the code is a module's or a class body's
    names: list[tuple[str, str]] = []
    if code.co_flags & _OPTIMIZED or type(values) is dict:
        for name, value in values.items():
            if name in cells:
                if type(held) is types.CellType and value is held.cell_contents:
                    names.append(("cell", name))
            elif value is held:
                names.append(("local", name))
    if not names and type(held) is dict:  # the dict of the frame's locals, asked for or its own
        names = [("local", str(key)) for key, value in held.items() if value is beyond]
    return names or [("reference", _edge(frame, held))]


def _steps(path: list[Any], known: dict[int, str]) -> tuple[str, ...]:
    steps = [_node(path, 0)]
    attribute = False
    for i in range(1, len(path)):
        edge = known.get(i - 1) or _edge(path[i - 1], path[i])
        if edge == "__dict__" and i < len(path) - 1:
            attribute = True
            continue
        if attribute:
            edge, attribute = f"attribute {edge.strip('[]')}", False
        step = f"{edge}: {_node(path, i)}"
        if _is_tb(path[i - 1]) and _is_tb(path[i]):  # the last entry of the chain tells enough
            edge = steps.pop().rpartition(": ")[0]
            step = f"{edge}: {_node(path, i)}" if edge else _node(path, i)
        steps.append(step)
    return tuple(steps)


def _node(path: list[Any], i: int) -> str:
    obj = path[i]
    if _is_exception(obj):
        return f"exception {_exception_text(obj)}"
    if _is_tb(obj):
        return f"traceback, line {obj.tb_lineno}"
    if type(obj) is types.FrameType:
        return f"frame of {_qualname(obj.f_code)}, {obj.f_code.co_filename}"
    if type(obj) is types.FunctionType:
        return f"function {obj.__qualname__}"
    return f"{type(obj).__qualname__} object"


def _edge(source: Any, target: object) -> str:
    """How `source` refers to `target`."""
    if _is_exception(source):
        if _is_tb(target):
            return "__traceback__"
        for name, descriptor in _LINKS.items():
            if descriptor.__get__(source) is target:
                return name
    for name in _ATTRIBUTES.get(type(source), ()):
        if getattr(source, name, None) is target:
            return name
    for kind in (list, tuple, collections.deque):
        if issubclass(type(source), kind):
            for i, item in enumerate(kind.__iter__(source)):
                if item is target:
                    return f"[{i}]"
    if issubclass(type(source), dict):
        for key, value in dict.items(source):
            if value is target:
                return f"[{key!r}]" if type(key) in (str, int) else f"[{type(key).__qualname__}]"
    try:
        attributes = object.__getattribute__(source, "__dict__")
    except Exception:
        attributes = None
    if attributes is target:
        return "__dict__"
    if type(attributes) is dict:
        for name, value in attributes.items():
            if value is target:
                return f"attribute {name!r}"
    for base in type(source).__mro__:
        for name, member in vars(base).items():
            if type(member) is types.MemberDescriptorType:  # a slot
                try:
                    if member.__get__(source) is target:
                        return f"attribute {name!r}"
                except AttributeError:
                    pass
    return "a reference"


def _is_tb(obj: object) -> bool:
    return type(obj) is types.TracebackType


def _qualname(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # new in Python 3.11


def _owner(code: types.CodeType, module: str) -> str:
    parts = code.co_filename.replace("\\", "/").split("/")
    # Dynamo's resume functions have the file and the globals of the user's function.
    if module.partition(".")[0] == "torch" or code.co_name.startswith("torch_dynamo_resume_in_"):
        return "torch"
    if "site-packages" in parts or "dist-packages" in parts:
        return "library"
    if code.co_filename.startswith((_STANDARD_LIBRARY, "<frozen ")):
        return "standard library"
    return "user"


def _owner_in_words(cycle: Cycle) -> str:
    if cycle.owner == "library":
        return f"library {cycle.module.partition('.')[0]}"
    return "your own code" if cycle.owner == "user" else cycle.owner


def _covering_patch(code: types.CodeType, module: str, name: str) -> str | None:
    """Id of the patch for the local or cell `name` of this function of torch; None if none is."""
    from dynamo_cyclefix import _catalogue, _errors, _gate

    version = str(sys.modules["torch"].__version__)
    try:
        for patch, target in _catalogue.load().targets():
            function = target.function
            if not hasattr(code, "co_qualname"):
                function = function.rpartition(".")[2]
            if (
                (module, _qualname(code)) == (target.module, function)
                and name in target.names
                and _gate.is_affected(version, target.affected)
            ):
                return patch.id
    except (_errors.CatalogueError, _errors.Refused):
        pass  # nothing is patched then, and `status` says why
    return None


# ---- tensors -------------------------------------------------------------------------------------


def _storages(objects: list[object]) -> dict[int, tuple[int, int]]:
    """Address and bytes of the storage of each tensor in `objects`, by index."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)  # missing while torch is being imported
    if torch is None or tensor is None:
        return {}
    with torch._C.DisableTorchFunctionSubclass():  # no method of a subclass is called
        storages = {
            i: _storage(obj) for i, obj in enumerate(objects) if issubclass(type(obj), tensor)
        }
    return {i: storage for i, storage in storages.items() if storage is not None}


def _storage(tensor: Any) -> tuple[int, int] | None:
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # has a size, but no memory: fake tensors, too
            return None
        return storage.data_ptr(), storage.nbytes()
    except Exception:  # a layout or a wrapper without a storage of its own
        return None


def _bytes(storages: dict[int, tuple[int, int]], nodes: set[int]) -> int:
    return sum(size for _, size in {storages[i] for i in storages.keys() & nodes})


def _amount(frames: int, tensor_bytes: int) -> str:
    return f"{_plural(frames, 'frame')} and {tensor_bytes:,} bytes of tensors"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
