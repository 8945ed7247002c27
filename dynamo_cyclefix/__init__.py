"""Backport of PyTorch's fix for exceptions that leave Dynamo and pin the Python stack.

Importing the package activates it, unless ``DYNAMO_CYCLEFIX=off``.  Every interpreter may pay for
that import, so it reads this one file: the rest is loaded when torch is, or when it is asked for.
"""

import sys
from os import environ
from time import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from dynamo_cyclefix._activation import activate, deactivate, status
    from dynamo_cyclefix._errors import CatalogueError, PatchError

__all__ = ["CatalogueError", "PatchError", "activate", "deactivate", "status"]
__version__ = "0.1.0"


class Waiting:
    """The meta-path finder; once a submodule of torch is imported, it becomes a ``TargetFinder``.

    Finds nothing by itself: gives the spec that the other finders find a patching loader.
    """

    def __init__(self, way: str, strict: bool, patches: str, accept_unseen: bool) -> None:
        self.way = way
        self.since = time()
        self.strict = strict
        self.patches = patches
        self.accept_unseen = accept_unseen
        self.error = ""
        self._asked: set[tuple[str, int]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        # CPython calls this under its global import lock: to import here, or to wait for a lock,
        # could wait for a thread that waits for that one.
        question = name, sys.modules["_thread"].get_ident()
        # Another program's finder may ask every finder in turn, us too, on our own question.
        if not name.startswith("torch.") or question in self._asked:
            return None
        self._asked.add(question)
        try:
            spec = self._ask_others(name, path, target) if self.wants(name) else None
        except Exception:
            # The import system asks them next, and the importing code gets their answer.
            return None
        finally:
            self._asked.discard(question)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = patching_loader(spec.loader, self)
        return spec

    def wants(self, name: str) -> bool:
        """Whether something is to be done when this submodule of torch is imported."""
        return not self.error

    def _ask_others(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        finders = list(sys.meta_path)
        # Those before us have said no already.
        others = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in others:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec and find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def wake(self) -> None:
        """Before a module is executed: load what patches."""
        try:
            import dynamo_cyclefix

            if dynamo_cyclefix._active is not self:
                return  # deactivated, or the package was imported anew: then that one patches
            from dynamo_cyclefix._finder import wake

            wake(self)
        except Exception as error:
            self.error = f"the installation is damaged: {type(error).__name__}: {error}"
            import contextlib
            import logging

            try:
                logging.getLogger(__name__).warning("no patch is applied: %s", self.error)
            except Exception:  # of somebody's log handler
                with contextlib.suppress(Exception):
                    sys.stderr.write(f"dynamo-cyclefix: no patch is applied: {self.error}\n")
            if self.strict:
                from dynamo_cyclefix._errors import PatchError

                raise PatchError(self.error) from error
        else:
            self.wake()  # what it is now

    def catch_up(self, executed: "ModuleType | None" = None) -> None:
        """After a module was executed: patch it."""


def patching_loader(loader: "Any", finder: Waiting) -> "Any":
    """A loader that executes a module with its own loader, then has it patched."""

    # Made here: most interpreters never need it.
    class PatchingLoader:
        def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
            return loader.create_module(spec)  # type: ignore[no-any-return]

        def exec_module(self, module: "ModuleType") -> None:
            # The module, and whoever asks it for its source or resources, sees its own loader.
            spec: Any = module.__spec__
            if spec is not None:
                spec.loader = loader
            module.__loader__ = loader
            finder.wake()
            # The import system has said so already, but not of a module that is executed lazily.
            said = spec is None or getattr(spec, "_initializing", False)
            if not said:
                spec._initializing = True
            try:
                loader.exec_module(module)
            finally:
                if not said:
                    spec._initializing = False
            finder.catch_up(module)

        def __getattr__(self, name: str) -> "Any":
            return getattr(loader, name)

    return PatchingLoader()


_active: "Waiting | None" = None


def _way() -> str:
    """What imports us: ``site``, which reads the ``.pth`` file of autostart, or the program."""
    frame = sys._getframe().f_back
    while frame and frame.f_code.co_name != "addpackage":
        frame = frame.f_back
    return "autostart" if frame else "import"


def __dir__() -> "list[str]":
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in __all__:
        from dynamo_cyclefix import _activation

        return getattr(_activation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_mode = environ.get("DYNAMO_CYCLEFIX") or "on"
if _mode in ("on", "strict") and "torch" not in sys.modules:
    # What `activate` comes to where there is nothing else to do than to wait.
    _active = Waiting(
        _way(),
        _mode == "strict",
        environ.get("DYNAMO_CYCLEFIX_PATCHES", ""),
        environ.get("DYNAMO_CYCLEFIX_UNSEEN") == "accept",
    )
    sys.meta_path.insert(0, _active)
elif _mode.strip().lower() != "off":
    from dynamo_cyclefix._activation import activate

    activate(way=_way())
if environ.get("DYNAMO_CYCLEFIX_REPORT") == "1":
    from dynamo_cyclefix import _report  # noqa: F401 - it writes when the process exits
# What the finder can reach outlives all else in the process, and the interpreter's end gets longer.
del environ
