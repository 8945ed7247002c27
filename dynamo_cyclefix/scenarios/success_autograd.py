"""Backward in calls that succeed: autograd functions, hooks, optimizers, compiled autograd."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import compiled_autograd

from ._recording import calls, compiled, recording
from ._registry import scenario
from ._watch import watch


class Doubling(torch.autograd.Function):
    """An autograd function that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0


class Scaling(torch.autograd.Function):
    """An autograd function with an argument that is no tensor, kept on ``ctx``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None


class Split(torch.autograd.Function):
    """An autograd function with a ``setup_context``."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def enable() -> Any:
    """Return compiled autograd's context manager, by the name that the release has for it."""
    return getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable


@scenario("self-referring-closures")
def backward_eager_backend() -> object:
    """A compiled function is differentiated; the backend runs its graph eagerly."""
    return calls(compiled(lambda x: x.sin() * x), grad=True)


@scenario("self-referring-closures")
def backward_aot_eager() -> object:
    """A compiled function is differentiated by AOT Autograd."""
    return calls(compiled(lambda x: x.sin() * x, backend="aot_eager"), grad=True)


@scenario("self-referring-closures")
def backward_of_a_view() -> object:
    """A compiled function returns a view of its input, and is differentiated."""
    return calls(compiled(lambda x: x.view(-1)[1:], backend="aot_eager"), grad=True)


@scenario("self-referring-closures")
def backward_dynamic() -> object:
    """A compiled function with symbolic sizes is differentiated."""
    run = compiled(lambda x: x.sin() * x.shape[0], backend="aot_eager", dynamic=True)
    return calls(run, grad=True)


@scenario("self-referring-closures")
def backward_not_run() -> object:
    """A compiled function needs gradients that nobody asks for."""
    run = compiled(lambda x: x.sin() * x, backend="aot_eager")
    return calls(lambda x: run(x.requires_grad_()))


@scenario("autograd-functions")
def autograd_function_eager() -> object:
    """An autograd function is compiled; the backend runs its graph eagerly."""
    return calls(compiled(lambda x: Doubling.apply(x) + 1), grad=True)


@scenario("self-referring-closures")
def autograd_function_aot_eager() -> object:
    """An autograd function is compiled by AOT Autograd."""
    return calls(compiled(lambda x: Doubling.apply(x) + 1, backend="aot_eager"), grad=True)


@scenario("autograd-functions")
def autograd_function_saves_an_attribute() -> object:
    """An autograd function keeps a number on its context."""
    return calls(compiled(lambda x: Scaling.apply(x, 3.0) + 1), grad=True)


@scenario("autograd-functions")
def autograd_function_with_setup_context() -> object:
    """An autograd function with a ``setup_context`` is compiled."""
    return calls(compiled(lambda x: Split.apply(x) + 1), grad=True)


@scenario("autograd-functions")
def autograd_function_breaks() -> object:
    """The graph breaks beside an autograd function."""

    def run(x: torch.Tensor) -> Any:
        y = Doubling.apply(x)
        torch._dynamo.graph_break()
        return Doubling.apply(y) + x

    return calls(compiled(run), grad=True)


@scenario("symbol-bindings", "self-referring-closures")
def autograd_function_forward_breaks() -> object:
    """The graph breaks in the forward of an autograd function."""

    class Breaking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    return calls(compiled(lambda x: Breaking.apply(x) + 1), grad=True)


@scenario("self-referring-closures")
def autograd_function_without_gradient() -> object:
    """An autograd function is compiled for an input that needs no gradient."""
    return calls(compiled(lambda x: Doubling.apply(x) + 1))


@scenario("autograd-functions")
def autograd_function_called_often() -> object:
    """One compiled autograd function is called ten times."""
    run = compiled(lambda x: Doubling.apply(x) + 1)
    return [calls(run, grad=True) for _ in range(3)]


@scenario("self-referring-closures")
def hook_on_an_input() -> object:
    """An input has a gradient hook."""
    run = compiled(lambda x: x.sin() + 1, backend="aot_eager")

    def call(x: torch.Tensor) -> Any:
        x.register_hook(watch(hook=lambda grad: grad * 2))
        return run(x)

    return calls(call, grad=True)


