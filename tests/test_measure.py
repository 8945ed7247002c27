"""The instrument itself: its statistics, its verdicts, and real experiments on the real torch."""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_cyclefix._commands import measure as _measure
from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._measuring import memory, supervisor
from dynamo_cyclefix._measuring.analysis import Slope, judge, segments, slope, summarize
from dynamo_cyclefix._measuring.experiment import schedule
from dynamo_cyclefix._measuring.memory import MIB
from dynamo_cyclefix._measuring.records import Arm, Collection, Job, Run, Sample, Worker
from dynamo_cyclefix._patching.state import State

HERE = Path(__file__).parent


def measure(*options: str) -> subprocess.CompletedProcess[str]:
    # Small buffers return to the system at once too; by default glibc keeps them in its heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    # As in service: the collection after a compile makes what a request leaves old.
    environment.pop("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE")
    return subprocess.run(
        [sys.executable, "-m", "dynamo_cyclefix", "measure", *options],
        cwd=HERE,  # so that a worker finds the workloads of this file
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


# Workloads that a worker loads from this file as `test_measure:NAME`.


def leaking(setup: Any) -> Any:
    """A service with a leak of its own: it keeps every exception."""
    from dynamo_cyclefix._measuring.workloads import malformed

    handler, kept = malformed(setup), []

    def handle(request: int, inject: bool) -> object:
        try:
            return handler(request, inject)
        except Exception as error:
            kept.append(error)
            raise

    return handle


def interrupting(setup: Any) -> Any:
    """Interrupt the supervisor, as Ctrl-C does, in the arm with the patches."""
    from dynamo_cyclefix._measuring.workloads import malformed

    handler = malformed(setup)

    def handle(request: int, inject: bool) -> object:
        if os.environ["DYNAMO_CYCLEFIX"] == "on":
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        return handler(request, inject)

    return handle


def dying(setup: Any) -> Any:
    """Die in the first request."""

    def handle(request: int, inject: bool) -> object:
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)

    return handle


def broken(setup: Any) -> Any:
    """Fail at good requests too."""

    def handle(request: int, inject: bool) -> object:
        raise LookupError

    return handle


# Statistics


def test_slope_of_a_line_is_exact() -> None:
    fitted = slope([[(x, 3.0 * x + 7) for x in range(20)]])
    assert fitted == Slope(pytest.approx(3), pytest.approx(3), pytest.approx(3))


def test_slope_of_a_saw_tooth_is_that_of_its_teeth() -> None:
    tooth = [(float(x), 32.0 * x) for x in range(10)]
    moved = [(x + 10, y) for x, y in tooth]
    fitted = slope([tooth, moved])
    assert fitted is not None
    assert fitted.value == pytest.approx(32)
    whole = slope([tooth + moved])
    assert whole is not None
    assert whole.value < 16  # what one line through everything would say


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]])
def test_no_slope_without_enough_points(points: list[tuple[float, float]]) -> None:
    assert slope([points]) is None


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_interval_holds_the_true_slope_as_often_as_it_says(correlation: float) -> None:
    draw, covered = random.Random(1), 0
    for _ in range(200):
        noise, points = 0.0, []
        for x in range(100):
            noise = correlation * noise + draw.gauss(0, 1)
            points.append((float(x), 0.1 * x + noise))
        fitted = slope([points])
        assert fitted is not None
        covered += fitted.low <= 0.1 <= fitted.high
    assert 160 <= covered < 200  # 95 % nominal, fewer under correlation


# Verdicts


def a_run(arm: str, frames: float, mib: float, *, requests: int = 20, **last: Any) -> Run:
    """An arm in which each exception keeps so many frames and MiB; the noise is 1 MiB."""
    samples = [
        Sample(
            request=number,
            injected=True,
            raised="KeyError",
            latency=0.01,
            gc_seconds=0.0,
            rss=int((300 + mib * number + number % 2) * MIB),
            peak_rss=0,
            frames=int(frames * number),
            exceptions=0,
            gc_count=[0, 0, 0],
            full_collections=0,
            device_allocated=None,
            device_reserved=None,
        )
        for number in range(requests)
    ]
    return Run(Arm(arm, arm == "on"), [Worker({}, samples, **{"end": "finished", **last})])


