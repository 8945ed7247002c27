"""The version gate, on a table of version strings."""

import pytest
from packaging.specifiers import SpecifierSet

from dynamo_cyclefix._catalogue import gate as _gate
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._errors import Refused

AFFECTED = [
    # releases
    *("2.5.0", "2.5.1", "2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.9.1", "2.10.0", "2.11.0"),
    *("2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1"),
    # local versions
    *("2.14.1+cu130", "2.13.0+cpu", "2.9.1+rocm6.4", "2.5.1+cu121", "2.14.1+cpu.cxx11.abi"),
    # vendor builds and builds from a checkout
    *(
        "2.9.0a0+50eac811a6.nv25.10",
        "2.9.0a0+gitabc1234",
        "2.14.0a0+git0123abc",
        "2.5.0a0+872d972e41.nv24.08",
    ),
    # release candidates, nightlies, post-releases
    *(
        "2.13.0rc1",
        "2.14.1rc2+cu130",
        "2.14.0.dev20260701+cpu",
        "2.14.1.post1",
        "2.14.1.post1+cu130",
    ),
    # cut on the way to the fix: their code has the last word
    *("2.15.0.dev20260901+cpu", "2.15.0a0+gitabc1234", "2.15.0rc1", "2.15.0a0+50eac811a6.nv26.09"),
    # other spellings of the same
    *("v2.13.0", "2.13", "2.13.0.0"),
]
NOT_AFFECTED = [
    *("1.13.1", "2.0.0", "2.4.0", "2.4.1", "2.4.1+cu124", "2.4.1.post1", "2.4.0a0+gitabc1234"),
    *("2.15.0", "2.15.0+cu130", "2.15.0+rocm6.4", "2.15.0.post1", "2.15.1rc1", "2.15.1"),
    *("2.16.0.dev20261001", "2.16.0a0+gitabc1234", "2.100.0", "3.0.0"),
]


@pytest.fixture(scope="module")
def affected() -> SpecifierSet:
    """The versions that the patch of the observed exceptions says are affected."""
    patch = _catalogue.load().patches["observed-exceptions"]
    return patch.targets[0].affected


@pytest.mark.parametrize("version", AFFECTED)
def test_affected(version: str, affected: SpecifierSet) -> None:
    assert _gate.is_affected(version, affected)


@pytest.mark.parametrize("version", NOT_AFFECTED)
def test_not_affected(version: str, affected: SpecifierSet) -> None:
    assert not _gate.is_affected(version, affected)


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        # A pre-release of the lower bound may be affected already.
        ("2.11.0.dev20260101", ">=2.11", True),
        ("2.10.0", ">=2.11", False),
        # With an inclusive upper bound, what comes after it is out.
        ("2.10.0+cu130", "<=2.10", True),
        ("2.11.0a0+gitabc1234", "<=2.10", False),
        ("2.10.1", "<=2.10.0", False),
        # One release, excluded or alone.
        ("2.9.0+cpu", "!=2.9.0", False),
        ("2.9.1+cpu", ">=2.9,!=2.9.0", True),
        ("2.9.1.post2+cpu", "==2.9.1", True),
        ("2.9.7", "==2.9.*", True),
        ("2.12.0rc1", ">=2.5,<2.11", False),
        ("2.11.0rc1", ">=2.5,<2.11.0", True),
    ],
)
def test_other_bounds(version: str, specifier: str, expected: bool) -> None:
    assert _gate.is_affected(version, SpecifierSet(specifier)) is expected


@pytest.mark.parametrize("version", ["", "unknown", "main", "2.x", "2.13.0-cpu-1", "git-abc1234"])
def test_a_version_that_is_none_is_refused(version: str, affected: SpecifierSet) -> None:
    with pytest.raises(Refused) as refused:
        _gate.is_affected(version, affected)
    assert repr(version) in str(refused.value)
    assert "expected a PEP 440 version" in str(refused.value)
    assert "\n" not in str(refused.value)
