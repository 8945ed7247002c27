"""A model is exported with ``strict=True``; model and program are dropped.

torch 2.10 - 2.15.  Exits 1 while a parameter outlives a full
collection, 0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch
import torch.export


def caller():
    model = torch.nn.Linear(2, 2)
    torch.export.export(model, (torch.ones(3, 2),), strict=True)
    return weakref.ref(model.weight)


try:
    watched = caller()
except Exception:
    traceback.print_exc()
    sys.exit(2)
gc.collect()  # A program that was exported is a cycle of its own.
pinned = watched() is not None
print(f"After a full collection a parameter is pinned: {pinned}")
sys.exit(pinned)
