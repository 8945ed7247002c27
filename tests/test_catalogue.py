"""The patch catalogue: what ships, what a malformed file is told, and that each build has it."""

import importlib.util
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, run_child

from dynamo_cyclefix import CatalogueError
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._catalogue.model import Patch
from dynamo_cyclefix._rewriting.edits import Release

GOOD = """
id = "good"
title = "A title"
why = "A reason."
affected = ">=2.5,<2.15"

[[targets]]
module = "torch.one"
function = "Class.method.<locals>.inner"
edits = [{ release = ["error"] }]
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def without(key: str) -> str:
    return "\n".join(line for line in GOOD.splitlines() if not line.startswith(f"{key} ="))


# ---- what ships ----------------------------------------------------------------------------------


def test_what_ships_loads() -> None:
    catalogue = toml.load()
    observed = catalogue.patches["observed-exceptions"]
    assert observed.upstream.endswith("/pull/197567")
    (target,) = observed.targets
    assert (
        target.key == "torch._dynamo.symbolic_convert:InstructionTranslatorBase.exception_handler"
    )
    assert target.edits == (
        Release(("raised_exception",), helpers=("bubble_exception_to_interpreter",)),
    )
    assert "torch._dynamo.symbolic_convert" in catalogue.modules


@pytest.mark.parametrize("patch", toml.load().patches.values(), ids=lambda patch: patch.id)
def test_each_patch_that_ships_tells_the_user_enough(patch: Patch) -> None:
    assert patch.title
    assert "\n" not in patch.title
    assert patch.why
    for target in patch.targets:
        assert target.module.startswith("torch.")
        assert not target.affected.contains("1.13.1")


def test_known_sources_are_of_targets() -> None:
    catalogue = toml.load()
    keys = {f"{t.module}:{t.outermost}" for _, t in catalogue.targets()}
    assert set(catalogue.sources) <= keys
    for known in catalogue.sources.values():
        assert all(len(digest) == 64 and releases for digest, releases in known.items())


# ---- a file of one's own -------------------------------------------------------------------------


def test_a_good_file(tmp_path: Path) -> None:
    (patch,) = toml.load(write(tmp_path, good=GOOD)).patches.values()
    (target,) = patch.targets
    assert (patch.id, patch.upstream) == ("good", "")
    assert target.outermost == "Class.method"
    assert target.edits == (Release(("error",)),)
    assert target.affected.contains("2.14.1")
    assert not target.affected.contains("2.15.0")
    with pytest.raises(AttributeError):
        patch.id = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        target.edits = ()  # type: ignore[misc]


def test_a_target_may_have_versions_of_its_own(tmp_path: Path) -> None:
    text = GOOD + 'affected = "==2.9.*"\n'
    (patch,) = toml.load(write(tmp_path, good=text)).patches.values()
    (target,) = patch.targets
    assert target.affected.contains("2.9.1")
    assert not target.affected.contains("2.10.0")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (without("id"), ["key 'id'", "missing", "a non-empty string"]),
        (without("title"), ["key 'title'", "missing", "a non-empty string"]),
        (without("why"), ["key 'why'", "missing", "a non-empty string"]),
        (without("affected"), ["key 'affected'", "missing", "a non-empty string"]),
        (without("module"), ["[[targets]] 1", "key 'module'", "missing", "a non-empty string"]),
        (without("function"), ["[[targets]] 1", "key 'function'", "missing"]),
        (without("edits"), ["[[targets]] 1", "key 'edits'", "missing", "[[edits]] tables"]),
        (GOOD.partition("[[")[0], ["key 'targets'", "missing", "one or more [[targets]] tables"]),
        (GOOD.replace('"good"', "7"), ["key 'id'", "found 7", "a non-empty string"]),
        (GOOD.replace('"good"', '""'), ["key 'id'", "found ''", "a non-empty string"]),
        (GOOD.replace("edits = [", "edits = [1, "), ["key 'edits'", "[[edits]] tables"]),
        (GOOD.replace(">=2.5", "2.5 and up"), ["key 'affected'", "found '2.5 and up,", "PEP 440"]),
        (GOOD + 'affected = "~2"', ["[[targets]] 1", "key 'affected'", "found '~2'", "PEP 440"]),
        (GOOD + 'names = ["x"]', ["[[targets]] 1", "key 'names'", "unknown", "edits"]),
        ('titel = "x"\n' + GOOD, ["key 'titel'", "unknown", "expected one of", "title"]),
        (GOOD.replace("[[targets]]", "[targets]"), ["key 'targets'", "[[targets]] tables"]),
        ("id = good\n", ["found invalid TOML", "line 1"]),
    ],
)
def test_a_malformed_file_is_told_what_and_where(
    text: str, parts: list[str], tmp_path: Path
) -> None:
    write(tmp_path, fine=GOOD.replace('"good"', '"fine"').replace("torch.one", "torch.two"))
    with pytest.raises(CatalogueError) as error:
        toml.load(write(tmp_path, broken=text))
    message = str(error.value)
    assert message.startswith("patches/broken.toml")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_an_id_must_be_unique(tmp_path: Path) -> None:
    with pytest.raises(
        CatalogueError, match=r"^patches/two\.toml: key 'id': found 'good' a second"
    ):
        toml.load(write(tmp_path, one=GOOD, two=GOOD))


def test_a_function_belongs_to_one_patch(tmp_path: Path) -> None:
    other = GOOD.replace('"good"', '"other"').replace(".<locals>.inner", "")
    with pytest.raises(CatalogueError) as error:
        toml.load(write(tmp_path, one=GOOD, two=other))
    for part in ("'other'", "'good'", "torch.one:Class.method", "one patch for a function"):
        assert part in str(error.value)


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="found no patch file"):
        toml.load(tmp_path)


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="cannot be read"):
        toml.load(tmp_path / "missing")


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(GOOD.encode() + b"# \xe9\n")
    with pytest.raises(CatalogueError, match="cannot be read"):
        toml.load(tmp_path)


# ---- distributions -------------------------------------------------------------------------------

FILES = {file.name for file in (ROOT / "patches").glob("*.toml")}

LIST = """
    import json
    from dynamo_cyclefix._catalogue import toml
    print(json.dumps([str(toml.directory()), sorted(toml.load().patches)]))
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and the wheel that is built from it, as by an installer."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: nothing to build with")
    folder = tmp_path_factory.mktemp("distributions")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (checkout,) = (folder / "unpacked").iterdir()
    subprocess.run([*build, "-t", "wheel"], cwd=checkout, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def test_sdist_has_the_patches(distributions: tuple[Path, Path]) -> None:
    sdist, _ = distributions
    with tarfile.open(sdist) as archive:
        names = {Path(name) for name in archive.getnames()}
    assert {path.name for path in names if path.parent.name == "patches"} >= FILES
    assert any(path.name == "test_catalogue.py" for path in names)


def test_wheel_has_the_patches_and_runs_without_the_checkout(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    assert {f"dynamo_cyclefix/patches/{name}" for name in FILES} <= names
    assert "dynamo_cyclefix/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "patches/"))]
    directory, patches = run_child(LIST, path=[tmp_path]).json
    assert Path(directory) == tmp_path / "dynamo_cyclefix" / "patches"
    assert patches == sorted(toml.load().patches)


def test_checkout_finds_the_patches_beside_it() -> None:
    directory, _ = run_child(LIST).json
    assert Path(directory) == ROOT / "patches"


def test_a_zipped_wheel_finds_the_patches(distributions: tuple[Path, Path]) -> None:
    _, wheel = distributions
    directory, patches = run_child(LIST, path=[wheel]).json
    assert directory.startswith(str(wheel))
    assert patches == sorted(toml.load().patches)
