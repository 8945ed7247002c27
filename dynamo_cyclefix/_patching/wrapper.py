"""The second way to release frames, for a function whose source is missing: wrap it.

The wrapper clears the function's finished frames as an exception leaves.  It needs no source, but
reaches only holders that can be found by name, and adds a frame to tracebacks.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

import wrapt

from dynamo_cyclefix._catalogue.model import Target
from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._patching.functions import namespace


class Wrap:
    """One function, the wrapper around it, and everything that holds the function by name.

    Like a ``Replacement``, but for what it puts in place.

    Args:
        module: the module that defines the function.
        function: the function.
        targets: the targets in it.

    Raises:
        Refused: a target is nested, or unknown to the code; or the function has no name of its own,
            as beneath a decorator.
    """

    def __init__(self, module: ModuleType, function: FunctionType, targets: Sequence[Target]):
        self.targets = targets
        self.function = function
        # There are no closures to look for.
        self.nested = ()
        self.hidden = False
        for target in targets:
            _check(function.__code__, target)
        self._wrapper = wrapt.FunctionWrapper(function, _clearing(function.__code__))
        *classes, self._name = targets[0].outermost.split(".")
        self._owner: Any = module
        for name in classes:
            self._owner = getattr(self._owner, name)
        if namespace(self._owner).get(self._name) is not function:
            raise Refused(f"the source of {targets[0].key} is missing, and a decorator holds it")

    def install(self) -> None:
        """Put the wrapper wherever a module or the class has the function."""
        for holder in self._holders(self.function):
            setattr(holder, self._name, self._wrapper)

    def restore(self) -> None:
        """Undo ``install``."""
        for holder in self._holders(self._wrapper):
            setattr(holder, self._name, self.function)

    @property
    def is_in_place(self) -> bool:
        return vars(self._owner).get(self._name) is self._wrapper

    def _holders(self, held: object) -> Iterator[Any]:
        for holder in (self._owner, *tuple(sys.modules.values())):
            if namespace(holder).get(self._name) is held:
                yield holder


def _check(code: CodeType, target: Target) -> None:
    if not _suits(target):
        raise Refused(f"the source of {target.key} is missing, and no wrapper would do")
    for name in _names(target):
        if name not in code.co_varnames and name not in code.co_cellvars:
            raise Refused(f"{target.function} has no parameter or local {name!r}")


def _suits(target: Target) -> bool:
    return (
        target.function == target.outermost
        and not target.needs_source
        and all(edit.works_without_source for edit in target.edits)
    )


def is_fixed(code: CodeType, targets: Sequence[Target]) -> bool:
    """Whether the code deletes every parameter that holds an exception, and holds it nowhere else.

    Of a local that cannot be said: the end of an ``except`` block deletes its target too.
    """
    deleted = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("DELETE_FAST", "DELETE_DEREF")
    }
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return all(map(_suits, targets)) and all(
        name in deleted.intersection(parameters) for t in targets for name in _names(t)
    )


def _names(target: Target) -> list[str]:
    return [name for function, name in target.holders() if function == target.function]


def _clearing(code: CodeType) -> Callable[..., Any]:
    """A wrapt wrapper that clears the frames of ``code``, and of functions nested in it."""
    codes = frozenset(_family(code))

    def call_and_clear(
        wrapped: Callable[..., Any],
        instance: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except BaseException as error:
            _clear(error.__traceback__, codes)
            raise
        finally:
            # This frame is on the traceback too.
            del args, kwargs

    return call_and_clear


def _family(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _family(constant)


def _clear(traceback: TracebackType | None, codes: frozenset[CodeType]) -> None:
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            # Further out the same function may still be running.
            with contextlib.suppress(RuntimeError):
                traceback.tb_frame.clear()
        traceback = traceback.tb_next
