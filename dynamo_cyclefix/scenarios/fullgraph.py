"""What ``fullgraph=True`` turns from a graph break into an error for the user."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch

from ._recording import compiled
from ._registry import scenario


@scenario("fullgraph-errors")
def fullgraph_break() -> object:
    """A graph break is asked for under ``fullgraph``."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_break_inlined() -> object:
    """A graph break is met in a helper of a helper."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    return compiled(lambda x: outer(x), fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_break_many_calls() -> object:
    """A function that cannot be captured is called again and again."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    function = compiled(run, fullgraph=True)
    caught = []
    for _ in range(3):
        try:
            function(torch.ones(3))
        except Exception as error:
            caught.append(type(error).__name__)
    return caught


@scenario("fullgraph-errors")
def fullgraph_data_dependent_branch() -> object:
    """A branch on the value of a tensor is met under ``fullgraph``."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("observed-exceptions", "fullgraph-errors")
def fullgraph_observed_exception() -> object:
    """A helper raises under ``fullgraph``."""

    def lookup(name: str) -> float:
        raise KeyError(name)

    return compiled(lambda x: x * lookup("gelu"), fullgraph=True)(torch.ones(3))


@scenario("observed-exceptions", "fullgraph-errors")
def fullgraph_observed_cause() -> object:
    """A helper raises an exception with a cause under ``fullgraph``."""

    def activation(name: str) -> float:
        try:
            return {"relu": 1.0}[name]
        except KeyError as error:
            raise ValueError(name) from error

    return compiled(lambda x: x * activation("gelu"), fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_direct_raise() -> object:
    """The compiled function itself raises under ``fullgraph``."""

    def run(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("never")

    return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors")
def fullgraph_wrong_shape() -> object:
    """Shapes do not match under ``fullgraph``."""
    return compiled(lambda x, w: x @ w, fullgraph=True)(torch.ones(2, 3), torch.ones(4, 5))


@scenario("fullgraph-errors")
def fullgraph_disabled_function() -> object:
    """A function that is kept out of Dynamo is called under ``fullgraph``."""

    @torch.compiler.disable
    def checksum(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    return compiled(lambda x: x + checksum(x), fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_disabled_module() -> object:
    """A submodule that is kept out of Dynamo is called under ``fullgraph``."""
    layer = torch.compiler.disable(torch.nn.Linear(3, 3))
    return compiled(torch.nn.Sequential(layer), fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_printing() -> object:
    """A helper prints a tensor under ``fullgraph``."""

    def show(x: torch.Tensor) -> torch.Tensor:
        print(x)
        return x

    return compiled(lambda x: show(x + 1), fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_in_a_module() -> object:
    """A module whose ``forward`` breaks the graph is compiled with ``fullgraph``."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x

    return compiled(torch.nn.Sequential(Layer()), fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_method() -> object:
    """``Module.compile`` is used in place, with ``fullgraph``, and the graph breaks."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.tolist()[int(x.sum())]

    layer = Layer()
    layer.compile(backend="eager", fullgraph=True)
    return layer(torch.ones(3))


@scenario("fullgraph-errors")
def fullgraph_converted_by_the_caller() -> object:
    """The caller reports the failed capture as an error of its own."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    try:
        return compiled(run, fullgraph=True)(torch.ones(3))
    except Exception as error:
        raise RuntimeError("the model cannot be compiled") from error


@scenario()
def fullgraph_verbose() -> object:
    """The graph breaks under ``fullgraph`` with verbose errors asked for."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with torch._dynamo.config.patch(verbose=True):
        return compiled(run, fullgraph=True)(torch.ones(3))


@scenario("fullgraph-errors", torch=">=2.8")
def error_on_graph_break_region() -> object:
    """A graph break happens in a region that forbids it."""
    import torch._dynamo.decorators as decorators

    region = getattr(decorators, "error_on_graph_break", None) or decorators.set_fullgraph

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        with region(True):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    return run(torch.ones(3))


@scenario("observed-exceptions", "fake-tensor-errors", torch=">=2.10")
def ahead_of_time_compile() -> object:
    """``aot_compile`` of a function is given shapes that do not match."""
    function = compiled(lambda x, w: x @ w, fullgraph=True)
    return function.aot_compile(((torch.ones(2, 3), torch.ones(4, 5)), {}))


@scenario("fullgraph-errors", torch=">=2.10")
def ahead_of_time_break() -> object:
    """``aot_compile`` of a function meets a graph break."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    return compiled(run, fullgraph=True).aot_compile(((torch.ones(3),), {}))
