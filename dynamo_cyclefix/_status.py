"""What ``status`` tells: the state of this process, typed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timezone

from dynamo_cyclefix import _catalogue, _patcher
from dynamo_cyclefix._finder import TargetFinder
from dynamo_cyclefix._patcher import PatchStatus


@dataclass(frozen=True)
class Status:
    """The patches of one process.

    Attributes:
        torch: the version of the imported torch; ``None`` if it is not imported.
        python: the version of the interpreter.
        active: whether patches are, or will be, applied.
        way: what activated us; empty if nothing did.
        since: when, ISO 8601 in UTC; empty if nothing did.
        strict: whether strict mode is on.
        error: why no patch can be applied at all; empty if they can.
        patches: one entry for each patch of the catalogue.
    """

    torch: str | None
    python: str
    active: bool
    way: str
    since: str
    strict: bool
    error: str
    patches: tuple[PatchStatus, ...]


def status(finder: TargetFinder | None) -> Status:
    """The status of the process under ``finder``; ``None`` where nothing is active."""
    error = ""
    patches: tuple[PatchStatus, ...] = ()
    try:
        patcher = finder.patcher() if finder else _patcher.Patcher(_catalogue.load(), ())
        if patcher is not None:
            if finder:
                patcher.catch_up()
            patches = patcher.status()
    except (_catalogue.CatalogueError, _patcher.PatchError) as failure:
        error = str(failure)
    if finder:
        error = finder.error or error
        if finder not in sys.meta_path and not error:
            error = "our finder was removed from sys.meta_path: later imports are not patched"
    return Status(
        torch=_patcher.torch_version() if "torch" in sys.modules else None,
        python=sys.version.split()[0],
        active=finder is not None,
        way=finder.way if finder else "",
        since=datetime.fromtimestamp(finder.since, timezone.utc).isoformat() if finder else "",
        strict=bool(finder and finder.strict),
        error=error,
        patches=patches,
    )
