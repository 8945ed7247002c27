"""What keeps an object alive, once nothing of the user's refers to it any more.

An object that a collection finds is kept by a cycle; any other by a root: a frame that runs, or a
module.  The way from there to the object is looked for over everything that the collector tracks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dynamo_cyclefix._auditing import graph, words

Way = list[Any]
"""The objects from what keeps an object to the object itself."""


def ways_from_cycles(objects: list[object], watched: Iterable[int]) -> dict[int, Way]:
    """For each watched object in garbage, by its id, once round the nearest cycle, and on
    to the object.

    Args:
        objects: the garbage.
        watched: ids of objects.
    """
    index = {id(found): i for i, found in enumerate(objects)}
    inside = {number: index[number] for number in watched if number in index}
    if not inside:
        return {}
    edges = graph.references(objects)
    in_cycles: set[int] = set().union(*graph.components(edges, set(range(len(objects)))))
    back = graph.reversed_edges(edges)
    ways = {}
    for number, start in inside.items():
        path = graph.shortest_path(back, start, in_cycles.__contains__)
        if path is not None:
            once = graph.shortest_cycle(edges, path[-1], in_cycles)
            ways[number] = [objects[i] for i in (*once, *path[-2::-1])]
    return ways


def ways_from_roots(watched: Sequence[object]) -> tuple[dict[int, Way], set[int]]:
    """For each watched object, by its id, the way from the nearest root.

    Returns:
        Those that only torch or another library keeps, each with the way; and the ids of those that
        the user's own frames or modules refer to.  An object in neither is kept by what Python
        cannot see.
    """
    frames = list(_running_frames())
    roots: dict[int, object] = {id(frame): frame for frame in frames}
    modules = {id(vars(m)): m for m in list(sys.modules.values()) if type(m) is types.ModuleType}
    objects = [*gc.get_objects(), *frames]
    index = {id(found): i for i, found in enumerate(objects)}
    own = {id(objects), id(index), id(roots), id(modules), id(watched), id(frames)}
    edges: graph.Edges = []
    locals_of = {
        id(frame): values for frame, values in zip(frames, map(_locals, frames), strict=True)
    }
    for found in objects:
        if id(found) in own:
            targets: Iterable[object] = ()
        else:
            targets = locals_of.get(id(found)) or gc.get_referents(found)
        edges.append([index[id(t)] for t in targets if id(t) in index])
    del locals_of
    back = graph.reversed_edges(edges)

    def is_root(i: int) -> bool:
        return id(objects[i]) in roots or id(objects[i]) in modules

    def followed(i: int) -> list[int]:
        found = objects[i]
        if words.owner_of(found) not in ("torch", "standard library") or _is_users(found):
            return edges[i]
        # A compiled function: what it was made from is the user's.
        made_from = _attributes(found).get("_torchdynamo_orig_callable")
        return [index[id(made_from)]] if id(made_from) in index else []

    users = [
        index[number]
        for number, root in (*roots.items(), *modules.items())
        if number in index and words.owner_of(root) == "user"
    ]
    reached_by_user = graph.reachable(followed, users)
    ways: dict[int, Way] = {}
    theirs = set()
    for found in watched:
        start = index.get(id(found))
        if start is None:
            continue
        if start in reached_by_user:
            theirs.add(id(found))
            continue
        path = graph.shortest_path(back, start, is_root)
        if path is not None:
            ways[id(found)] = [modules.get(id(objects[i]), objects[i]) for i in reversed(path)]
    return ways, theirs


def _is_users(found: object) -> bool:
    """Whether it is a thing that a user makes of torch's or the standard library's.

    A tensor, a module, a container; torch's own containers may be caches, but no tuple is one.
    """
    torch: Any = sys.modules.get("torch")
    kinds: list[type] = [tuple]
    if words.owner_of(found) == "standard library":
        kinds += [dict, collections.deque, functools.partial, types.SimpleNamespace]
    elif hasattr(torch, "nn"):
        kinds += [torch.Tensor, torch.nn.Module]
    return issubclass(type(found), tuple(kinds))


def _attributes(found: object) -> Mapping[str, object]:
    return found.__dict__ if type(found) is types.FunctionType else {}


def _running_frames() -> Iterator[types.FrameType]:
    """The frames that run in any thread, but those of this package."""
    for frame in list(sys._current_frames().values()):
        current: types.FrameType | None = frame
        while current is not None:
            name = current.f_globals.get("__name__")
            if not (type(name) is str and name.partition(".")[0] == "dynamo_cyclefix"):
                yield current
            current = current.f_back


def _locals(frame: types.FrameType) -> list[object]:
    values: Mapping[str, object] = frame.f_locals
    found = list(values.values())
    if frame.f_code.co_flags & words.OPTIMIZED and type(values) is dict:
        # Before Python 3.13 a copy, which the frame would keep.
        values.clear()
    return [*found, frame.f_globals]


class Holder(NamedTuple):
    """The last step of a way that has a name; see `dynamo_cyclefix.audit.Held`."""

    kind: str
    name: str
    function: str
    module: str
    file: str
    owner: str


def holder(source: Any, target: object, beyond: object) -> Holder | None:
    """How `source` refers to `target`, if that has a name in somebody's code.

    Args:
        source: one object.
        target: what it refers to.
        beyond: what that refers to in turn, as a dictionary of attributes does.
    """
    owner = words.owner_of(source)
    if type(source) is types.FrameType:
        kind, name = words.names_of(source, target, beyond)[0]
        code = source.f_code
        module = str(source.f_globals.get("__name__"))
        return Holder(kind, name, words.qualname(code), module, code.co_filename, owner)
    if type(source) is types.FunctionType:
        module = str(source.__globals__.get("__name__"))
        cells = source.__closure__ or ()
        for name, cell in zip(source.__code__.co_freevars, cells, strict=True):
            # The closure is a tuple of cells.
            if cell is beyond or (cell is target):
                file = source.__code__.co_filename
                return Holder("cell", name, source.__qualname__, module, file, owner)
        return None
    if type(source) is types.ModuleType:
        name = words.edge_text(vars(source), beyond if target is vars(source) else target)
        return Holder("global", name.strip("[]'"), "", source.__name__, "", owner)
    cls = type(source)
    if cls.__module__ == "builtins":
        return None
    name = words.edge_text(source, target)
    if name == "__dict__":
        name = f"attribute {words.edge_text(target, beyond).strip('[]')}"
    if not name.startswith("attribute "):
        return None
    name = name.removeprefix("attribute ").strip("'")
    return Holder("attribute", name, cls.__qualname__, str(cls.__module__), "", owner)


def describe(found: object) -> str:
    """What an object is, in a few words."""
    torch: Any = sys.modules.get("torch")
    kind = type(found).__qualname__
    if torch is not None and issubclass(type(found), torch.Tensor):
        # A lazy module's parameter, a nested tensor: not all have a shape.
        with contextlib.suppress(Exception), torch._C.DisableTorchFunctionSubclass():
            return f"{kind} of shape {tuple(found.shape)}"  # type: ignore[attr-defined]
    return f"{kind} object"


def things(value: object, label: str) -> Iterator[tuple[str, object]]:
    """The tensors, modules and other objects in what was handed to a call, each with a label.

    Goes into lists, tuples, sets, dictionaries and modules.
    """
    torch: Any = sys.modules.get("torch")
    module = getattr(getattr(torch, "nn", None), "Module", ())
    queue = collections.deque([(label, value)])
    seen: set[int] = set()
    while queue:
        label, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in (list, tuple, set, frozenset):
            queue += [(f"{label}[{i}]", item) for i, item in enumerate(value)]  # type: ignore
        elif type(value) is dict:
            queue += [(f"{label}[{key!r}]", item) for key, item in value.items()]
        elif type(value) not in (int, float, complex, bool, str, bytes, type(None)):
            yield label, value
        if issubclass(type(value), module):
            # Its attributes, not its methods, which may be the user's.
            attributes = vars(module)["__dict__"].__get__(value)
            for name in ("_parameters", "_buffers", "_modules"):
                parts: Any = attributes.get(name)
                if issubclass(type(parts), dict):  # TorchScript has views of what is in C++
                    queue += [(f"{label}.{n}", part) for n, part in dict.items(parts)]
