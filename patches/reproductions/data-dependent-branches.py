"""A branch on the value of a tensor breaks the graph; nothing is raised.

torch 2.11 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch
import torch._dynamo

# Dynamo collects the young generations after a compile, which hides this until they are old.
if hasattr(torch._dynamo.config, "run_gc_after_compile"):
    torch._dynamo.config.run_gc_after_compile = False


@torch.compile(backend="eager")
def branching(x):
    y = x + 1
    if y.sum() > 0:
        return y * 2
    return y


def provoke():
    branching(torch.ones(3))


def caller():
    held = {"a local of the caller"}
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
