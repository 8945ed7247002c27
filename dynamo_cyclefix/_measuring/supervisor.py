"""Starts the workers of an experiment, restarts those that pass a limit, gathers their reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO

from dynamo_cyclefix._measuring.memory import mib
from dynamo_cyclefix._measuring.records import Collection, Job, Run, Sample, Worker

OnSample = Callable[[Sample], None]


class WorkerError(Exception):
    """A worker could not serve; the text is one line that says why."""


def serve(
    run: Run,
    job: Job,
    environment: Mapping[str, str],
    *,
    announced: int,
    limit: int | None,
    on_sample: OnSample,
) -> None:
    """Have the job done by workers, one after the other, and add what they report to `run`.

    A worker that uses more than `limit` bytes is killed and another goes on with the next request,
    as an orchestrator does; one that uses more than `announced` ends the run. When this function is
    interrupted, `run` has what was measured until then.

    Raises:
        WorkerError: a worker failed, or uses more than the limit before it serves.
    """
    job = dataclasses.replace(job, collect_every=run.arm.collect_every)
    environment = {**environment, "DYNAMO_CYCLEFIX": "on" if run.arm.patched else "off"}
    while job.first < len(job.schedule):
        worker = _serve_once(run, job, environment, announced, limit, on_sample)
        if worker.end != "memory limit":
            return
        job = dataclasses.replace(job, first=worker.samples[-1].request + 1)


def _serve_once(
    run: Run,
    job: Job,
    environment: Mapping[str, str],
    announced: int,
    limit: int | None,
    on_sample: OnSample,
) -> Worker:
    started = time.perf_counter()
    worker: Worker | None = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        _worker_process(job, environment, errors) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            kind, content = json.loads(line)
            if kind == "failed":
                reason = content
                break
            if kind == "ready":
                worker = Worker(content, start_seconds=time.perf_counter() - started)
                run.workers.append(worker)
                _check_room(job, worker, limit)
                continue
            assert worker is not None
            if kind == "collection":
                worker.collections.append(Collection(**content))
            elif kind == "finished":
                worker.end = "finished"
                return worker
            else:
                sample = Sample(**content)
                worker.samples.append(sample)
                on_sample(sample)
                if limit is not None and sample.memory > limit:
                    worker.end = "memory limit"
                    return worker
                if sample.rss > announced:
                    worker.end = "announced memory"
                    return worker
        else:
            code = process.wait()
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it wrote no error"])[-1]
            reason = f"exit code {code}, {last}"
    if worker is not None:
        worker.end = "failed"
    raise WorkerError(f"the worker with patches {run.arm.name} failed: {reason}")


@contextlib.contextmanager
def _worker_process(
    job: Job, environment: Mapping[str, str], errors: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "dynamo_cyclefix._measuring.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        text=True,
        start_new_session=True,  # an interrupt is for the supervisor, which keeps the samples
    ) as process:
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                json.dump(dataclasses.asdict(job), process.stdin)
            yield process
        finally:
            # Inductor's compile workers are in the group too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _check_room(job: Job, worker: Worker, limit: int | None) -> None:
    idle, device_free = worker.environment["rss"], worker.environment["device_free"]
    if device_free is None and limit is not None and idle >= limit:
        raise WorkerError(
            f"the memory limit, {mib(limit)}, is below the {mib(idle)} of a worker that has served "
            "nothing yet: raise --memory-limit"
        )
    wanted = sum(job.schedule) * job.buffer
    if device_free is not None and wanted > device_free:
        raise WorkerError(
            f"{mib(wanted)} of device memory may be needed and {mib(device_free)} are free: "
            "lower --requests or --buffer"
        )
