"""Higher-order operators and function transforms in calls that succeed."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ._recording import calls, compiled
from ._registry import scenario
from ._watch import watch


def operator(module: str, name: str) -> Any:
    """Return an operator from a module that not every release has."""
    return getattr(importlib.import_module(f"torch._higher_order_ops.{module}"), name)


def choose(x: torch.Tensor) -> Any:
    """Call ``cond``."""
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


@scenario("side-effect-tables", "self-referring-closures")
def cond_compiled() -> object:
    """``torch.cond`` in a compiled function."""
    return calls(compiled(choose))


@scenario("side-effect-tables", "self-referring-closures")
def cond_eager() -> object:
    """``torch.cond`` outside ``torch.compile``, which compiles itself."""
    return calls(choose)


@scenario("side-effect-tables", "self-referring-closures")
def cond_with_a_closure() -> object:
    """The branches of ``torch.cond`` close over a tensor."""
    weight = watch(cell=torch.ones(1))

    @compiled
    def run(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y * weight, lambda y: y - weight, (x,))

    return calls(run)


@scenario("side-effect-tables", "self-referring-closures")
def cond_nested() -> object:
    """A branch of ``torch.cond`` calls it again."""

    def run(x: torch.Tensor) -> Any:
        return torch.cond(x.max() > 0, choose, lambda y: y + 0.5, (x,))

    return calls(compiled(run))


@scenario("side-effect-tables", "self-referring-closures")
def cond_in_a_module() -> object:
    """The branches of ``torch.cond`` use layers of a module."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda y: self.linear(y), lambda y: y.cos(), (x,))

    module = watch(module=Gated().requires_grad_(False))
    for parameter in module.parameters():
        torch.nn.init.constant_(watch(parameter=parameter), 0.25)
    return calls(compiled(module), 2)


@scenario("side-effect-tables", "self-referring-closures")
def while_loop_compiled() -> object:
    """``while_loop`` in a compiled function."""
    while_loop = operator("while_loop", "while_loop")

    def run(x: torch.Tensor) -> Any:
        return while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x,))[0]

    return calls(compiled(run))


@scenario("side-effect-tables", "self-referring-closures")
def while_loop_eager() -> object:
    """``while_loop`` outside ``torch.compile``."""
    while_loop = operator("while_loop", "while_loop")
    return calls(lambda x: while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x,))[0])


@scenario("side-effect-tables", "self-referring-closures", torch=">=2.6")
def scan_compiled() -> object:
    """``scan`` in a compiled function."""
    scan = operator("scan", "scan")

    def run(x: torch.Tensor) -> Any:
        return scan(lambda total, y: (total + y, total.sin()), torch.zeros(2), x)[1]

    return calls(compiled(run), 2)


@scenario("side-effect-tables", "self-referring-closures", torch=">=2.6")
def scan_eager() -> object:
    """``scan`` outside ``torch.compile``."""
    scan = operator("scan", "scan")

    def run(x: torch.Tensor) -> Any:
        return scan(lambda total, y: (total + y, total.sin()), torch.zeros(2), x)[1]

    return calls(run, 2)


@scenario("self-referring-closures", torch=">=2.6")
def associative_scan_compiled() -> object:
    """``associative_scan`` in a compiled function."""
    associative_scan = operator("associative_scan", "associative_scan")

    def run(x: torch.Tensor) -> Any:
        return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")

    return calls(compiled(run), 2)


@scenario("side-effect-tables", "self-referring-closures")
def map_compiled() -> object:
    """The ``map`` operator in a compiled function."""
    control_flow = importlib.import_module("functorch.experimental.control_flow")
    return calls(compiled(lambda x: control_flow.map(lambda y: y.sin() + 1, x)), 2)


@scenario("side-effect-tables", "self-referring-closures")
def map_eager() -> object:
    """The ``map`` operator outside ``torch.compile``."""
    control_flow = importlib.import_module("functorch.experimental.control_flow")
    return calls(lambda x: control_flow.map(lambda y: y.sin() + 1, x), 2)


@scenario("side-effect-tables", "translator-state", "self-referring-closures")
def flex_attention_compiled() -> object:
    """``flex_attention`` with a score function in a compiled function."""
    from torch.nn.attention.flex_attention import flex_attention

    def run(q: torch.Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2)

    return calls(compiled(lambda x: run(x.reshape(1, 1, -1, 16))), 16)


