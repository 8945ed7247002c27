"""Observed exceptions: Dynamo traces code that raises, and the exception leaves an inlined call."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from typing import Any

import torch

from ._recording import compiled
from ._registry import scenario


class OutOfRangeError(ValueError):
    """An exception class of the user's own."""


class BoundsError(ValueError):
    """An exception class of the user's own, with a constructor of its own."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(f"not in [{low}, {high}]")
        self.bounds = (low, high)


@scenario("observed-exceptions")
def missing_key() -> object:
    """A helper looks up a key that its dictionary lacks."""

    def scale(table: dict[str, float]) -> float:
        return table["absent"]

    return compiled(lambda x: x * scale({"present": 2.0}))(torch.ones(3))


@scenario("observed-exceptions")
def missing_index() -> object:
    """A helper reads past the end of a list."""

    def last(sizes: list[int]) -> int:
        return sizes[len(sizes)]

    return compiled(lambda x: x.reshape(last([3])))(torch.ones(3))


@scenario("observed-exceptions", "unsupported-constants")
def missing_attribute() -> object:
    """A helper reads an attribute that its object lacks."""

    def rate(options: object) -> float:
        return options.rate  # type: ignore[attr-defined,no-any-return]

    return compiled(lambda x: x * rate(dataclasses.make_dataclass("Options", [])()))(torch.ones(3))


@scenario("observed-exceptions", "unsupported-constants")
def division_by_zero() -> object:
    """A helper divides an int by zero."""

    def mean(total: int, count: int) -> float:
        return total / count

    return compiled(lambda x: x + mean(6, 0))(torch.ones(3))


@scenario("observed-exceptions", "unsupported-constants")
def int_parsing() -> object:
    """A helper parses a text that is not a number."""

    def width(text: str) -> int:
        return int(text)

    return compiled(lambda x: x + width("wide"))(torch.ones(3))


@scenario("observed-exceptions")
def custom_exception_class() -> object:
    """A helper raises an exception of the user's own class."""

    def check(value: int) -> None:
        if value > 2:
            raise OutOfRangeError("above 2", value)

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        check(x.dim() + 2)
        return x + 1

    return run(torch.ones(3))


@scenario()
def custom_exception_constructor() -> object:
    """A helper raises an exception whose class has a constructor of its own."""

    def check(value: int) -> None:
        if value > 2:
            raise BoundsError(0, 2)

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        check(x.dim() + 2)
        return x + 1

    return run(torch.ones(3))


@scenario("observed-exceptions")
def exception_with_tensor_argument() -> object:
    """A helper raises an exception that carries a tensor of the graph."""

    def reject(x: torch.Tensor) -> None:
        raise ValueError("rejected", x * 2)

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        reject(x + 1)
        return x

    return run(torch.ones(3))


@scenario("data-dependent-branches")
def failed_assertion() -> object:
    """A helper asserts something of a shape that does not hold."""

    def check(x: torch.Tensor) -> None:
        assert x.dim() == 2, "a matrix is needed"

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        check(x)
        return x + 1

    return run(torch.ones(3))


@scenario("observed-exceptions")
def abstract_method() -> object:
    """A method that a subclass should have overridden raises ``NotImplementedError``."""

    class Layer:
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("apply")

    layer = Layer()
    return compiled(lambda x: layer.apply(x))(torch.ones(3))


@scenario("observed-exceptions")
def unpacking() -> object:
    """A helper returns three values where two are unpacked one call further out."""

    def sizes() -> tuple[int, ...]:
        return 1, 2, 3

    def area() -> int:
        height, width = sizes()
        return height * width

    return compiled(lambda x: x * area())(torch.ones(3))


@scenario("observed-exceptions")
def enum_lookup() -> object:
    """A helper looks up an enumeration member by a value that no member has."""

    class Mode(enum.Enum):
        TRAIN = 1

    def mode(value: int) -> int:
        return Mode(value).value

    return compiled(lambda x: x * mode(7))(torch.ones(3))


@scenario("observed-exceptions")
def dataclass_post_init() -> object:
    """A dataclass that is built during tracing rejects its fields."""

    @dataclasses.dataclass
    class Window:
        size: int

        def __post_init__(self) -> None:
            if self.size <= 0:
                raise ValueError("the size must be positive")

    return compiled(lambda x: x * Window(0).size)(torch.ones(3))


@scenario("observed-exceptions")
def constructor() -> object:
    """An ``__init__`` that is traced raises."""

    class Schedule:
        def __init__(self, steps: int) -> None:
            if steps == 0:
                raise ValueError("no steps")
            self.steps = steps

    return compiled(lambda x: x * Schedule(0).steps)(torch.ones(3))


@scenario("observed-exceptions")
def empty_pop() -> object:
    """A helper pops from an empty list."""

    def take(queue: list[int]) -> int:
        return queue.pop()

    return compiled(lambda x: x * take([]))(torch.ones(3))


@scenario("observed-exceptions")
def wrong_operand_types() -> object:
    """A helper adds an int to a str."""

    def label(index: int) -> int:
        return len("layer" + index)  # type: ignore[operator]

    return compiled(lambda x: x * label(1))(torch.ones(3))


