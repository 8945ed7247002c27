"""What `deactivate()` takes, as a ratio: over one pass of `gc.get_referrers` on the same heap.

    python benchmarks/deactivate.py

With every module imported that has patched functions, plain and with 5 million objects more.
"""

import gc
import statistics
import sys
import time

import dynamo_cyclefix
from dynamo_cyclefix._commands.loading import load_torch

LIMIT = 1.5
ROUNDS = 15


def seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def ratio(what):
    times = ([], [])
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        dynamo_cyclefix.activate()
        times[1].append(seconds(lambda: gc.get_referrers(main)))
        times[0].append(seconds(dynamo_cyclefix.deactivate))
    gc.enable()
    ours, one_pass = map(statistics.median, times)
    print(
        f"{what}: deactivate() {ours * 1e3:.1f} ms, one pass {one_pass * 1e3:.1f} ms,"
        f" ratio {ours / one_pass:.3f} (limit {LIMIT})",
        flush=True,
    )
    return ours / one_pass <= LIMIT


def main():
    load_torch()
    assert all(patch.state != "pending" for patch in dynamo_cyclefix.status().patches)
    held = [ratio("plain")]
    extra = [[i] for i in range(5_000_000)]
    held.append(ratio(f"{len(extra):,} objects more"))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
