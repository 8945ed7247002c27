"""The measurements as a table, JSON, CSV and a self-contained HTML page."""

from __future__ import annotations

import base64
import csv
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import IO, Any

from rich.table import Table

from dynamo_cyclefix import _json
from dynamo_cyclefix._measuring.analysis import Slope, Summary, Verdict
from dynamo_cyclefix._measuring.memory import MIB, mib
from dynamo_cyclefix._measuring.records import SUCCEEDING, Run, Sample
from dynamo_cyclefix._patching.state import State


def _interval(slope: Slope | None, unit: float = 1) -> str:
    if slope is None:
        return "-"
    value, low, high = (each / unit + 0.0 for each in (slope.value, slope.low, slope.high))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _largest(summary: Summary) -> str:
    largest = summary.largest_collection
    return f"{mib(largest.memory_before)} → {mib(largest.memory_after)}" if largest else "-"


def _held(summary: Summary) -> str:
    largest = summary.largest_collection
    if largest is None:
        return "-"
    frames = largest.frames_before - largest.frames_after
    return f"{mib(largest.memory_before - largest.memory_after)}, {frames} frames"


_ROWS: list[tuple[str, Callable[[Summary], str]]] = [
    ("requests", lambda s: str(s.requests)),
    ("exceptions injected, raised", lambda s: f"{s.injected}, {s.raised}"),
    ("frames kept per exception *", lambda s: _interval(s.frames_slope)),
    ("exceptions kept per exception *", lambda s: _interval(s.exceptions_slope)),
    ("MiB kept per exception *", lambda s: _interval(s.memory_slope, MIB)),
    ("most frames alive", lambda s: str(s.frames_most)),
    ("peak resident memory", lambda s: mib(s.peak_rss)),
    ("peak device memory", lambda s: mib(s.peak_device) if s.peak_device else "-"),
    ("largest full collection", _largest),
    ("so the cycles held", _held),
    ("full collections in service", lambda s: str(s.full_collections)),
    ("time in the collector", lambda s: f"{s.gc_seconds:.2f} s"),
    ("latency p50, p99", lambda s: f"{1000 * s.latency_p50:.1f}, {1000 * s.latency_p99:.1f} ms"),
    ("throughput with restarts", lambda s: f"{s.throughput:.1f} requests/s"),
    ("restarts", lambda s: str(s.restarts)),
    ("restarts per 1,000 requests", lambda s: f"{s.restarts_per_1000:.1f}"),
    ("requests per worker", lambda s: f"{s.requests_per_worker:.0f}"),
    ("ended by", lambda s: s.end),
]
_WORDS_OF_SUCCESS = {
    "exceptions injected, raised": "objects watched, exceptions",
    "per exception": "per request",
    "frames": "objects",
}
NOTE = "* between full collections; in brackets the 95 % confidence interval"


def worded(workload: str, text: str) -> str:
    """Text about exceptions and frames, for a workload that raises nothing too."""
    if workload in SUCCEEDING:
        for usual, word in _WORDS_OF_SUCCESS.items():
            text = text.replace(usual, word)
    return text


def rows(summaries: Sequence[Summary], workload: str) -> list[list[str]]:
    """The comparison, one row per quantity: its name, then a cell for each arm."""
    made = [
        [worded(workload, text) for text in (name, *(cell(summary) for summary in summaries))]
        for name, cell in _ROWS
    ]
    return [row for row in made if any(cell != "-" for cell in row[1:])]


def table(summaries: Sequence[Summary], title: str, workload: str) -> Table:
    made = Table(title=title, title_justify="left")
    made.add_column("patches")
    for summary in summaries:
        made.add_column(summary.arm, justify="right")
    for row in rows(summaries, workload):
        made.add_row(*row)
    return made


def as_json(
    settings: dict[str, Any],
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    verdict: Verdict,
) -> str:
    return _json.document(
        {
            "settings": settings,
            "verdict": dataclasses.asdict(verdict),
            "summaries": [dataclasses.asdict(summary) for summary in summaries],
            "runs": [dataclasses.asdict(run) for run in runs],
        },
        indent=1,
    )


def write_csv(file: IO[str], runs: Sequence[Run]) -> None:
    """Write one line per request: the arm, the number of the worker and its sample."""
    names = [field.name for field in dataclasses.fields(Sample)]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["arm", "worker", *names])
    for run in runs:
        for number, worker in enumerate(run.workers):
            for sample in worker.samples:
                cells = dataclasses.asdict(sample)
                cells["gc_count"] = " ".join(map(str, sample.gc_count))
                writer.writerow([run.arm.name, number, *cells.values()])


_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #999;padding:.3em .7em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
)


def html(
    settings: dict[str, Any],
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    verdict: Verdict,
    svg: bytes,
) -> str:
    """Return a page that refers to nothing outside itself."""

    def line(cells: Sequence[object], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    def lines(content: Iterable[Sequence[object]]) -> str:
        return "\n".join(line(cells) for cells in content)

    environment = next((run.environment for run in runs if run.environment), {})
    facts = [(name, value) for name, value in environment.items() if name != "patches"]
    patches = [
        (run.arm.name, patch["id"], State(patch["state"]).words, patch["reason"])
        for run in runs
        for patch in run.environment.get("patches", ())
    ]
    picture = base64.b64encode(svg).decode()
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>dynamo-cyclefix measure</title>
<style>{_STYLE}</style></head><body>
<h1>dynamo-cyclefix measure</h1>
<p><strong>{escape(verdict.text)}</strong> (exit code {verdict.code})</p>
<table>
{line(["patches", *(summary.arm for summary in summaries)], "th")}
{lines(rows(summaries, str(settings["workload"])))}
</table>
<p>{escape(NOTE)}</p>
<p><img alt="Memory and live frames over requests, for each arm"
src="data:image/svg+xml;base64,{picture}"></p>
<h2>Settings</h2>
<table>
{lines(list(settings.items()))}
</table>
<h2>Environment</h2>
<table>
{lines(facts)}
</table>
<h2>Patch states</h2>
<table>
{line(["arm", "patch", "state", "reason"], "th")}
{lines(patches)}
</table>
</body></html>
"""