@scenario("symbol-bindings", "self-referring-closures")
def hook_in_the_graph() -> object:
    """A gradient hook is registered in a compiled function."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * 2)
        return y + 1

    return calls(compiled(run), grad=True)


@scenario("symbol-bindings", "self-referring-closures")
def hook_in_the_graph_with_a_closure() -> object:
    """A gradient hook that closes over a tensor is registered in a compiled function."""
    scale = watch(cell=torch.ones(1))

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * scale)
        return y + 1

    return calls(compiled(run), grad=True)


@scenario("self-referring-closures")
def hook_after_accumulation() -> object:
    """A hook runs when a gradient has been accumulated."""
    run = compiled(lambda x: x.sin() + 1, backend="aot_eager")

    def double(x: torch.Tensor) -> None:
        x.grad = x.grad * 2

    def call(x: torch.Tensor) -> Any:
        x.register_post_accumulate_grad_hook(double)
        return run(x)

    return calls(call, grad=True)


@scenario("self-referring-closures")
def saved_tensors_hooks() -> object:
    """Saved tensors are packed and unpacked by hooks of the user's."""
    run = compiled(lambda x: x.sin() * x, backend="aot_eager")

    def call(x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            return run(x)

    return calls(call, grad=True)


@scenario("symbol-bindings", "self-referring-closures")
def gradient_in_the_graph() -> object:
    """A compiled function calls ``torch.autograd.grad`` itself."""

    def run(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)[0]

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def backward_in_a_compiled_step() -> object:
    """A compiled training step calls ``backward``, which breaks the graph."""
    weight = watch(parameter=torch.nn.Parameter(torch.ones(1)))

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight).sum()
        loss.backward()
        return loss.detach() + weight.grad

    return calls(compiled(run))


@scenario("self-referring-closures")
def optimizer_step_compiled() -> object:
    """An optimizer's step is compiled."""
    weight = watch(parameter=torch.nn.Parameter(torch.ones(3)))
    optimizer = watch(optimizer=torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    step = compiled(optimizer.step)
    for _ in range(3):
        weight.grad = watch(gradient=torch.ones(3))
        step()
    return weight.detach()


@scenario("self-referring-closures")
def optimizer_adam_compiled() -> object:
    """Adam's step is compiled, its state made in the first call."""
    weight = watch(parameter=torch.nn.Parameter(torch.ones(3)))
    optimizer = watch(optimizer=torch.optim.Adam([weight], lr=0.1))
    step = compiled(optimizer.step)
    for _ in range(3):
        weight.grad = watch(gradient=torch.ones(3))
        step()
    return weight.detach()


@scenario("self-referring-closures")
def gradients_accumulate() -> object:
    """Gradients of three calls accumulate in one parameter."""
    weight = watch(parameter=torch.nn.Parameter(torch.ones(1)))
    run = compiled(lambda x: x * weight, backend="aot_eager")
    return calls(run, grad=True), weight.grad


@scenario("self-referring-closures")
def double_backward_of_eager() -> object:
    """A second derivative of a function whose graph runs eagerly."""
    run = compiled(lambda x: (x.sin() ** 2).sum())

    def call(x: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad(run(x), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    return calls(lambda x: call(x.requires_grad_()))


@scenario()
def compiled_autograd_backward() -> object:
    """Backward is run under compiled autograd."""

    def call(x: torch.Tensor) -> Any:
        x.requires_grad_()
        with enable()(lambda graph: compiled(graph)):
            x.sin().sum().backward()
        return x.grad

    return calls(call)


@scenario()
def compiled_autograd_with_a_hook() -> object:
    """Backward with a gradient hook is run under compiled autograd."""

    def call(x: torch.Tensor) -> Any:
        x.requires_grad_()
        x.register_hook(watch(hook=lambda grad: grad * 2))
        with enable()(lambda graph: compiled(graph)):
            x.sin().sum().backward()
        return x.grad

    return calls(call)


@scenario("symbol-bindings", "self-referring-closures")
def compiled_autograd_of_a_compiled_step() -> object:
    """A compiled training step runs its backward with compiled autograd."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sin().sum()
        loss.backward()
        return loss.detach()

    run = torch.compile(step, backend=recording("eager"))
    with torch._dynamo.config.patch(compiled_autograd=True):
        return calls(lambda x: run(x.requires_grad_()))
