"""On the installed torch: frames are released, and nothing else is changed.

Both sides run in child processes, the same scenarios with the patches off and on.  The side that is
off is the control: a scenario that does not pin without us can prove nothing, and is skipped as
such for the release tests, not for equivalence.
"""

import pytest
import torch
from conftest import observation

from dynamo_cyclefix import scenarios
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._patching.state import State

NAMES = list(scenarios.load())
CATALOGUE = toml.load()


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_released(sides, name):
    off, on = sides
    before, after = observation(off, name), observation(on, name)
    if not before["pinned"]:
        assert not after["pinned"]
        pytest.skip("the control pins nothing on this release")
    if after["pinned"] and CATALOGUE.reason_for(name, torch.__version__):
        return  # on purpose
    local = before["kept"].get("local", "freed by a collection")
    assert local == "freed by a collection", "its local is kept by more than a cycle"
    assert not after["pinned"]
    assert after["garbage_frames"] == 0
    assert after["garbage_exceptions"] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aspect", ["outcome", "warnings", "counters", "graphs", "guards"])
def test_behaviour_is_the_same(sides, name, aspect):
    off, on = (without_own_args(observation(side, name)[aspect]) for side in sides)
    assert on == off


def without_own_args(observed):
    """Leave out what the patch `unsupported-constants` changes on purpose: an exception's args."""
    if isinstance(observed, list):
        return [without_own_args(item) for item in observed]
    if not isinstance(observed, dict):
        return observed
    hidden = ()
    if str(observed.get("type")).endswith(".AsPythonConstantNotImplementedError"):
        hidden = "args", "str"
    return {k: without_own_args(v) for k, v in observed.items() if k not in hidden}


def test_the_controls_pin(sides):
    off, on = sides
    states = {patch["id"]: patch["state"] for patch in on.status["patches"]}
    pinned = [name for name in NAMES if off.observations.get(name, {}).get("pinned")]
    assert len(pinned) > (40 if State(states["observed-exceptions"]).in_place else 10)


def test_off_is_off_and_on_is_on(sides):
    off, on = sides
    assert not off.status["active"]
    assert on.status["active"]
    assert {patch["state"] for patch in off.status["patches"]} == {State.DISABLED}
    assert State.REFUSED not in {patch["state"] for patch in on.status["patches"]}
