"""Service loops that meet exceptions in Dynamo, to be measured in a worker process.

A workload is a function that takes a `Setup` once and returns the handler of requests. The handler
is called with the request's number and whether this request is one that has to make Dynamo raise.
"""

from __future__ import annotations

import importlib
import random
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

Handler = Callable[[int, bool], object]
FEATURES, HIDDEN, BATCH = 64, 128, 8


@dataclass(frozen=True)
class Setup:
    """How a workload is to build its model."""

    backend: str
    device: str
    seed: int


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


BUILT_IN: dict[str, Workload] = {"malformed": malformed, "fresh": fresh, "mixed": mixed}


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
