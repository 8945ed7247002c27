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

    from dynamo_cyclefix._activation import activate, deactivate, status
    from dynamo_cyclefix._errors import CatalogueError, PatchError

__all__ = ["CatalogueError", "PatchError", "activate", "deactivate", "status"]
__version__ = "0.1.0"


class Waiting:
    """The meta-path finder until a submodule of torch is looked for; see ``_finder``."""

    def __init__(self, way: str, strict: bool, patches: str, accept_unseen: bool) -> None:
        self.way = way
        self.since = time()
        self.strict = strict
        self.patches = patches
        self.accept_unseen = accept_unseen
        self.error = ""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name.startswith("torch.") and not self.error:
            try:
                from dynamo_cyclefix._finder import find_spec
            except Exception as error:
                self.error = f"the installation is damaged: {error}"
                import logging

                logging.getLogger(__name__).warning("no patch is applied: %s", self.error)
                if self.strict:
                    raise RuntimeError(self.error) from error
            else:
                return find_spec(self, name, path, target)
        return None


_active: "Waiting | None" = None


def _way() -> str:
    """What imports us: ``site``, which reads the ``.pth`` file of autostart, or the program."""
    frame = sys._getframe().f_back
    while frame and frame.f_code.co_name != "addpackage":
        frame = frame.f_back
    return "autostart" if frame else "import"


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
