"""A compiled function multiplies matrices whose shapes do not match.

torch 2.0 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import contextlib
import gc
import sys
import traceback
import weakref

import torch


def provoke():
    torch.compile(lambda x, w: x @ w, backend="eager")(torch.ones(2, 3), torch.ones(4, 5))


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
