"""An operator without a meta kernel returns a view of its input under ``FakeTensorMode``.

torch 2.0 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import contextlib
import gc
import sys
import traceback
import weakref

import torch
from torch._subclasses import FakeTensorMode

# Fake tensors run the real kernel only of operators in PyTorch's own namespaces.
library = torch.library.Library("vision", "FRAGMENT")
library.define("flat(Tensor(a) x) -> Tensor(a)")
library.impl("flat", lambda x: x.view(-1), "CPU")


def provoke():
    with FakeTensorMode():
        torch.ops.vision.flat(torch.ones(2, 3))


def caller():
    held = {"a local of the caller"}
    with contextlib.suppress(NotImplementedError):
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
