"""``torch.fx.symbolic_trace`` traces a module; module and trace are dropped.

torch 2.4 - 2.15.  Exits 1 while the module outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch
import torch.fx


def caller():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    torch.fx.symbolic_trace(model)
    return weakref.ref(model)


try:
    gc.disable()
    watched = caller()
except Exception:
    traceback.print_exc()
    sys.exit(2)
pinned = watched() is not None
gc.collect()
print(f"The module is pinned: {pinned}; after a full collection: {watched() is not None}")
sys.exit(pinned)
