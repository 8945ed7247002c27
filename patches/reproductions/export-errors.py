"""Export finds a dimension constant that was declared dynamic.

torch 2.1 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import contextlib
import gc
import sys
import traceback
import weakref

import torch
import torch._dynamo


class Model(torch.nn.Module):
    def forward(self, x):
        return x + torch.ones(4)


def provoke():
    shapes = {"x": {0: torch.export.Dim("batch")}}
    torch.export.export(Model(), (torch.ones(4),), strict=False, dynamic_shapes=shapes)


def caller():
    held = {"a local of the caller"}
    with contextlib.suppress(torch._dynamo.exc.UserError):
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
