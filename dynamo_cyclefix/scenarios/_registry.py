"""The registry of scenarios: what each is for, which patches claim it, where it can run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

_MODULES = (
    "observed",
    "protocols",
    "handlers",
    "fake_tensor",
    "graph_breaks",
    "fullgraph",
    "higher_order",
    "exporting",
    "tracing",
    "backend",
    "inductor",
    "artifacts",
    "autograd",
    "recompile",
    "interrupts",
    "modes",
    "success_breaks",
    "success_functions",
    "success_modules",
    "success_higher_order",
    "success_autograd",
    "success_protocols",
    "success_export",
    "success_tracing",
)

_registered: dict[str, Scenario] = {}


@dataclass(frozen=True)
class Scenario:
    """One way in which user code meets an exception in Dynamo.

    ``patches`` are the ids of the patches that claim it: with these applied it must not keep a
    user frame alive. ``torch`` is a PEP 440 specifier of the releases on which it can run. With
    ``collected``, what the scenario watches may wait for a collection, as whatever an exported
    program refers to does (a ``GraphModule`` and its graph refer to each other): it must not need
    more than that.
    """

    name: str
    purpose: str
    body: Callable[[], object]
    patches: tuple[str, ...]
    torch: str = ""
    collected: bool = False

    def applies(self, torch_version: str) -> bool:
        """Whether the scenario can run on ``torch_version`` (pre-releases count as releases)."""
        return SpecifierSet(self.torch).contains(Version(torch_version).base_version)


def scenario(
    *patches: str, torch: str = "", collected: bool = False
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a function as a scenario, named after it with ``-`` for ``_``.

    Raises ``ValueError`` for a name that is taken or a function without a docstring.
    """

    def register(body: Callable[[], object]) -> Callable[[], object]:
        name = body.__name__.replace("_", "-")
        if name in _registered:
            raise ValueError(
                f"scenario {name!r} is registered already: give one of them a new name"
            )
        if not body.__doc__:
            raise ValueError(f"scenario {name!r} has no docstring: say in one line what it is for")
        purpose = body.__doc__.strip().splitlines()[0]
        _registered[name] = Scenario(name, purpose, body, patches, torch, collected)
        return body

    return register


def load_all() -> dict[str, Scenario]:
    """Import the scenario modules, and torch with them; return every scenario by name, in order."""
    for module in _MODULES:
        importlib.import_module(f"{__package__}.{module}")
    return dict(_registered)


def load() -> dict[str, Scenario]:
    """Return by name, in order, the scenarios that can run on the installed torch."""
    every = load_all()
    import torch

    return {name: found for name, found in every.items() if found.applies(torch.__version__)}
