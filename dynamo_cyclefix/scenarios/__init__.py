"""User code that makes Dynamo raise, convert or swallow an exception, and what is seen of it.

Each scenario does in a few lines what a real program does. The tests and ``verify`` share them:
``observe`` runs one in this process, ``python -m dynamo_cyclefix.scenarios`` runs many in a child.
"""

from ._observe import Observation, observe
from ._registry import Scenario, load, load_all, scenario

__all__ = ["Observation", "Scenario", "load", "load_all", "observe", "scenario"]
