"""What is ready to be sent upstream: the reproductions, and the report around them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import is_at_least

from dynamo_cyclefix import _installed
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._catalogue.gate import is_affected
from dynamo_cyclefix._rewriting import text
from dynamo_cyclefix._rewriting.derive import apply

ROOT = Path(__file__).parent.parent
CATALOGUE = toml.load()
FOLDER = Path(str(toml.directory())) / "reproductions"
REPRODUCTIONS = {file.stem: file for file in FOLDER.glob("*.py")}
TORCH = _installed.find()
RELEASE = _installed.version(TORCH)


def python(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DYNAMO_"))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**environment, **env},
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=300,
    )


def upstream(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "dynamo_cyclefix", "upstream", *arguments, PYTHONPATH=str(ROOT))


def is_in(patch: str, release: str) -> bool:
    return any(is_affected(release, target.affected) for target in CATALOGUE.patches[patch].targets)


def test_every_patch_of_the_newest_release_has_a_reproduction() -> None:
    # Other holders keep what its one site in that release keeps.
    wanted = {patch for patch in CATALOGUE.patches if is_in(patch, "2.15.0")}
    assert set(REPRODUCTIONS) == wanted - {"self-referring-closures"}


@pytest.mark.skipif(not is_at_least("2.15"), reason="they are for the newest release")
@pytest.mark.parametrize("patch", sorted(REPRODUCTIONS))
def test_reproduction(patch: str) -> None:
    file = REPRODUCTIONS[patch]
    assert "cyclefix" not in file.read_text("utf-8")
    alone = python("-I", file)
    if alone.returncode == 2:
        pytest.skip(f"it cannot run here: {alone.stderr.splitlines()[-1]}")
    assert alone.returncode == 1, alone.stdout + alone.stderr
    assert "is pinned: True" in alone.stdout
    others = ",".join(sorted(CATALOGUE.patches.keys() - {patch}))
    without, patched = (
        python(
            *("-m", "dynamo_cyclefix", "run", file),
            PYTHONPATH=str(ROOT),
            DYNAMO_CYCLEFIX_PATCHES=patches,
        )
        for patches in (others, "all")
    )
    assert without.returncode == 1, without.stdout + without.stderr
    assert patched.returncode == 0, patched.stdout + patched.stderr
    assert "is pinned: False" in patched.stdout


@pytest.mark.parametrize("patch", sorted(CATALOGUE.patches))
def test_diff_is_a_patch_to_the_installed_torch(patch: str, tmp_path: Path) -> None:
    """It applies, and what it makes is what the edits make of the functions."""
    sites = [t for t in CATALOGUE.patches[patch].targets if is_affected(RELEASE, t.affected)]
    done = upstream(patch, "--only", "diff")
    if not sites:
        assert done.returncode == 1
        assert f"torch {RELEASE} has nothing of what {patch} fixes" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    (tmp_path / "change.diff").write_text(done.stdout, encoding="utf-8")
    modules = {site.module for site in sites}
    files = {m: Path(*m.split(".")).with_suffix(".py") for m in modules}
    for file in files.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TORCH / file, tmp_path / file)
    subprocess.run(["git", "apply", "change.diff"], cwd=tmp_path, check=True)
    for module, file in files.items():
        wanted, made = (
            ast.parse(folder.joinpath(file).read_text("utf-8")) for folder in (TORCH, tmp_path)
        )
        assert ast.dump(wanted) != ast.dump(made)
        for name in {site.outermost for site in sites if site.module == module}:
            targets = [s for s in sites if (s.module, s.outermost) == (module, name)]
            apply(text.definition(wanted, name), name, targets)
        assert ast.dump(wanted) == ast.dump(made)


SOURCE = '''
class Garage:
    # Above it.
    @staticmethod
    def park(car):
        """Park."""

        # Why it is tried.
        try:  # once
            text = f"""
  {car} and
    more"""
        except ValueError as e:  # of the car

            error = e
            # Raised by name.
            raise error
        # Between.
        else:
            return (
                text  # as it is
            )

    def leave(self): pass
'''


@pytest.mark.parametrize("released", ["error", "car"])
def test_comments_layout_and_strings_stay(released: str) -> None:
    from dynamo_cyclefix._catalogue.model import Target
    from dynamo_cyclefix._rewriting.edits import Release

    target = Target("garage", "Garage.park", (Release((released,)),), affected=None)  # type: ignore[arg-type]
    made = text.edited(SOURCE, {"Garage.park": [target]})
    assert "                raise error" in made.splitlines()
    before, after = ([x.strip() for x in part.splitlines()] for part in (SOURCE, made))
    added = [x for x in after if x not in before]
    assert added in (["try:", "finally:", "error = None"], ["try:", "finally:", "del car"])
    assert [x for x in before if x not in after] == []
    assert "\n  {car} and\n    more" in made
    assert text.edited(made, {"Garage.park": [target]}) == made


def test_report() -> None:
    done = upstream("fake-tensor-errors")
    assert done.returncode == 0, done.stderr
    for part in (
        "# An operator that fails on fake tensors",
        REPRODUCTIONS["fake-tensor-errors"].read_text("utf-8"),
        "`torch/_dynamo/utils.py:",
        "let go of `",
        "releases: 2.",
        "--- a/torch/_dynamo/utils.py\n+++ b/torch/_dynamo/utils.py\n@@ ",
    ):
        assert part in done.stdout
    alone = upstream("fake-tensor-errors", "--only", "reproduction")
    assert alone.stdout == REPRODUCTIONS["fake-tensor-errors"].read_text("utf-8")


def test_report_without_a_reproduction() -> None:
    done = upstream("self-referring-closures")
    assert done.returncode == 0, done.stderr
    assert "None: no script shows this alone on the newest release that was seen." in done.stdout
    assert ", 2.15.0" in done.stdout  # which does have the mistake


def test_unknown_patch_or_torch(tmp_path: Path) -> None:
    done = upstream("no-such-patch")
    assert done.returncode == 2
    assert "found no patch 'no-such-patch', expected one of artifact-errors," in done.stderr
    done = upstream("fake-tensor-errors", "--root", tmp_path)
    assert done.returncode == 2
    assert "found no torch in" in done.stderr