@scenario("side-effect-tables", "translator-state", "self-referring-closures")
def flex_attention_with_a_closure() -> object:
    """The score function of ``flex_attention`` reads a tensor from a cell."""
    from torch.nn.attention.flex_attention import flex_attention

    bias = watch(cell=torch.arange(8.0))

    def run(q: torch.Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[j])

    return calls(compiled(lambda x: run(x.reshape(1, 1, -1, 16))), 16)


@scenario("side-effect-tables", "self-referring-closures")
def flex_attention_eager() -> object:
    """``flex_attention`` outside ``torch.compile``."""
    from torch.nn.attention.flex_attention import flex_attention

    def run(q: torch.Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2)

    return calls(lambda x: run(x.reshape(1, 1, -1, 16)), 16)


@scenario("translator-state", "self-referring-closures")
def vmap_compiled() -> object:
    """``vmap`` in a compiled function."""
    return calls(compiled(lambda x: torch.vmap(lambda y: y.sin() + y.sum())(x)), 2)


@scenario("translator-state", "self-referring-closures")
def vmap_with_a_closure() -> object:
    """The function given to ``vmap`` closes over a tensor and an argument."""
    weight = watch(cell=torch.ones(1))

    def run(x: torch.Tensor) -> Any:
        scale = x.sum()
        return torch.vmap(lambda y: y * weight + scale)(x)

    return calls(compiled(run), 2)


@scenario("translator-state", "self-referring-closures")
def grad_compiled() -> object:
    """``torch.func.grad`` in a compiled function."""
    return calls(compiled(lambda x: torch.func.grad(lambda y: y.sin().sum())(x)))


@scenario("translator-state", "self-referring-closures")
def grad_and_value_compiled() -> object:
    """``torch.func.grad_and_value`` of a function that closes over its caller's local."""

    def run(x: torch.Tensor) -> Any:
        scale = x.detach() * 2
        grad, value = torch.func.grad_and_value(lambda y: (y * scale).sum())(x)
        return grad + value

    return calls(compiled(run))


@scenario("translator-state", "self-referring-closures")
def vmap_of_grad_compiled() -> object:
    """``vmap`` over ``torch.func.grad``."""
    return calls(compiled(lambda x: torch.vmap(torch.func.grad(lambda y: y.sin().sum()))(x)), 2)


@scenario("translator-state", "self-referring-closures")
def jacrev_compiled() -> object:
    """``torch.func.jacrev`` in a compiled function."""
    return calls(compiled(lambda x: torch.func.jacrev(torch.sin)(x)))


@scenario("self-referring-closures")
def jvp_compiled() -> object:
    """``torch.func.jvp`` in a compiled function."""
    return calls(compiled(lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1]))


@scenario("translator-state", "self-referring-closures")
def vjp_compiled() -> object:
    """``torch.func.vjp`` in a compiled function."""
    return calls(compiled(lambda x: torch.func.vjp(torch.sin, x)[1](x)[0]))


@scenario("self-referring-closures")
def checkpoint_compiled() -> object:
    """A checkpointed function is differentiated."""

    def run(x: torch.Tensor) -> Any:
        return checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False)

    return calls(compiled(run), grad=True)


@scenario("self-referring-closures")
def checkpoint_compiled_aot() -> object:
    """A checkpointed function is differentiated, by AOT Autograd."""

    def run(x: torch.Tensor) -> Any:
        return checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False)

    return calls(compiled(run, backend="aot_eager"), grad=True)


@scenario("self-referring-closures")
def checkpoint_of_compiled() -> object:
    """A compiled function is checkpointed."""
    run = compiled(lambda y: y.sin().cos(), backend="aot_eager")
    return calls(lambda x: checkpoint(run, x, use_reentrant=False), grad=True)


@scenario("self-referring-closures", torch=">=2.8")
def nested_region_compiled() -> object:
    """A function marked with ``nested_compile_region`` is called twice."""
    region = torch.compiler.nested_compile_region(lambda x: x.sin() + 1)
    return calls(compiled(lambda x: region(region(x))))


@scenario("translator-state", "self-referring-closures")
def wrapped_with_a_context() -> object:
    """A transform is called in a context manager, beside a graph break."""

    def run(x: torch.Tensor) -> Any:
        with contextlib.nullcontext():
            y = torch.vmap(torch.sin)(x)
        torch._dynamo.graph_break()
        return y + torch.func.grad(lambda z: z.sum())(x)

    return calls(compiled(run))


@scenario("self-referring-closures")
def foreach_operator() -> object:
    """A ``_foreach`` operator gets a list of inputs."""
    return calls(compiled(lambda x: torch._foreach_add([x, x + 1], 1)[1]))
