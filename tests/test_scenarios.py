"""The registry of scenarios: complete, well named, and in a stable order."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dynamo_cyclefix import scenarios
from dynamo_cyclefix._catalogue.toml import load as load_catalogue
from dynamo_cyclefix._commands.verify import _labels
from dynamo_cyclefix.scenarios import _registry
from dynamo_cyclefix.scenarios._watch import watch


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, scenarios.Scenario]:
    """A registry of this test's own."""
    found: dict[str, scenarios.Scenario] = {}
    monkeypatch.setattr(_registry, "_registered", found)
    return found


def test_every_scenario_module_is_loaded() -> None:
    folder = Path(scenarios.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    loaded = {found.body.__module__.rpartition(".")[2] for found in scenarios.load_all().values()}
    assert loaded == modules


def test_enough_scenarios() -> None:
    every = scenarios.load_all()
    assert len(every) >= 100
    claimed = Counter(patch for found in every.values() for patch in found.patches)
    assert claimed["observed-exceptions"] >= 25


def test_scenarios_name_patches_that_exist() -> None:
    known = set(load_catalogue().patches)
    claimed = {patch for found in scenarios.load_all().values() for patch in found.patches}
    assert claimed <= known


def test_every_patch_has_a_scenario() -> None:
    known = set(load_catalogue().patches)
    claimed = {patch for found in scenarios.load_all().values() for patch in found.patches}
    assert known <= claimed


def test_order_is_that_of_the_source() -> None:
    every = list(scenarios.load_all().values())
    places = [
        (_registry._MODULES.index(found.body.__module__.rpartition(".")[2]), line)
        for found in every
        if (line := found.body.__code__.co_firstlineno)
    ]
    assert places == sorted(places)


def test_only_what_applies_is_loaded() -> None:
    every, applicable = scenarios.load_all(), scenarios.load()
    assert set(applicable) <= set(every)
    assert all(
        (name in applicable) == found.applies(torch.__version__) for name, found in every.items()
    )


@pytest.mark.parametrize(
    ("version", "applies"),
    [
        ("2.7.1", False),
        ("2.8.0", True),
        ("2.8.0+cu128", True),
        ("2.9.0a0+50eac811a6.nv25.10", True),
        ("2.8.0rc1", True),
        ("2.15.0.dev20260901+cpu", True),
        ("2.7.0a0+git1234567", False),
    ],
)
def test_releases_on_which_a_scenario_applies(
    registered: dict[str, scenarios.Scenario], version: str, applies: bool
) -> None:
    @scenarios.scenario("observed-exceptions", torch=">=2.8")
    def recent_feature() -> None:
        """Use what is new."""

    assert registered["recent-feature"].applies(version) is applies


def test_registering(registered: dict[str, scenarios.Scenario]) -> None:
    @scenarios.scenario("observed-exceptions", "fullgraph-errors")
    def something_raises() -> str:
        """A helper raises.

        More about it.
        """
        return "done"

    found = registered["something-raises"]
    assert found.purpose == "A helper raises."
    assert found.patches == ("observed-exceptions", "fullgraph-errors")
    assert found.body() == something_raises() == "done"
    assert found.applies("2.4.1")


def test_a_name_that_is_taken_is_refused(registered: dict[str, scenarios.Scenario]) -> None:
    def twice() -> None:
        """Do something."""

    scenarios.scenario()(twice)
    with pytest.raises(ValueError, match="'twice' is registered already"):
        scenarios.scenario()(twice)


def test_a_scenario_without_a_purpose_is_refused(
    registered: dict[str, scenarios.Scenario],
) -> None:
    def silent() -> None: ...

    with pytest.raises(ValueError, match="'silent' has no docstring"):
        scenarios.scenario()(silent)
    assert not registered


class Thing:
    """Something that takes a weak reference."""


FOR_EVER: list[object] = []


def observed(body: Callable[[], object]) -> scenarios.Observation:
    """What is seen of a function, by the labels of what it watches."""
    return scenarios.observe(scenarios.Scenario("test", "Test.", body, ()))


def test_what_outlives_the_frame_is_told_by_its_label() -> None:
    def body() -> None:
        watch(dropped=Thing())
        cycle, cached, leaked = watch(cycle=Thing(), cached=Thing(), leaked=Thing())
        cycle.itself = cycle
        torch._dynamo.eval_frame.cached_backends[-1] = lambda: cached
        FOR_EVER.append(leaked)

    try:
        seen = observed(body)
    finally:
        FOR_EVER.clear()
    assert seen.kept == {
        "cycle": "freed by a collection",
        "cached": "freed by reset",
        "leaked": "never freed",
    }
    assert seen.pinned
    assert not seen.freed


def test_a_label_is_kept_while_one_of_its_objects_is() -> None:
    def body() -> None:
        things = [watch(input=Thing()) for _ in range(3)]
        things[1].itself = things[1]

    seen = observed(body)
    assert seen.kept == {"input": "freed by a collection"}
    assert seen.freed


def test_what_dies_in_time_is_not_told() -> None:
    seen = observed(lambda: watch(output=torch.ones(2)))
    assert (seen.kept, seen.pinned, seen.freed) == ({}, False, True)


def test_a_frozen_cycle_is_no_leak() -> None:
    def body() -> None:
        thing = watch(input=Thing())
        thing.itself = thing
        gc.freeze()

    seen = observed(body)
    gc.unfreeze()
    assert seen.kept == {"input": "freed by a collection"}


def test_tensors_are_compared_bit_for_bit() -> None:
    zero = observed(lambda: [torch.tensor(0.0)]).outcome
    assert zero == observed(lambda: [torch.tensor(0.0)]).outcome
    assert zero != observed(lambda: [torch.tensor(-0.0)]).outcome
    assert zero != observed(lambda: [torch.tensor(1e-9)]).outcome
    assert observed(lambda: torch.ones(2, 3)).outcome != observed(lambda: torch.ones(6)).outcome
    straight, turned = torch.ones(2, 2), torch.ones(2, 2).t()
    assert observed(lambda: straight).outcome != observed(lambda: turned).outcome


def test_guards_of_each_compile_are_told() -> None:
    def body() -> None:
        run = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        run(torch.ones(2))
        run(torch.ones(3))

    first, second = observed(body).guards
    assert "size=[2]" in first
    assert "size=[3]" in second
    assert observed(body).guards == (first, second)


def test_the_table_tells_a_leak_from_what_a_collection_frees() -> None:
    kept = {"input": "freed by a collection", "local": "freed by a collection"}
    assert _labels(kept) == " (freed by a collection: input, local)"
    kept["parameter"] = "never freed"
    assert _labels(kept) == " (freed by a collection: input, local; never freed: parameter)"


def test_what_may_wait_for_a_collection_must_not_need_more() -> None:
    def body() -> None:
        cycle, leaked = watch(cycle=Thing(), leaked=Thing())
        cycle.itself = cycle
        FOR_EVER.append(leaked)

    collected = scenarios.Scenario("test", "Test.", body, (), collected=True)
    try:
        seen = scenarios.observe(collected)
    finally:
        FOR_EVER.clear()
    assert (seen.kept, seen.pinned) == ({"leaked": "never freed"}, True)