@pytest.mark.parametrize(
    ("control", "patched", "limited", "code", "text"),
    [
        (a_run("off", 1, 32), a_run("on", 0, 0), False, 0, "holds"),
        (a_run("off", 1, 32), a_run("on", 1, 32), False, 1, "grows with the patches on"),
        (a_run("off", 1, 32), a_run("on", 0, 8), False, 1, "memory is not flat"),
        (a_run("off", 0, 0), a_run("on", 0, 0), False, 2, "no difference"),
        (a_run("off", 0, 0), a_run("on", 1, 32), False, 1, "grows with the patches on"),
        (a_run("off", 1, 0), a_run("on", 0, 0), False, 2, "no difference"),
        (a_run("off", 1, 32, requests=9), a_run("on", 0, 0), False, 2, "too small"),
        (a_run("off", 1, 32), a_run("on", 0, 0), True, 2, "never passed the memory limit"),
        (a_run("off", 1, 32, end="memory limit"), a_run("on", 0, 0), True, 0, "holds"),
        (
            a_run("off", 1, 32, end="memory limit"),
            a_run("on", 0, 0, end="memory limit"),
            True,
            1,
            "as many restarts",
        ),
    ],
)
def test_verdict(control: Run, patched: Run, limited: bool, code: int, text: str) -> None:
    off, on = summarize(control), summarize(patched)
    assert off is not None
    assert on is not None
    verdict = judge(off, on, limited)
    assert (verdict.code, text in verdict.text) == (code, True), verdict


def test_segments_end_where_a_collection_or_a_restart_resets_the_signal() -> None:
    first, second = a_run("off", 1, 32, requests=4).workers + a_run("off", 1, 32).workers
    assert [len(each) for each in segments([first, second], "frames")] == [4, 20]
    first.samples[2:] = [
        Sample(**{**vars(sample), "full_collections": 1}) for sample in first.samples[2:]
    ]
    assert [len(each) for each in segments([first, second], "frames")] == [2, 2, 20]


# Arguments, memory, schedule


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1500MB", 1_500_000_000), ("2GiB", 2 * 2**30), ("32mib", 32 * MIB), ("1.5k", 1500), ("7", 7)],
)
def test_size(text: str, expected: int) -> None:
    assert memory.size(text) == expected


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1TB", "1 2"])
def test_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size such as"):
        memory.size(text)


@pytest.mark.parametrize(
    "options",
    [
        ["--error-rate", "0"],
        ["--error-rate", "2"],
        ["--requests", "0"],
        ["--buffer", "big"],
        ["--gc-threshold", "1,2,3,4"],
        ["--plot", "picture.gif"],
    ],
)
def test_bad_arguments(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    _measure.add_arguments(parser)
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(options)
    assert exit_.value.code == 2
    assert options[1] in capsys.readouterr().err


def test_schedule_has_the_exact_rate_and_follows_the_seed() -> None:
    made = schedule(200, 0.1, seed=3)
    assert (len(made), sum(made)) == (200, 20)
    assert made == schedule(200, 0.1, seed=3)
    assert made != schedule(200, 0.1, seed=4)


@pytest.mark.parametrize(
    ("group", "files", "room"),
    [
        ("0::/a/b", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 700),
        ("0::/gone", {"memory.max": "5000"}, 4700),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "900"}, 600),
        ("3:cpuset:/a", {}, None),
        (None, {}, None),
    ],
)
def test_control_groups_bound_what_is_free(
    tmp_path: Path, group: str | None, files: dict[str, str], room: int | None
) -> None:
    if group is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(group + "\n")
    for name, text in files.items():
        limit = tmp_path / "sys/fs/cgroup" / name
        limit.parent.mkdir(parents=True, exist_ok=True)
        limit.write_text(text + "\n")
        for usage in ("memory.current", "memory.usage_in_bytes"):
            (limit.parent / usage).write_text("350\n")
        (limit.parent / "memory.stat").write_text("inactive_file 50\ntotal_inactive_file 50\n")
    assert memory._control_group_room(tmp_path) == room


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CommandError, match=r"pip install 'dynamo-cyclefix\[measure\]'"):
        _measure.run(argparse.Namespace())


