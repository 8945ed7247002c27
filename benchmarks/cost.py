"""What the patches cost, as ratios of medians of paired runs: with them over without.

    python benchmarks/cost.py [--scale 0.1]

Four ratios: the start of a bare interpreter with autostart on; `import torch._dynamo`; compiling a
small model; a compiled call that does not raise.  Run it on a quiet machine; byte code caches are
on, whatever PYTHONDONTWRITEBYTECODE says.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    k: v
    for k, v in os.environ.items()
    if k != "PYTHONDONTWRITEBYTECODE" and not k.startswith("DYNAMO_CYCLEFIX")
}


def paired(first, second, pairs):
    """Seconds of both, in pairs that change their order every time."""
    times = ([], [])
    for i in range(pairs):
        order = ((0, first), (1, second))
        for side, action in order if i % 2 else order[::-1]:
            start = time.perf_counter()
            action()
            times[side].append(time.perf_counter() - start)
    return times


def show(what, with_, without, limit):
    ratio = statistics.median(with_) / statistics.median(without)
    unit, scale = ("ms", 1e3) if statistics.median(without) > 1e-3 else ("us", 1e6)
    print(
        f"{what}: {statistics.median(with_) * scale:.2f} {unit} with,"
        f" {statistics.median(without) * scale:.2f} {unit} without,"
        f" ratio {ratio:.4f} (limit {limit}), {len(with_)} pairs",
        flush=True,
    )
    return ratio <= limit


def process(command, **environment):
    return lambda: subprocess.run(command, env={**ENVIRONMENT, **environment}, check=True)


def bare_start(pairs):
    with tempfile.TemporaryDirectory() as folder:
        starts = []
        for name in ("with", "without"):
            # Both have the package, as a wheel lays it out, so that only autostart differs.
            where = Path(folder, name)
            venv.create(where, symlinks=True)
            python = str(where / "bin" / "python")
            site = next(where.glob("lib/python*/site-packages"))
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "dynamo_cyclefix", site / "dynamo_cyclefix", ignore=without)
            shutil.copytree(ROOT / "patches", site / "dynamo_cyclefix" / "patches")
            if name == "with":
                command = [python, "-m", "dynamo_cyclefix", "autostart", "enable"]
                subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
            starts.append(process([python, "-c", "pass"]))
            starts[-1]()
        return show("bare interpreter start", *paired(*starts, pairs), 1.05)


def dynamo_import(pairs):
    path = {"PYTHONPATH": str(ROOT)}
    code = "import dynamo_cyclefix, torch._dynamo"
    on = process([sys.executable, "-c", code], **path)
    off = process([sys.executable, "-c", "import torch._dynamo"], **path)
    on(), off()
    return show("import torch._dynamo", *paired(on, off, pairs), 1.03)


# Times what it is asked for, in a process that has the patches or has never had them.
WORKER = """
import gc, json, sys, time
if sys.argv[1] == "with":
    import dynamo_cyclefix
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)), torch.nn.ReLU())
batch = torch.ones(2, 8)

def compiling():
    torch._dynamo.reset()
    gc.collect()
    start = time.perf_counter()
    torch.compile(model, backend="eager")(batch)
    return time.perf_counter() - start

def calling():
    start = time.perf_counter()
    for _ in range(1000):
        compiled(batch)
    return (time.perf_counter() - start) / 1000

for _ in range(20):
    compiling()
compiled = torch.compile(lambda x: x + 1, backend="eager")
for _ in range(20):
    calling()
# What is alive now stays, and need not be looked at by each collection.
gc.collect()
gc.freeze()
gc.disable()
for line in sys.stdin:
    sample = globals()[line.strip()]
    if sample is calling:
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        calling()
    print(json.dumps([sample() for _ in range(10)]), flush=True)
"""


def worker(side, seed):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, side],
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process, what):
    print(what, file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def long_running(processes, blocks):
    """Two processes at a time, asked in turn; several, since where memory lies matters too."""
    times = {"compiling": ([], []), "calling": ([], [])}
    for seed in range(processes):
        sides = [worker(side, seed) for side in ("with", "without")]
        for i in range(blocks):
            for what, (with_, without) in times.items():
                order = ((with_, sides[0]), (without, sides[1]))
                for found, process in order if i % 2 else order[::-1]:
                    found += ask(process, what)
        for process in sides:
            process.stdin.close()
            process.wait()
    held = [
        show("compiling a small model", *times["compiling"], 1.01),
        show("a compiled call", *times["calling"], 1.01),
    ]
    return all(held)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1, help="part of the pairs (default: 1)")
    scale = parser.parse_args().scale
    held = [
        bare_start(int(1500 * scale)),
        dynamo_import(max(2, int(40 * scale))),
        long_running(max(1, int(12 * scale)), 5),
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
