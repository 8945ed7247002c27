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
import contextlib
import dataclasses
import functools
import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dynamo_cyclefix._auditing import graph, held, tensors, words
from dynamo_cyclefix._errors import CatalogueError, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_cyclefix._catalogue.model import Key

__all__ = ["Cycle", "Held", "Report", "run", "watch"]


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
class Held:
    """An object that outlived the last reference of the user's, as text and numbers."""

    object: str
    """Its label (``args[0]``, ``objects[2]``) and what it is."""
    path: tuple[str, ...]
    """The shortest way to it from the cycle or the root that keeps it; empty if Python can't see
    one, as where C++ keeps it."""
    freed_by_collection: bool
    """Whether a full garbage collection freed it."""
    kind: str = ""
    """``"local"``, ``"cell"``, ``"attribute"``, ``"item"``, ``"global"`` or ``"reference"``: how
    the holder refers to what it holds."""
    name: str = ""
    """Name of that local, cell, attribute, item or global."""
    function: str = ""
    """Qualified name of the holder's function, or of its class."""
    module: str = ""
    file: str = ""
    owner: str = "unknown"
    """Whose the holder is: ``"torch"``, ``"standard library"``, ``"library"``, ``"user"``."""
    patch: str | None = None
    """Id of the patch in this package that lets go of it; None if there is none."""
    reason: str = ""
    """Why no patch lets go of it, where that is known."""
    tensor_bytes: int = 0
    """Bytes of tensor storage that the object itself is, or a module's parameters are."""

    def __str__(self) -> str:
        freed = "until a collection" if self.freed_by_collection else "after a collection too"
        lines = [f"{self.object} is kept alive {freed}"]
        if self.function or self.name:
            where = " of ".join(filter(None, (f"{self.kind} '{self.name}'", self.function)))
            place = ", ".join(filter(None, (self.file or self.module, _owner_in_words(self))))
            lines.append(f"  held by {where} ({place})")
        else:
            lines.append("  held by something that Python cannot see")
        if self.patch:
            lines.append(f"  covered by patch {self.patch}")
        elif self.reason:
            lines.append(f"  no patch covers it: {self.reason}")
        lines += [f"    {'-> ' if i else ''}{step}" for i, step in enumerate(self.path)]
        return "\n".join(lines)


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
    held: tuple[Held, ...] = ()
    """What of the call's inputs, or of the objects given, is alive though nothing of the user's
    refers to it any more."""

    def __str__(self) -> str:
        count = sum(cycle.count for cycle in self.cycles)
        lines = [f"{_plural(count, 'exception cycle')} left"]
        if count:
            lines[0] += f", pinning {_amount(self.frames, self.tensor_bytes)}"
        if self.raised:
            lines.append(f"the audited code raised {self.raised}")
        lines += [f"not judged, since something still refers to it: {text}" for text in self.alive]
        lines += [f"{i}. {cycle}" for i, cycle in enumerate(self.cycles, 1)]
        lines += map(str, self.held)
        return "\n".join(lines)


