"""The graph breaks while compiled code enumerates a module's layers.

torch 2.7 - 2.15.  Exits 1 while the input outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ReLU() for _ in range(2))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x) + index
            torch._dynamo.graph_break()
        return x


def caller():
    x = torch.ones(3)
    torch.compile(Layers(), backend="eager")(x)
    return weakref.ref(x)


try:
    gc.disable()
    watched = caller()
except Exception:
    traceback.print_exc()
    sys.exit(2)
pinned = watched() is not None
gc.collect()
print(f"The input is pinned: {pinned}; after a full collection: {watched() is not None}")
sys.exit(pinned)
