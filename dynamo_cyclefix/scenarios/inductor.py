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

    square = pattern_matcher.PatternMatcherPass()
    x = pattern_matcher.KeywordArg("x")
    product = pattern_matcher.CallFunction(torch.ops.aten.mul.Tensor, x, x)
    pattern_matcher.register_graph_pattern(product, pass_dict=square)(lambda match, x: None)
    graph = make_fx(lambda x, y: x * y)(torch.ones(3), torch.ones(3))
    return square.apply(graph)


@scenario("pattern-mismatches")
def pattern_with_other_numbers() -> object:
    """A replacement matches until its numbers are compared, which is done last."""
    from torch._inductor import pattern_matcher

    replacements = pattern_matcher.PatternMatcherPass()
    pattern_matcher.register_replacement(
        lambda x: x.sum(0) * 2,
        lambda x: x.mul(2).sum(0),
        [torch.ones(2, 3)],
        pattern_matcher.fwd_only,
        replacements,
    )
    with FakeTensorMode():
        graph = make_fx(lambda x: x.sum(1) * 2, tracing_mode="fake")(torch.ones(2, 3))
    return replacements.apply(graph)


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
        def __init__(self) -> None:
            self.configs, self.compile_results, self.launchers = [object()], [], []

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
        def __init__(self) -> None:
            self.compile_results, self.launchers = [Kernel()], []
            self.triton_meta = {"device": None}
            self.device_props = types.SimpleNamespace(type="cpu")

    return Autotuner()._make_launchers()
