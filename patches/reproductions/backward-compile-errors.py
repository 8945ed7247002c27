"""A backward graph with symbolic sizes fails to compile ahead of time and is not needed.

torch 2.5 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch
from torch._dynamo.backends.common import aot_autograd

# Dynamo collects the young generations after a compile, which hides this until they are old.
if hasattr(torch._dynamo.config, "run_gc_after_compile"):
    torch._dynamo.config.run_gc_after_compile = False


def refusing(graph_module, example_inputs):
    raise ValueError("unsupported graph")


def provoke():
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=refusing)

    @torch.compile(backend=backend, dynamic=True)
    def run(x):
        return (x.sin() * x.shape[0]).view(-1, x.shape[0]).sum(1)

    run(torch.ones(5, requires_grad=True))


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
