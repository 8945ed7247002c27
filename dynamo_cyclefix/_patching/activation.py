"""One activation: has the modules of torch patched as a finder meets them, and takes it all back.

Loaded before torch's first submodule is executed, and with it what does the work
(:mod:`dynamo_cyclefix._patching.patcher`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dynamo_cyclefix import Finder, patching_loader
from dynamo_cyclefix._locking import lock, log

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from dynamo_cyclefix._errors import PatchError
    from dynamo_cyclefix._patching.patcher import Patcher


def begin(finder: Finder) -> Activation:
    """The activation of a finder; it gets one now if it has none."""
    with lock:
        if finder.activation is None:
            finder.activation = Activation(finder)
            retire_others(finder)
        return finder.activation


def retire_others(but: Finder | None = None) -> None:
    """Stop every finder on ``sys.meta_path`` that a reload, or a second copy of the package, left.

    Args:
        but: the finder that stays.
    """
    finder: Any
    for finder in list(sys.meta_path):
        home = str(type(finder).__module__)
        if home.partition(".")[0] == "dynamo_cyclefix" and finder is not but:
            sys.meta_path.remove(finder)
            # Without it, it has patched nothing yet.
            if finder.activation is not None:
                finder.activation.restore()


class Activation:
    """What a finder has patched.

    Args:
        finder: it has the options, and is told of a fault of our own.
    """

    def __init__(self, finder: Finder) -> None:
        self.finder = finder
        self._patcher: Patcher | None = None
        self._hidden = False
        self._retired = False

    def patcher(self) -> Patcher | None:
        """What applies the patches; ``None`` if it cannot be made, which is said once.

        Raises:
            PatchError: in strict mode, if it cannot be made.
        """
        # Of two threads that import torch at once, each would make one.
        with lock:
            if self.finder.error and self.finder.strict:
                raise self._strict_error()
            if self._retired:
                return None
            if self._patcher is None and not self.finder.error:
                try:
                    from dynamo_cyclefix._patching import patcher as _patcher

                    self._patcher = _patcher.make(
                        self.finder.strict, self.finder.patches, self.finder.accept_unseen
                    )
                except Exception as error:
                    self.give_up(error)
            return self._patcher

    def give_up(self, error: Exception) -> None:
        """After a fault of our own: leave torch alone from here on, and say so.

        Raises:
            PatchError: in strict mode.
        """
        if not self.finder.error:
            self.finder.error = f"{type(error).__name__}: {error}"
            try:
                if self._patcher is not None:
                    self._patcher.restore()
                    self._patcher = None
            finally:
                log("warning", "no patch is applied: %s", self.finder.error)
        if self.finder.strict:
            raise self._strict_error() from error

    def _strict_error(self) -> PatchError:
        from dynamo_cyclefix._errors import PatchError

        return PatchError(
            f"no patch can be applied ({self.finder.error});"
            " set DYNAMO_CYCLEFIX=on to go on without"
        )

    def catch_up(self, executed: Sequence[ModuleType] = ()) -> None:
        """Patch modules that have just been executed, and all that were imported past this finder.

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
            patcher.catch_up(executed)
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
        """Have Dynamo skip the finder's frames, as it skips those of the import system."""
        skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip_code is not None and not self._hidden:
            self._hidden = True
            ours = type(patching_loader(None, self.finder)), type(self._patcher)
            for owner in (type(self.finder), type(self), *ours):
                for method in vars(owner).values():
                    if hasattr(method, "__code__"):
                        skip_code(method.__code__)

    def restore(self) -> None:
        """Give every function its original code object again, for good.

        An import that is under way has this finder in hand, and patches nothing from here on.
        """
        with lock:
            self._retired = True
            if self._patcher is not None:
                self._patcher.restore()

    @property
    def has_restored(self) -> bool:
        """Whether nothing that it patched is left."""
        return self._patcher is None or not self._patcher.changes()

    def wants(self, name: str) -> bool:
        """See :meth:`Finder.wants`; called under CPython's global import lock."""
        patcher = self._patcher
        if patcher is None or self._retired:
            # In strict mode a fault is raised when the module is executed.
            return self.finder.strict and bool(self.finder.error)
        if name in patcher.modules:
            return True
        # Inside of an import at whose end all is patched that is there by then, nothing else is.
        # With a package, all that its import brings in is patched together.
        return "executed" not in vars(self.finder.inner) and (
            name in patcher.packages or bool(patcher.overdue())
        )
