"""Observed exceptions that leave code which Python calls on the user's behalf."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ._recording import compiled
from ._registry import scenario


@scenario("observed-exceptions")
def property_getter() -> object:
    """A property raises."""

    class Config:
        @property
        def scale(self) -> float:
            raise ValueError("the scale is not set")

    config = Config()
    return compiled(lambda x: x * config.scale)(torch.ones(3))


@scenario("observed-exceptions")
def property_attribute_error() -> object:
    """A property raises ``AttributeError`` and ``getattr`` falls back to its default."""

    class Config:
        @property
        def scale(self) -> float:
            raise AttributeError("scale")

    config = Config()
    return compiled(lambda x: x * getattr(config, "scale", 2.0))(torch.ones(3))


@scenario("observed-exceptions")
def getattr_hook() -> object:
    """A ``__getattr__`` raises."""

    class Config:
        def __getattr__(self, name: str) -> float:
            raise AttributeError(f"no option {name}")

    config = Config()
    return compiled(lambda x: x * config.scale)(torch.ones(3))


@scenario("observed-exceptions")
def setattr_hook() -> object:
    """A ``__setattr__`` refuses a value."""

    class Frozen:
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError(f"{name} is read-only")

    frozen = Frozen()

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        frozen.rate = 1
        return x + 1

    return run(torch.ones(3))


@scenario("observed-exceptions")
def descriptor() -> object:
    """A descriptor's ``__get__`` raises."""

    class Required:
        def __get__(self, owner: object, kind: type) -> float:
            raise LookupError("required")

    class Config:
        scale = Required()

    config = Config()
    return compiled(lambda x: x * config.scale)(torch.ones(3))


@scenario("observed-exceptions")
def missing_hook() -> object:
    """The ``__missing__`` of a dict subclass raises."""

    class Registry(dict[str, float]):
        def __missing__(self, name: str) -> float:
            raise LookupError(f"unregistered: {name}")

    registry = Registry()
    return compiled(lambda x: x * registry["swish"])(torch.ones(3))


@scenario("observed-exceptions")
def getitem_method() -> object:
    """A ``__getitem__`` of the user's own raises."""

    class Table:
        def __getitem__(self, index: int) -> float:
            raise IndexError(index)

    table = Table()
    return compiled(lambda x: x * table[4])(torch.ones(3))


@scenario("observed-exceptions")
def call_method() -> object:
    """An object's ``__call__`` raises."""

    class Policy:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise PermissionError("denied")

    policy = Policy()
    return compiled(lambda x: policy(x))(torch.ones(3))


@scenario("observed-exceptions")
def comparison_method() -> object:
    """An ``__eq__`` raises."""

    class Version:
        def __eq__(self, other: object) -> bool:
            raise TypeError("versions do not compare")

        __hash__ = None  # type: ignore[assignment]

    version = Version()
    return compiled(lambda x: x + 1 if version == 3 else x)(torch.ones(3))


@scenario("observed-exceptions")
def arithmetic_method() -> object:
    """A reflected ``__radd__`` raises."""

    class Unit:
        def __add__(self, other: object) -> float:
            raise ArithmeticError("units do not match")

    unit = Unit()
    return compiled(lambda x: x * (unit + 1))(torch.ones(3))


@scenario("observed-exceptions")
def truth_method() -> object:
    """A ``__bool__`` raises in a condition."""

    class Ambiguous:
        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

    ambiguous = Ambiguous()
    return compiled(lambda x: x + 1 if ambiguous else x)(torch.ones(3))


@scenario("observed-exceptions")
def iterator_method() -> object:
    """The ``__next__`` of an iterator of the user's own raises half way."""

    class Batches:
        def __init__(self) -> None:
            self.served = 0

        def __iter__(self) -> Batches:
            return self

        def __next__(self) -> int:
            self.served += 1
            if self.served == 2:
                raise EOFError("truncated")
            return self.served

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        for scale in Batches():
            x = x * scale
        return x

    return run(torch.ones(3))


@scenario("observed-exceptions")
def exhausted_iterator() -> object:
    """A helper takes ``next`` of an iterator that has no more."""

    def first(values: list[int]) -> int:
        return next(iter(values))

    return compiled(lambda x: x * first([]))(torch.ones(3))


@scenario("observed-exceptions")
def generator_raises() -> object:
    """A generator raises at its second value."""

    def scales() -> Iterator[float]:
        yield 1.0
        raise ValueError("no second scale")

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        for scale in scales():
            x = x * scale
        return x

    return run(torch.ones(3))


@scenario("observed-exceptions")
def generator_throw() -> object:
    """An exception is thrown into a generator, which turns it into another one."""

    def worker() -> Iterator[int]:
        try:
            yield 1
        except ValueError as error:
            raise RuntimeError("the worker failed") from error

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        running = worker()
        x = x * next(running)
        running.throw(ValueError("stop"))  # type: ignore[attr-defined]
        return x

    return run(torch.ones(3))


@scenario("observed-exceptions")
def generator_delegation() -> object:
    """A generator that another one delegates to with ``yield from`` raises."""

    def inner() -> Iterator[int]:
        yield 1
        raise KeyError("inner")

    def outer() -> Iterator[int]:
        yield from inner()

    return compiled(lambda x: x * sum(outer()))(torch.ones(3))


@scenario("observed-exceptions")
def stop_iteration_in_a_generator() -> object:
    """A ``StopIteration`` leaves a generator, which Python turns into ``RuntimeError``."""

    def firsts() -> Iterator[int]:
        yield next(iter(()))

    return compiled(lambda x: x * sum(firsts()))(torch.ones(3))


@scenario("observed-exceptions")
def comprehension() -> object:
    """A call in a list comprehension raises."""

    def width(name: str) -> int:
        return {"a": 1}[name]

    return compiled(lambda x: x * sum([width(name) for name in ("a", "b")]))(torch.ones(3))


@scenario("observed-exceptions")
def generator_expression() -> object:
    """A generator expression raises while ``any`` consumes it."""
    names: list[Any] = ["a", None]
    return compiled(lambda x: x + 1 if any(name.isdigit() for name in names) else x)(torch.ones(3))


@scenario("observed-exceptions")
def sort_key() -> object:
    """The key function of ``sorted`` raises."""

    def key(name: str) -> int:
        return {"a": 1}[name]

    return compiled(lambda x: x * len(sorted(["a", "b"], key=key)))(torch.ones(3))


@scenario("observed-exceptions")
def map_function() -> object:
    """The function given to ``map`` raises."""

    def width(text: str) -> int:
        return int(text)

    return compiled(lambda x: x * sum(map(width, ["1", "one"])))(torch.ones(3))


@scenario("observed-exceptions")
def filter_function() -> object:
    """The function given to ``filter`` raises."""

    def positive(value: int) -> bool:
        if value < 0:
            raise ValueError("a negative value")
        return value > 0

    return compiled(lambda x: x * sum(filter(positive, [1, -1])))(torch.ones(3))


@scenario("observed-exceptions")
def reduce_function() -> object:
    """The function given to ``functools.reduce`` raises."""
    return compiled(lambda x: x * functools.reduce(lambda a, b: a // b, [4, 0]))(torch.ones(3))
