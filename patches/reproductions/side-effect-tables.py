"""Compiled code sets an attribute of a module; nothing is raised.

torch 2.12 - 2.15.  Exits 1 while the module outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch


class Remembering(torch.nn.Module):
    last = None

    def forward(self, x):
        self.last = x + 1
        return self.last * 2


def caller():
    model = Remembering()
    torch.compile(model, backend="eager")(torch.ones(3))
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
