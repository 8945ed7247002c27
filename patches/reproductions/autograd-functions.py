"""A compiled function calls a custom ``autograd.Function``; nothing is raised.

torch 2.4 - 2.15.  Exits 1 while the input outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def caller():
    run = torch.compile(lambda x: Square.apply(x), backend="eager")
    x = torch.ones(3, requires_grad=True)
    run(x).sum().backward()
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
