"""Graph breaks of every kind in calls that succeed: what they were given must die with them."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from ._recording import calls, compiled
from ._registry import scenario
from ._watch import watch


class Local:
    """An object of the user's own, that compiled code reads."""

    def __init__(self, value: float = 2.0) -> None:
        self.value = value


def broken(x: torch.Tensor) -> torch.Tensor:
    """Break the graph, where it is called."""
    y = x.sin()
    torch._dynamo.graph_break()
    return y + x


@scenario("symbol-bindings", "self-referring-closures")
def break_explicit() -> object:
    """``graph_break()`` is called, and what lies before is used after it."""
    return calls(compiled(lambda x: broken(x) + 1))


@scenario("symbol-bindings", "self-referring-closures")
def break_at_the_top() -> object:
    """``graph_break()`` is called in the compiled function itself."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + x

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_twice() -> object:
    """Two graph breaks, each with a local that lives across it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        z = y + x
        torch._dynamo.graph_break()
        return z * y

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_print() -> object:
    """``print`` of a tensor breaks the graph."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print(y)
        return y * x

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_item() -> object:
    """``item()`` breaks the graph, and its number goes on."""

    def run(x: torch.Tensor) -> torch.Tensor:
        scale = x.sum().item()
        return x * scale

    return calls(compiled(run))


@scenario("fake-tensor-errors", "self-referring-closures")
def break_tolist() -> object:
    """``tolist()`` of a tensor of sizes is used to split another."""

    def run(x: torch.Tensor) -> Any:
        sizes = (x > -9).long().tolist()
        return x.sin() + len(sizes)

    return calls(compiled(run))


@scenario("self-referring-closures")
def tolist_captured() -> object:
    """``tolist()`` of a tensor is captured as symbols."""

    def run(x: torch.Tensor) -> Any:
        first, *_ = (x > -9).long().tolist()
        return x * first

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return calls(compiled(run))


@scenario("self-referring-closures")
def break_item_captured() -> object:
    """``item()`` is captured as a symbol, without a graph break."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return calls(compiled(run))


@scenario("self-referring-closures")
def break_numpy() -> object:
    """A tensor becomes a numpy array and comes back."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1) * x

    return calls(compiled(run))


@scenario("data-dependent-branches", "self-referring-closures")
def break_data_dependent_branch() -> object:
    """A branch on a tensor's value is taken."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if y.sum() > 0:
            return y * 2
        return y - 1

    return calls(compiled(run))


@scenario("data-dependent-branches", "symbol-bindings", "self-referring-closures")
def break_data_dependent_branch_inlined() -> object:
    """A branch on a tensor's value is taken in a helper."""

    def pick(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    return calls(compiled(lambda x: pick(x + 1) + x))


@scenario("data-dependent-branches", "self-referring-closures")
def break_while() -> object:
    """A ``while`` loop runs until a tensor is large enough."""

    def run(x: torch.Tensor) -> torch.Tensor:
        while x.sum() < 9:
            x = x + 1
        return x

    return calls(compiled(run))


@scenario("fake-tensor-errors", "symbol-bindings", "self-referring-closures")
def break_nonzero() -> object:
    """An operator whose output size depends on data breaks the graph."""
    return calls(compiled(lambda x: x.nonzero().float() + 1))


@scenario()
def break_in_for_loop() -> object:
    """A graph break inside a ``for`` loop over a range makes Dynamo skip the frame."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for step in range(2):
            x = x + step
            torch._dynamo.graph_break()
        return x

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_in_try() -> object:
    """A graph break inside ``try`` / ``finally``."""

    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            y = broken(x)
        finally:
            x = x + 1
        return y * x

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_in_no_grad() -> object:
    """A graph break inside ``torch.no_grad()``, that the resume function enters again."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
            torch._dynamo.graph_break()
            return y + x

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_disabled_function() -> object:
    """A function that is kept out of Dynamo is called in the middle."""

    @torch.compiler.disable
    def checksum(x: torch.Tensor) -> float:
        return float(x.sum())

    return calls(compiled(lambda x: (x + 1) * checksum(x)))


@scenario("symbol-bindings", "self-referring-closures")
def break_nested_helpers() -> object:
    """The graph breaks three helpers deep, each with a local of its own."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        torch._dynamo.graph_break()
        return y + x

    def middle(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return inner(y) + y

    return calls(compiled(lambda x: middle(x) + x))


@scenario("symbol-bindings", "self-referring-closures")
def break_logging() -> object:
    """A log call breaks the graph."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        logging.getLogger("user").debug("step")
        return y + x

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_warning() -> object:
    """A warning is issued by a compiled function."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        warnings.warn("slow", UserWarning, stacklevel=1)
        return y + x

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_builtin() -> object:
    """A builtin that Dynamo does not know is called with a user's object."""

    def run(x: torch.Tensor, local: Local) -> torch.Tensor:
        y = x.sin()
        size = hash(local) * 0
        return y + size + local.value

    run_compiled = compiled(run)
    local = watch(object=Local())
    return calls(lambda x: run_compiled(x, local))


@scenario("symbol-bindings", "self-referring-closures")
def break_with_a_local_object() -> object:
    """An object is made before a graph break and used after it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        local = Local(3.0)
        y = x * local.value
        torch._dynamo.graph_break()
        local.value += 1
        return y + local.value

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_with_a_list_of_inputs() -> object:
    """A list of tensors is an input, and lives across a graph break."""

    def run(x: torch.Tensor) -> torch.Tensor:
        values = [x, x + 1]
        torch._dynamo.graph_break()
        values.append(values[0] * 2)
        return torch.stack(values)

    return calls(compiled(run))


@scenario("translator-state", "symbol-bindings", "self-referring-closures")
def break_with_a_closure() -> object:
    """A cell is written before a graph break and read after it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        total = x

        def add(y: torch.Tensor) -> None:
            nonlocal total
            total = total + y

        add(x.sin())
        torch._dynamo.graph_break()
        add(x.cos())
        return total

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_returns_what_is_used() -> object:
    """What a graph break returns is an argument of the call that goes on."""

    @torch.compiler.disable
    def fetch(x: torch.Tensor) -> Any:
        return watch(fetched=Local(float(x.shape[0])))

    def run(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * fetch(x).value

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def break_in_backward_pass() -> object:
    """A compiled function breaks the graph and its result is differentiated."""
    return calls(compiled(lambda x: broken(x) * 2, backend="aot_eager"), grad=True)


@scenario("symbol-bindings", "self-referring-closures")
def break_explained() -> object:
    """``torch._dynamo.explain`` counts graph breaks."""
    found = torch._dynamo.explain(broken)(watch(input=torch.ones(3)))
    return found.graph_count, found.graph_break_count


@scenario("side-effect-tables", "self-referring-closures")
def break_setattr_on_an_object() -> object:
    """An attribute of a user's object is set before a graph break."""
    local = watch(object=Local())

    def run(x: torch.Tensor, local: Local) -> torch.Tensor:
        local.value = local.value + 1
        torch._dynamo.graph_break()
        return x * local.value

    run_compiled = compiled(run)
    return [calls(lambda x: run_compiled(x, local)), local.value]
