"""Puts a rewritten code object into a live function, and takes it out again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import CodeType, FunctionType

from dynamo_cyclefix._catalogue.model import Target


class Replacement:
    """One outermost function, the code it had and the code it gets.

    Args:
        targets: the targets in it.
        function: the function.
        replacement: its new code.
        nested: the old and new code of each nested target: closures made earlier hold the old one.

    Attributes:
        hidden: whether ``gc.freeze()`` may hide some of those closures: they keep the old.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        function: FunctionType,
        replacement: CodeType,
        nested: Sequence[tuple[CodeType, CodeType]],
    ) -> None:
        self.targets = targets
        self.function = function
        self.original = function.__code__
        self.replacement = replacement
        self.nested = nested
        self.hidden = False

    def install(self) -> None:
        """Make the function run the replacement; ``exchange`` sees to closures made earlier."""
        self.function.__code__ = self.replacement

    def restore(self) -> None:
        """Undo ``install``; leave a function that somebody else changed since."""
        if self.function.__code__ is self.replacement:
            self.function.__code__ = self.original

    @property
    def is_in_place(self) -> bool:
        """Whether the function still runs the replacement."""
        return self.function.__code__ is self.replacement


def exchange(
    pairs: Sequence[tuple[CodeType, CodeType]], functions: Sequence[FunctionType] = ()
) -> list[FunctionType]:
    """Give the second code object to every function that runs the first, wherever it is held.

    One walk over all objects, tens of milliseconds and more: so call it once for many.

    Returns:
        Those of ``functions`` that the walk does not see, since ``gc.freeze()`` hides them, and
        with each, maybe, a closure that it made before that.
    """
    if not pairs:
        return []
    # CPython 3.12 freezes some objects of its own when it starts, so the count tells nothing more.
    functions = functions if gc.get_freeze_count() else ()
    codes = [*(old for old, _ in pairs), *(function.__code__ for function in functions)]
    # By identity: the code objects of a module that was executed twice are equal.
    exchanged = {id(old): new for old, new in pairs}
    seen = set()
    for holder in gc.get_referrers(*codes):
        if type(holder) is FunctionType:
            seen.add(id(holder))
            if new := exchanged.get(id(holder.__code__)):
                holder.__code__ = new
    return [function for function in functions if id(function) not in seen]