@scenario("observed-exceptions")
def missing_argument() -> object:
    """A helper is called without an argument that it needs, two calls deep."""

    def combine(left: float, right: float) -> float:
        return left + right

    def helper() -> float:
        return combine(1.0)  # type: ignore[call-arg]

    return compiled(lambda x: x * helper())(torch.ones(3))


@scenario("observed-exceptions")
def deep_call_chain() -> object:
    """An exception passes through eight inlined calls."""

    def descend(depth: int) -> int:
        if depth == 0:
            raise LookupError("bottom")
        return descend(depth - 1)

    return compiled(lambda x: x * descend(8))(torch.ones(3))


@scenario("observed-exceptions")
def partial_function() -> object:
    """A ``functools.partial`` of a helper that raises is called."""

    def choose(table: dict[str, int], name: str) -> int:
        return table[name]

    return compiled(lambda x: x * functools.partial(choose, {})("relu"))(torch.ones(3))


@scenario("observed-exceptions")
def decorated_function() -> object:
    """A helper behind a decorator of the user's own raises."""

    def traced(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    @traced
    def choose(name: str) -> float:
        raise KeyError(name)

    return compiled(lambda x: x * choose("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def super_call() -> object:
    """A method reaches a base class through ``super()`` and that raises."""

    class Base:
        def step(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the base has no step")

    class Derived(Base):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return super().step(x + 1)

    derived = Derived()
    return compiled(lambda x: derived.step(x))(torch.ones(3))


@scenario("observed-exceptions")
def operator_function() -> object:
    """A helper indexes through the ``operator`` module."""

    def pick(values: tuple[int, ...]) -> int:
        return operator.getitem(values, 5)

    return compiled(lambda x: x * pick((1, 2)))(torch.ones(3))


@scenario("observed-exceptions")
def lambda_expression() -> object:
    """A lambda that is called during tracing raises."""
    scales = {"a": lambda table: table["b"]}
    return compiled(lambda x: x * scales["a"]({}))(torch.ones(3))


@scenario("observed-exceptions")
def second_call_raises() -> object:
    """A compiled function works for one argument and raises for the next."""

    def activation(name: str) -> float:
        return {"relu": 1.0}[name]

    run = compiled(lambda x, name: x * activation(name))
    run(torch.ones(3), "relu")
    return run(torch.ones(3), "gelu")


@scenario("observed-exceptions")
def many_functions() -> object:
    """Several compiled functions raise one after another, each caught by the caller."""

    def lookup(name: str) -> float:
        raise KeyError(name)

    caught = []
    for name in ("a", "b", "c"):
        try:
            compiled(lambda x, name=name: x * lookup(name))(torch.ones(3))
        except KeyError as error:
            caught.append(str(error))
    return caught


@scenario("observed-exceptions")
def module_forward() -> object:
    """A submodule's ``forward`` raises in a compiled module."""

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("closed")

    return compiled(torch.nn.Sequential(torch.nn.Identity(), Gate()))(torch.ones(3))


@scenario("observed-exceptions")
def module_forward_hook() -> object:
    """A forward hook of a submodule raises."""

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        raise ValueError("an unexpected output")

    layer = torch.nn.Identity()
    layer.register_forward_hook(hook)
    return compiled(torch.nn.Sequential(layer))(torch.ones(3))


@scenario("observed-exceptions")
def module_pre_hook() -> object:
    """A forward pre-hook of a submodule raises."""

    def hook(module: torch.nn.Module, args: Any) -> None:
        raise ValueError("an unexpected input")

    layer = torch.nn.Identity()
    layer.register_forward_pre_hook(hook)
    return compiled(torch.nn.Sequential(layer))(torch.ones(3))


@scenario("observed-exceptions")
def module_missing_attribute() -> object:
    """A module's ``forward`` asks for a layer that was never made."""

    class Head(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.projection(x)

    return compiled(torch.nn.Sequential(Head()))(torch.ones(3))


@scenario("observed-exceptions")
def module_container() -> object:
    """A ``ModuleDict`` is asked for a name that it lacks."""
    layers = torch.nn.ModuleDict({"a": torch.nn.Identity()})

    def select(name: str) -> torch.nn.Module:
        return layers[name]

    return compiled(lambda x: select("b")(x))(torch.ones(3))


@scenario("observed-exceptions")
def nested_compile() -> object:
    """A compiled function calls a compiled function that raises."""

    @compiled
    def inner(x: torch.Tensor) -> torch.Tensor:
        table: dict[str, float] = {}
        return x + table["absent"]

    return compiled(lambda x: inner(x) + 1)(torch.ones(3))


@scenario("observed-exceptions")
def after_a_graph_break() -> object:
    """A helper raises in the part of a function that follows a graph break."""

    def scale(table: dict[str, float]) -> float:
        return table["absent"]

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * scale({})

    return run(torch.ones(3))


@scenario()
def raised_directly() -> object:
    """The compiled function itself raises, with no call in between."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            raise ValueError("a matrix is needed")
        return x

    return run(torch.ones(3))
