"""Run test files of other projects with the patches off and on, and compare every test.

    python tools/paired.py FOLDER [FILE ...] [--results FILE] [--table FILE] [--timeout SECONDS]

Each file runs in two fresh processes side by side, one with the patches off, one with them on.
Outcome, exception type and message of every test are compared.  A test that takes its process with
it, or hangs, counts as crashed, and the rest of the file goes on in a new process.  What differs
runs again, alone, three times in each arm; what differs every time is real, and the exit code is 1.

A control of our own comes first: it must fail with the patches off and pass with them on.  The off
arm must have nothing applied, and the on arm nothing refused.  Where one of these does not hold,
nothing is said of the tests, and the exit code is 2.

What is found is kept in the results file after each file, and files that are in it are not run
again.  Pytest, and what the files import, must be installed beside torch and dynamo-cyclefix.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARMS = ("off", "on")
TRIES = 3

CONTROL = """
import gc
import weakref
import torch

def test_a_malformed_request_dies_with_its_frame():
    compiled = torch.compile(lambda x: x @ torch.ones(3, 3), backend="eager")
    class Held:
        pass
    references = []
    def request():
        held = Held()
        references.append(weakref.ref(held))
        try:
            compiled(torch.ones(2, 5))
        except Exception:
            pass
        else:
            raise AssertionError("the control did not raise")
    gc.collect()
    gc.disable()
    try:
        request()
        assert references[0]() is None
    finally:
        gc.enable()
