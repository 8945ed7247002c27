"""Higher-order operators and function transforms whose bodies raise or break the graph."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as run_checkpoint

from ._recording import compiled
from ._registry import scenario


def breaking(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Break the graph, as the body of an operator must not."""
    torch._dynamo.graph_break()
    return x.sin()


def raising(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Raise in the body of an operator."""
    raise ValueError("the body failed")


def operator(module: str, name: str) -> Any:
    """Return an operator from a module that not every release has."""
    return getattr(importlib.import_module(f"torch._higher_order_ops.{module}"), name)


@scenario("fullgraph-errors", "higher-order-errors")
def cond_breaks() -> object:
    """A branch of ``torch.cond`` breaks the graph."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, breaking, torch.cos, (x,))

    return compiled(run)(torch.ones(3))


@scenario("observed-exceptions", "fullgraph-errors", "higher-order-errors")
def cond_raises() -> object:
    """A branch of ``torch.cond`` raises."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, raising, lambda y: y.cos(), (x,))

    return compiled(run)(torch.ones(3))


@scenario("fullgraph-errors", "higher-order-errors")
def cond_mismatched_outputs() -> object:
    """The branches of ``torch.cond`` return tensors of different shapes."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y[:2], lambda y: y.unsqueeze(0), (x,))

    return compiled(run)(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def cond_wrong_shape() -> object:
    """A branch of ``torch.cond`` multiplies matrices whose shapes do not match."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y @ y, lambda y: y, (x,))

    return compiled(run)(torch.ones(2, 3))


@scenario("fullgraph-errors", "higher-order-errors")
def cond_fullgraph() -> object:
    """A branch of ``torch.cond`` breaks the graph under ``fullgraph``."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, breaking, lambda y: y.cos(), (x,))

    return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors", "higher-order-errors")
def cond_without_compile() -> object:
    """``torch.cond`` is called outside ``torch.compile`` with a branch that breaks."""
    return torch.cond(torch.tensor(True), breaking, lambda y: y.cos(), (torch.ones(3),))


@scenario("observed-exceptions", "fullgraph-errors", "higher-order-errors")
def while_loop_raises() -> object:
    """The body of a ``while_loop`` raises."""
    while_loop = operator("while_loop", "while_loop")

    def run(x: torch.Tensor) -> Any:
        return while_loop(lambda y: y.sum() < 9, lambda y: (raising(y),), (x,))

    return compiled(run)(torch.ones(3))


@scenario("fullgraph-errors", "higher-order-errors")
def while_loop_breaks() -> object:
    """The condition of a ``while_loop`` breaks the graph."""
    while_loop = operator("while_loop", "while_loop")

    def run(x: torch.Tensor) -> Any:
        return while_loop(lambda y: breaking(y).sum() < 9, lambda y: (y * 2,), (x,))

    return compiled(run)(torch.ones(3))


@scenario("observed-exceptions", "fullgraph-errors", "higher-order-errors", torch=">=2.6")
def scan_raises() -> object:
    """The function given to ``scan`` raises."""
    scan = operator("scan", "scan")

    def run(x: torch.Tensor) -> Any:
        return scan(lambda total, y: (raising(y), total), x[0] * 0, x)

    return compiled(run)(torch.ones(3, 2))


@scenario("fullgraph-errors", "higher-order-errors", torch=">=2.6")
def scan_breaks() -> object:
    """The function given to ``scan`` breaks the graph."""
    scan = operator("scan", "scan")

    def run(x: torch.Tensor) -> Any:
        return scan(lambda total, y: (total + breaking(y), total.clone()), x[0] * 0, x)

    return compiled(run)(torch.ones(3, 2))


@scenario("fullgraph-errors", torch=">=2.6")
def associative_scan_breaks() -> object:
    """The function given to ``associative_scan`` breaks the graph."""
    associative_scan = operator("associative_scan", "associative_scan")

    def run(x: torch.Tensor) -> Any:
        return associative_scan(lambda a, b: breaking(a) + b, x, 0, combine_mode="generic")

    return compiled(run, fullgraph=True)(torch.ones(3, 2))


@scenario("fullgraph-errors", "higher-order-errors")
def map_breaks() -> object:
    """The function given to the ``map`` operator breaks the graph."""
    control_flow = importlib.import_module("functorch.experimental.control_flow")

    return compiled(lambda x: control_flow.map(breaking, x))(torch.ones(3, 2))


@scenario("fullgraph-errors", torch=">=2.5")
def flex_attention_breaks() -> object:
    """The score function of ``flex_attention`` breaks the graph."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 1, 16, 16)
    return compiled(lambda q: flex_attention(q, q, q, score_mod=breaking), fullgraph=True)(q)


@scenario("observed-exceptions", "fullgraph-errors", torch=">=2.5")
def flex_attention_raises() -> object:
    """The score function of ``flex_attention`` raises."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 1, 16, 16)
    return compiled(lambda q: flex_attention(q, q, q, score_mod=raising), fullgraph=True)(q)


@scenario()
def vmap_breaks() -> object:
    """The function given to ``vmap`` breaks the graph."""
    return compiled(lambda x: torch.vmap(breaking)(x))(torch.ones(3, 2))


@scenario("observed-exceptions")
def vmap_raises() -> object:
    """The function given to ``vmap`` raises."""
    return compiled(lambda x: torch.vmap(raising)(x))(torch.ones(3, 2))


@scenario("observed-exceptions", "fake-tensor-errors")
def vmap_wrong_shape() -> object:
    """The function given to ``vmap`` multiplies vectors of different lengths."""
    return compiled(lambda x, y: torch.vmap(torch.dot)(x, y))(torch.ones(2, 3), torch.ones(2, 4))


@scenario("observed-exceptions")
def grad_raises() -> object:
    """The function given to ``torch.func.grad`` raises."""
    return compiled(lambda x: torch.func.grad(raising)(x))(torch.ones(3))


@scenario("observed-exceptions")
def jacrev_raises() -> object:
    """The function given to ``torch.func.jacrev`` raises."""
    return compiled(lambda x: torch.func.jacrev(raising)(x))(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def functional_call_wrong_shape() -> object:
    """``functional_call`` is given a parameter of the wrong shape."""
    layer = torch.nn.Linear(3, 3)

    def run(w: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.func.functional_call(layer, {"weight": w}, (x,))

    return compiled(run)(torch.ones(3, 4), torch.ones(2, 3))


@scenario("observed-exceptions")
def checkpoint_raises() -> object:
    """A checkpointed function raises."""

    def run(x: torch.Tensor) -> Any:
        return run_checkpoint(raising, x, use_reentrant=False)

    return compiled(run)(torch.ones(3, requires_grad=True))


@scenario("fullgraph-errors")
def checkpoint_fullgraph() -> object:
    """A checkpointed function breaks the graph under ``fullgraph``."""

    def run(x: torch.Tensor) -> Any:
        return run_checkpoint(breaking, x, use_reentrant=False)

    return compiled(run, fullgraph=True)(torch.ones(3, requires_grad=True))


@scenario("fullgraph-errors", "higher-order-errors", torch=">=2.8")
def nested_region_breaks() -> object:
    """A function marked with ``nested_compile_region`` breaks the graph."""
    region = torch.compiler.nested_compile_region(breaking)
    return compiled(lambda x: region(x) + 1)(torch.ones(3))


@scenario("observed-exceptions", "fullgraph-errors", "higher-order-errors", torch=">=2.8")
def nested_region_raises() -> object:
    """A function marked with ``nested_compile_region`` raises."""
    region = torch.compiler.nested_compile_region(raising)
    return compiled(lambda x: region(x) + 1)(torch.ones(3))
