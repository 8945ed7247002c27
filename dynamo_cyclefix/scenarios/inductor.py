"""Inductor at compile time: patterns that do not match, kernels that cannot be chosen."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ._registry import scenario


@scenario("pattern-mismatches")
def pattern_with_a_repeated_argument() -> object:
    """A pass of the user's own looks for squares and meets a product."""
    from torch._inductor import pattern_matcher

    squares = pattern_matcher.PatternMatcherPass()
    square = pattern_matcher.CallFunction(
        torch.ops.aten.mul.Tensor, pattern_matcher.KeywordArg("x"), pattern_matcher.KeywordArg("x")
    )
    pattern_matcher.register_graph_pattern(square, pass_dict=squares)(lambda match, x: None)
    return squares.apply(make_fx(lambda x, y: x * y)(torch.ones(3), torch.ones(3)))


@scenario("pattern-mismatches")
def pattern_with_other_numbers() -> object:
    """A replacement of the user's own matches until it is traced again with the graph's shapes."""
    from torch._inductor import pattern_matcher

    def search(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor + x.shape[0]

    replacements = pattern_matcher.PatternMatcherPass()
    pattern_matcher.register_replacement(
        search,
        lambda x, factor: (x + 1) * factor,
        [torch.ones(3)],
        pattern_matcher.fwd_only,
        replacements,
        scalar_workaround={"factor": 2},
    )
    with FakeTensorMode():
        return replacements.apply(make_fx(lambda x: x * 2 + 7)(torch.ones(2)))


@scenario("autotuning-errors", torch=">=2.9")
def template_cannot_be_used() -> object:
    """A kernel template of the user's own refuses the input that it is offered."""
    from torch._inductor.codegen.common import KernelTemplate

    class Refusing(KernelTemplate):
        def generate(self, **options: Any) -> Any:
            raise NotImplementedError("float16 only")

    return Refusing("refusing").choice_or_none()


@scenario("autotuning-errors", torch=">=2.8")
def benchmark_fails_in_a_subprocess() -> object:
    """A benchmark raises in autotuning's child process (asked for directly: no GPU)."""
    from torch._inductor.autotune_process import TuningProcess

    process = TuningProcess(None)
    try:
        process.put(functools.partial(operator.truediv, 1, 0))
        return process.get()
    finally:
        process.shutdown()


@scenario("autotuning-errors", torch=">=2.7")
def kernel_out_of_resources() -> object:
    """No Triton config fits the device (the autotuner's compile step is made to say so: no GPU)."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, OutOfResources

    class Autotuner(CachingAutotuner):
        configs, compile_results, launchers = (object(),), (), ()

        def __init__(self) -> None:
            pass

        def _precompile_config(self, config: object) -> Any:
            raise OutOfResources(96, 48, "shared memory")

    return Autotuner()._precompile_worker()


@scenario("autotuning-errors", torch=">=2.7,<2.14")
def launcher_out_of_resources() -> object:
    """No compiled kernel can be launched (the autotuner is given one that says so: no GPU)."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, OutOfResources

    class Kernel:
        config = types.SimpleNamespace(num_stages=1, kwargs={})

        def make_launcher(self) -> Any:
            raise OutOfResources(96, 48, "shared memory")

    class Autotuner(CachingAutotuner):
        compile_results, launchers = (Kernel(),), ()
        device_props = types.SimpleNamespace(type="cpu")

        def __init__(self) -> None:
            self.triton_meta = {"device": None}

    return Autotuner()._make_launchers()
