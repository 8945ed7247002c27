"""``torch.compile`` with a backend that records the graphs which Dynamo hands to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

graphs: list[str] = []


@functools.cache
def recording(backend: str) -> Callable[..., Any]:
    """Return the named backend, made to append the code of each graph to ``graphs`` first."""
    from torch._dynamo.backends.registry import lookup_backend

    compile_graph = lookup_backend(backend)

    def record(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.extend(
            module.code
            for module in graph_module.modules()
            if isinstance(module, torch.fx.GraphModule)
        )
        return compile_graph(graph_module, example_inputs)

    return record


def compiled(function: Any, *, backend: str = "eager", **options: Any) -> Any:
    """Return ``torch.compile(function, **options)`` with the named backend, recorded."""
    return torch.compile(function, backend=recording(backend), **options)
