"""Errors of an operator that Dynamo, or export, runs on fake tensors or on example values."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._dynamo import config

from ._recording import compiled
from ._registry import scenario

_library = torch.library.Library("dynamo_cyclefix_scenarios", "DEF")
_library.define("no_fake(Tensor x) -> Tensor")
_library.impl("no_fake", lambda x: x.clone(), "CPU")
_library.define("bad_fake(Tensor x) -> Tensor")
_library.impl("bad_fake", lambda x: x.clone(), "CPU")
_library.define("no_kernel(Tensor x) -> Tensor")
_library.define("interrupted(Tensor x) -> Tensor")
_library.define("warning(Tensor x) -> Tensor")
_library.define("plain(Tensor x) -> Tensor")
_library.impl("plain", lambda x: x.clone(), "CPU")
ops = torch.ops.dynamo_cyclefix_scenarios


@torch.library.register_fake("dynamo_cyclefix_scenarios::bad_fake", lib=_library)
def _bad_fake(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the fake implementation failed")


@torch.library.register_fake("dynamo_cyclefix_scenarios::interrupted", lib=_library)
def _interrupted_fake(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


@torch.library.register_fake("dynamo_cyclefix_scenarios::warning", lib=_library)
def _warning_fake(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("the operator is deprecated", DeprecationWarning, stacklevel=2)
    return torch.empty_like(x)


@torch.library.register_fake("dynamo_cyclefix_scenarios::plain", lib=_library)
def _plain_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_shape() -> object:
    """A compiled function multiplies matrices whose shapes do not match."""
    return compiled(lambda x, w: x @ w)(torch.ones(2, 3), torch.ones(4, 5))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_shape_many_calls() -> object:
    """One compiled function gets malformed input again and again, each time caught."""
    run = compiled(lambda x, w: x @ w)
    caught = []
    for _ in range(3):
        try:
            run(torch.ones(2, 3), torch.ones(4, 5))
        except RuntimeError as error:
            caught.append(type(error).__name__)
    return caught


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_shape_after_a_good_call() -> object:
    """A compiled function serves one request, then gets a malformed one."""
    run = compiled(lambda x, w: x @ w)
    run(torch.ones(2, 3), torch.ones(3, 2))
    return run(torch.ones(2, 3), torch.ones(2, 3))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_shape_dynamic() -> object:
    """A mismatch is met with symbolic sizes."""
    return compiled(lambda x, w: x + w, dynamic=True)(torch.ones(6), torch.ones(7))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_shape_in_a_module() -> object:
    """A linear layer gets an input of the wrong width."""
    return compiled(torch.nn.Sequential(torch.nn.Linear(4, 2)))(torch.ones(2, 3))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_shape_inlined() -> object:
    """A helper multiplies matrices whose shapes do not match."""

    def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, w)

    return compiled(lambda x, w: project(x, w) + 1)(torch.ones(2, 3), torch.ones(4, 5))


@scenario("fake-tensor-errors")
def wrong_shape_caught_in_the_function() -> object:
    """The compiled function itself handles the ``RuntimeError`` of a mismatch."""

    @compiled
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        try:
            return x @ w
        except RuntimeError:
            return x

    return run(torch.ones(2, 3), torch.ones(4, 5))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_shape_converted_by_the_caller() -> object:
    """The caller turns the error into one of its own with ``raise ... from``."""
    try:
        return compiled(torch.cat)([torch.ones(2, 3), torch.ones(3, 2)])
    except RuntimeError as error:
        raise ValueError("bad request") from error


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_view() -> object:
    """A tensor is viewed in a shape of another size."""
    return compiled(lambda x: x.view(4))(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_broadcast_in_place() -> object:
    """An in-place addition would have to enlarge its target."""
    return compiled(lambda x, y: x.add_(y))(torch.ones(3), torch.ones(2, 4))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_channels() -> object:
    """A convolution gets an input with the wrong number of channels."""
    return compiled(torch.nn.Conv2d(3, 4, 1))(torch.ones(1, 2, 5, 5))


@scenario("fake-tensor-errors")
def wrong_dimension() -> object:
    """A reduction asks for a dimension that does not exist."""
    return compiled(lambda x: x.sum(dim=3))(torch.ones(2, 2))


@scenario("observed-exceptions", "fake-tensor-errors")
def wrong_argument_type() -> object:
    """An operator gets an argument of a type that its schema does not take."""
    return compiled(lambda x: torch.ops.aten.sum.dim_IntList(x, ["a"]))(torch.ones(2, 2))


@scenario("fake-tensor-errors")
def index_past_the_end() -> object:
    """A tensor is indexed past its end with a constant."""
    return compiled(lambda x: x[5] + 1)(torch.ones(3))


@scenario("fake-tensor-errors")
def device_mismatch() -> object:
    """Tensors of two devices are added (``meta`` against ``cpu``)."""
    return compiled(lambda x, y: x + y)(torch.ones(3), torch.ones(3, device="meta"))


@scenario("observed-exceptions", "fake-tensor-errors")
def embedding_dtype() -> object:
    """An embedding layer gets indices that are not integers."""
    return compiled(torch.nn.Embedding(4, 2))(torch.ones(3))


@scenario("fake-tensor-errors")
def custom_op_without_fake() -> object:
    """A custom operator has no fake implementation."""
    return compiled(lambda x: ops.no_fake(x + 1))(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def custom_op_with_a_bad_fake() -> object:
    """The fake implementation of a custom operator raises."""
    return compiled(lambda x: ops.bad_fake(x + 1))(torch.ones(3))


@scenario("fake-tensor-errors")
def custom_op_without_a_kernel() -> object:
    """A custom operator has a schema and nothing else."""
    return compiled(lambda x: ops.no_kernel(x + 1))(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def custom_op_wrong_call() -> object:
    """A custom operator is called without its argument."""
    return compiled(lambda x: ops.no_fake() + x)(torch.ones(3))


@scenario("fake-tensor-errors")
def nonzero() -> object:
    """An operator whose output size depends on data breaks the graph."""
    return compiled(lambda x: torch.nonzero(x + 1) + 1)(torch.ones(3))


@scenario("fake-tensor-errors", "fullgraph-errors")
def nonzero_fullgraph() -> object:
    """An operator whose output size depends on data is met under ``fullgraph``."""
    return compiled(lambda x: torch.nonzero(x + 1) + 1, fullgraph=True)(torch.ones(3))


@scenario("fake-tensor-errors")
def boolean_mask() -> object:
    """A tensor is indexed with a mask, in an inlined function."""

    def positive(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    return compiled(lambda x: positive(x) + 1)(torch.ones(3))


@scenario("fullgraph-errors")
def item_fullgraph() -> object:
    """``Tensor.item`` is met under ``fullgraph``."""
    return compiled(lambda x: x * x.sum().item(), fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def captured_item_in_a_shape() -> object:
    """A captured scalar decides a branch that cannot be decided."""

    def run(x: torch.Tensor) -> torch.Tensor:
        size = x.sum().int().item()
        if size > 2:
            return torch.ones(size)
        return x

    with config.patch(capture_scalar_outputs=True):
        return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def captured_item_in_an_operator() -> object:
    """A captured scalar of unknown size is given to an operator that must know it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        size = x.sum().int().item()
        return torch.ones(size).view(size, -1, 2) + torch.ones(size + 1)

    with config.patch(capture_scalar_outputs=True):
        return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def captured_nonzero_in_a_branch() -> object:
    """A captured output size decides a branch that cannot be decided."""

    def run(x: torch.Tensor) -> torch.Tensor:
        found = torch.nonzero(x)
        return found + 1 if found.shape[0] > 2 else found

    with config.patch(capture_dynamic_output_shape_ops=True):
        return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("fake-tensor-errors")
def constant_result_of_a_bad_value() -> object:
    """A function assumed constant needs a real value, which cannot be computed."""

    @torch.compiler.assume_constant_result
    def rank(factor: torch.Tensor) -> int:
        return int(factor.sum())

    return compiled(lambda x: x * rank(torch.linalg.cholesky(x)))(-torch.eye(2))


@scenario("observed-exceptions", "fake-tensor-errors")
def numpy_function() -> object:
    """A NumPy function that Dynamo traces gets arrays whose shapes do not match."""
    import numpy as np

    def run(x: Any, y: Any) -> Any:
        return np.dot(x, y)

    return compiled(run)(np.ones((2, 3)), np.ones((4, 5)))
