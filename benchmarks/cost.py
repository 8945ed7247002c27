"""What the patches cost: the median of the ratios of paired runs, with them over without.

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
    # Of each pair, since what runs beside it changes a machine's pace from one minute to the next.
    ratio = statistics.median(a / b for a, b in zip(with_, without, strict=True))
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


# Takes the patches back and applies them again in turn: between two processes, where memory happens
# to lie makes more of a difference than the patches do.
WORKER = """
import gc, json, logging, sys, time, timeit
import dynamo_cyclefix
import torch

# It warns of what is frozen below, at each switch.
logging.getLogger("dynamo_cyclefix").setLevel("ERROR")

model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)), torch.nn.ReLU())
batch = torch.ones(2, 8)

def compiling():
    torch._dynamo.reset()
    gc.collect()
    start = time.perf_counter()
    torch.compile(model, backend="eager")(batch)
    return time.perf_counter() - start

def calling():
    for _ in range(100):
        compiled[side](batch)
    # The fastest of some: what is slower, something else has slowed down.
    return min(timeit.repeat(lambda: compiled[side](batch), number=100, repeat=10)) / 100

def switch(to):
    global side
    side = to
    dynamo_cyclefix.activate() if side == "with" else dynamo_cyclefix.deactivate()

def show(what, seconds):
    print(json.dumps([what, side, seconds]), flush=True)

for _ in range(20):
    compiling()
# What is alive now stays, and need not be looked at by each collection.
gc.collect()
gc.freeze()
gc.disable()
order = ["with", "without"]
for block in range(int(sys.argv[1])):
    order.reverse()
    compiled = {}
    for to in order:
        switch(to)
        applied = any(patch.state.in_place for patch in dynamo_cyclefix.status().patches)
        assert applied == (side == "with"), dynamo_cyclefix.status()
        compiling()  # specializes the interpreter's code
        show("compiling", min(compiling() for _ in range(3)))
        compiled[side] = torch.compile(lambda x: x + 1, backend="eager")
        compiled[side](batch)
    for to in order * 5:
        switch(to)
        show("calling", calling())
"""


def long_running(processes, blocks):
    times = {"compiling": {"with": [], "without": []}, "calling": {"with": [], "without": []}}
    for seed in range(processes):
        # Several, since where memory lies differs between them, and with the order of sets.
        lines = subprocess.run(
            [sys.executable, "-c", WORKER, str(blocks)],
            env={**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.splitlines()
        for what, side, seconds in map(json.loads, lines):
            times[what][side].append(seconds)
    held = [
        show("compiling a small model", *times["compiling"].values(), 1.01),
        show("a compiled call", *times["calling"].values(), 1.01),
    ]
    return all(held)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1, help="part of the pairs (default: 1)")
    scale = parser.parse_args().scale
    held = [
        bare_start(int(1500 * scale)),
        dynamo_import(max(2, int(40 * scale))),
        long_running(max(1, int(12 * scale)), 20),
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
