"""Compiled artifacts that cannot be saved, loaded or served."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from ._registry import scenario


@torch.compiler.allow_in_graph
def opaque(x: torch.Tensor) -> torch.Tensor:
    """Do something that a cache cannot look into."""
    return x.sin()


@scenario("artifact-errors", torch=">=2.15")
def cache_refuses_a_graph() -> object:
    """A graph cannot be looked up in the cache of AOT Autograd, which is made an error."""
    strict = functorch_config.patch(enable_autograd_cache=True, strict_autograd_cache=True)
    with strict, inductor_config.patch(pattern_matcher=False):
        return torch.compile(lambda x: opaque(x) + 1)(torch.ones(3))


@scenario("artifact-errors", torch=">=2.11")
def cache_cannot_keep_a_graph() -> object:
    """What was compiled cannot be pickled for the cache (whose saving function is called)."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    class Entry:
        def pre_save(self) -> None:
            pass

    with functorch_config.patch(strict_autograd_cache=True):
        return AOTAutogradCache.save("dynamo_cyclefix", Entry(), remote=False)


@scenario("artifact-errors", torch=">=2.10")
def precompiled_entry_cannot_be_read() -> object:
    """One of the entries to be saved is broken (torch's saving function is called directly)."""
    from torch._dynamo.precompile_context import PrecompileContext

    class Entry:
        def debug_info(self) -> dict[str, Any]:
            return {}

    PrecompileContext.record_dynamo_cache_entry(Entry(), "broken")
    try:
        return PrecompileContext.save_to_dynamo_cache()
    finally:
        PrecompileContext.clear()


@scenario("artifact-errors", torch=">=2.15")
def function_of_a_module_that_is_gone() -> object:
    """A pickled function's module cannot be imported (torch's unpickler is called directly)."""
    from torch._dynamo.package import FunctionPicklerBase

    return FunctionPicklerBase._unpickle_fn_from_module(
        "dynamo_cyclefix_absent", None, opaque.__code__, "opaque", "opaque", None
    ).__name__


@scenario("artifact-errors", torch=">=2.15")
def served_guards_raise() -> object:
    """A model compiled ahead of time is called with a key whose comparison fails."""
    from torch._dynamo.aot_compile import ModelInput

    class Key:
        def __hash__(self) -> int:
            return hash("scale")

        def __eq__(self, other: object) -> bool:
            raise ValueError("not comparable")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, options: dict[Any, int]) -> torch.Tensor:
            return x * 2 if "scale" in options else x

    x = torch.ones(3)
    model = torch.compile(Model(), backend="eager", fullgraph=True)
    model._aot_compile([ModelInput((x, {}), {}, [])])
    return model(x, {Key(): 1})


@scenario("artifact-errors", torch=">=2.11")
def unpicklable_part_is_looked_for() -> object:
    """``GraphPickler`` looks for what cannot be pickled."""
    from torch.fx._graph_pickler import GraphPickler

    return GraphPickler.debug_dumps({"scale": 2, "activation": [lambda x: x]}, verbose=False)
