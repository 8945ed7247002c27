"""The measured process: serves the requests of a job and reports after each.

Run as `python -m dynamo_cyclefix._measuring.worker`: importing the package places the patches
before torch is loaded, unless DYNAMO_CYCLEFIX=off. The job is read from standard input as JSON;
standard output gets one JSON message per line.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import resource
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch

import dynamo_cyclefix
from dynamo_cyclefix._measuring import workloads
from dynamo_cyclefix._measuring.records import Collection, Job, Sample

Send = Callable[[str, Any], None]


class _Token:
    """Kept by one object alone, so that it lives as long as that object does.

    Looking for frames and exceptions in gc.get_objects() after each request would cost more than
    the request, and built-in exceptions cannot be referred to weakly.
    """

    __slots__ = ("__weakref__",)


class _Monitor:
    """Watches the collector, and the frames and exceptions of requests that are over."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.frames: weakref.WeakSet[_Token] = weakref.WeakSet()
        self.exceptions: weakref.WeakSet[_Token] = weakref.WeakSet()
        self.collections: list[Collection] = []
        self.full_collections = 0
        self.gc_seconds = 0.0
        self.request = 0
        self.cause = "automatic"
        self._process = psutil.Process()
        self._before = (0, 0)
        self._started = 0.0

    def rss(self) -> int:
        return int(self._process.memory_info().rss)

    def memory(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else self.rss()

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Be a callback for `gc.callbacks`."""
        full = info["generation"] == 2
        if phase == "start":
            if full:
                self._before = (self.memory(), len(self.frames))
            self._started = time.perf_counter()
            return
        seconds = time.perf_counter() - self._started
        self.gc_seconds += seconds
        if full:
            self.full_collections += 1
            memory, frames = self._before
            self.collections.append(
                Collection(
                    request=self.request,
                    cause=self.cause,
                    seconds=seconds,
                    memory_before=memory,
                    memory_after=self.memory(),
                    frames_before=frames,
                    frames_after=len(self.frames),
                )
            )

    def collect(self, cause: str) -> None:
        self.cause = cause
        gc.collect()
        self.cause = "automatic"

    def watch_frame(self) -> _Token:
        token = _Token()
        self.frames.add(token)
        return token

    def watch_object(self, found: Any) -> None:
        """Count an object with a ``__dict__`` among the frames, as long as it lives."""
        found._dynamo_cyclefix_token = self.watch_frame()

    def watch_exception(self, error: BaseException | None) -> None:
        """Watch an exception and those it came from."""
        while error is not None and "_dynamo_cyclefix_token" not in vars(error):
            token = _Token()
            self.exceptions.add(token)
            vars(error)["_dynamo_cyclefix_token"] = token
            error = error.__context__ if error.__cause__ is None else error.__cause__


def _serve(
    handler: workloads.Handler, request: int, inject: bool, buffer: torch.Tensor, token: _Token
) -> None:
    """Be the caller's frame of one request: its arguments are what a pinned frame holds."""
    handler(request, inject)


def _work(job: Job, send: Send) -> None:
    device = torch.device(job.device)
    monitor = _Monitor(cuda=device.type == "cuda")
    torch.manual_seed(job.seed)
    setup = workloads.Setup(job.backend, job.device, job.seed, job.buffer, monitor.watch_object)
    handler = workloads.load(job.workload)(setup)

    def request(number: int, inject: bool) -> str | None:
        # No name here may outlive the call: it would pin the frame that is being counted.
        try:
            _serve(
                handler,
                number,
                inject,
                torch.full((job.buffer,), 1, dtype=torch.uint8, device=device),
                monitor.watch_frame(),
            )
        except Exception as error:
            monitor.watch_exception(error)
            return type(error).__qualname__
        return None

    # What is loaded and compiled once is no growth; and the collector starts with nothing pending.
    for number in range(4):
        if (raised := request(number, number % 2 == 1)) and number == 0:
            raise RuntimeError(f"the first good request of {job.workload!r} raised {raised}")
    gc.collect()
    if job.gc_threshold is not None:
        gc.set_threshold(*job.gc_threshold)
    send("ready", _environment(monitor))
    gc.callbacks.append(monitor.on_collection)
    for number in range(job.first, len(job.schedule)):
        inject = job.schedule[number]
        monitor.request = number
        start = time.perf_counter()
        raised = request(number, inject)
        if job.collect_every and (number + 1) % job.collect_every == 0:
            monitor.collect("periodic")
        latency = time.perf_counter() - start
        rss = monitor.rss()
        sample = Sample(
            request=number,
            injected=inject,
            raised=raised,
            latency=latency,
            gc_seconds=monitor.gc_seconds,
            rss=rss,
            peak_rss=max(_peak_rss(), rss),
            frames=len(monitor.frames),
            exceptions=len(monitor.exceptions),
            gc_count=list(gc.get_count()),
            full_collections=monitor.full_collections,
            device_allocated=torch.cuda.memory_allocated() if monitor.cuda else None,
            device_reserved=torch.cuda.memory_reserved() if monitor.cuda else None,
        )
        send("sample", dataclasses.asdict(sample))
        _send_collections(monitor, send)
    monitor.collect("final")
    _send_collections(monitor, send)
    send("finished", None)


def _peak_rss() -> int:
    """Bytes. The kernel counts it in kilobytes, on macOS in bytes, and updates it late."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _send_collections(monitor: _Monitor, send: Send) -> None:
    while monitor.collections:
        send("collection", dataclasses.asdict(monitor.collections.pop(0)))


def _environment(monitor: _Monitor) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if monitor.cuda else platform.machine(),
        "device_free": torch.cuda.mem_get_info()[0] if monitor.cuda else None,
        "gc_threshold": list(gc.get_threshold()),
        "rss": monitor.rss(),
        "patches": dataclasses.asdict(dynamo_cyclefix.status())["patches"],
    }


def main() -> int:
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the workload prints goes to standard error

    def send(kind: str, content: Any) -> None:
        messages.write(json.dumps([kind, content], default=str) + "\n")

    try:
        _work(Job(**json.load(sys.stdin)), send)
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        send("failed", f"{type(error).__qualname__}: {text[0]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
