"""The packages are the design: what each is for, and which way imports run."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGES = sorted(path.parent.name for path in (ROOT / "dynamo_cyclefix").glob("*/__init__.py"))


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts in the folder's pyproject.toml."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_no_import_runs_upward_and_none_in_a_circle() -> None:
    finished = lint(ROOT)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("module", "imports"),
    [
        ("_rewriting/scopes.py", "_patching.patcher"),
        ("_patching/wrapper.py", "_commands.main"),
        ("_rewriting/compare.py", "_rewriting.derive"),
    ],
)
def test_an_import_that_does_is_found(module: str, imports: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "dynamo_cyclefix", tmp_path / "dynamo_cyclefix")
    with (tmp_path / "dynamo_cyclefix" / module).open("a") as file:
        file.write(f"import dynamo_cyclefix.{imports}\n")
    finished = lint(tmp_path)
    assert finished.returncode == 1
    assert "BROKEN" in finished.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_what_is_in_it(package: str) -> None:
    text = importlib.import_module(f"dynamo_cyclefix.{package}").__doc__
    assert text
    assert len(text) > 150
    if package != "scenarios":
        assert "mport" in text  # what it imports, or what may import it
