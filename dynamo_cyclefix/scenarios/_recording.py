"""``torch.compile`` with a backend that records the graphs which Dynamo hands to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._watch import watch

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


def calls(run: Callable[..., Any], *rest: int, grad: bool = False) -> list[tuple[Any, ...]]:
    """Call ``run`` on three inputs, the last of another size, and watch them and what it returns.

    Args:
        run: the compiled function or module.
        rest: the sizes of the inputs beside the first.
        grad: whether the inputs need gradients; if so, ``backward`` is called on each result.

    Returns:
        for each call its result, the input's gradient, and how many graphs there were by then.
    """
    told = []
    for first in (3, 3, 4):
        x = torch.linspace(-1, 1, first).reshape(first, *[1 for _ in rest]).repeat(1, *rest)
        watch(input=x.requires_grad_(grad))
        y = run(x)
        if isinstance(y, torch.Tensor):
            watch(output=y)
        if grad:
            y.sum().backward()
        told.append((y, x.grad, len(graphs)))
    return told
