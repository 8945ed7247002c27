"""Puts a rewritten code object into a live function, and takes it out again."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType, ModuleType

from dynamo_cyclefix._catalogue.model import Target
from dynamo_cyclefix._errors import Refused


class Swap:
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

    def put(self) -> None:
        """Make the function run the replacement; ``exchange`` sees to closures made earlier."""
        self.function.__code__ = self.replacement

    def take_back(self) -> None:
        """Undo ``put``; leave a function that somebody else changed since."""
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


_DEEPEST = 100  # wrappers around one function, some of which make a new one whenever asked


def live_function(module: ModuleType, qualname: str) -> FunctionType:
    """The function object behind a module's or class's attribute, beneath what wraps it.

    Raises:
        Refused: there is none that the module itself defines.
    """
    found = _attribute(module, qualname)
    innermost = found
    # `type(...) is`, since a proxy says that it is an instance of what it wraps.
    seen: set[int] = set()
    while innermost is not None and id(innermost) not in seen and len(seen) < _DEEPEST:
        seen.add(id(innermost))
        if (
            type(innermost) is FunctionType
            and innermost.__globals__ is module.__dict__
            and innermost.__code__.co_name == qualname.rpartition(".")[2]
        ):
            return innermost
        if type(innermost) in (staticmethod, classmethod):
            innermost = innermost.__func__  # type: ignore[attr-defined]
        else:
            try:
                innermost = getattr(innermost, "__wrapped__", None)
            except Exception:  # of the code that another program put there
                break
    if found is None:
        raise Refused(f"{module.__name__} has no {qualname}")
    raise Refused(f"{qualname} was replaced by {_described(found)} before us")


def decorators(module: ModuleType, qualname: str) -> list[str]:
    """Tell of code around a live function that no patch reaches, and that may hold an exception."""
    found = _attribute(module, qualname)
    if type(found) in (staticmethod, classmethod):
        found = found.__func__  # type: ignore[attr-defined]
    if type(found) is FunctionType and not hasattr(found, "__wrapped__"):
        return []
    return [f"beneath {_described(found)}, which is not patched"]


def overrides(module: ModuleType, function: str) -> list[str]:
    """Tell of methods that run in place of a patched one, and that no patch reaches."""
    owner, _, name = function.rpartition(".")
    base = _attribute(module, owner) if owner else None
    stack: list[type] = type.__subclasses__(base) if isinstance(base, type) else []
    found = set()
    while stack:
        subclass = stack.pop()
        stack += type.__subclasses__(subclass)
        if name in vars(subclass):
            found.add(_described(subclass))
    return [f"overridden in {subclass}, which is not patched" for subclass in sorted(found)]


def _attribute(module: ModuleType, qualname: str) -> object:
    found: object = module
    for name in qualname.split("."):
        found = namespace(found).get(name)
    return found


# What `vars` gives, whatever attributes a subclass defines; in C, so Dynamo sees no frame of it.
module_namespace = vars(ModuleType)["__dict__"].__get__
_class_namespace = vars(type)["__dict__"].__get__


def namespace(owner: object) -> Mapping[str, object]:
    """The attributes of a module or class, and none of anything else that looks like one.

    Runs no code of the owner's.
    """
    found: Mapping[str, object] = {}
    if issubclass(type(owner), ModuleType):
        found = module_namespace(owner)
    elif issubclass(type(owner), type):
        found = _class_namespace(owner)
    return found


def _described(found: object) -> str:
    if type(found) is FunctionType:
        # Its own names may be copies of the wrapped function's (`functools.wraps`).
        code = found.__code__
        qualname = getattr(code, "co_qualname", code.co_name)
        return f"{found.__globals__.get('__name__')}.{qualname}"
    kind = type(found)
    module, qualname = (
        getattr(found, part, getattr(kind, part)) for part in ("__module__", "__qualname__")
    )
    return f"{module}.{qualname}"
