"""The ``verify`` command: every scenario in child processes, with the patches off and on."""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dynamo_cyclefix import _json, _settings
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._patching.state import State

# With a patch in one of these states, a scenario that needs it may go on pinning: what was refused
# is a failure of its own.
_OPEN = {State.DISABLED, State.REFUSED}
SILENCE_LIMIT = 120.0  # seconds without a word from a child, after which it counts as hanging


@dataclass
class Run:
    """What one side, off or on, showed.

    Attributes:
        ready: what the child said of itself: torch, Python, the scenarios.
        observations: by name of the scenario.
        failures: why a scenario has no observation, by its name.
        status: the child's own ``status()`` after its scenarios.
        error: why nothing could be run; empty if something was.
    """

    ready: dict[str, Any] = field(default_factory=dict)
    observations: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run_scenarios(
    environment: Mapping[str, str],
    names: Sequence[str] = (),
    seen: Callable[[str], None] = lambda name: None,
    silence_limit: float = SILENCE_LIMIT,
) -> Run:
    """Run scenarios in a child process, and the rest in another where one takes its child along.

    Args:
        environment: variables to set for the child, on top of this process's own.
        names: the scenarios to run; all that apply if empty.
        seen: called with the name of each scenario that is done.
        silence_limit: seconds without an event after which the child is killed.
    """
    result = Run()
    todo: list[str] | None = list(names) or None
    while todo is None or todo:
        current = None
        ended = False
        for event in _events(environment, todo or (), silence_limit):
            kind = event["event"]
            if kind == "ready":
                result.ready = event
                applicable = [s["name"] for s in event["scenarios"] if s["applies"]]
                todo = [name for name in applicable if todo is None or name in todo]
            elif kind == "start":
                current = event["name"]
            elif kind == "observed":
                result.observations[event["name"]] = event["observation"]
                seen(event["name"])
                current = None
            elif kind == "done":
                result.status = event["status"]
                ended = True
            elif kind == "lost":
                if current is not None:
                    result.failures[current] = event["reason"]
                    seen(current)
                else:
                    result.error = event["reason"]
        if todo is None or ended or (current is None and not ended):
            if not ended and not result.error:
                result.error = "the child process ended early"
            break
        done = {*result.observations, *result.failures}
        todo = [name for name in todo if name not in done]
    return result


def _events(
    environment: Mapping[str, str], names: Sequence[str], silence_limit: float
) -> Iterator[dict[str, Any]]:
    """The events of one child; a last one, ``lost``, where it did not come to its end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "dynamo_cyclefix.scenarios", *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},
    )
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    def read_errors() -> None:
        assert child.stderr is not None
        errors.extend(child.stderr)

    readers = [threading.Thread(target=target, daemon=True) for target in (read, read_errors)]
    for reader in readers:
        reader.start()
    reason = ""
    try:
        while True:
            try:
                line = lines.get(timeout=silence_limit)
            except queue.Empty:
                reason = f"hung: no sign of life for {silence_limit:g} s"
                break
            if line is None:
                break
            yield json.loads(line)
    finally:
        if reason or sys.exc_info()[0] is not None:
            child.kill()
        code = child.wait()
        for reader in readers:
            reader.join()
    if not reason and code:
        said = errors[-1].strip() if errors else "nothing on stderr"
        # With 2 it could not begin, and says why.
        reason = (
            said.removeprefix("error: ") if code == 2 else f"crashed: exit code {code} ({said})"
        )
    if reason:
        yield {"event": "lost", "reason": reason}


def run_both(
    names: Sequence[str] = (), seen: Callable[[str], None] = lambda name: None
) -> tuple[Run, Run]:
    """Run scenarios with the patches off and on, side by side."""
    modes = "off", "strict" if _settings.read().mode == "strict" else "on"
    with ThreadPoolExecutor(2) as pool:
        off, on = pool.map(lambda mode: run_scenarios({_settings.MODE: mode}, names, seen), modes)
    return off, on


@dataclass(frozen=True)
class Row:
    """One line of the table: a scenario, off and on.

    ``before`` and ``after``: ``pinned``, ``free`` or ``failed``, and ``kept_before`` and
    ``kept_after``: by label what outlived the frame, and what frees it.
    """

    name: str
    patches: tuple[str, ...]
    exception: str
    before: str
    after: str
    verdict: str
    kept_before: Mapping[str, str] = field(default_factory=dict)
    kept_after: Mapping[str, str] = field(default_factory=dict)


def judge(off: Run, on: Run) -> tuple[list[Row], str]:
    """Turn what was seen into a table and the reason why ``verify`` fails, empty if it does not."""
    if error := off.error or on.error:
        return [], error
    states = {patch["id"]: State(patch["state"]) for patch in on.status["patches"]}
    catalogue, release = toml.load(), off.ready["torch"]
    rows = []
    problems = []

    def explain(scenario: str) -> str:
        return catalogue.reason_for(scenario, release)

    for entry in off.ready["scenarios"]:
        if entry["applies"] and (row := _row(entry, off, on, states, explain)) is not None:
            rows.append(row)
            if row.verdict not in ("released", "not pinned", "open", "explained"):
                problems.append(f"{row.name}: {row.verdict}")
    refused = [p for p in on.status["patches"] if p["state"] == State.REFUSED]
    problems[:0] = [f"patch {p['id']} was not applied: {p['reason']}" for p in refused]
    if error := on.status["error"]:
        problems = [error]
    elif set(states.values()) == {State.DISABLED}:
        problems = ["every patch is switched off (DYNAMO_CYCLEFIX_PATCHES)"]
    applied = any(state.in_place for state in states.values())
    if applied and not any(row.before == "pinned" for row in rows) and len(rows) > 1:
        problems.append("with the patches off nothing was pinned: the check is blind")
    return rows, "; ".join(problems[:3]) + (" ..." if len(problems) > 3 else "")


def _row(
    entry: Mapping[str, Any],
    off: Run,
    on: Run,
    states: Mapping[str, str],
    explain: Callable[[str], str],
) -> Row | None:
    name = entry["name"]
    if name not in off.observations and name not in off.failures:
        return None
    before, after = (_pinned(name, side) for side in (off, on))
    found = {states.get(patch, State.DISABLED) for patch in entry["patches"]}
    claimed = bool(found) and not found & _OPEN
    if name in on.failures or name in off.failures:
        verdict = on.failures.get(name) or f"with the patches off: {off.failures[name]}"
    elif after == "pinned" and explain(name):
        verdict = "explained"
    elif after == "pinned":
        verdict = "STILL PINNED" if claimed else "open"
    else:
        verdict = "released" if before == "pinned" else "not pinned"
    outcome = off.observations.get(name, {}).get("outcome", {})
    raised = (outcome.get("raised") or {}).get("type", "none leaves")
    kept = (side.observations.get(name, {}).get("kept", {}) for side in (off, on))
    return Row(
        name, tuple(entry["patches"]), raised.rpartition(".")[2], before, after, verdict, *kept
    )


def _pinned(name: str, side: Run) -> str:
    if name not in side.observations:
        return "failed"
    return "pinned" if side.observations[name]["pinned"] else "free"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: all")
    parser.add_argument("--json", action="store_true", help="print everything observed as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the scenarios, print the table and tell whether all that is claimed is released."""
    show = _progress() if sys.stderr.isatty() else lambda name: None
    off, on = run_both(arguments.scenarios, show)
    rows, problem = judge(off, on)
    if off.error or on.error:
        raise CommandError(problem)
    if arguments.json:
        table = [vars(row) for row in rows]
        found = {"problem": problem, "table": table, "off": vars(off), "on": vars(on)}
        print(_json.document(found))
    else:
        _print(rows, off, on)
    if problem:
        raise CommandError(problem, 1)
    return 0


