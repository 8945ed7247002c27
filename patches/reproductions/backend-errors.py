"""``repro_level = 4`` finds a backend that computes something else.

torch 2.4 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import contextlib
import gc
import operator
import os
import sys
import tempfile
import traceback
import weakref

import torch
from torch._dynamo import config
from torch._dynamo.exc import BackendCompilerFailed

folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)


def inaccurate(graph_module, example_inputs):
    for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
        node.args = (node.args[0], 3)
    graph_module.recompile()
    return graph_module


def provoke():
    with config.patch(repro_after="dynamo", repro_level=4, debug_dir_root=folder.name):
        torch.compile(lambda x: x * 2, backend=inaccurate)(torch.ones(3))


def caller():
    held = {"a local of the caller"}
    with contextlib.suppress(BackendCompilerFailed):
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
