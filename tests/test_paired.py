"""The tool that runs other projects' tests in pairs: what it compares, and that it is not blind."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT

SUITE = """
    import os
    import pytest
    import unittest

    def test_passes():
        pass

    def test_takes_the_process_along():
        os._exit(3)

    def test_after_it():
        pass

    def test_fails_the_same():
        raise KeyError(hex(id(object())))

    @pytest.mark.skip
    def test_skipped():
        pass

    class Case(unittest.TestCase):
        def test_method(self):
            self.assertEqual(1, 2)
"""
DIFFERENT = """
    import os
    from pathlib import Path

    def test_differs_every_time():
        assert os.environ["DYNAMO_CYCLEFIX"] == "off"

    def test_differs_in_its_message():
        raise ValueError(os.environ["DYNAMO_CYCLEFIX"])

    def test_differs_once():
        seen = Path(__file__).with_suffix("." + os.environ["DYNAMO_CYCLEFIX"])
        first = not seen.exists()
        seen.touch()
        assert not (first and seen.suffix == ".on")
"""


def paired(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [
            *(sys.executable, str(ROOT / "tools" / "paired.py"), str(folder)),
            *(f"--results={folder / 'results.json'}", f"--table={folder / 'table.md'}"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_same.py").write_text(textwrap.dedent(SUITE))
    (folder / "test_different.py").write_text(textwrap.dedent(DIFFERENT))
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    return paired(folder)


def test_what_is_compared(finished: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert finished.returncode == 1, finished.stdout + finished.stderr
    results = json.loads((folder / "results.json").read_text())
    same, different = (
        next(result for key, result in results.items() if key.endswith(name))
        for name in ("test_same.py", "test_different.py")
    )
    assert not same["real"]
    assert not same["passing"]
    assert same["pairs"] == 6
    assert same["off"] == {"passed": 2, "crashed": 1, "failed": 2, "skipped in setup": 1}
    assert {test.partition("::")[2] for test in different["real"]} == {
        "test_differs_every_time",
        "test_differs_in_its_message",
    }
    assert [test.partition("::")[2] for test in different["passing"]] == ["test_differs_once"]


def test_the_table(finished: subprocess.CompletedProcess[str], folder: Path) -> None:
    table = (folder / "table.md").read_text()
    assert "`test_same.py` | 6 | 2 | 4 | 0 |" in table
    assert "9 pairs, 2 real differences." in table


def test_what_has_run_is_not_run_again(
    finished: subprocess.CompletedProcess[str], folder: Path
) -> None:
    (folder / "test_same.py").write_text("raise SystemExit\n")
    again = paired(folder)
    assert again.returncode == 1
    assert "`test_same.py` | 6 | 2 | 4 | 0 |" in again.stdout


def test_without_patches_nothing_is_concluded(tmp_path: Path) -> None:
    (tmp_path / "test_fine.py").write_text("def test_fine():\n    pass\n")
    finished = paired(tmp_path, DYNAMO_CYCLEFIX_PATCHES="backend-errors")
    assert finished.returncode == 2
    assert "the control should fail with the patches off and pass with them on" in finished.stderr
