"""Limits on compilation: recompiles that are refused, sizes that must not change."""

from __future__ import annotations

import torch
from torch._dynamo import config

from ._recording import compiled
from ._registry import scenario


def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Make a graph that depends on a constant."""
    return x * factor + len("abc" * factor)


@scenario()
def recompile_is_an_error() -> object:
    """``error_on_recompile`` forbids the second graph."""
    run = compiled(scaled)
    with config.patch(error_on_recompile=True):
        run(torch.ones(3), 1)
        return run(torch.ones(3, dtype=torch.float64), 1)


@scenario()
def recompile_limit() -> object:
    """A function reaches the limit of its recompiles and runs eagerly from there on."""
    run = compiled(scaled, dynamic=False)
    with config.patch(cache_size_limit=2):
        return [run(torch.ones(1), factor).item() for factor in range(4)]


@scenario()
def recompile_limit_fullgraph() -> object:
    """A function compiled with ``fullgraph`` reaches the limit of its recompiles."""
    run = compiled(scaled, dynamic=False, fullgraph=True)
    with config.patch(cache_size_limit=2):
        return [run(torch.ones(1), factor).item() for factor in range(4)]


@scenario(torch=">=2.6")
def stance_fails_on_recompile() -> object:
    """``set_stance("fail_on_recompile")`` forbids a recompile."""
    run = compiled(scaled)
    run(torch.ones(3), 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        return run(torch.ones(3, dtype=torch.float64), 1)


@scenario()
def marked_dynamic() -> object:
    """A size that was marked dynamic turns out to be constant."""
    x = torch.ones(4)
    torch._dynamo.mark_dynamic(x, 0)
    return compiled(lambda x: x + torch.ones(4))(x)


@scenario("observed-exceptions")
def errors_suppressed() -> object:
    """``suppress_errors`` is on while a helper raises."""

    def lookup(name: str) -> float:
        raise KeyError(name)

    with config.patch(suppress_errors=True):
        return compiled(lambda x: x * lookup("gelu"))(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def errors_suppressed_wrong_shape() -> object:
    """``suppress_errors`` is on while shapes do not match."""
    with config.patch(suppress_errors=True):
        return compiled(lambda x, w: x @ w)(torch.ones(2, 3), torch.ones(4, 5))
