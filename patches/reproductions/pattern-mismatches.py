"""One of inductor's passes looks for squares and meets a product.

torch 2.4 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import gc
import sys
import traceback
import weakref

import torch
from torch._inductor import pattern_matcher as pm
from torch.fx.experimental.proxy_tensor import make_fx


def provoke():
    squares = pm.PatternMatcherPass()
    square = pm.CallFunction(torch.ops.aten.mul.Tensor, pm.KeywordArg("x"), pm.KeywordArg("x"))
    pm.register_graph_pattern(square, pass_dict=squares)(lambda match, x: None)
    squares.apply(make_fx(lambda x, y: x * y)(torch.ones(3), torch.ones(3)))


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
