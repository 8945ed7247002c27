"""The picture: memory and live frames over requests."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dynamo_cyclefix._measuring.memory import MIB
from dynamo_cyclefix._measuring.records import Collection, Run, Sample

# Told apart by line style and width as well as by colour, for print in grey.
_STYLES: list[dict[str, Any]] = [
    {"color": "#d55e00", "linestyle": "-", "linewidth": 1.6},
    {"color": "#8c8c8c", "linestyle": "--", "linewidth": 1.3},
    {"color": "#0072b2", "linestyle": "-.", "linewidth": 2.4},
]


def draw(runs: Sequence[Run], title: str, limit: int | None, form: str) -> bytes:
    """Return the picture as a file of the given form, `png` or `svg`."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    memory, frames = figure.subplots(2, 1, sharex=True)
    device = any(sample.device_allocated is not None for run in runs for sample in run.samples)
    styles = _STYLES if len(runs) == len(_STYLES) else [_STYLES[0], _STYLES[-1]]
    for run, style in zip(runs, styles, strict=True):
        if not run.samples:
            continue
        label = f"patches {run.arm.name}"
        for axes, signal, before in (
            (memory, lambda sample: sample.memory / MIB, lambda each: each.memory_before / MIB),
            (frames, lambda sample: sample.frames, lambda each: each.frames_before),
        ):
            _draw_arm(axes, run, signal, before, label, style)
        killed = [w.samples[-1] for w in run.workers if w.end == "memory limit"]
        _mark_restarts(memory, killed, style["color"])
    memory.plot([], [], "v", color="black", label="full collection")
    if limit is not None:
        memory.plot([], [], "x", color="black", label="restart at the limit")
        memory.axhline(limit / MIB, color="black", linestyle=":", linewidth=1, label="limit")
    memory.set_ylabel("device memory allocated (MiB)" if device else "resident memory (MiB)")
    frames.set_ylabel("request frames alive")
    frames.yaxis.set_major_locator(MaxNLocator(integer=True))
    frames.set_xlabel("requests served")
    for axes in (memory, frames):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(
        *memory.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize="small"
    )
    memory.set_title(title, fontsize="medium")
    file = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(file, format=form, dpi=150, metadata=metadata)
    return file.getvalue()


def _draw_arm(
    axes: Axes,
    run: Run,
    signal: Callable[[Sample], float],
    before: Callable[[Collection], float],
    label: str,
    style: dict[str, Any],
) -> None:
    """Draw one signal, with what each full collection found as the tip of its tooth."""
    served = [each for each in run.collections if each.cause != "final"]
    tips = {each.request: before(each) for each in served}
    points = []
    for sample in run.samples:
        at = sample.request + 1
        if sample.request in tips:
            points.append((at, tips[sample.request]))
        points.append((at, signal(sample)))
    axes.plot(*zip(*points, strict=True), label=label, clip_on=False, **style)
    axes.plot([each + 1 for each in tips], list(tips.values()), "v", color=style["color"], ms=5)


def _mark_restarts(memory: Axes, killed: Sequence[Sample], color: str) -> None:
    at = [sample.request + 1 for sample in killed]
    memory.plot(at, [sample.memory / MIB for sample in killed], "x", color=color, markersize=7)
