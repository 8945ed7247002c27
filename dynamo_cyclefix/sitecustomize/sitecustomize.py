"""For ``PYTHONPATH``: activates dynamo-cyclefix, then runs the sitecustomize that this one shadows.

Every interpreter that inherits ``PYTHONPATH`` runs this file, so it is plain enough for Python 2.7;
before Python 3.10 it activates nothing.
"""

import os
import sys


def _activate(copy):  # type: (str) -> None
    if sys.version_info < (3, 10) or "dynamo_cyclefix" in sys.modules:
        return
    # The copy that this file belongs to, wherever that is, and nothing else from there.
    sys.path.insert(0, copy)
    try:
        import dynamo_cyclefix
    finally:
        sys.path.remove(copy)
    if dynamo_cyclefix._active is not None:
        # Loaded where any variable of ours is set.
        settings = sys.modules.get("dynamo_cyclefix._settings")
        dynamo_cyclefix._active.activated_by = (
            settings and settings.read().activated_by
        ) or "sitecustomize"


def _run_shadowed(here):  # type: (str) -> None
    if here not in sys.path:
        return
    own = sys.modules.pop("sitecustomize")
    place = sys.path.index(here)
    sys.path.remove(here)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own
    finally:
        # Children may get their PYTHONPATH from sys.path: torch's compile workers do.
        sys.path.insert(place, here)


_here = os.path.dirname(os.path.abspath(__file__))
try:
    _activate(os.path.dirname(os.path.dirname(_here)))
except Exception as _error:  # A start-up goes on, whatever is wrong with us.
    if sys.stderr is not None:
        sys.stderr.write("dynamo-cyclefix: not activated by sitecustomize: " + repr(_error) + "\n")
_run_shadowed(_here)
