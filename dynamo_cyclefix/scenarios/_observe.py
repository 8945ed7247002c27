"""Run one scenario and describe all that can be seen of it from outside."""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ._registry import Scenario

# What differs from one process to the next: addresses and ids, counters of generated modules,
# names of compiled functions, temporary files.
_RUN_DEPENDENT = (
    (re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"), "0x..."),
    (re.compile(r"\b1[0-9]{14}\b"), "<id>"),
    (re.compile(r"<eval_with_key>\.\d+"), "<eval_with_key>.N"),
    (re.compile(r"_[0-9a-f]{8}(?:_[0-9a-f]{4}){3}_[0-9a-f]{12}"), "_<uuid>"),
    (re.compile(r"\btmp[a-z0-9_]{8}\b"), "<tmp>"),
    (re.compile(r"\brun_[0-9_]+-pid_[0-9]+\b"), "run_<time>"),
)


@dataclass(frozen=True)
class Observation:
    """What one run of a scenario showed; plain data that goes through JSON.

    ``pinned``: an object that only a local of the user's frame refers to outlived that frame.
    ``freed``: a full collection released it. ``outcome``: the exception that left the user's code,
    or the value it returned. ``garbage_exceptions`` and ``garbage_frames``: how many of them only
    the cyclic collector could release; ``garbage_types``: the type of each such exception.
    """

    pinned: bool
    freed: bool
    outcome: dict[str, Any]
    warnings: tuple[tuple[str, str, str, int], ...]
    counters: dict[str, dict[str, int]]
    graphs: tuple[str, ...]
    garbage_exceptions: int
    garbage_frames: int
    garbage_types: tuple[str, ...]


class _Sentinel:
    """What the user's frame keeps in a local."""


def observe(scenario: Scenario) -> Observation:
    """Run ``scenario`` with the cyclic collector off and return what was seen.

    Resets Dynamo. The state of ``gc``, the warning filters and the configuration are restored;
    whatever the scenario raises, ``KeyboardInterrupt`` and ``SystemExit`` included, is part of
    the outcome.
    """
    import torch._dynamo
    from torch._dynamo.utils import counters

    from ._recording import graphs

    torch._dynamo.reset()
    counters.clear()
    graphs.clear()
    sentinels: list[weakref.ref[_Sentinel]] = []
    with _collector_off(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _no_collection_after_compile():
            outcome = _outcome(scenario.body, sentinels)
        pinned = sentinels[0]() is not None
        garbage = _take_garbage()
        exceptions = sorted(
            type(found).__name__ for found in garbage if issubclass(type(found), BaseException)
        )
        frames = sum(type(found) is types.FrameType for found in garbage)
        del garbage
        gc.collect()
        freed = sentinels[0]() is None
    return Observation(
        pinned=pinned,
        freed=freed,
        outcome=outcome,
        warnings=tuple(
            (seen.category.__name__, _stable(str(seen.message)), seen.filename, seen.lineno)
            for seen in caught
        ),
        counters={
            str(group): {_stable(str(key)): count for key, count in counts.items()}
            for group, counts in counters.items()
        },
        graphs=tuple(map(_stable, graphs)),
        garbage_exceptions=len(exceptions),
        garbage_frames=frames,
        garbage_types=tuple(exceptions),
    )


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Start without garbage and collect only on request; restore the collector's state."""
    enabled, flags = gc.isenabled(), gc.get_debug()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(flags)
        if enabled:
            gc.enable()


def _no_collection_after_compile() -> contextlib.AbstractContextManager[Any]:
    """Keep Dynamo from collecting after a compile (it does, up to the release that has no such
    setting), so that a cycle made by an earlier compile of the same scenario still shows.
    """
    from torch._dynamo import config

    if hasattr(config, "run_gc_after_compile"):
        return config.patch(run_gc_after_compile=False)  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def _take_garbage() -> list[Any]:
    """Run a full collection and return what it found unreachable, dead weak proxies included."""
    flags, before = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = gc.garbage[before:]
        del gc.garbage[before:]
    finally:
        gc.set_debug(flags)
    return found


def _outcome(body: Callable[[], object], sentinels: list[weakref.ref[_Sentinel]]) -> dict[str, Any]:
    try:
        return {"returned": _shown(_user_frame(body, sentinels))}
    except BaseException as error:
        return {"raised": _described(error, [])}


def _user_frame(body: Callable[[], object], sentinels: list[weakref.ref[_Sentinel]]) -> object:
    sentinel = _Sentinel()
    sentinels.append(weakref.ref(sentinel))
    return body()


def _described(error: BaseException | None, seen: list[int]) -> dict[str, Any] | None:
    """Describe an exception, its causes and contexts; one met before is told by its position."""
    if error is None:
        return None
    if id(error) in seen:
        return {"seen": seen.index(id(error))}
    seen.append(id(error))
    kind = type(error)
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "args": _shown(error.args),
        "str": _shown(error, str),
        "notes": [_stable(note) for note in getattr(error, "__notes__", ())],
        "suppress_context": error.__suppress_context__,
        "traceback": [
            (_stable(frame.f_code.co_filename), line, _stable(frame.f_code.co_name))
            for frame, line in traceback.walk_tb(error.__traceback__)
        ],
        "cause": _described(error.__cause__, seen),
        "context": _described(error.__context__, seen),
    }


def _shown(value: object, show: Callable[[object], str] = repr) -> str:
    try:
        return _stable(show(value))
    except Exception as error:
        return f"<{show.__name__} of {type(value).__name__} raised {type(error).__name__}>"


def _stable(text: str) -> str:
    """Replace what differs from one process to the next."""
    for pattern, replacement in _RUN_DEPENDENT:
        text = pattern.sub(replacement, text)
    return text
