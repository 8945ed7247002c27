"""Exceptions that pass through, or end in, handlers, ``finally`` blocks and context managers."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ._recording import compiled
from ._registry import scenario


def lookup(name: str) -> float:
    """Raise as a helper of a user's does, in a frame of its own."""
    return {"relu": 1.0}[name]


class Span:
    """A context manager of the user's own, that may swallow what leaves its body."""

    def __init__(self, swallows: bool) -> None:
        self.swallows = swallows

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *details: object) -> bool:
        return self.swallows


@contextlib.contextmanager
def span() -> Iterator[None]:
    """A generator context manager with a ``finally`` block."""
    try:
        yield
    finally:
        lookup("relu")


@scenario("observed-exceptions")
def caught_in_the_compiled_function() -> object:
    """The compiled function handles what its helper raises; nothing leaves."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * lookup("gelu")
        except KeyError:
            return x * 2

    return run(torch.ones(3))


@scenario("observed-exceptions")
def caught_in_an_inlined_function() -> object:
    """An inlined function handles what a function further in raises; nothing leaves."""

    def safe(name: str) -> float:
        try:
            return lookup(name)
        except LookupError:
            return 3.0

    return compiled(lambda x: x * safe("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def handler_of_another_class() -> object:
    """A handler for another exception class is passed by."""

    def guarded(name: str) -> float:
        try:
            return lookup(name)
        except ValueError:
            return 0.0

    return compiled(lambda x: x * guarded("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def raise_from() -> object:
    """A helper turns an exception into another one with ``raise ... from``."""

    def activation(name: str) -> float:
        try:
            return lookup(name)
        except KeyError as error:
            raise ValueError(f"no activation {name}") from error

    return compiled(lambda x: x * activation("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def raise_from_none() -> object:
    """A helper hides the cause with ``raise ... from None``."""

    def activation(name: str) -> float:
        try:
            return lookup(name)
        except KeyError:
            raise ValueError(f"no activation {name}") from None

    return compiled(lambda x: x * activation("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def raise_in_a_handler() -> object:
    """A handler fails itself, so that the first exception becomes the context of the second."""

    def activation(name: str) -> float:
        try:
            return lookup(name)
        except KeyError:
            return lookup("default")

    return compiled(lambda x: x * activation("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def reraise() -> object:
    """A helper handles an exception and raises it again with a bare ``raise``."""

    def logged(name: str) -> float:
        try:
            return lookup(name)
        except KeyError:
            name.upper()
            raise

    return compiled(lambda x: x * logged("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def reraise_by_name() -> object:
    """A helper raises the exception that it caught by its name."""

    def logged(name: str) -> float:
        try:
            return lookup(name)
        except KeyError as error:
            raise error

    return compiled(lambda x: x * logged("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def nested_handlers() -> object:
    """An exception is raised in a handler inside a handler and leaves both."""

    def activation(name: str) -> float:
        try:
            return lookup(name)
        except KeyError:
            try:
                return lookup(name + "_approximate")
            except KeyError as error:
                raise LookupError(name) from error

    return compiled(lambda x: x * activation("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def inner_handler_outer_exception() -> object:
    """A handler raises and swallows a second exception, then raises the first one again."""

    def activation(name: str) -> float:
        try:
            return lookup(name)
        except KeyError:
            with contextlib.suppress(KeyError):
                lookup("default")
            raise

    return compiled(lambda x: x * activation("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def handler_in_a_loop() -> object:
    """A loop tries one candidate after another and gives up after the last."""

    def first(names: tuple[str, ...]) -> float:
        for name in names:
            try:
                return lookup(name)
            except KeyError:
                continue
        raise LookupError(names)

    return compiled(lambda x: x * first(("gelu", "silu")))(torch.ones(3))


@scenario("observed-exceptions")
def else_block() -> object:
    """The ``else`` block of a ``try`` raises, which its own handlers must not catch."""

    def activation(name: str) -> float:
        try:
            found = lookup(name)
        except KeyError:
            return 0.0
        else:
            return found / 0

    return compiled(lambda x: x * activation("relu"))(torch.ones(3))


@scenario("observed-exceptions")
def finally_block() -> object:
    """An exception passes through a ``finally`` block."""

    def counted(name: str, calls: list[str]) -> float:
        try:
            return lookup(name)
        finally:
            calls.append(name)

    return compiled(lambda x: x * counted("gelu", []))(torch.ones(3))


@scenario("observed-exceptions")
def finally_raises() -> object:
    """A ``finally`` block raises an exception of its own over the first one."""

    def counted(name: str, calls: dict[str, int]) -> float:
        try:
            return lookup(name)
        finally:
            calls[name] += 1

    return compiled(lambda x: x * counted("gelu", {}))(torch.ones(3))


@scenario("observed-exceptions")
def finally_returns() -> object:
    """A ``return`` in a ``finally`` block swallows the exception."""

    def counted(name: str) -> float:
        try:
            return lookup(name)
        finally:
            return 4.0  # noqa: B012, SIM107

    return compiled(lambda x: x * counted("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def finally_in_the_compiled_function() -> object:
    """An exception of an inlined call passes a ``finally`` block of the compiled function."""

    @compiled
    def run(x: torch.Tensor, calls: list[str]) -> torch.Tensor:
        try:
            x = x * lookup("gelu")
        finally:
            calls.append("done")
        return x

    return run(torch.ones(3), [])


@scenario("observed-exceptions")
def class_context_manager() -> object:
    """An exception leaves the body of a context manager of the user's own."""

    def measured(name: str) -> float:
        with Span(swallows=False):
            return lookup(name)
        return 0.0

    return compiled(lambda x: x * measured("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def swallowing_context_manager() -> object:
    """The ``__exit__`` of an inlined ``with`` statement swallows the exception."""

    def measured(name: str) -> float:
        with Span(swallows=True):
            return lookup(name)
        return 5.0

    return compiled(lambda x: x * measured("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def exit_raises() -> object:
    """An ``__exit__`` raises while another exception passes through it."""

    class Transaction(Span):
        def __exit__(self, *details: object) -> bool:
            raise ConnectionError("rollback failed")

    def measured(name: str) -> float:
        with Transaction(swallows=False):
            return lookup(name)
        return 0.0

    return compiled(lambda x: x * measured("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def enter_raises() -> object:
    """An ``__enter__`` raises."""

    class Locked(Span):
        def __enter__(self) -> Span:
            raise TimeoutError("locked")

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        with Locked(swallows=False):
            return x + 1

    return run(torch.ones(3))


@scenario("observed-exceptions")
def generator_context_manager() -> object:
    """An exception leaves the body of a generator context manager."""

    def measured(name: str) -> float:
        with span():
            return lookup(name)

    return compiled(lambda x: x * measured("gelu"))(torch.ones(3))


@scenario("observed-exceptions")
def stacked_context_managers() -> object:
    """An exception leaves three ``with`` statements, one of them torch's."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        with Span(swallows=False), torch.no_grad(), Span(swallows=False):
            return x * lookup("gelu")

    return run(torch.ones(3))


@scenario("observed-exceptions")
def suppressed() -> object:
    """``contextlib.suppress`` swallows what a helper raises."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(KeyError):
            x = x * lookup("gelu")
        return x + 1

    return run(torch.ones(3))


@scenario("observed-exceptions")
def exit_stack() -> object:
    """An exception unwinds a ``contextlib.ExitStack``."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(Span(swallows=False))
            return x * lookup("gelu")

    return run(torch.ones(3))


@scenario("observed-exceptions")
def grad_mode() -> object:
    """An exception leaves a helper under ``torch.no_grad``."""

    @torch.no_grad()
    def frozen(x: torch.Tensor) -> torch.Tensor:
        return x * lookup("gelu")

    return compiled(lambda x: frozen(x))(torch.ones(3, requires_grad=True))


@scenario("observed-exceptions")
def autocast() -> object:
    """An exception leaves an autocast region inside an inlined function."""

    def mixed(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x) * lookup("gelu")

    return compiled(lambda x: mixed(x))(torch.ones(3, 3))


@scenario()
def break_under_a_handler() -> object:
    """A graph break happens inside a ``try`` block whose helper raises afterwards."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            x = x + 1
            torch._dynamo.graph_break()
            return x * lookup("gelu")
        except KeyError:
            return x * 2

    return run(torch.ones(3))


@scenario("observed-exceptions")
def break_in_a_handler() -> object:
    """A graph break happens in the handler, which then raises the exception again."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * lookup("gelu")
        except KeyError:
            torch._dynamo.graph_break()
            raise

    return run(torch.ones(3))


@scenario("observed-exceptions")
def break_under_a_context_manager() -> object:
    """A graph break happens under ``torch.no_grad`` and a helper raises after it."""

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x + 1
            torch._dynamo.graph_break()
            x = x * lookup("gelu")
        return x + 1

    return run(torch.ones(3))
