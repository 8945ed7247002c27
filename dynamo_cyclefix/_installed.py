"""A torch as files: where it is and what version it is.  Nothing of it is imported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


class TorchNotFound(Exception):  # noqa: N818 - not a fault, but what the user has
    """There is no torch; the text says what to do."""


def find() -> Path:
    """The directory that holds the installed ``torch`` package.

    Raises:
        TorchNotFound: none is installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise TorchNotFound("found no torch: install it, or name its directory with --root")
    return Path(spec.submodule_search_locations[0]).parent


def version(root: Path) -> str:
    """The version of the torch whose package is ``root/torch``.

    Raises:
        TorchNotFound: it does not tell.
    """
    path = root / "torch" / "version.py"
    try:
        found = re.search(r"""^__version__ = ['"](.+)['"]""", path.read_text("utf-8"), re.MULTILINE)
    except (OSError, ValueError) as error:
        raise TorchNotFound(f"found no torch in {root} ({error})") from error
    if found is None:
        raise TorchNotFound(f"{path}: found no __version__")
    return found[1]
