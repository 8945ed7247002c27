"""``GraphPickler`` looks for the part of an object that cannot be pickled.

torch 2.11 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

from torch.fx._graph_pickler import GraphPickler


def provoke():
    GraphPickler.debug_dumps({"scale": 2, "activation": [lambda x: x]}, verbose=False)


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
