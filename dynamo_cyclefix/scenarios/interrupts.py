"""Exceptions that are not ordinary errors: interrupts, exits, recursion, warnings as errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import warnings
from typing import Any

import torch

from ._recording import compiled
from ._registry import scenario
from .fake_tensor import ops


def interrupted(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Be interrupted by the user while compiling."""
    raise KeyboardInterrupt


@scenario()
def keyboard_interrupt_in_the_backend() -> object:
    """The user interrupts a backend that is compiling."""
    return torch.compile(lambda x: x + 1, backend=interrupted)(torch.ones(3))


@scenario()
def keyboard_interrupt_in_a_fake_kernel() -> object:
    """The user interrupts Dynamo while it runs an operator's fake implementation."""
    return compiled(lambda x: ops.interrupted(x + 1))(torch.ones(3))


@scenario("observed-exceptions")
def keyboard_interrupt_in_a_helper() -> object:
    """A helper raises ``KeyboardInterrupt``."""

    def stop() -> None:
        raise KeyboardInterrupt

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        stop()
        return x

    return run(torch.ones(3))


@scenario("observed-exceptions")
def system_exit_in_a_helper() -> object:
    """A helper raises ``SystemExit``."""

    def stop() -> None:
        raise SystemExit(3)

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        stop()
        return x

    return run(torch.ones(3))


@scenario("observed-exceptions")
def cancelled_task() -> object:
    """A helper raises ``asyncio.CancelledError``, which is no ``Exception``."""

    def poll() -> None:
        raise asyncio.CancelledError("shutdown")

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        poll()
        return x

    return run(torch.ones(3))


@scenario()
def recursion() -> object:
    """A helper calls itself without end."""

    def descend(depth: int) -> int:
        return descend(depth + 1)

    return compiled(lambda x: x * descend(0))(torch.ones(3))


@scenario("observed-exceptions")
def recursion_error_raised() -> object:
    """A helper raises ``RecursionError`` at a depth of its own."""

    def descend(depth: int) -> int:
        if depth > 5:
            raise RecursionError("too deep")
        return descend(depth + 1)

    return compiled(lambda x: x * descend(0))(torch.ones(3))


@scenario()
def warning_as_error() -> object:
    """A helper warns while warnings are errors."""

    def old(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("old() is deprecated", DeprecationWarning, stacklevel=2)
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compiled(lambda x: old(x) * 2)(torch.ones(3))


@scenario("fake-tensor-errors", "observed-exceptions")
def operator_warning_as_error() -> object:
    """The fake implementation of an operator warns while warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compiled(lambda x: ops.warning(x) * 2)(torch.ones(3))


# Each with a helper of its own: Dynamo keeps what it learnt with a function's code.


@scenario("observed-exceptions")
def in_a_coroutine() -> object:
    """An exception leaves a compiled call inside an asyncio task, which hands it on."""

    def lookup(name: str) -> float:
        raise KeyError(name)

    async def serve() -> torch.Tensor:
        return compiled(lambda x: x * lookup("gelu"))(torch.ones(3))

    try:
        serve().send(None)
    except KeyError as error:
        return str(error)
    return "no error"


@scenario("observed-exceptions")
def in_a_generator() -> object:
    """An exception leaves a compiled call inside a generator of the user's."""

    def lookup(name: str) -> float:
        raise KeyError(name)

    def batches() -> Any:
        yield compiled(lambda x: x * lookup("gelu"))(torch.ones(3))

    return next(batches())


@scenario("observed-exceptions")
def in_a_thread() -> object:
    """An exception leaves a compiled call in a worker thread and is raised by the future."""

    def lookup(name: str) -> float:
        raise KeyError(name)

    def serve() -> torch.Tensor:
        return compiled(lambda x: x * lookup("gelu"))(torch.ones(3))

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        futures = [pool.submit(serve)]
    # It is done: whether `result` has to wait shows in the traceback.  And no local may keep it.
    return futures.pop().result()
