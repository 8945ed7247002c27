"""``DYNAMO_CYCLEFIX_REPORT=1``: one line on stderr when the process exits."""

from __future__ import annotations

import atexit
import json
import os
import sys

import dynamo_cyclefix
from dynamo_cyclefix import _settings

# The state of a process is the first of these that any patch has.
_ORDER = (
    "not applied",
    "applied by a wrapper, source missing",
    "applied, source not seen before",
    "applied",
    "pending",
    "fixed upstream",
)


@atexit.register
def write() -> None:
    """Say what became of the patches."""
    if sys.stderr is not None:
        line = {"pid": os.getpid(), **_state()}
        print(f"dynamo-cyclefix: {json.dumps(line)}", file=sys.stderr, flush=True)


def _state() -> dict[str, object]:
    finder = dynamo_cyclefix._active
    if finder is None:
        return {"state": "off", "reason": _settings.not_active()}
    found: dict[str, object] = {"way": finder.way}
    if "torch" not in sys.modules:
        # Not asked for a status: a process without torch need not load what tells it.
        state = "not applied" if finder.error else "pending"
        return found | {"state": state, "reason": finder.error or "torch is not imported"}
    try:
        status = dynamo_cyclefix.status()
    except Exception as error:  # of a damaged installation
        reason = finder.error or f"{type(error).__name__}: {error}"
        return found | {"state": "not applied", "reason": reason}
    by_state: dict[str, list[str]] = {}
    for patch in status.patches:
        by_state.setdefault(patch.state.value, []).append(patch.id)
    if status.error:
        state = "not applied"
    else:
        state = next((state for state in _ORDER if state in by_state), "not affected")
    return found | {
        "state": state,
        "torch": status.torch,
        "reason": status.error,
        "patches": by_state,
    }