"""


class Blind(Exception):  # noqa: N818 - says that nothing can be concluded
    """The comparison would prove nothing; the text says why."""


def run_arm(
    arm: str, folder: Path, file: str, only: list[str] | None, timeout: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a file, or some of its tests, in one arm.

    Args:
        arm: ``off`` or ``on``.
        folder: the folder of the tests, which is on ``sys.path``.
        file: its path in that folder.
        only: the ids of the tests to run; all if ``None``.
        timeout: seconds after which a silent process counts as hanging.

    Returns:
        By test id its outcome; and what the process said of its patches.
    """
    found: dict[str, Any] = {}
    patches: dict[str, Any] = {}
    while only is None or only:
        with tempfile.TemporaryDirectory() as scratch:
            events = Path(scratch, "events")
            selection = Path(scratch, "selection")
            selection.write_text(json.dumps({"only": only, "done": list(found)}))
            environment = {
                **os.environ,
                "DYNAMO_CYCLEFIX": arm,
                "PAIRED_EVENTS": str(events),
                "PAIRED_SELECTION": str(selection),
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": os.pathsep.join(
                    [str(HERE), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
                "TORCHINDUCTOR_CACHE_DIR": str(Path(scratch, "inductor")),
            }
            command = [sys.executable, "-m", "pytest", "-q", "-p", "paired_plugin", file]
            # Pytest keeps what is logged, and torch logs exceptions.
            for plugin in ("cacheprovider", "randomly", "logging"):
                command += ["-p", f"no:{plugin}"]
            try:
                code = subprocess.run(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            lines = events.read_text("utf-8").splitlines() if events.is_file() else []
        started = None
        ended = False
        for event in map(json.loads, lines):
            if event["event"] == "start":
                started = event["test"]
            elif event["event"] == "result":
                found[event["test"]] = event["result"]
                started = None
            elif event["event"] == "patches":
                patches = event
            elif event["event"] == "end":
                ended = True
        if ended:
            break
        if started is None:
            found.setdefault(f"{file}::", {"outcome": f"not collected, exit code {code}"})
            break
        found[started] = {"outcome": "crashed"}
    return found, patches


def run_both(
    folder: Path, file: str, only: list[str] | None, timeout: float
) -> dict[str, dict[str, Any]]:
    """Run a file in both arms, side by side; the outcomes by arm."""
    with ThreadPoolExecutor(len(ARMS)) as pool:
        runs = list(pool.map(lambda arm: run_arm(arm, folder, file, only, timeout), ARMS))
    for arm, (_, patches) in zip(ARMS, runs, strict=True):
        if not patches:
            print(f"{file}: no process with the patches {arm} came to its end", flush=True)
            continue
        states = set(patches["states"].values())
        if patches["active"] != (arm == "on") or (arm == "off") != (states == {"disabled"}):
            raise Blind(f"{file}: with the patches {arm}, their states were {patches['states']}")
        if "refused" in states:
            raise Blind(f"{file}: a patch was refused: {patches['states']}")
    return {arm: found for arm, (found, _) in zip(ARMS, runs, strict=True)}


def compare(folder: Path, file: str, timeout: float) -> dict[str, Any]:
    """What a file showed: counts, and the tests that differ."""
    outcomes = run_both(folder, file, None, timeout)
    tests = sorted(outcomes["off"].keys() | outcomes["on"].keys())
    suspects = [t for t in tests if outcomes["off"].get(t) != outcomes["on"].get(t)]
    real, passing = {}, {}
    for test in suspects:
        again: dict[str, list[Any]] = {arm: [outcomes[arm].get(test)] for arm in ARMS}
        for _ in range(TRIES):
            for arm, found in run_both(folder, file, [test], timeout).items():
                again[arm].append(found.get(test))
        alone = {arm: again[arm][1:] for arm in ARMS}
        (real if not any(o in alone["on"] for o in alone["off"]) else passing)[test] = again
    counts = Counter(o["outcome"] for o in outcomes["off"].values())
    return {"pairs": len(tests), "off": counts, "real": real, "passing": passing}


def check_control(timeout: float) -> None:
    """Have the comparison find a difference that is there.

    Raises:
        Blind: it does not.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_control.py").write_text(CONTROL)
        found = run_both(Path(folder), "test_control.py", None, timeout)
    seen = {arm: [r["outcome"] for r in found[arm].values()] for arm in ARMS}
    if seen != {"off": ["failed"], "on": ["passed"]}:
        raise Blind(f"the control should fail with the patches off and pass with them on: {seen}")


def table(results: dict[str, Any]) -> str:
    """The results, in Markdown."""
    lines = [
        "| torch | file | pairs | passed | not passed | real differences |",
        "|" + " --- |" * 6,
    ]
    for key, result in sorted(results.items()):
        torch, _, file = key.partition(" ")
        passed = result["off"].get("passed", 0)
        others = result["pairs"] - passed
        cells = torch, f"`{file}`", result["pairs"], passed, others, len(result["real"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    pairs, real = (
        sum(result["pairs"] for result in results.values()),
        sum(len(result["real"]) for result in results.values()),
    )
    return "\n".join([*lines, "", f"{pairs} pairs, {real} real differences.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: every test_*.py below")
    parser.add_argument("--results", type=Path, default=Path("paired.json"))
    parser.add_argument("--table", type=Path, help="write the table there too")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a process")
    options = parser.parse_args()
    folder = options.folder.resolve()
    files = options.files or sorted(
        str(path.relative_to(folder)) for path in folder.rglob("test_*.py")
    )
    import torch

    results = json.loads(options.results.read_text()) if options.results.is_file() else {}
    try:
        check_control(options.timeout)
        for file in files:
            key = f"{torch.__version__} {file}"
            if key not in results:
                results[key] = compare(folder, file, options.timeout)
                options.results.write_text(json.dumps(results, indent=1) + "\n")
            result = results[key]
            real, passing = (", ".join(result[kind]) or "none" for kind in ("real", "passing"))
            print(
                f"{key}: {result['pairs']} pairs; differ every time: {real}; at times: {passing}",
                flush=True,
            )
    except Blind as error:
        print(f"paired: {error}", file=sys.stderr)
        return 2
    if options.table:
        options.table.write_text(table(results))
    print(table(results))
    return int(any(result["real"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
