"""A kernel template refuses the input that inductor offers it while it tunes.

torch 2.9 - 2.15.  Exits 1 while the caller's frame outlives the call,
0 once it does not, 2 where this cannot run.
"""

import contextlib
import gc
import sys
import traceback
import weakref

from torch._inductor.codegen.common import KernelTemplate


class Refusing(KernelTemplate):
    def generate(self, **options):
        raise NotImplementedError("float16 only")


def provoke():
    Refusing("refusing").choice_or_none()


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