def test_more_memory_than_is_free_is_refused() -> None:
    done = measure("--buffer", "900GiB")
    assert done.returncode == 2
    announced, free = re.findall(r"([\d,]+) MiB", done.stderr)[1:3]
    assert int(announced.replace(",", "")) > int(free.replace(",", ""))
    assert "lower --requests or --buffer" in done.stderr


# Experiments


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measure")
    done = measure(
        *("--requests", "30", "--buffer", "4MiB", "--gc-threshold", "701,11,12"),
        *("--json", str(folder / "r.json"), "--csv", str(folder / "r.csv")),
        *("--html", str(folder / "r.html"), "--plot", str(folder / "r.png")),
    )
    (folder / "table").write_text(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_memory_grows_in_the_control_alone(reports: Path) -> None:
    measured = json.loads((reports / "r.json").read_text())
    off, collected, on = measured["summaries"]
    assert measured["verdict"]["code"] == 0
    assert off["frames_slope"]["low"] > 0.5
    assert on["frames_slope"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert off["memory_slope"]["low"] > 3 * MIB
    assert off["raised"] == on["raised"] == off["injected"] == 30
    assert collected["frames_most"] < 10  # the workaround, every 10 requests


def test_arms_are_paired(reports: Path) -> None:
    runs = json.loads((reports / "r.json").read_text())["runs"]
    off, on = ([s["injected"] for s in run["workers"][0]["samples"]] for run in runs[::2])
    assert off == on
    assert runs[0]["workers"][0]["environment"]["gc_threshold"] == [701, 11, 12]
    states = [
        {State(patch["state"]) for patch in run["workers"][0]["environment"]["patches"]}
        for run in runs
    ]
    assert not any(state.in_place for state in states[0] | states[1])
    assert any(state.in_place for state in states[2])


def test_full_collections_are_recorded_with_what_they_freed(reports: Path) -> None:
    off = json.loads((reports / "r.json").read_text())["runs"][0]["workers"][0]
    final = Collection(**off["collections"][-1])
    assert final.cause == "final"
    assert final.frames_before == off["samples"][-1]["frames"] > final.frames_after == 0


def test_csv_has_one_line_for_each_request_of_each_arm(reports: Path) -> None:
    with (reports / "r.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * 30
    assert {line["arm"] for line in lines} == {"off", "off, collect every 10", "on"}
    assert all(int(line["rss"]) > 50 * MIB and float(line["latency"]) > 0 for line in lines)


def test_html_needs_no_network_and_agrees_with_the_table(reports: Path) -> None:
    page = (reports / "r.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|<script""", page)
    for name in ("frames kept per exception", "peak resident memory", "torch", "platform"):
        assert name in page
    peak = re.search(r"peak resident memory\D*([\d,]+ MiB)", (reports / "table").read_text())
    assert peak is not None
    assert peak[1] in page


def test_plot_is_a_picture(reports: Path) -> None:
    assert (reports / "r.png").read_bytes().startswith(b"\x89PNG")


def test_no_difference_where_both_arms_have_the_patches() -> None:
    done = measure(
        *("--control", "on", "--collect-every", "0", "--requests", "15", "--buffer", "4MiB"),
        *("--json", "-"),
    )
    measured = json.loads(done.stdout)
    assert done.returncode == 2, done.stderr
    assert "no difference" in measured["verdict"]["text"]
    control, patched = measured["summaries"]
    assert control["frames_slope"] == patched["frames_slope"]


def test_a_leak_of_the_service_itself_is_reported_with_the_patches_on() -> None:
    done = measure(
        *("--workload", "test_measure:leaking", "--collect-every", "0"),
        *("--requests", "15", "--buffer", "4MiB", "--json", "-"),
    )
    measured = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert "grows with the patches on" in measured["verdict"]["text"]
    assert measured["summaries"][-1]["frames_slope"]["value"] == pytest.approx(1)


def test_good_requests_among_failing_ones() -> None:
    done = measure(
        *("--workload", "mixed", "--error-rate", "0.5", "--collect-every", "0"),
        *("--requests", "40", "--buffer", "4MiB", "--json", "-"),
    )
    measured = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    for run in measured["runs"]:
        samples = run["workers"][0]["samples"]
        assert [s["raised"] is not None for s in samples] == [s["injected"] for s in samples]
        assert len({s["raised"] for s in samples}) == 3  # none, and one for each kind of failure


@pytest.mark.parametrize("workload", ["cond", "export"])
def test_what_a_successful_call_leaves_behind(workload: str) -> None:
    done = measure(
        *("--workload", workload, "--collect-every", "0"),
        *("--requests", "15", "--buffer", "8MiB", "--json", "-"),
    )
    measured = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "1.00 objects" in measured["verdict"]["text"]
    assert "per request" in measured["verdict"]["text"]
    assert "objects kept per request" in done.stderr
    off, on = measured["summaries"]
    assert off["raised"] == on["raised"] == 0
    assert on["frames_most"] == 0


def test_workers_are_restarted_at_the_memory_limit(tmp_path: Path) -> None:
    done = measure(
        *("--memory-limit", "1200MiB", "--buffer", "64MiB", "--requests", "24"),
        *("--collect-every", "0", "--json", "-", "--plot", str(tmp_path / "r.svg")),
    )
    measured = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    off, on = measured["summaries"]
    assert off["restarts"] > 0 == on["restarts"]
    for run in measured["runs"]:  # every request was served once, whichever the worker
        served = [s["request"] for worker in run["workers"] for s in worker["samples"]]
        assert served == list(range(24))
    for worker in measured["runs"][0]["workers"][:-1]:
        assert worker["samples"][-1]["rss"] > 1200 * MIB >= worker["samples"][-2]["rss"]
    assert b"<svg" in (tmp_path / "r.svg").read_bytes()


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    samples = tmp_path / "r.csv"
    done = measure(
        *("--workload", "test_measure:interrupting", "--collect-every", "0", "--requests", "12"),
        *("--buffer", "1", "--csv", str(samples), "--html", str(tmp_path / "r.html")),
    )
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stdout
    with samples.open(newline="") as file:
        assert [line["arm"] for line in csv.DictReader(file)] == ["off"] * 12
    assert "interrupted" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--workload", "nowhere:nothing"], "cannot load the workload 'nowhere:nothing'"),
        (["--workload", "test_measure:dying"], "failed: exit code 3, out of luck"),
        (["--workload", "test_measure:broken"], "the first good request .* raised LookupError"),
        (["--memory-limit", "50MiB"], "raise --memory-limit"),
        (["--csv", "nowhere/r.csv"], "nowhere is no directory"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(options: list[str], text: str) -> None:
    done = measure(*options, "--requests", "20", "--buffer", "1MiB")
    assert done.returncode == 2
    assert re.search(text, done.stderr.splitlines()[-1]), done.stderr


def test_a_worker_never_uses_more_than_was_announced() -> None:
    run = Run(Arm("off", patched=False))
    job = Job("malformed", [True] * 50, 0, MIB, 0, None, "eager", "cpu", 0)
    supervisor.serve(run, job, os.environ, announced=1, limit=None, on_sample=lambda sample: None)
    (worker,) = run.workers
    assert (worker.end, len(worker.samples)) == ("announced memory", 1)
