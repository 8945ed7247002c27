"""Tensor subclasses, torch-function and dispatch modes, and DDP, with code of theirs that fails."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ._recording import compiled
from ._registry import scenario


class Guarded(torch.Tensor):
    """A tensor subclass that refuses one function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cos:
            raise PermissionError("cos")
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A wrapper subclass whose dispatch refuses to multiply."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            raise ValueError("wrappers do not multiply")
        args = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return Wrapper(func(*args, **(kwargs or {})))


class Refusing(TorchFunctionMode):
    """A mode that refuses one function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cos:
            raise PermissionError("cos")
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """A dispatch mode that refuses one operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cos.default:
            raise PermissionError("cos")
        return func(*args, **(kwargs or {}))


class Model(torch.nn.Module):
    """A module of the user's own: a linear layer and an activation."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))


def one_process_group() -> contextlib.ExitStack:
    """Make this process a group of its own, without the network."""
    # No generator context manager: on CPython 3.13.0 contextlib itself keeps what leaves its body.
    stack = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    store = torch.distributed.FileStore(os.path.join(folder, "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    stack.callback(torch.distributed.destroy_process_group)
    return stack


@scenario("observed-exceptions")
def subclass_function() -> object:
    """The ``__torch_function__`` of a tensor subclass raises."""
    return compiled(lambda x: torch.cos(x + 1))(torch.ones(3).as_subclass(Guarded))


@scenario()
def subclass_dispatch() -> object:
    """The ``__torch_dispatch__`` of a wrapper subclass raises for a fake tensor."""
    return compiled(lambda x: x * x, backend="aot_eager")(Wrapper(torch.ones(3)))


@scenario("observed-exceptions", "fake-tensor-errors")
def subclass_wrong_shape() -> object:
    """Tensors of a subclass have shapes that do not match."""
    left, right = (torch.ones(2, size).as_subclass(Guarded) for size in (3, 4))
    return compiled(lambda x, y: x + y)(left, right)


@scenario("observed-exceptions", "fake-tensor-errors")
def function_mode() -> object:
    """A torch-function mode that is active around the call raises."""
    with Refusing():
        return compiled(lambda x: torch.cos(x + 1))(torch.ones(3))


@scenario("observed-exceptions")
def function_mode_in_the_function() -> object:
    """A torch-function mode is entered in the compiled function and raises."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        with Refusing():
            return torch.cos(x + 1)

    return run(torch.ones(3))


@scenario("observed-exceptions")
def distributed_module() -> object:
    """A module wrapped in ``DistributedDataParallel`` calls a helper that raises."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("closed")

    with one_process_group():
        return compiled(DistributedDataParallel(Model(gate)))(torch.ones(2, 3))


@scenario("observed-exceptions", "fake-tensor-errors")
def distributed_wrong_shape() -> object:
    """A module wrapped in ``DistributedDataParallel`` gets an input of the wrong width."""
    with one_process_group():
        return compiled(DistributedDataParallel(Model(torch.relu)))(torch.ones(2, 4))


@scenario()
def distributed_backend_fails() -> object:
    """The backend raises for a part of a graph that DDP's optimizer has split."""

    def failing(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise ValueError("unsupported graph")

    with one_process_group():
        model = DistributedDataParallel(Model(torch.relu), bucket_cap_mb=1)
        return torch.compile(model, backend=failing)(torch.ones(2, 3))
