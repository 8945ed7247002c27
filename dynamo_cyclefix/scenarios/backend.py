"""Backends and later compile stages that fail: Dynamo's own, AOT Autograd's, Inductor's."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import contextlib
import operator
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config

from ._recording import compiled
from ._registry import scenario
from .fake_tensor import ops


def failing(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Fail to compile, as a backend of the user's own may."""
    raise ValueError("unsupported graph")


def failing_later(
    graph_module: torch.fx.GraphModule, example_inputs: list[Any]
) -> Callable[..., Any]:
    """Compile to code that fails when it runs."""

    def run(*args: Any) -> Any:
        raise RuntimeError("device lost")

    return run


def double(x: torch.Tensor) -> torch.Tensor:
    """Do something simple, for what fails elsewhere."""
    return x * 2


def reproducers(level: int) -> contextlib.ExitStack:
    """Have Dynamo write a reproducer of a failing graph, in a folder that is removed again."""
    # No generator context manager: on CPython 3.13.0 contextlib itself keeps what leaves its body.
    stack = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.callback(os.chdir, os.getcwd())
    os.chdir(folder)
    stack.enter_context(
        config.patch(repro_after="dynamo", repro_level=level, debug_dir_root=folder)
    )
    return stack


@scenario()
def backend_fails() -> object:
    """A backend of the user's own raises while it compiles."""
    return torch.compile(double, backend=failing)(torch.ones(3))


@scenario()
def backend_fails_many_calls() -> object:
    """A backend raises at every call, and the caller falls back to eager."""
    run = torch.compile(double, backend=failing)
    caught = []
    for _ in range(3):
        try:
            run(torch.ones(3))
        except Exception as error:
            caught.append(type(error).__name__)
    return caught


@scenario()
def backend_fails_at_a_break() -> object:
    """A backend raises for the part of a function before a graph break."""

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    return torch.compile(run, backend=failing)(torch.ones(3))


@scenario()
def backend_fails_at_run_time() -> object:
    """The code that a backend returned raises when it runs."""
    return torch.compile(double, backend=failing_later)(torch.ones(3))


@scenario()
def backend_returns_nothing() -> object:
    """A backend returns something that cannot be called."""
    return torch.compile(double, backend=lambda graph, inputs: None)(torch.ones(3))


@scenario()
def backend_skips_the_frame() -> object:
    """A backend raises ``NotImplementedError``."""

    def partial(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise NotImplementedError("later")

    return torch.compile(double, backend=partial)(torch.ones(3))


@scenario()
def backend_error_suppressed() -> object:
    """``suppress_errors`` makes Dynamo fall back to eager when the backend raises."""
    with config.patch(suppress_errors=True):
        return torch.compile(double, backend=failing)(torch.ones(3))


@scenario()
def backend_state_is_dumped() -> object:
    """A backend's code raises at run time while ``repro_level=1`` asks for a dump."""
    with reproducers(level=1):
        return torch.compile(double, backend=failing_later)(torch.ones(3))


@scenario("backend-errors")
def backend_is_inaccurate() -> object:
    """A backend computes something else, which ``repro_level=4`` finds."""

    def inaccurate(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
            node.args = (node.args[0], 3)
        graph_module.recompile()
        return graph_module

    with reproducers(level=4):
        return torch.compile(double, backend=inaccurate)(torch.ones(3))


@scenario()
def aot_forward_fails() -> object:
    """The forward compiler given to AOT Autograd raises."""
    backend = aot_autograd(fw_compiler=failing)
    return torch.compile(double, backend=backend)(torch.ones(3))


@scenario()
def aot_backward_fails() -> object:
    """The backward compiler given to AOT Autograd raises, in ``backward``."""
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=failing)
    loss = torch.compile(lambda x: x.sin().sum(), backend=backend)(
        torch.ones(3, requires_grad=True)
    )
    loss.backward()
    return loss.item()


@scenario("backward-compile-errors")
def aot_backward_fails_dynamic() -> object:
    """The backward compiler raises ahead of time, with symbolic sizes, and is not needed."""
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=failing)

    def run(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.shape[0]).view(-1, x.shape[0]).sum(1)

    return torch.compile(run, backend=backend, dynamic=True)(torch.ones(5, requires_grad=True))


@scenario("observed-exceptions", "fake-tensor-errors")
def aot_traces_a_failing_op() -> object:
    """AOT Autograd meets a custom operator whose autograd formula fails to trace."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.view(7)

    x = torch.ones(3, requires_grad=True)
    return compiled(lambda x: Broken.apply(x) + 1, backend="aot_eager")(x)


@scenario("observed-exceptions", "fake-tensor-errors")
def aot_mutated_view() -> object:
    """AOT Autograd is given an input that must not be changed in place."""
    x = torch.ones(3, requires_grad=True)
    return compiled(lambda x: x.add_(1), backend="aot_eager")(x)


@scenario()
def inductor_pass_fails() -> object:
    """A pass of the user's own over Inductor's graph raises."""

    def rewrite(graph: torch.fx.Graph) -> None:
        raise ValueError("the pattern does not apply")

    with inductor_config.patch(pre_grad_custom_pass=rewrite):
        return torch.compile(double, backend="inductor")(torch.ones(3))


@scenario()
def inductor_lowering_fails() -> object:
    """Inductor meets a custom operator that it may not fall back for."""
    # Without the pattern matcher, whose patterns take seconds to prepare.
    with inductor_config.patch(implicit_fallbacks=False, pattern_matcher=False):
        return torch.compile(lambda x: ops.plain(x), backend="inductor")(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def inductor_wrong_shape() -> object:
    """Shapes do not match in a function compiled with Inductor, which is never reached."""
    return torch.compile(lambda x, w: x @ w)(torch.ones(2, 3), torch.ones(4, 5))
