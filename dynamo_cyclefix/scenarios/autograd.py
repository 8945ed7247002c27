"""Failures around backward: hooks, autograd functions, compiled autograd."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import compiled_autograd

from ._recording import compiled, recording
from ._registry import scenario


def leaf() -> torch.Tensor:
    """Return an input that needs a gradient."""
    return torch.ones(3, requires_grad=True)


def refuse(grad: torch.Tensor) -> torch.Tensor:
    """Raise in a gradient hook."""
    raise ValueError("the gradient is refused")


class Failing(torch.autograd.Function):
    """An autograd function whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


class Rejecting(torch.autograd.Function):
    """An autograd function whose forward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no value")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Breaking(torch.autograd.Function):
    """An autograd function whose forward breaks the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def compiled_backward(loss: torch.Tensor) -> None:
    """Run backward under compiled autograd, by the name that the release has for it."""
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    with enable(lambda graph: compiled(graph)):
        loss.backward()


@scenario("observed-exceptions")
def autograd_function_forward() -> object:
    """The ``forward`` of an autograd function raises."""
    return compiled(lambda x: Rejecting.apply(x) + 1)(leaf())


@scenario("fullgraph-errors")
def autograd_function_fullgraph() -> object:
    """The ``forward`` of an autograd function breaks the graph under ``fullgraph``."""
    return compiled(lambda x: Breaking.apply(x) + 1, fullgraph=True)(leaf())


@scenario("observed-exceptions")
def autograd_function_backward() -> object:
    """The ``backward`` of an autograd function raises."""
    loss = compiled(lambda x: Failing.apply(x).sum())(leaf())
    loss.backward()
    return loss.item()


@scenario()
def backward_hook() -> object:
    """A hook on an input's gradient raises in ``backward``."""
    x = leaf()
    x.register_hook(refuse)
    loss = compiled(lambda x: x.sin().sum(), backend="aot_eager")(x)
    loss.backward()
    return loss.item()


@scenario("observed-exceptions")
def backward_hook_in_the_graph() -> object:
    """A hook that is registered in a compiled function raises in ``backward``."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(refuse)
        return y.sum()

    loss = run(leaf())
    loss.backward()
    return loss.item()


@scenario()
def backward_twice() -> object:
    """``backward`` is called twice on one graph."""
    loss = compiled(lambda x: x.sin().sum(), backend="aot_eager")(leaf())
    loss.backward()
    loss.backward()
    return loss.item()


@scenario()
def double_backward() -> object:
    """A second derivative is asked of a function that AOT Autograd compiled."""
    x = leaf()
    loss = compiled(lambda x: (x.sin() ** 2).sum(), backend="aot_eager")(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)


@scenario("observed-exceptions")
def compiled_autograd_hook() -> object:
    """A gradient hook raises while compiled autograd traces it."""
    x = leaf()
    x.register_hook(refuse)
    compiled_backward(x.sin().sum())
    return x.grad


@scenario("observed-exceptions")
def compiled_autograd_function() -> object:
    """The ``backward`` of an autograd function raises under compiled autograd."""
    compiled_backward(Failing.apply(leaf()).sum())
    return "no error"


@scenario("observed-exceptions", "fake-tensor-errors")
def compiled_autograd_wrong_shape() -> object:
    """A hook under compiled autograd multiplies by a tensor of another shape."""
    x = leaf()
    x.register_hook(lambda grad: grad @ torch.ones(4, 4))
    compiled_backward(x.sin().sum())
    return x.grad


@scenario()
def compiled_autograd_backend_fails() -> object:
    """The backend that compiled autograd is given raises."""

    def fail(graph: torch.fx.GraphModule) -> Any:
        raise ValueError("unsupported graph")

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    with enable(fail):
        leaf().sin().sum().backward()
    return "no error"


@scenario("observed-exceptions")
def compiled_autograd_setting() -> object:
    """A compiled training step runs its backward with compiled autograd and a hook raises."""
    x = leaf()
    x.register_hook(refuse)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sin().sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        return torch.compile(step, backend=recording("eager"))(x)


@scenario("observed-exceptions", "fake-tensor-errors")
def optimizer_step() -> object:
    """A compiled optimizer step meets a gradient of the wrong shape."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.state[weight]["momentum_buffer"] = torch.ones(4)
    return compiled(optimizer.step)()
