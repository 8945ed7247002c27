"""What a worker reports: one sample per request, one record per full collection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SUCCEEDING = ("cond", "export")
"""Workloads that raise nothing: each request has an object watched that must die with it."""


@dataclass(frozen=True)
class Job:
    """What one worker process has to do. Sent to it as JSON."""

    workload: str
    schedule: list[bool]  # one entry per request: is it one that makes Dynamo raise?
    first: int  # the request to start at: above 0 after a restart
    buffer: int  # bytes that the caller's frame of each request holds
    collect_every: int  # requests between two gc.collect() calls; 0: never
    gc_threshold: list[int] | None
    backend: str
    device: str
    seed: int


@dataclass(frozen=True)
class Sample:
    """The state of a worker after one request. Sizes in bytes, times in seconds."""

    request: int
    injected: bool
    raised: str | None  # type of the exception that reached the service loop
    latency: float
    gc_seconds: float  # in the cyclic collector since the worker was ready
    rss: int
    peak_rss: int
    frames: int  # request frames alive, though their requests are over
    exceptions: int  # alive exceptions that reached the service loop, causes and contexts included
    gc_count: list[int]
    full_collections: int
    device_allocated: int | None
    device_reserved: int | None

    @property
    def memory(self) -> int:
        """Bytes where the buffers are: in the process, or on its device."""
        return self.rss if self.device_allocated is None else self.device_allocated


@dataclass(frozen=True)
class Collection:
    """A full collection. `request` is the one during or after which it ran."""

    request: int
    cause: str  # "automatic", "periodic" or "final"
    seconds: float
    memory_before: int
    memory_after: int
    frames_before: int
    frames_after: int


@dataclass
class Worker:
    """The life of one worker process."""

    environment: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    collections: list[Collection] = field(default_factory=list)
    start_seconds: float = 0.0  # from its creation until it was ready to serve
    end: str = "interrupted"  # or "finished", "failed", "memory limit", "announced memory"


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: the same job with or without the patches."""

    name: str
    patched: bool
    collect_every: int = 0


@dataclass
class Run:
    """What was measured for one arm: one worker, or several after restarts."""

    arm: Arm
    workers: list[Worker] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for worker in self.workers for sample in worker.samples]

    @property
    def collections(self) -> list[Collection]:
        return [collection for worker in self.workers for collection in worker.collections]

    @property
    def environment(self) -> dict[str, Any]:
        """Of the first worker; its successors have the same."""
        return self.workers[0].environment if self.workers else {}
