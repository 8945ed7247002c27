"""Generators, context managers, subclasses and modes in calls that succeed."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ._recording import calls, compiled
from ._registry import scenario
from ._watch import watch


def steps(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what grows."""
    y = x
    for step in range(3):
        y = y + step
        yield y


class Managed:
    """A context manager of the user's own."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> Managed:
        self.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


@contextlib.contextmanager
def managed(scale: float) -> Iterator[float]:
    """Manage a context by a generator."""
    yield scale * 2


class Doubled(torch.Tensor):
    """A tensor subclass with a torch function of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.sin:
            return super().__torch_function__(torch.cos, types, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A wrapper subclass."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return Wrapper(func(*args, **(kwargs or {})))


class Renaming(TorchFunctionMode):
    """A mode that calls another function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """A dispatch mode that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@scenario("self-referring-closures")
def generator_consumed() -> object:
    """A generator is consumed by ``sum``."""
    return calls(compiled(lambda x: sum(steps(x))))


@scenario("self-referring-closures")
def generator_in_a_for_loop() -> object:
    """A ``for`` loop runs over a generator."""

    def run(x: torch.Tensor) -> torch.Tensor:
        total = x
        for y in steps(x):
            total = total * y
        return total

    return calls(compiled(run))


@scenario("translator-state", "self-referring-closures")
def generator_in_a_for_loop_and_a_break() -> object:
    """A ``for`` loop runs over a generator, and the graph breaks in its body."""

    def run(x: torch.Tensor) -> torch.Tensor:
        total = x
        for y in steps(x):
            total = total * y
            torch._dynamo.graph_break()
        return total

    return calls(compiled(run))


@scenario("translator-state", "symbol-bindings", "self-referring-closures")
def generator_that_breaks() -> object:
    """The graph breaks inside a generator."""

    def broken(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x + 1
        torch._dynamo.graph_break()
        yield x + 2

    return calls(compiled(lambda x: sum(broken(x))))


@scenario("self-referring-closures")
def generator_left_unfinished() -> object:
    """A generator is left after its first value."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for y in steps(x):
            return y * 2
        return x

    return calls(compiled(run))


@scenario("self-referring-closures")
def generator_expression_consumed() -> object:
    """A generator expression is consumed."""
    return calls(compiled(lambda x: torch.stack(tuple(x + n for n in range(3)))))


@scenario("self-referring-closures")
def generator_zipped() -> object:
    """Two generators are zipped."""

    def run(x: torch.Tensor) -> Any:
        return sum(a * b for a, b in zip(steps(x), steps(x + 1)))  # noqa: B905

    return calls(compiled(run))


@scenario("translator-state", "self-referring-closures")
def generator_enumerated_and_a_break() -> object:
    """A generator is enumerated, and the graph breaks in the loop."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for index, y in enumerate(steps(x)):
            x = x + y * index
            torch._dynamo.graph_break()
        return x

    return calls(compiled(run))


@scenario("self-referring-closures")
def generator_delegates() -> object:
    """A generator delegates to another."""

    def both(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from steps(x)
        yield from steps(x * 2)

    return calls(compiled(lambda x: sum(both(x))))


@scenario()
def generator_returned() -> object:
    """A compiled function is given a generator that was begun outside."""
    run = compiled(lambda values: sum(values) * 2)

    def call(x: torch.Tensor) -> Any:
        values = watch(generator=steps(x))
        next(values)
        return run(list(values))

    return calls(call)


@scenario("self-referring-closures")
def iterators_of_itertools() -> object:
    """Iterators of ``itertools`` are used over tensors."""

    def run(x: torch.Tensor) -> Any:
        chained = itertools.chain([x], (x + n for n in range(2)))
        return sum(a * b for a, b in itertools.product(chained, [x, x + 1]))

    return calls(compiled(run))


@scenario("observed-exceptions", "side-effect-tables", "self-referring-closures")
def iterator_of_the_users() -> object:
    """A class of the user's own is iterated."""

    class Countdown:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.left = x, 3

        def __iter__(self) -> Countdown:
            return self

        def __next__(self) -> torch.Tensor:
            if self.left == 0:
                raise StopIteration
            self.left -= 1
            return self.x + self.left

    run = compiled(lambda x, values: sum(values) + x)
    return calls(lambda x: run(x, watch(object=Countdown(x))))


@scenario("self-referring-closures")
def context_of_the_users() -> object:
    """A context manager of the user's own is entered."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with Managed() as manager:
            return x * manager.depth

    return calls(compiled(run))


@scenario("side-effect-tables")
def context_of_the_users_and_a_break() -> object:
    """The graph breaks in a context manager of the user's own, that is an argument."""

    def run(x: torch.Tensor, manager: Managed) -> torch.Tensor:
        with manager:
            y = x * manager.depth
            torch._dynamo.graph_break()
            return y + x

    run_compiled = compiled(run)
    return calls(lambda x: run_compiled(x, watch(object=Managed())))


@scenario()
def context_around_a_break() -> object:
    """A context manager of the user's own is made before a graph break and left after it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with Managed() as manager:
            y = x * manager.depth
            torch._dynamo.graph_break()
        return y + x

    return calls(compiled(run))


@scenario("self-referring-closures")
def context_by_a_generator() -> object:
    """A generator context manager is entered."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with managed(2.0) as scale:
            return x * scale

    return calls(compiled(run))


@scenario()
def context_by_a_generator_and_a_break() -> object:
    """The graph breaks in a generator context manager."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with managed(2.0) as scale:
            y = x * scale
            torch._dynamo.graph_break()
        return y + x

    return calls(compiled(run))


@scenario()
def context_stack() -> object:
    """An exit stack is used in a compiled function."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            return x * 2

    return calls(compiled(run))


@scenario("symbol-bindings", "self-referring-closures")
def context_autocast() -> object:
    """Autocast is entered in a compiled function, and the graph breaks in it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.mm(x, x.t())
            torch._dynamo.graph_break()
            return torch.mm(y, y)

    return calls(compiled(run), 2)


@scenario("self-referring-closures")
def context_inference_mode() -> object:
    """A compiled function is called in inference mode."""
    run = compiled(lambda x: x * 2 + 1, backend="aot_eager")
    with torch.inference_mode():
        return calls(run)


@scenario("self-referring-closures")
def context_set_grad_enabled() -> object:
    """A compiled function switches gradients off and on."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        y = x.sin()
        torch.set_grad_enabled(True)
        return y + x

    return calls(compiled(run), grad=True)


@scenario("self-referring-closures")
def subclass_with_a_torch_function() -> object:
    """A tensor subclass with a torch function of its own is an input."""
    run = compiled(lambda x: torch.sin(x) + 1)
    return calls(lambda x: run(watch(subclass=x.as_subclass(Doubled))).as_subclass(torch.Tensor))


@scenario(torch=">=2.10")
def subclass_that_wraps() -> object:
    """A wrapper subclass is an input, traced by AOT Autograd."""
    run = compiled(lambda x: x * 2 + x, backend="aot_eager")
    return calls(lambda x: watch(subclass=run(watch(subclass=Wrapper(x)))).inner)


@scenario("symbol-bindings", "self-referring-closures")
def subclass_of_parameter() -> object:
    """A subclass of ``Parameter`` is used by a module."""

    class Own(torch.nn.Parameter):
        pass

    module = watch(module=torch.nn.Linear(2, 2, bias=False))
    module.weight = watch(parameter=Own(torch.ones(2, 2)))
    return calls(compiled(module), 2)


@scenario("self-referring-closures", torch=">=2.6")
def subclass_made_in_the_graph() -> object:
    """A compiled function makes a tensor subclass."""
    run = compiled(lambda x: torch.sin(x.as_subclass(Doubled)) + 1)
    return calls(lambda x: run(x).as_subclass(torch.Tensor))


@scenario("symbol-bindings", "self-referring-closures")
def mode_around_the_call() -> object:
    """A compiled function is called under a torch-function mode."""
    run = compiled(lambda x: torch.sin(x) + 1)

    def call(x: torch.Tensor) -> Any:
        with watch(mode=Renaming()):
            return run(x)

    return calls(call)


@scenario("self-referring-closures")
def mode_in_the_graph() -> object:
    """A torch-function mode is entered in a compiled function."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with Renaming():
            return torch.sin(x) + 1

    return calls(compiled(run))


@scenario()
def mode_of_dispatch() -> object:
    """A compiled function is called under a dispatch mode."""
    run = compiled(lambda x: torch.sin(x) + 1)

    def call(x: torch.Tensor) -> Any:
        with watch(mode=Counting()) as mode:
            return run(x) + 0 * mode.count

    return calls(call)


@scenario("self-referring-closures")
def mode_of_a_device() -> object:
    """A compiled function makes tensors under a default device."""
    run = compiled(lambda x: x + torch.ones(1))

    def call(x: torch.Tensor) -> Any:
        with torch.device("cpu"):
            return run(x)

    return calls(call)
