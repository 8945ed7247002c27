"""From samples to numbers and a verdict. Pure: no process is touched."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dynamo_cyclefix._measuring.memory import MIB
from dynamo_cyclefix._measuring.records import Collection, Run, Sample, Worker

Point = tuple[float, float]
_Z = statistics.NormalDist().inv_cdf(0.975)
# Memory counts as flat below this part of the control's slope: allocators and caches move a little.
_TOLERANCE = 0.1
_FEWEST_EXCEPTIONS = 10


@dataclass(frozen=True)
class Slope:
    """Growth per exception, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def slope(segments: Sequence[Sequence[Point]]) -> Slope | None:
    """Fit one slope to all segments by ordinary least squares, each with an intercept of its own.

    The interval uses the Newey-West standard error (Bartlett weights, lag 4 (n/100)^(2/9)), since
    samples that follow each other are correlated, and the normal distribution's quantile.

    Returns:
        None where there are too few points to fit a line.
    """
    parts = [np.asarray(segment, dtype=float) for segment in segments if len(segment) > 1]
    if not parts:
        return None
    x, y = np.concatenate([part - part.mean(axis=0) for part in parts]).T
    count, freedom = len(x), len(x) - len(parts) - 1
    spread = float(x @ x)
    if spread == 0 or freedom < 1:
        return None
    value = float(x @ y) / spread
    score = x * (y - value * x)
    lags = int(4 * (count / 100) ** (2 / 9))
    variance = float(score @ score)
    for lag in range(1, min(lags, count - 1) + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(score[lag:] @ score[:-lag])
    half = _Z * math.sqrt(max(variance, 0.0) * count / freedom) / spread
    return Slope(value, value - half, value + half)


def segments(workers: Sequence[Worker], signal: str) -> list[list[Point]]:
    """Pair exceptions so far with a signal, split where a full collection or a restart resets it.

    A line through the whole saw-tooth would hide what is held between two collections.
    """
    exceptions, split = 0, []
    for worker in workers:
        for _, samples in groupby(worker.samples, key=lambda sample: sample.full_collections):
            points = []
            for sample in samples:
                exceptions += sample.injected
                points.append((float(exceptions), float(getattr(sample, signal))))
            split.append(points)
    return split


@dataclass(frozen=True)
class Summary:
    """What one arm did. Sizes in bytes, times in seconds, slopes per exception."""

    arm: str
    requests: int
    injected: int
    raised: int
    frames_slope: Slope | None
    exceptions_slope: Slope | None
    memory_slope: Slope | None
    frames_most: int
    peak_rss: int
    peak_device: int | None
    full_collections: int
    gc_seconds: float
    largest_collection: Collection | None  # the full collection that freed the most memory
    latency_p50: float
    latency_p99: float
    throughput: float  # requests per second of serving, restarts included
    restarts: int
    requests_per_worker: float
    end: str

    @property
    def restarts_per_1000(self) -> float:
        return 1000 * self.restarts / self.requests


def summarize(run: Run) -> Summary | None:
    """Return None where no request was measured."""
    workers = [worker for worker in run.workers if worker.samples]
    samples: list[Sample] = run.samples
    if not samples:
        return None
    latencies = [sample.latency for sample in samples]
    reserved = [sample.device_reserved or 0 for sample in samples]
    restarts = sum(worker.end == "memory limit" for worker in workers)
    return Summary(
        arm=run.arm.name,
        requests=len(samples),
        injected=sum(sample.injected for sample in samples),
        raised=sum(sample.raised is not None for sample in samples),
        frames_slope=slope(segments(workers, "frames")),
        exceptions_slope=slope(segments(workers, "exceptions")),
        memory_slope=slope(segments(workers, "memory")),
        frames_most=max(sample.frames for sample in samples),
        peak_rss=max(sample.peak_rss for sample in samples),
        peak_device=max(reserved) or None,
        full_collections=sum(worker.samples[-1].full_collections for worker in workers),
        gc_seconds=sum(worker.samples[-1].gc_seconds for worker in workers),
        largest_collection=max(
            run.collections, key=lambda each: each.memory_before - each.memory_after, default=None
        ),
        latency_p50=float(np.percentile(latencies, 50)),
        latency_p99=float(np.percentile(latencies, 99)),
        throughput=len(samples)
        / (sum(latencies) + sum(worker.start_seconds for worker in run.workers[1:])),
        restarts=restarts,
        requests_per_worker=len(samples) / len(workers),
        end=workers[-1].end,
    )


@dataclass(frozen=True)
class Verdict:
    """The exit code of the command and the sentence that explains it."""

    code: int
    text: str


def judge(control: Summary, patched: Summary, limited: bool) -> Verdict:
    """Compare the arm with the patches to the control.

    Args:
        control: the arm that is expected to grow.
        patched: the arm with the patches.
        limited: workers were restarted at a memory limit.
    """
    slopes = (
        control.frames_slope,
        control.memory_slope,
        patched.frames_slope,
        patched.memory_slope,
    )
    fewest = min(control.injected, patched.injected)
    if fewest < _FEWEST_EXCEPTIONS or any(each is None for each in slopes):
        return Verdict(
            2,
            f"too small to tell: {fewest} exceptions, at least {_FEWEST_EXCEPTIONS} are needed "
            "between collections; raise --requests or --error-rate",
        )
    frames_off, memory_off, frames_on, memory_on = (each for each in slopes if each is not None)
    off, on = _kept(frames_off, memory_off), _kept(frames_on, memory_on)
    if frames_on.low > 0:
        return Verdict(1, f"grows with the patches on: {on} kept per exception")
    if frames_off.low <= 0 or memory_off.low <= 0:
        return Verdict(
            2,
            f"no difference: the control ({control.arm}) did not grow either, {off} kept per "
            f"exception, {on} with the patches on; nothing to fix here, or the workload is too "
            "small",
        )
    if memory_on.high > _TOLERANCE * memory_off.value:
        return Verdict(
            1,
            f"memory is not flat with the patches on: up to {memory_on.high / MIB:.2f} MiB kept "
            f"per exception, the control kept {off}",
        )
    if limited and control.restarts == 0:
        return Verdict(
            2, "the control never passed the memory limit: lower --memory-limit or raise --requests"
        )
    if patched.restarts >= control.restarts > 0:
        return Verdict(
            1,
            f"as many restarts with the patches ({patched.restarts}) as without "
            f"({control.restarts})",
        )
    text = (
        f"holds: {off} kept per exception in the control ({control.arm}), {on} with the patches on"
    )
    if limited:
        text += f"; {control.restarts} restarts against {patched.restarts}"
    return Verdict(0, text)


def _kept(frames: Slope, memory: Slope) -> str:
    return f"{frames.value + 0.0:.2f} frames and {memory.value / MIB + 0.0:.2f} MiB"