def run(function: Callable[..., object], /, *args: Any, **kwargs: Any) -> Report:
    """Call `function` and report the exception cycles that the call left.

    The result of the call is dropped. An `Exception` that it raises is what one audits, so it is
    not raised again: it is kept as text in `Report.raised`, dropped, and its cycles are then looked
    for. Other exceptions (`KeyboardInterrupt`, `SystemExit`) pass.

    Hand over `*values`, not `*make()`: the interpreter keeps what it unpacks until the call ends,
    so it would be said to be held by something that Python cannot see.

    Raises:
        RuntimeError: no collection could be run, see `watch`.
    """
    watched = watch()
    watched._watch(args, "args")
    watched._watch(kwargs, "kwargs")
    with watched:
        try:
            function(*args, **kwargs)
        except Exception as error:
            watched._raised = words.exception_text(error)
        del args, kwargs
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
    def __init__(self, *, objects: Iterable[object] = ()) -> None:
        self._watched: dict[int, tuple[str, weakref.ref[Any]]] = {}
        self._ways: dict[int, list[str]] = {}
        self._held: list[Held] = []
        self._watch(list(objects), "objects")
        self._cycles: list[Cycle] = []
        self._frames = 0
        self._tensor_bytes = 0
        self._raised: str | None = None
        self._known: set[int] | None = None
        self._report: Report | None = None
        self._restores_dynamo = False

    def _watch(self, value: object, label: str) -> None:
        for name, found in held.things(value, label):
            with contextlib.suppress(TypeError):  # what cannot be referred to weakly
                self._watched[id(found)] = f"{name}: {held.describe(found)}", weakref.ref(found)

    def _alive(self) -> dict[int, tuple[str, object]]:
        found = ((i, label, ref()) for i, (label, ref) in self._watched.items())
        return {i: (label, value) for i, label, value in found if value is not None}

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
                    self._raised = words.exception_text(error)
                _sweep()
                self._held += _held_by_roots(self._alive())
                alive = _live_exceptions()
                for known in self._known or ():
                    alive.pop(known, None)
                self._report = Report(
                    cycles=tuple(self._cycles),
                    raised=self._raised,
                    alive=tuple(alive.values()),
                    frames=self._frames,
                    tensor_bytes=self._tensor_bytes,
                    held=tuple(_without_parts(self._held)),
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
            # A collection clears the weak references to what it finds, though nothing is freed.
            alive = [{i: label for i, (label, _) in audit._alive().items()} for audit in _open]
            _garbage()
            objects = _garbage()
            try:
                cycles, frames, tensor_bytes = _describe(objects)
                for audit, labels in zip(_open, alive, strict=True):
                    audit._held += _held_by_cycles(objects, labels)
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
        id(obj): words.exception_text(obj)
        for obj in gc.get_objects()
        if words.is_exception(obj) and words.LINKS["__traceback__"].__get__(obj) is not None
    }


# ---- what garbage holds --------------------------------------------------------------------------


def _describe(objects: list[object]) -> tuple[list[Cycle], int, int]:
    """The exception cycles in garbage, and the frames and tensor bytes that they pin together.

    Takes the shortest cycle through an exception (or a traceback, where no exception is left), cuts
    it where the holder refers to what it holds, and looks again until no such cycle is left.
    """
    exceptions = {i for i, obj in enumerate(objects) if words.is_exception(obj)}
    tracebacks = {i for i, obj in enumerate(objects) if type(obj) is types.TracebackType}
    frames = {i for i, obj in enumerate(objects) if type(obj) is types.FrameType}
    if not exceptions and not tracebacks:
        return [], 0, 0
    edges = graph.references(objects)
    kept = [list(targets) for targets in edges]
    nodes = set(range(len(objects)))
    pinned: dict[Cycle, set[int]] = {}
    counts: collections.Counter[Cycle] = collections.Counter()
    named: set[tuple[int, str]] = set()
    while components := [
        c for c in graph.components(kept, nodes) if not c.isdisjoint(exceptions | tracebacks)
    ]:
        nodes = set().union(*components)
        for component in components:
            # A loop may have stored thousands of exceptions in one list: a few of them will do.
            seeds = sorted(component & exceptions or component & tracebacks)[:32]
            path = min((graph.shortest_cycle(kept, seed, component) for seed in seeds), key=len)
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
            reached = graph.reachable(edges.__getitem__, [path[0]])
            for cycle in _in_words([objects[node] for node in path], holder):
                if (path[holder], cycle.name) not in named:
                    named.add((path[holder], cycle.name))
                    pinned.setdefault(cycle, set()).update(reached)
                    counts[cycle] += 1
    storages = tensors.storages(objects)
    together = set().union(*pinned.values())
    return (
        [
            dataclasses.replace(
                cycle,
                count=counts[cycle],
                frames=len(reached & frames),
                tensor_bytes=tensors.total_bytes(storages, reached),
            )
            for cycle, reached in pinned.items()
        ],
        len(together & frames),
        tensors.total_bytes(storages, together),
    )


def _held_by_cycles(objects: list[object], labels: "Mapping[int, str]") -> list[Held]:
    ways = held.ways_from_cycles(objects, labels)
    return [_held(labels[i], way, freed=True) for i, way in ways.items()]


def _held_by_roots(alive: "Mapping[int, tuple[str, object]]") -> list[Held]:
    if not alive:
        return []
    ways, users = held.ways_from_roots([value for _, value in alive.values()])
    return [
        _held(label, ways.get(i, [value]), freed=False)
        for i, (label, value) in alive.items()
        if i not in users
    ]


