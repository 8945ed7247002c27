"""Service loops to be measured in a worker process: exceptions in Dynamo, and calls that succeed.

A workload is a function that takes a `Setup` once and returns the handler of requests. The handler
is called with the request's number and whether this request is one that has to make Dynamo raise
(or, where all succeed, to have something watched that must die with it).
"""

from __future__ import annotations

import gc
import importlib
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.export
from torch._dynamo.backends.registry import lookup_backend

Handler = Callable[[int, bool], object]
FEATURES, HIDDEN, BATCH = 64, 128, 8


@dataclass(frozen=True)
class Setup:
    """How a workload is to build its model.

    Attributes:
        backend: of ``torch.compile``.
        device: of the model and its inputs.
        seed: of whatever is drawn at random.
        buffer: bytes that a request which succeeds leaves behind, if it is pinned.
        watch: counts an object as long as it lives, as the frames of callers are.
    """

    backend: str
    device: str
    seed: int
    buffer: int
    watch: Callable[[object], None]


Workload = Callable[[Setup], Handler]


def malformed(setup: Setup) -> Handler:
    """One compiled model; a malformed request has a feature too few."""
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
    ).to(setup.device)
    compiled = torch.compile(model, backend=setup.backend)

    def handle(request: int, inject: bool) -> float:
        batch = torch.randn(BATCH, FEATURES - inject, device=setup.device)
        with torch.inference_mode():
            return float(compiled(batch).sum())

    return handle


def _rate(prices: dict[str, float]) -> float:
    return prices["rate"]


def _price(amounts: torch.Tensor, prices: dict[str, float]) -> torch.Tensor:
    return amounts * _rate(prices)


def fresh(setup: Setup) -> Handler:
    """A function compiled anew for each request; its helper raises KeyError on a missing key."""

    def handle(request: int, inject: bool) -> float:
        # Dynamo caches by code object: a copy of it makes the function new.
        code = _price.__code__.replace(co_name=f"price_{request}")
        price = torch.compile(types.FunctionType(code, globals()), backend=setup.backend)
        amounts = torch.randn(BATCH, device=setup.device)
        return float(price(amounts, {} if inject else {"rate": 1.5}).sum())

    return handle


def mixed(setup: Setup) -> Handler:
    """Good requests to one model; an injected one fails in either of the two ways, by the seed."""
    model, pricing = malformed(setup), fresh(setup)

    def handle(request: int, inject: bool) -> object:
        failing = random.Random(setup.seed + request).choice((model, pricing))
        return (failing if inject else model)(request, inject)

    return handle


def _choose(x: torch.Tensor) -> object:
    return torch.cond(x.sum() > 0, lambda y: y.sum() + 1, lambda y: y.sum() - 1, (x,))


def cond(setup: Setup) -> Handler:
    """A function compiled anew for each request calls ``torch.cond`` with an input of its own."""

    def backend(graph: Any, inputs: Any) -> Any:
        # The compile of a model of some size outlasts many collections of the young generations:
        # what it leaves behind is old, and waits for a full one.
        gc.collect(1)
        return lookup_backend(setup.backend)(graph, inputs)

    def handle(request: int, inject: bool) -> float:
        code = _choose.__code__.replace(co_name=f"choose_{request}")
        choose = torch.compile(types.FunctionType(code, globals()), backend=backend)
        x = torch.ones(max(1, setup.buffer // 4), device=setup.device)
        if inject:
            setup.watch(x)
        return float(choose(x))

    return handle


class _Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        weight = torch.ones(max(1, setup.buffer // 4), device=setup.device)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def export(setup: Setup) -> Handler:
    """Each request exports a model of its own with ``strict=True``, and drops it.

    A graph module and its graph hold each other, by the design of ``torch.fx``: what is exported
    always waits for a collection, so one of the young generations ends each request.  They have all
    of it, since nothing else collects during the export.
    """
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):
        torch._dynamo.config.run_gc_after_compile = False

    def exported(inject: bool) -> int:
        model = _Model(setup)
        if inject:
            setup.watch(model.weight)
        program = torch.export.export(model, (torch.ones(BATCH, device=setup.device),), strict=True)
        return len(program.graph.nodes)

    def handle(request: int, inject: bool) -> int:
        gc.disable()
        try:
            return exported(inject)
        finally:
            gc.collect(1)
            gc.enable()

    return handle


BUILT_IN: dict[str, Workload] = {
    "malformed": malformed,
    "fresh": fresh,
    "mixed": mixed,
    "cond": cond,
    "export": export,
}


def load(name: str) -> Workload:
    """Return the workload `name`: one of `BUILT_IN`, or `module:function`.

    Raises:
        ValueError: there is no such module or function.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, function = name.partition(":")
    try:
        workload: Workload = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load the workload {name!r}: {error}") from error
    return workload
