"""Modules in calls that succeed: attributes that are set, layers that are enumerated, hooks."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize

from ._recording import calls, compiled
from ._registry import scenario
from ._watch import watch


def watched(module: torch.nn.Module) -> torch.nn.Module:
    """Watch a module and its parameters, whose values are made the same in every process."""
    watch(module=module)
    for parameter in module.parameters():
        torch.nn.init.constant_(watch(parameter=parameter), 0.25)
    return module


class Layers(torch.nn.Module):
    """Two linear layers in a list."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
        self.broken = broken


class Enumerated(Layers):
    """The layers are enumerated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) + index
            if self.broken:
                torch._dynamo.graph_break()
        return x


class Zipped(Layers):
    """The layers are zipped with numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, layer in zip((1.0, 2.0), self.layers):  # noqa: B905
            x = layer(x) * scale
            if self.broken:
                torch._dynamo.graph_break()
        return x


class Comprehended(Layers):
    """The layers are called in a comprehension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


class Remembering(torch.nn.Module):
    """Keeps its last result in an attribute."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.broken = broken
        self.last: Any = None
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.last = y.detach()
        self.count += 1
        if self.broken:
            torch._dynamo.graph_break()
        return y + self.last


@scenario("self-referring-closures")
def module_linear() -> object:
    """A linear layer is compiled and called."""
    return calls(compiled(watched(torch.nn.Linear(2, 2))), 2)