def _without_parts(found: list[Held]) -> "Iterator[Held]":
    """Leave out the parameters and parts of a module that is held itself, and as long."""
    names = {(one.object.partition(": ")[0], one.freed_by_collection) for one in found}
    for one in found:
        parts = one.object.partition(": ")[0].split(".")
        wholes = {".".join(parts[:i]) for i in range(1, len(parts))}
        if not any((whole, one.freed_by_collection) in names for whole in wholes):
            yield one


def _held(label: str, way: list[Any], freed: bool) -> Held:
    """Describe a way; the holder is the first step of it that has a name in somebody's code."""
    found = Held(label, words.path_text(way, {}) if len(way) > 1 else (), freed)
    for source, target, beyond in zip(way, way[1:], [*way[2:], None], strict=False):
        if holder := held.holder(source, target, beyond):
            covered = _covered_holder(holder)
            return dataclasses.replace(found, **holder._asdict(), **covered)
    return found


def _in_words(path: list[Any], holder: int) -> list[Cycle]:
    """The cycle along `path`, once for each name by which the frame at `holder` refers on."""
    source, held = path[holder], path[holder + 1]
    exception = words.exception_text(path[0]) if words.is_exception(path[0]) else "traceback"
    if type(source) is not types.FrameType:
        name = words.edge_text(source, held)
        steps = words.path_text(path, {})
        return [Cycle(exception, steps, "reference", name, "", "", "", 0, "unknown", None)]
    code = source.f_code
    module = source.f_globals.get("__name__")
    module = module if type(module) is str else ""
    owner = words.owner(code, module)
    line = (
        path[holder - 1].tb_lineno if words.is_traceback(path[holder - 1]) else source.f_lineno
    ) or 0
    beyond = path[holder + 2] if holder + 2 < len(path) else None
    return [
        Cycle(
            exception=exception,
            path=words.path_text(path, {holder: f"{kind} '{name}'"}),
            kind=kind,
            name=name,
            function=words.qualname(code),
            module=module,
            file=code.co_filename,
            line=line,
            owner=owner,
            patch=_covering_patch(code, module, name) if owner == "torch" else None,
        )
        for kind, name in words.names_of(source, held, beyond)
    ]


def _covered_holder(holder: held.Holder) -> dict[str, Any]:
    """The patch for a holder, or the reason why there is none."""
    if holder.owner != "torch":
        return {}
    function = holder.function  # none for a global
    while True:
        patch, reason = _patch_or_reason((holder.module, function, holder.name))
        if patch:
            return {"patch": patch}
        if reason:
            return {"reason": reason}
        # A cell of an inner function is a local of an outer one.
        function = function.rpartition(".<locals>.")[0]
        if not function:
            return {}


def _owner_in_words(cycle: "Cycle | Held") -> str:
    if cycle.owner == "library":
        return f"library {cycle.module.partition('.')[0]}"
    return "your own code" if cycle.owner == "user" else cycle.owner


def _covering_patch(code: types.CodeType, module: str, name: str) -> str | None:
    """Id of the patch for the local or cell `name` of this function of torch; None if none is."""
    return _patch_or_reason((module, words.qualname(code), name))[0]


def _patch_or_reason(key: "Key") -> tuple[str | None, str]:
    """The id of the patch for a name, and the reason why there is none."""
    from dynamo_cyclefix._catalogue.model import covering_patch

    covered, explained = _catalogued(str(sys.modules["torch"].__version__))
    return covering_patch(covered, key), explained.get(key, "")


@functools.cache
def _catalogued(release: str) -> "tuple[Mapping[Key, str], Mapping[Key, str]]":
    """The ids of the patches, and the reasons why there is none, by what holds something."""
    # Here, as long as there is nothing of torch to name.
    from dynamo_cyclefix._catalogue import toml
    from dynamo_cyclefix._catalogue.gate import is_affected

    try:
        catalogue = toml.load()
        covered = catalogue.covering(release)
    except (CatalogueError, Refused):
        return {}, {}  # nothing is patched then, and `status` says why
    explained = {(e.module, e.function, e.name): e.reason for e in catalogue.explained}
    for kept in catalogue.kept:
        if kept.holder and is_affected(release, kept.affected):
            explained[kept.holder] = kept.reason
    if not hasattr(types.CodeType, "co_qualname"):
        covered = {(m, f.rpartition(".")[2], name): p for (m, f, name), p in covered.items()}
    return covered, explained


def _amount(frames: int, tensor_bytes: int) -> str:
    return f"{_plural(frames, 'frame')} and {tensor_bytes:,} bytes of tensors"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
