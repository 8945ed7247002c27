"""``DYNAMO_CYCLEFIX_REPORT=1``: one line on stderr when the process exits."""

from __future__ import annotations

import atexit
import os
import sys

import dynamo_cyclefix
from dynamo_cyclefix import _json, _settings
from dynamo_cyclefix._patching.state import State


@atexit.register
def write() -> None:
    """Say what became of the patches."""
    if sys.stderr is not None:
        line = _json.document({"pid": os.getpid(), **_state()})
        print(f"dynamo-cyclefix: {line}", file=sys.stderr, flush=True)


def _state() -> dict[str, object]:
    finder = dynamo_cyclefix._active
    if finder is None:
        return {"state": State.DISABLED, "reason": _settings.not_active()}
    found: dict[str, object] = {"activated_by": finder.activated_by}
    if "torch" not in sys.modules:
        # Not asked for a status: a process without torch need not load what tells it.
        state = State.REFUSED if finder.error else State.PENDING
        return found | {"state": state, "reason": finder.error or "torch is not imported"}
    try:
        status = dynamo_cyclefix.status()
    except Exception as error:  # of a damaged installation
        reason = finder.error or f"{type(error).__name__}: {error}"
        return found | {"state": State.REFUSED, "reason": reason}
    by_state: dict[str, list[str]] = {}
    for patch in status.patches:
        by_state.setdefault(patch.state, []).append(patch.id)
    if status.error:
        state = State.REFUSED
    else:
        # What the operator has switched off does not count, unless that is all.
        counted = by_state.keys() - {State.DISABLED} or {State.DISABLED}
        state = min(map(State, counted), key=lambda found: found.rank)
    return found | {
        "state": state,
        "torch": status.torch,
        "reason": status.error,
        "patches": by_state,
    }