@scenario("self-referring-closures")
def module_sequential_training() -> object:
    """A small network is trained for three steps."""
    model = watched(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = compiled(model, backend="aot_eager")
    told = calls(run, 2, grad=True)
    optimizer.step()
    return told, [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()]


@scenario("self-referring-closures")
def module_enumerates_layers() -> object:
    """A module enumerates its layers."""
    return calls(compiled(watched(Enumerated())), 2)


@scenario("translator-state", "self-referring-closures")
def module_enumerates_layers_and_breaks() -> object:
    """A module enumerates its layers, and the graph breaks in the loop."""
    return calls(compiled(watched(Enumerated(broken=True))), 2)


@scenario()
def module_zips_layers_and_breaks() -> object:
    """A module zips its layers with numbers, and the graph breaks in the loop."""
    return calls(compiled(watched(Zipped(broken=True))), 2)


@scenario("self-referring-closures")
def module_calls_layers_in_a_comprehension() -> object:
    """A module calls its layers in a list comprehension."""
    return calls(compiled(watched(Comprehended())), 2)


@scenario("side-effect-tables", "translator-state", "self-referring-closures")
def module_sets_an_attribute() -> object:
    """A module keeps its result in an attribute, in one whole graph."""
    return calls(compiled(watched(Remembering()), fullgraph=True), 2)


@scenario("side-effect-tables", "translator-state", "self-referring-closures")
def module_sets_an_attribute_and_breaks() -> object:
    """A module keeps its result in an attribute before a graph break."""
    return calls(compiled(watched(Remembering(broken=True))), 2)


@scenario()
def module_updates_a_buffer() -> object:
    """A module assigns a new tensor to a buffer."""

    class Averaging(torch.nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            return x - self.mean

    module = watched(Averaging())
    return calls(compiled(module), 2), module.state_dict()


@scenario("self-referring-closures")
def module_batch_norm_training() -> object:
    """Batch normalisation updates its statistics."""
    module = watched(torch.nn.BatchNorm1d(2))
    return calls(compiled(module, backend="aot_eager"), 2, grad=True), module.state_dict()


@scenario("side-effect-tables", "self-referring-closures")
def module_cache_of_keys() -> object:
    """An object that is no module keeps what compiled code appends to it, as a KV cache does."""

    class Cache:
        def __init__(self) -> None:
            self.keys: Any = None

        def update(self, x: torch.Tensor) -> torch.Tensor:
            self.keys = x if self.keys is None else torch.cat((self.keys, x))
            return self.keys

    cache = watch(object=Cache())
    run = compiled(lambda x, cache: cache.update(x).sum(0))
    return calls(lambda x: run(x, cache), 2)


@scenario("translator-state", "self-referring-closures")
def module_hook_on_forward() -> object:
    """A forward hook changes the output."""
    module = watched(torch.nn.Linear(2, 2))
    module.register_forward_hook(lambda module, args, output: output * 2)
    return calls(compiled(module), 2)


@scenario("translator-state", "self-referring-closures")
def module_forward_pre_hook() -> object:
    """A forward pre-hook changes the input, and keeps the last one in a cell."""
    last = None

    def keep(module: torch.nn.Module, args: Any) -> Any:
        nonlocal last
        last = args[0] * 2
        return (last,)

    module = watched(torch.nn.Linear(2, 2))
    module.register_forward_pre_hook(watch(hook=keep))
    return calls(compiled(module), 2), last


@scenario("translator-state")
def module_full_backward_hook() -> object:
    """A full backward hook scales the gradient."""
    module = watched(torch.nn.Linear(2, 2))
    module.register_full_backward_hook(lambda module, given, out: tuple(g * 2 for g in given))
    return calls(compiled(module), 2, grad=True)


@scenario("side-effect-tables", "translator-state", "self-referring-closures")
def module_functional_call() -> object:
    """``functional_call`` runs a module with other parameters."""
    module = watched(torch.nn.Linear(2, 2))
    weight = watch(weight=torch.full((2, 2), 0.5))

    @compiled
    def run(x: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return calls(run, 2)


@scenario("side-effect-tables", "translator-state", "self-referring-closures")
def module_functional_call_fullgraph() -> object:
    """``functional_call`` gets its parameters as an argument, in one whole graph."""
    module = watched(torch.nn.Linear(2, 2))
    weights = {name: p.detach() * 2 for name, p in module.named_parameters()}

    def run(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(module, weights, (x,))

    run_compiled = compiled(run, fullgraph=True)
    return calls(lambda x: run_compiled(x, weights), 2)


@scenario()
def module_parametrized() -> object:
    """A parametrized module is compiled."""

    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    module = torch.nn.Linear(2, 2)
    parametrize.register_parametrization(module, "weight", Doubled())
    return calls(compiled(watched(module)), 2)


@scenario()
def module_weight_norm() -> object:
    """A module with weight normalisation is compiled."""
    return calls(compiled(watched(parametrizations.weight_norm(torch.nn.Linear(2, 2)))), 2)


@scenario()
def module_compiled_in_place() -> object:
    """``module.compile()`` compiles a module in place."""
    module = watched(torch.nn.Linear(2, 2))
    module.compile(backend="eager")
    return calls(module, 2)


@scenario("side-effect-tables", "translator-state", "self-referring-closures")
def module_method_compiled() -> object:
    """A bound method of a module is compiled."""
    module = watched(Remembering())
    return calls(compiled(module.forward), 2)


@scenario("self-referring-closures")
def module_in_a_closure() -> object:
    """A compiled function closes over a module."""
    module = watched(torch.nn.Linear(2, 2))
    return calls(compiled(lambda x: module(x) + 1), 2)


@scenario("self-referring-closures")
def module_as_an_argument() -> object:
    """A compiled function is given a module."""
    module = watched(torch.nn.Linear(2, 2))
    run = compiled(lambda x, module: module(x) + 1)
    return calls(lambda x: run(x, module), 2)


@scenario("self-referring-closures")
def module_training_mode_changes() -> object:
    """A module is compiled again in evaluation mode."""
    module = watched(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0)))
    run = compiled(module)
    told = calls(run, 2)
    module.eval()
    return told, calls(run, 2)


@scenario()
def module_lstm() -> object:
    """A recurrent layer, which breaks the graph."""
    module = watched(torch.nn.LSTM(2, 2))
    run = compiled(lambda x: module(x)[0])
    return calls(run, 2)


@scenario("self-referring-closures")
def module_attention() -> object:
    """An encoder layer with attention."""
    layer = torch.nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)
    return calls(compiled(watched(layer)), 1, 2)


@scenario("self-referring-closures")
def module_copied() -> object:
    """A compiled module is copied, and the copy is called."""
    copy = importlib.import_module("copy")
    module = watched(torch.nn.Linear(2, 2))
    run = compiled(module)
    told = calls(run, 2)
    return told, calls(compiled(watch(copy=copy.deepcopy(module))), 2)


@scenario()
def module_lazy() -> object:
    """A lazy module gets its parameters in its first compiled call."""
    module = watch(module=torch.nn.LazyLinear(2, bias=False))
    run = compiled(lambda x: module(x).shape[0] + x)
    return calls(run, 2)


@scenario("self-referring-closures")
def module_property() -> object:
    """A module computes its scale in a property."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Parameter(torch.ones(2))

        @property
        def scale(self) -> torch.Tensor:
            return self.base * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    return calls(compiled(watched(Scaled())), 2)