def _progress() -> Callable[[str], None]:
    done = 0

    def show(name: str) -> None:
        nonlocal done
        done += 1
        print(f"\r{done} runs done, last: {name:60}", end="\r", file=sys.stderr, flush=True)

    return show


def _print(rows: Sequence[Row], off: Run, on: Run) -> None:
    header = Row("scenario", ("patch",), "exception", "before", "after", "verdict")
    lines = [
        (
            r.name,
            ", ".join(r.patches) or "-",
            r.exception,
            r.before + _labels(r.kept_before),
            r.after + _labels(r.kept_after),
            r.verdict,
        )
        for r in (header, *rows)
    ]
    try:
        print(_rich_table(lines))
    except ImportError:
        print(_plain_table(lines))
    for patch in on.status["patches"]:
        print(f"patch {patch['id']}: {State(patch['state']).words}")
    before, after = (
        sum(getattr(r, side) == "pinned" for r in rows) for side in ("before", "after")
    )
    print(
        f"torch {off.ready['torch']}, Python {off.ready['python']}: {len(rows)} scenarios,"
        f" {before} pinned before, {after} pinned after"
    )


def _labels(kept: Mapping[str, str]) -> str:
    """What outlived the frame, by what frees it; nothing where that is its local, until freed by a
    collection.
    """
    if kept == {"local": "freed by a collection"}:
        return ""
    ways: dict[str, list[str]] = {}
    for label, way in kept.items():
        ways.setdefault(way, []).append(label)
    told = (f"{way}: {', '.join(labels)}" for way, labels in sorted(ways.items()))
    return f" ({'; '.join(told)})" if kept else ""


def _plain_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side; the first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = (
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(row.rstrip() for row in rows)


def _rich_table(lines: Sequence[Sequence[str]]) -> str:
    """The same, fitted into the terminal.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # a pipe or file has none to fit into
    columns = list(zip(*lines, strict=True))
    longest = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    # Words stay whole where they all fit; where they do not, rich would leave columns out.
    fits = sum(longest) + 3 * len(columns) <= console.width
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name, width in zip(lines[0], longest, strict=True):
        table.add_column(name, overflow="fold", min_width=width if fits else None)
    for line in lines[1:]:
        table.add_row(*map(Text, line))  # no markup: these are not our words
    # Not printed by rich, which ends the process where the reader has gone.
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")
