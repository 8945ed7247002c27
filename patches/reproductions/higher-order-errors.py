"""The body of a higher-order operator breaks the graph.

torch 2.9 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import contextlib
import gc
import sys
import traceback
import weakref

import torch


def breaking(x):
    torch._dynamo.graph_break()
    return x.sin()


def choose(x):
    return torch.cond(x.sum() > 0, breaking, torch.cos, (x,))


def provoke():
    # The wrapper of torch.compile keeps a part of it too: `cur_exn`, as in fullgraph-errors.py.
    torch.compile(choose, backend="eager")(torch.ones(3))


def caller():
    held = {"a local of the caller"}
    with contextlib.suppress(RuntimeError):
        provoke()
    return weakref.ref(held)


try:
    gc.disable()
    watched = caller()
except Exception:
    traceback.print_exc()
    sys.exit(2)
pinned = watched() is not None
gc.collect()
print(f"The caller's frame is pinned: {pinned}; after a full collection: {watched() is not None}")
sys.exit(pinned)
