"""What must die with the user's frame: weak references to it, each with a label."""

from __future__ import annotations

import weakref
from typing import Any

_watched: list[tuple[str, weakref.ref[Any]]] = []


def watch(**objects: Any) -> Any:
    """Have it observed whether these objects outlive the frame that calls the scenario.

    Args:
        objects: by label (``input``, ``module``, ``parameter``, ...), which may be used again: it
            counts as alive while one of its objects is. A list, a tuple, a dictionary or a cell
            takes no weak reference (``TypeError``): watch what is in it.

    Returns:
        the object, or a tuple of them where there are several.
    """
    _watched.extend((label, weakref.ref(found)) for label, found in objects.items())
    return tuple(objects.values()) if len(objects) > 1 else next(iter(objects.values()))


def take() -> list[tuple[str, weakref.ref[Any]]]:
    """Return what was watched since the last call, and forget it."""
    taken = list(_watched)
    _watched.clear()
    return taken


def alive(watched: list[tuple[str, weakref.ref[Any]]]) -> list[str]:
    """Return the labels of which an object is alive, each once, in order."""
    return list(dict.fromkeys(label for label, ref in watched if ref() is not None))
