"""A model is exported with ``strict=False``; model and program are dropped.

torch 2.4 - 2.15.  Exits 1 while the model outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch
import torch.export


def caller():
    model = torch.nn.Linear(2, 2)
    torch.export.export(model, (torch.ones(3, 2),), strict=False)
    return weakref.ref(model)


try:
    gc.disable()
    watched = caller()
except Exception:
    traceback.print_exc()
    sys.exit(2)
pinned = watched() is not None
gc.collect()
print(f"The model is pinned: {pinned}; after a full collection: {watched() is not None}")
sys.exit(pinned)
