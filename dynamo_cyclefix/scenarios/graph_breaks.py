"""Graph breaks that Dynamo handles: it raises and swallows, and the user sees only a result."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import torch

from ._recording import compiled
from ._registry import scenario


@scenario("data-dependent-branches")
def data_dependent_branch() -> object:
    """A branch on the value of a tensor splits the graph."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if y.sum() > 0:
            return y * 2
        return y

    return run(torch.ones(3))


@scenario("data-dependent-branches")
def data_dependent_branch_inlined() -> object:
    """A branch on the value of a tensor is taken in a helper."""

    def clip(x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1:
            return x.clamp(max=1)
        return x

    return compiled(lambda x: clip(x + 1) + 1)(torch.ones(3))


@scenario()
def data_dependent_assertion() -> object:
    """An assertion about the value of a tensor fails at run time."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        assert x.sum() > 5, "too small"
        return x + 1

    return run(torch.ones(3))


@scenario("data-dependent-branches")
def data_dependent_loop() -> object:
    """A ``while`` loop runs until a tensor is large enough."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        while x.sum() < 20:
            x = x * 2
        return x

    return run(torch.ones(3))


@scenario()
def loop_with_a_break() -> object:
    """A graph break inside a ``for`` loop makes Dynamo skip the frame."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    return run(torch.ones(3))


@scenario()
def disabled_function() -> object:
    """A function that is kept out of Dynamo is called in the middle."""

    @torch.compiler.disable
    def checksum(x: torch.Tensor) -> float:
        return float(x.sum())

    return compiled(lambda x: (x + 1) * checksum(x))(torch.ones(3))


@scenario()
def disabled_function_raises() -> object:
    """A function that is kept out of Dynamo raises at run time."""

    @torch.compiler.disable
    def fetch(name: str) -> float:
        raise KeyError(name)

    return compiled(lambda x: (x + 1) * fetch("weights"))(torch.ones(3))


@scenario("data-dependent-branches")
def explain() -> object:
    """``torch._dynamo.explain`` reports the graph breaks of a function."""

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2 if x.sum() > 0 else x

    found = torch._dynamo.explain(run)(torch.ones(3))
    return found.graph_count, found.graph_break_count


@scenario("observed-exceptions")
def explain_raising() -> object:
    """``torch._dynamo.explain`` is given a function whose helper raises."""

    def lookup(name: str) -> float:
        raise KeyError(name)

    return torch._dynamo.explain(lambda x: x * lookup("gelu"))(torch.ones(3))
