"""Exports that succeed: what was exported must not hold the model that was dropped."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

from ._observe import stable
from ._registry import scenario
from ._watch import watch


class Exported(torch.nn.Module):
    """A linear layer, a buffer, and a body that a scenario gives."""

    def __init__(self, body: Callable[..., Any] = torch.sin) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("mean", torch.ones(2))
        self.body = body

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(self.linear(x) - self.mean, *args)


def model(body: Callable[..., Any] = torch.sin, *, parameters: bool = True) -> Any:
    """Return a watched model, whose parameters are the same in every process.

    They are not watched where they are parameters of the exported module too, which is a cycle.
    """
    made = watch(module=Exported(body))
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, 0.25)
        if parameters:
            watch(parameter=parameter)
    if parameters:
        watch(buffer=made.mean)
    return made


def export(module: Any, *args: Any, strict: bool, **options: Any) -> Any:
    """Export a model for watched inputs and return the program."""
    x = watch(input=torch.linspace(-1, 1, 6).reshape(3, 2))
    return torch.export.export(module, (x, *args), strict=strict, **options)


def choose(x: torch.Tensor) -> Any:
    """Call ``cond``."""
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


@scenario("strict-export", "export-errors", collected=True)
def export_strict() -> object:
    """Strict export of a model with parameters and a buffer; the program is dropped."""
    return export(model(), strict=True)


@scenario()
def export_strict_without_a_collection() -> object:
    """Strict export, whose program and the parameters in it wait for a collection."""
    return export(model(), strict=True)


@scenario("non-strict-export")
def export_non_strict() -> object:
    """Non-strict export of a model with parameters and a buffer; the program is dropped."""
    return export(model(), strict=False)


@scenario("strict-export", "export-errors", collected=True)
def export_strict_repeatedly() -> object:
    """Three models are exported strictly, one after the other."""
    return [export(model(), strict=True) for _ in range(3)]


@scenario("non-strict-export")
def export_non_strict_repeatedly() -> object:
    """Three models are exported, one after the other."""
    return [export(model(), strict=False) for _ in range(3)]


@scenario("strict-export", "export-errors", collected=True)
def export_strict_dynamic() -> object:
    """Strict export with a dynamic dimension."""
    return export(model(), strict=True, dynamic_shapes=({0: Dim("batch")},))


@scenario("non-strict-export")
def export_non_strict_dynamic() -> object:
    """Non-strict export with a dynamic dimension."""
    return export(model(), strict=False, dynamic_shapes=({0: Dim("batch")},))


@scenario("strict-export", "export-errors", collected=True)
def export_strict_cond() -> object:
    """Strict export of a model that calls ``cond``."""
    return export(model(choose), strict=True)


@scenario("non-strict-export")
def export_non_strict_cond() -> object:
    """Non-strict export of a model that calls ``cond``."""
    return export(model(choose), strict=False)


@scenario("strict-export", "export-errors", collected=True)
def export_strict_and_run() -> object:
    """A strictly exported program is run."""
    run = export(model(), strict=True).module()
    return run(torch.ones(3, 2))


@scenario("non-strict-export")
def export_non_strict_and_run() -> object:
    """An exported program is run."""
    run = export(model(parameters=False), strict=False).module()
    return run(torch.ones(3, 2))


@scenario("strict-export", "export-errors", collected=True)
def export_strict_decomposed() -> object:
    """A strictly exported program is decomposed."""
    return export(model(), strict=True).run_decompositions({})


@scenario("non-strict-export")
def export_non_strict_decomposed() -> object:
    """An exported program is decomposed."""
    return export(model(parameters=False), strict=False).run_decompositions({})


@scenario("strict-export", "export-errors", collected=True)
def export_strict_nested_input() -> object:
    """Strict export with a dictionary among the inputs."""
    pair = {"a": watch(input=torch.ones(2)), "b": watch(input=torch.zeros(2))}
    return export(model(lambda x, pair: x + pair["a"] * pair["b"]), pair, strict=True)


@scenario("non-strict-export")
def export_non_strict_nested_input() -> object:
    """Non-strict export with a dictionary among the inputs."""
    pair = {"a": watch(input=torch.ones(2)), "b": watch(input=torch.zeros(2))}
    return export(model(lambda x, pair: x + pair["a"] * pair["b"]), pair, strict=False)


@scenario("strict-export", "export-errors", collected=True)
def export_strict_constant() -> object:
    """Strict export of a model that closes over a tensor."""
    weight = watch(cell=torch.ones(2))
    return export(model(lambda x: x * weight), strict=True)


@scenario()
def export_non_strict_constant() -> object:
    """Non-strict export of a model with a tensor in a plain attribute."""
    module = model()
    module.weight = watch(constant=torch.ones(2))
    module.body = lambda x: x * module.weight
    program = export(module, strict=False)
    del module.body
    return program


@scenario("non-strict-export")
def export_non_strict_buffer_changes() -> object:
    """Non-strict export of a model that changes a buffer."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    return export(watch(module=Counting()), strict=False)


@scenario("strict-export", "export-errors", collected=True)
def export_strict_buffer_changes() -> object:
    """Strict export of a model that changes a buffer."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    return export(watch(module=Counting()), strict=True)


@scenario("non-strict-export")
def export_non_strict_layers() -> object:
    """Non-strict export of a model that enumerates its layers."""

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.ReLU() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(x) + index
            return x

    return export(watch(module=Layers()), strict=False)


@scenario("strict-export", "export-errors", collected=True)
def export_strict_saved() -> object:
    """A strictly exported program is serialised, and its bytes are the same each time."""
    return saved(export(model(), strict=True))


@scenario("non-strict-export")
def export_non_strict_saved() -> object:
    """An exported program is serialised, and its bytes are the same each time."""
    return saved(export(model(), strict=False))


def saved(program: Any) -> object:
    """Return a digest of a serialised program, and the code of what is loaded from it."""
    from torch._export.serde.serialize import serialize

    # Names of modules have ids of objects in them.
    text = stable(serialize(program).exported_program.decode())
    digest = hashlib.sha256(text.encode()).hexdigest()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return digest, torch.export.load(file)


@scenario("strict-export", "export-errors", collected=True)
def export_for_inference_twice() -> object:
    """One model is exported both ways, and goes on being used."""
    module = model()
    programs = [export(module, strict=strict) for strict in (True, False)]
    return programs, module(torch.ones(3, 2))


@scenario("export-errors", collected=True)
def dynamo_export() -> object:
    """``torch._dynamo.export`` of a model."""
    graph, guards = torch._dynamo.export(model())(watch(input=torch.ones(3, 2)))
    return graph, len(guards)


@scenario("export-errors", collected=True)
def dynamo_export_function() -> object:
    """``torch._dynamo.export`` of a function with a nested input."""

    def run(pair: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
        return pair[0] + pair[1]["other"]

    pair = watch(input=torch.ones(3)), {"other": watch(input=torch.ones(3))}
    return torch._dynamo.export(watch(function=run))(pair)[0]


@scenario("export-errors", collected=True)
def dynamo_export_aten() -> object:
    """``torch._dynamo.export`` down to ATen operators."""
    exported = torch._dynamo.export(model(), aten_graph=True)
    return exported(watch(input=torch.ones(3, 2)))[0]


@scenario("export-errors", collected=True)
def dynamo_export_symbolic() -> object:
    """``torch._dynamo.export`` with symbolic sizes."""
    exported = torch._dynamo.export(model(), aten_graph=True, tracing_mode="symbolic")
    return exported(watch(input=torch.ones(3, 2)))[0]
