"""Run one scenario and describe all that can be seen of it from outside."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ._registry import Scenario
from ._watch import alive, take, watch

# What differs from one process to the next: addresses and ids, counters of generated modules,
# names of compiled functions, temporary files.
_RUN_DEPENDENT = (
    (re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"), "0x..."),
    (re.compile(r"\b1[0-9]{14}\b"), "<id>"),
    (re.compile(r"<eval_with_key>\.\d+"), "<eval_with_key>.N"),
    (re.compile(r"_[0-9a-f]{8}(?:_[0-9a-f]{4}){3}_[0-9a-f]{12}"), "_<uuid>"),
    (re.compile(r"\btmp[a-z0-9_]{8}\b"), "<tmp>"),
    (re.compile(r"\brun_[0-9_]+-pid_[0-9]+\b"), "run_<time>"),
    # In guards and names of globals: ids, hashes, versions, counters.
    (re.compile(r"(?<![0-9])[0-9]{12,}(?![0-9])"), "<id>"),
    (re.compile(r"_c[0-9]+(?=[\\]'\"]|/|\)|$)"), "_cN"),
    (re.compile(r"(?<=_version\()(.*\) == )[0-9]+"), r"\1<version>"),
    # Sets of types and functions are in the order of their addresses.
    (re.compile(r"(?<=\{)<[^{}]*>(?=\})"), lambda m: ", ".join(sorted(re.split(r", (?=<)", m[0])))),
)
FREED, FREED_BY_RESET, NEVER_FREED = "freed by a collection", "freed by reset", "never freed"


@dataclass(frozen=True)
class Observation:
    """What one run of a scenario showed; plain data that goes through JSON.

    ``pinned``: an object that only a local of the user's frame refers to, or another that the
    scenario watches, outlived that frame (a collection as well, if the scenario says so).
    ``freed``: a full collection released all of them.
    ``kept``: by its label what outlived the frame, and what frees it: a collection, a collection
    after ``torch._dynamo.reset()``, or nothing; the label of the frame's own local is ``local``.
    ``outcome``: the exception that left the user's code, or the value it returned, tensors bit for
    bit. ``graphs``: the code of each that Dynamo handed to a recording backend. ``guards``: the
    text of those of each compile. ``garbage_exceptions`` and ``garbage_frames``: how many of them
    only the cyclic collector could release; ``garbage_types``: the type of each such exception.
    """

    pinned: bool
    freed: bool
    kept: dict[str, str]
    outcome: dict[str, Any]
    warnings: tuple[tuple[str, str, str, int], ...]
    counters: dict[str, dict[str, int]]
    graphs: tuple[str, ...]
    guards: tuple[str, ...]
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
    guards: list[str] = []
    take()
    with _collector_off():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _no_collection_after_compile(), _guards_recorded(guards):
                outcome = _outcome(scenario.body)
            watched = take()
            pinned = alive(watched)
            garbage = _take_garbage()
            exceptions = sorted(
                type(found).__name__ for found in garbage if issubclass(type(found), BaseException)
            )
            frames = sum(type(found) is types.FrameType for found in garbage)
            del garbage
            gc.collect()
        counted = {
            str(group): {stable(str(key)): count for key, count in counts.items()}
            for group, counts in counters.items()
        }
        kept = dict.fromkeys(pinned, FREED)
        if alive(watched):
            kept.update(_kept_for_longer(watched))
        if scenario.collected:
            kept = {label: way for label, way in kept.items() if way != FREED or label == "local"}
    return Observation(
        pinned=bool(kept),
        freed=set(kept.values()) <= {FREED},
        kept=kept,
        outcome=outcome,
        warnings=tuple(
            (seen.category.__name__, stable(str(seen.message)), seen.filename, seen.lineno)
            for seen in caught
        ),
        counters=counted,
        graphs=tuple(map(stable, graphs)),
        guards=tuple(map(stable, guards)),
        garbage_exceptions=len(exceptions),
        garbage_frames=frames,
        garbage_types=tuple(exceptions),
    )


def _kept_for_longer(watched: list[Any]) -> dict[str, str]:
    """Tell what a reset frees from what nothing does; what neither is needed for is left out."""
    import torch._dynamo

    # A holder that was frozen after an earlier scenario would look like one for ever.
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    kept = dict.fromkeys(alive(watched), FREED_BY_RESET)
    if kept:
        torch._dynamo.reset()
        gc.collect()
        kept.update(dict.fromkeys(alive(watched), NEVER_FREED))
    if frozen:
        gc.freeze()
    return kept


@contextlib.contextmanager
def _guards_recorded(guards: list[str]) -> Iterator[None]:
    """Append to ``guards`` the text of the guards of each compile.

    Torch's own log of them would do, but with it on Dynamo takes other ways (each guard keeps the
    stack that it was made on).
    """
    from torch._dynamo.guards import CheckFunctionManager

    original = CheckFunctionManager.__init__

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guards.append(_sorted_guards(str(self.guard_manager)))

    CheckFunctionManager.__init__ = recorded
    try:
        yield
    finally:
        CheckFunctionManager.__init__ = original


def _sorted_guards(text: str) -> str:
    """Each guard of a compile on a line, without its place in the tree and the code it is for.

    Guards are kept in sets: their order depends on addresses, and with it which code is named.
    """
    lines = (line.partition("  # ")[0].lstrip("| +-").rstrip() for line in stable(text).split("\n"))
    return "\n".join(sorted(lines))


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


def _outcome(body: Callable[[], object]) -> dict[str, Any]:
    try:
        return {"returned": _returned(_user_frame(body))}
    except BaseException as error:
        return {"raised": _described(error, [])}


def _user_frame(body: Callable[[], object]) -> object:
    sentinel = _Sentinel()
    watch(local=sentinel)
    return body()


def _returned(value: object) -> str:
    """Show what a scenario returned: tensors bit for bit, exported programs as their code."""
    import torch

    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_returned, value))})"
    if isinstance(value, dict) and type(value) is dict:
        return f"{{{', '.join(f'{_shown(k)}: {_returned(v)}' for k, v in value.items())}}}"
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        try:
            return _bits(value)
        except Exception:  # one without storage, such as a sparse or a fake one
            return _shown(value)
    if isinstance(value, torch.export.ExportedProgram):
        described = [value.graph_module.code, str(value.graph_signature)]
        described.append(str(sorted((str(k), str(v)) for k, v in value.range_constraints.items())))
        return stable("\n".join(described)) + _returned(dict(value.state_dict))
    if isinstance(value, torch.fx.GraphModule):
        return stable(value.code)
    return _shown(value)


def _bits(tensor: Any) -> str:
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    content = bytes(flat.tolist())
    digest = content.hex() if len(content) <= 32 else hashlib.sha256(content).hexdigest()
    return (
        f"{type(tensor).__name__}({tensor.dtype}, {tuple(tensor.shape)}, {tensor.stride()},"
        f" requires_grad={tensor.requires_grad}, {type(tensor.grad_fn).__name__}, {digest})"
    )


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
        "notes": [stable(note) for note in getattr(error, "__notes__", ())],
        "suppress_context": error.__suppress_context__,
        "traceback": [
            (stable(frame.f_code.co_filename), line, stable(frame.f_code.co_name))
            for frame, line in traceback.walk_tb(error.__traceback__)
        ],
        "cause": _described(error.__cause__, seen),
        "context": _described(error.__context__, seen),
    }


def _shown(value: object, show: Callable[[object], str] = repr) -> str:
    try:
        return stable(show(value))
    except Exception as error:
        return f"<{show.__name__} of {type(value).__name__} raised {type(error).__name__}>"


def stable(text: str) -> str:
    """Replace what differs from one process to the next."""
    for pattern, replacement in _RUN_DEPENDENT:
        text = pattern.sub(replacement, text)
    return text
