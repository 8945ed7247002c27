"""One experiment: the arms of the comparison, run in turn on the same schedule, and its report."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._measuring import plot, report, supervisor
from dynamo_cyclefix._measuring.analysis import Summary, Verdict, judge, summarize
from dynamo_cyclefix._measuring.memory import free, mib, needed
from dynamo_cyclefix._measuring.records import SUCCEEDING, Arm, Job, Run, Sample

_INTERRUPTED = 130
_WIDTH = 110


def schedule(requests: int, error_rate: float, seed: int) -> list[bool]:
    """Which requests make Dynamo raise: an exact number of them, at places drawn by the seed."""
    injected = set(random.Random(seed).sample(range(requests), round(requests * error_rate)))
    return [request in injected for request in range(requests)]


def _arms(arguments: argparse.Namespace) -> list[Arm]:
    control_on = arguments.control == "on"
    arms = [Arm("on (control)" if control_on else "off", control_on)]
    if arguments.collect_every:
        name = f"off, collect every {arguments.collect_every}"
        arms.append(Arm(name, False, arguments.collect_every))
    return [*arms, Arm("on", True)]


def run(arguments: argparse.Namespace) -> int:
    """Carry out what the command line asks for; see `dynamo_cyclefix._measuring.run`."""
    rate = arguments.error_rate or (0.2 if arguments.workload == "mixed" else 1.0)
    job = Job(
        workload=arguments.workload,
        schedule=schedule(arguments.requests, rate, arguments.seed),
        first=0,
        buffer=arguments.buffer,
        collect_every=0,
        gc_threshold=arguments.gc_threshold,
        backend=arguments.backend,
        device=arguments.device,
        seed=arguments.seed,
    )
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    outputs = [arguments.csv, arguments.plot, arguments.html]
    if arguments.json not in (None, "-"):
        outputs.append(Path(arguments.json))
    for path in outputs:
        if path is not None and not path.parent.is_dir():
            raise CommandError(f"{path.parent} is no directory: {path} could not be written")
    exceptions, limit = sum(job.schedule), arguments.memory_limit
    announced, room = needed(exceptions, job.buffer, job.device, limit), free()
    do = "are watched" if job.workload in SUCCEEDING else "raise"
    notes.print(
        f"{len(job.schedule)} requests, {exceptions} of them {do}, each with "
        f"{mib(job.buffer)}; at most {mib(announced)} of memory, {mib(room)} are free"
    )
    if announced > room:
        raise CommandError("too little memory is free: lower --requests or --buffer")

    runs = [Run(arm) for arm in _arms(arguments)]
    stopped = None
    try:
        _serve_all(runs, job, announced, limit, notes)
    except KeyboardInterrupt:
        stopped = Verdict(_INTERRUPTED, "interrupted: only what was measured until then is shown")
    except supervisor.WorkerError as error:
        stopped = Verdict(2, str(error))
    summaries = [summary for each in runs if (summary := summarize(each)) is not None]
    if stopped is not None and not summaries:
        raise CommandError(stopped.text, stopped.code)
    verdict = stopped or judge(summaries[0], summaries[-1], limited=limit is not None)
    verdict = Verdict(verdict.code, report.worded(arguments.workload, verdict.text))
    settings = {key: _plain(value) for key, value in vars(arguments).items()}
    settings |= {"error_rate": rate, "announced_memory": announced}
    _report(arguments, settings, runs, summaries, verdict)
    return verdict.code


def _serve_all(
    runs: Sequence[Run], job: Job, announced: int, limit: int | None, notes: Console
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=notes) as progress:
        for each in runs:
            task = progress.add_task(
                f"patches {each.arm.name}", total=len(job.schedule), state="starting"
            )

            def advance(sample: Sample, task: TaskID = task) -> None:
                state = f"{mib(sample.rss)}, {sample.frames} frames"
                progress.update(task, completed=sample.request + 1, state=state)

            supervisor.serve(
                each, job, os.environ, announced=announced, limit=limit, on_sample=advance
            )


def _report(
    arguments: argparse.Namespace,
    settings: dict[str, object],
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    verdict: Verdict,
) -> None:
    torch = runs[0].environment.get("torch", "?")
    title = f"{arguments.workload} on torch {torch}, {arguments.backend}, {arguments.device}"
    limit = arguments.memory_limit
    if arguments.json is not None:
        text = report.as_json(settings, runs, summaries, verdict) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.json).write_text(text, encoding="utf-8")
    if arguments.csv is not None:
        with arguments.csv.open("w", encoding="utf-8", newline="") as file:
            report.write_csv(file, runs)
    if arguments.plot is not None:
        form = arguments.plot.suffix[1:]
        arguments.plot.write_bytes(plot.draw(runs, title, limit, form))
    if arguments.html is not None:
        svg = plot.draw(runs, title, limit, "svg")
        page = report.html(settings, runs, summaries, verdict, svg)
        arguments.html.write_text(page, encoding="utf-8")
    console = Console(stderr=arguments.json == "-", highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH  # a pipe or file has no width to fit into
    console.print(report.table(summaries, title, arguments.workload))
    console.print(report.NOTE, soft_wrap=True)
    console.print(verdict.text, markup=False, soft_wrap=True)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
