"""Finds the live functions of a module, and what stands around them; runs no code of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, ModuleType

from dynamo_cyclefix._errors import Refused

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
