"""The meta-path finder: waits for a target module, then has it patched before anyone can use it.

What does the work (:mod:`dynamo_cyclefix._patcher`) is loaded with the first submodule of torch.
"""

from __future__ import annotations

import sys
from _thread import RLock, get_ident
from typing import TYPE_CHECKING

from dynamo_cyclefix import Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from dynamo_cyclefix._errors import PatchError
    from dynamo_cyclefix._patcher import Patcher

_waking = RLock()


def find_spec(
    waiting: Waiting, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """What a finder that waits finds in the end."""
    # One of a copy of the package that this copy has replaced: then this one's finder is in place.
    return wake(waiting).find_spec(name, path, target) if isinstance(waiting, Waiting) else None


def wake(waiting: Waiting) -> TargetFinder:
    """Make the finder that waits one that knows the targets.

    The same object, since other programs may hold it where no one would find it.
    """
    with _waking:
        if not isinstance(waiting, TargetFinder):
            # In this order: another thread may have it in hand.
            TargetFinder._prepare(waiting)  # type: ignore[arg-type]
            waiting.__class__ = TargetFinder
            retire_others(waiting)
    return waiting  # type: ignore[return-value]


def retire_others(but: Waiting | None = None) -> None:
    """Stop every finder on ``sys.meta_path`` that a reload, or a second copy of the package, left.

    Args:
        but: the finder that stays.
    """
    for finder in list(sys.meta_path):
        if type(finder).__module__.partition(".")[0] == __package__ and finder is not but:
            sys.meta_path.remove(finder)
            # Without it, it has patched nothing yet.
            if hasattr(finder, "take_back"):
                finder.take_back()


class TargetFinder(Waiting):
    """Finds nothing by itself: gives the spec that the other finders find a patching loader."""

    def _prepare(self) -> None:
        self._patcher: Patcher | None = None
        self._asked: set[tuple[str, int]] = set()
        self._lock = RLock()
        self._hidden = False
        self._retired = False

    def patcher(self) -> Patcher | None:
        """What applies the patches; ``None`` if it cannot be made, which is said once.

        Raises:
            PatchError: in strict mode, if it cannot be made.
        """
        # Of two threads that import torch at once, each would make one.
        with self._lock:
            if self.error and self.strict:
                raise self._strict_error()
            if self._patcher is None and not self.error and not self._retired:
                try:
                    from dynamo_cyclefix import _patcher

                    self._patcher = _patcher.make(self.strict, self.patches, self.accept_unseen)
                except Exception as error:
                    self.give_up(error)
            return self._patcher

    def give_up(self, error: Exception) -> None:
        """After a fault of our own: leave torch alone from here on, and say so.

        Raises:
            PatchError: in strict mode.
        """
        import logging

        if not self.error:
            self.error = f"{type(error).__name__}: {error}"
            logging.getLogger("dynamo_cyclefix").warning("no patch is applied: %s", self.error)
            if self._patcher is not None:
                self._patcher.take_back()
                self._patcher = None
        if self.strict:
            raise self._strict_error() from error

    def _strict_error(self) -> PatchError:
        from dynamo_cyclefix._errors import PatchError

        return PatchError(
            f"no patch can be applied ({self.error}); set DYNAMO_CYCLEFIX=on to go on without"
        )

    def catch_up(self, executed: ModuleType | None = None) -> None:
        """Patch a module that has just been executed, or all that were imported past this finder.

        Raises:
            PatchError: in strict mode, if an affected torch cannot be patched.
        """
        patcher = self.patcher()
        if patcher is None:
            return
        # An import inside a compiled call: Dynamo must neither trace nor count our own frames.
        eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
        callback = eval_frame and eval_frame.set_eval_frame(None)
        try:
            if executed is None:
                patcher.catch_up()
            else:
                patcher.patch_module(executed)
            self._hide()
        except Exception as error:
            from dynamo_cyclefix._errors import PatchError

            if isinstance(error, PatchError):
                raise
            self.give_up(error)
        finally:
            if eval_frame:
                eval_frame.set_eval_frame(callback)

    def _hide(self) -> None:
        """Have Dynamo skip the frames of this module, as it skips those of the import system."""
        skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip_code is not None and not self._hidden:
            self._hidden = True
            for owner in (TargetFinder, PatchingLoader):
                for method in vars(owner).values():
                    if hasattr(method, "__code__"):
                        skip_code(method.__code__)

    def take_back(self) -> None:
        """Give every function its original code object again, for good.

        An import that is under way has this finder in hand, and patches nothing from here on.
        """
        with self._lock:
            self._retired = True
            patcher, self._patcher = self._patcher, None
        if patcher is not None:
            patcher.take_back()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :meth:`importlib.abc.MetaPathFinder.find_spec`."""
        if not name.startswith("torch."):
            return None
        # Another program's finder may ask every finder in turn, us too, on our own question.
        question = name, get_ident()
        if question in self._asked:
            return None
        self._asked.add(question)
        try:
            patcher = self._patcher
            # All that most imports pay for, and without a frame that Dynamo could see.
            if patcher is None or not sys.modules.keys().isdisjoint(patcher.waiting):
                self.catch_up()
                patcher = self._patcher
            if patcher is None or name not in patcher.modules:
                return None
            try:
                spec = self._ask_others(name, path, target)
            except Exception:
                # The import system asks them next, and the importing code gets their answer.
                return None
            if spec is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = PatchingLoader(spec.loader, self)  # type: ignore[assignment]
            return spec
        finally:
            self._asked.discard(question)

    def _ask_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        # Those before us have said no already.
        others = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in others:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec and find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


class PatchingLoader:
    """Executes a target module with its own loader, then has it patched."""

    def __init__(self, loader: Any, finder: TargetFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See :meth:`importlib.abc.Loader.create_module`."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See :meth:`importlib.abc.Loader.exec_module`."""
        # The module, and whoever asks it for its source or resources, sees its own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.catch_up(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
