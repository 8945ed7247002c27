"""Backport of PyTorch's fix for exceptions that leave Dynamo and pin the Python stack.

Importing the package activates it, unless ``DYNAMO_CYCLEFIX=off``.  Every interpreter may pay for
that import, so it reads this one file, and a small one where a variable of ours is set: the rest is
loaded when torch is, or when it is asked for.
"""

import sys
from time import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from dynamo_cyclefix._errors import CatalogueError, PatchError
    from dynamo_cyclefix._patching.activation import Activation
    from dynamo_cyclefix._patching.session import activate, deactivate, status

__all__ = ["CatalogueError", "PatchError", "activate", "deactivate", "status"]
__version__ = "0.2.0"


class Finder:
    """The meta-path finder.

    Finds nothing by itself: gives the spec that the other finders find a patching loader.  It waits
    until a submodule of torch is executed, and gets the :class:`Activation` that patches only then.
    """

    def __init__(self, activated_by: str, strict: bool, patches: str, accept_unseen: bool) -> None:
        self.activated_by = activated_by
        self.since = time()
        self.strict = strict
        self.patches = patches
        self.accept_unseen = accept_unseen
        self.error = ""
        self.activation: Activation | None = None
        self._asked: set[tuple[str, int]] = set()
        # Of each thread: the modules that it has executed inside of another one's import.
        self.inner = sys.modules["_thread"]._local()

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
        return not self.error if self.activation is None else self.activation.wants(name)

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

    def prepare(self) -> None:
        """Before a module is executed: load what patches.

        Raises:
            PatchError: in strict mode, if no patch can be applied.
        """
        try:
            import dynamo_cyclefix

            if self.activation is None and dynamo_cyclefix._active is not self:
                return  # deactivated, or the package was imported anew: then that one patches
            from dynamo_cyclefix._patching.activation import begin

            activation = begin(self)
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
            activation.patcher()

    def catch_up(self, executed: "Sequence[ModuleType]" = ()) -> None:
        """After modules were executed: patch them."""
        import dynamo_cyclefix

        # Another one may have been activated while they were.
        active = dynamo_cyclefix._active
        activation = (active and active.activation) or self.activation
        if activation is not None:
            activation.catch_up(executed)


def patching_loader(loader: "Any", finder: Finder) -> "Any":
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
            finder.prepare()
            # The import system has said so already, but not of a module that is executed lazily.
            said = spec is None or getattr(spec, "_initializing", False)
            if not said:
                spec._initializing = True
            # What one import brings in is patched at its end, together: to find the closures that
            # exist by then takes a walk over all objects.
            inner = vars(finder.inner)
            is_outermost = "executed" not in inner
            try:
                executed = inner.setdefault("executed", [])
                loader.exec_module(module)
                executed.append(module)
            finally:
                if not said:
                    spec._initializing = False
                if is_outermost:
                    finder.catch_up(inner.pop("executed", ()))

        def __getattr__(self, name: str) -> "Any":
            return getattr(loader, name)

    return PatchingLoader()


_active: "Finder | None" = None


def _activated_by() -> str:
    """What imports us: ``site``, which reads the ``.pth`` file of autostart, or the program."""
    frame = sys._getframe().f_back
    while frame and frame.f_code.co_name != "addpackage":
        frame = frame.f_back
    return "autostart" if frame else "import"


def __dir__() -> "list[str]":
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in __all__:
        from dynamo_cyclefix._patching import session as _activation

        return getattr(_activation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _start() -> None:
    global _active
    # In here, since what the finder can reach outlives all else, and the interpreter's end gets
    # longer.
    from os import environ

    mode, patches, accept_unseen, report = "on", "", False, False
    # Where no variable of ours is set there is nothing to judge.
    if "DYNAMO_CYCLEFIX" in "\n".join(environ):
        from dynamo_cyclefix._settings import read

        found = read()
        mode, patches, accept_unseen = found.mode, found.patches, found.accept_unseen
        report = found.report
    if mode != "off" and "torch" in sys.modules:
        from dynamo_cyclefix._patching.session import start

        start(_activated_by())
    elif mode != "off":
        # What `activate` comes to where there is nothing else to do than to wait.
        _active = Finder(_activated_by(), mode == "strict", patches, accept_unseen)
        sys.meta_path.insert(0, _active)
    if report:
        from dynamo_cyclefix import _report  # noqa: F401 - it writes when the process exits


_start()
