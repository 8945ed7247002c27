"""Export that fails: violated constraints, graph breaks, errors in the exported program."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

from ._registry import scenario


def module(forward: Callable[..., Any]) -> torch.nn.Module:
    """Return a module with the given ``forward``, since export takes modules only."""

    class Exported(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return forward(*args)

    return Exported()


def export(forward: Callable[..., Any], *args: torch.Tensor, **options: Any) -> object:
    """Export ``forward`` for ``args`` and return the name of what comes out."""
    return type(torch.export.export(module(forward), args, **options)).__name__


def breaking(x: torch.Tensor) -> torch.Tensor:
    """Break the graph."""
    torch._dynamo.graph_break()
    return x + 1


def raising(x: torch.Tensor) -> torch.Tensor:
    """Raise."""
    raise KeyError("absent")


def branching(x: torch.Tensor) -> torch.Tensor:
    """Branch on the value of a tensor."""
    return x + 1 if x.sum() > 0 else x


@scenario("export-errors")
def export_strict_constraint() -> object:
    """Strict export finds a dimension constant that was declared dynamic."""
    shapes = {"args": ({0: Dim("batch")},)}
    return export(lambda x: x + torch.ones(4), torch.ones(4), strict=True, dynamic_shapes=shapes)


@scenario("export-errors")
def export_non_strict_constraint() -> object:
    """Non-strict export finds a dimension constant that was declared dynamic."""
    shapes = {"args": ({0: Dim("batch")},)}
    return export(lambda x: x + torch.ones(4), torch.ones(4), strict=False, dynamic_shapes=shapes)


@scenario("export-errors")
def export_strict_range() -> object:
    """Strict export is given an example outside the declared range."""
    shapes = {"args": ({0: Dim("batch", min=5, max=9)},)}
    return export(lambda x: x + 1, torch.ones(4), strict=True, dynamic_shapes=shapes)


@scenario("export-errors")
def export_non_strict_range() -> object:
    """Non-strict export finds a condition that narrows the declared range."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 3 else x

    shapes = {"args": ({0: Dim("batch", min=2, max=9)},)}
    return export(forward, torch.ones(4), strict=False, dynamic_shapes=shapes)


@scenario("export-errors")
def export_related_dimensions() -> object:
    """Strict export finds two dimensions equal that were declared independent."""
    shapes = {"args": ({0: Dim("left")}, {0: Dim("right")})}
    return export(
        lambda x, y: x + y, torch.ones(4), torch.ones(4), strict=True, dynamic_shapes=shapes
    )


@scenario("export-errors")
def export_derived_dimension() -> object:
    """Non-strict export is given an example that breaks a derived dimension."""
    batch = Dim("batch")
    shapes = {"args": ({0: batch}, {0: 2 * batch})}
    return export(
        lambda x, y: (x + 1, y + 1),
        torch.ones(4),
        torch.ones(7),
        strict=False,
        dynamic_shapes=shapes,
    )


@scenario("fullgraph-errors")
def export_strict_break() -> object:
    """Strict export meets a graph break."""
    return export(breaking, torch.ones(3), strict=True)


@scenario()
def export_non_strict_break() -> object:
    """Non-strict export meets a branch on the value of a tensor."""
    return export(branching, torch.ones(3), strict=False)


@scenario("fullgraph-errors")
def export_strict_branch() -> object:
    """Strict export meets a branch on the value of a tensor."""
    return export(branching, torch.ones(3), strict=True)


@scenario("observed-exceptions", "fullgraph-errors")
def export_strict_raises() -> object:
    """Strict export of a module whose helper raises."""
    return export(raising, torch.ones(3), strict=True)


@scenario()
def export_non_strict_raises() -> object:
    """Non-strict export of a module whose helper raises."""
    return export(raising, torch.ones(3), strict=False)


@scenario("observed-exceptions", "fake-tensor-errors")
def export_strict_wrong_shape() -> object:
    """Strict export meets shapes that do not match."""
    return export(lambda x: x @ x, torch.ones(2, 3), strict=True)


@scenario()
def export_non_strict_wrong_shape() -> object:
    """Non-strict export meets shapes that do not match."""
    return export(lambda x: x @ x, torch.ones(2, 3), strict=False)


@scenario("fake-tensor-errors", "fullgraph-errors")
def export_strict_item() -> object:
    """Strict export meets a size that depends on data and cannot be decided."""
    return export(lambda x: x[: int(x.sum().item())] + x, torch.ones(3), strict=True)


@scenario()
def export_non_strict_item() -> object:
    """Non-strict export meets a size that depends on data and cannot be decided."""
    return export(lambda x: x[: int(x.sum().item())] + x, torch.ones(3), strict=False)


@scenario("export-errors")
def dynamo_export_constraint() -> object:
    """``torch._dynamo.export`` is told of a dimension that is dynamic and is not."""
    x = torch.ones(4)
    torch._dynamo.mark_dynamic(x, 0)
    return torch._dynamo.export(lambda x: x + torch.ones(4))(x)


@scenario("fullgraph-errors")
def dynamo_export_break() -> object:
    """``torch._dynamo.export`` meets a graph break."""
    return torch._dynamo.export(breaking)(torch.ones(3))


@scenario("observed-exceptions", "fullgraph-errors")
def dynamo_export_raises() -> object:
    """``torch._dynamo.export`` of a function whose helper raises."""
    return torch._dynamo.export(lambda x: raising(x))(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def dynamo_export_wrong_shape() -> object:
    """``torch._dynamo.export`` meets shapes that do not match."""
    return torch._dynamo.export(lambda x: x @ x)(torch.ones(2, 3))


@scenario()
def trace_with_symbols() -> object:
    """``make_fx`` traces a branch on the value of a tensor with symbolic sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(branching, tracing_mode="symbolic")(torch.ones(3))
