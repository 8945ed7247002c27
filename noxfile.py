"""The release matrix: every torch that is covered, one environment at a time.

    nox -s matrix                               the whole matrix
    nox -s matrix -- 2.9.1 2.15.0               some releases, on CPython 3.11
    nox -s matrix -- --python 3.13 2.14.1       a release on another Python
    nox -s matrix -- --results FILE 2.9.1       keep what is found elsewhere
    nox -s table                                write what was found into docs/compatibility.md
    nox -s sources [-- RELEASE ...]             record the sources of releases
    nox -s upstream -- PATH [--torch VERSION] [FILE ...]
                                                PyTorch's own tests, with the patches off and on
    nox -s downstream -- [LIBRARY ...]          the same for libraries that use torch.compile

What a run found is kept in `docs/matrix.json`, one entry for a release and a Python.  A release
that could not be installed is "not run".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nox

nox.options.sessions = ["matrix", "table"]

ROOT = Path(__file__).parent
RESULTS = ROOT / "docs" / "matrix.json"
TABLE = ROOT / "docs" / "compatibility.md"
README = ROOT / "README.md"  # has a summary
MARKERS = "<!-- written by `nox -s table` -->", "<!-- /written -->"
PATCH = "observed-exceptions"  # the patch that gives the project its name
# The file alone: to import the package would activate it, here and in every child.
State = runpy.run_path(str(ROOT / "dynamo_cyclefix" / "_patching" / "state.py"))["State"]

RELEASES = (
    *("2.4.1", "2.5.0", "2.5.1", "2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.9.1", "2.10.0"),
    *("2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
)
# On the other Pythons: the oldest affected release, and the newest.  2.5 can be installed on 3.13,
# but its `torch.compile` refuses to run there.
OTHERS = {"3.10": ("2.5.0", "2.14.1"), "3.12": ("2.5.0", "2.14.1"), "3.13": ("2.6.0", "2.14.1")}
PAIRS = [(torch, "3.11") for torch in RELEASES] + [
    (torch, python) for python, releases in OTHERS.items() for torch in releases
]
PACKAGES = ("numpy", "pytest", "pytest-randomly", "setuptools")
TESTS = (
    "tests/test_release.py",
    "tests/test_foreign.py::test_the_wrapper_releases_frames",
    "tests/test_foreign.py::test_the_wrapper_changes_nothing_else",
    "tests/test_foreign.py::test_without_its_source_a_patch_is_refused_or_a_wrapper",
    "tests/test_exports.py",
    "tests/test_limits.py",
    "tests/test_upstream.py",
)
ATTEMPTS = 3


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Install, test and delete one release after the other."""
    parser = argparse.ArgumentParser(prog="nox -s matrix --")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="default: the whole matrix")
    parser.add_argument("--python", default="3.11", help="the CPython for these releases")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: docs/matrix.json")
    options = parser.parse_args(session.posargs)
    pairs = [(torch, options.python) for torch in options.releases] or PAIRS
    problems = []
    for torch, python in pairs:
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            result = run_one(session, Path(folder), torch, python)
        save(options.results, result)
        line = f"torch {torch}, Python {python}: {result['outcome']}"
        session.log(line)
        if result["outcome"] != "passed":
            problems.append(line)
    if problems:
        session.error("; ".join(problems))


def run_one(session: nox.Session, folder: Path, torch: str, python: str) -> dict[str, Any]:
    """What one release shows on one Python."""
    result: dict[str, Any] = {"torch": torch, "python": python, "platform": platform_name()}
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("DYNAMO_CYCLEFIX", "PYTHON"))},
        # Deleted with the environment, so that one release at a time is on the disk.
        "UV_CACHE_DIR": str(folder / "cache"),
    }
    venv = folder / "venv"
    interpreter = str(venv / "bin" / "python")
    # What is tested is the wheel: nothing below may import the checkout.
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))

    uv = shutil.which(
        "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if uv is None:
        session.error("uv is not installed; install the extra `matrix`")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        session.log(" ".join(command))
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace"
        )

    made = run(uv, "venv", "--quiet", "--python", find_python(python), str(venv))
    if made.returncode:
        return result | {"outcome": f"not run: no environment ({last_line(made)})"}
    made = run(uv, "build", "--quiet", "--wheel", "--out-dir", str(folder / "dist"), str(ROOT))
    if made.returncode:
        return result | {"outcome": f"failed: no wheel could be built ({last_line(made)})"}
    (wheel,) = map(str, folder.glob("dist/*.whl"))
    for attempt in range(ATTEMPTS):
        install = (uv, "pip", "install", "--quiet", "--python", interpreter)
        made = run(*install, f"torch=={torch}", *PACKAGES, wheel)
        if not made.returncode:
            break
        session.warn(f"attempt {attempt + 1} of {ATTEMPTS}: {made.stderr.strip()}")
    else:
        reason = f"torch {torch} could not be installed in {ATTEMPTS} attempts"
        return result | {"outcome": f"not run: {reason} ({last_line(made)})"}

    command = interpreter, "-m", "dynamo_cyclefix"
    status, verify = run(*command, "status", "--json"), run(*command, "verify", "--json")
    for finished in (status, verify):
        # Without an answer: it could not run, or it broke.
        if not finished.stdout.startswith("{"):
            return result | {"outcome": f"failed: {last_line(finished)}"}
    observed = folder / "observed.json"
    observed.write_text(verify.stdout, encoding="utf-8")
    report = folder / "report.xml"
    pytest = run(
        *(interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", "--tb=short"),
        *(*TESTS, f"--observed={observed}", f"--junitxml={report}"),
    )
    print(pytest.stdout, pytest.stderr)
    found = json.loads(verify.stdout)
    tests = counts(report)
    problem = found["problem"] or (
        f"{tests['failed']} of the tests"
        if tests["failed"]
        else last_line(pytest, pytest.returncode)
    )
    return result | {
        "python_build": found["off"]["ready"]["python"],
        "torch_build": found["off"]["ready"]["torch"],
        "patches": {p["id"]: p["state"] for p in json.loads(status.stdout)["patches"]},
        "all": pinned(found["table"]),
        "named": pinned([row for row in found["table"] if PATCH in row["patches"]]),
        "tests": tests,
        "outcome": f"failed: {problem}" if problem else "passed",
    }


def pinned(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many scenarios there are, and how many pin the user's frame."""
    before, after = (sum(row[side] == "pinned" for row in rows) for side in ("before", "after"))
    return {"scenarios": len(rows), "before": before, "after": after}


def counts(report: Path) -> dict[str, int]:
    """How many tests passed, failed (errors too) and were skipped, from pytest's JUnit report."""
    suites = ElementTree.parse(report).iter("testsuite") if report.is_file() else ()
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for kind in total:
            total[kind] += int(suite.get(kind, 0))
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    return {"passed": passed, "failed": failed, "skipped": total["skipped"]}


def last_line(finished: subprocess.CompletedProcess[str], wanted: int = 1) -> str:
    """The last thing that a command said, which is why it failed; empty unless ``wanted``."""
    lines = (finished.stderr.strip() or finished.stdout.strip()).splitlines()
    return (lines[-1].strip() if lines else f"exit code {finished.returncode}") if wanted else ""


def find_python(version: str) -> str:
    """The path of a CPython: that of pyenv, or the one on PATH; the version if there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}") or version


def platform_name() -> str:
    """The operating system and the kind of processor."""
    return f"{platform.system()} {platform.machine()}"


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Put one result in place of an earlier one of the same release and Python."""
    kept = json.loads(path.read_text("utf-8")) if path.is_file() else []
    kept = [r for r in kept if pair(r) != pair(result)] + [result]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sorted(kept, key=pair), indent=1) + "\n", encoding="utf-8")


def pair(result: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """What a result is of, in the order of the table."""
    python, torch = (
        [int(part) for part in str(result[key]).split(".")] for key in ("python", "torch")
    )
    return python, torch


@nox.session(venv_backend="none")
def table(session: nox.Session) -> None:
    """Write the results into docs/compatibility.md, and into the README what they come to."""
    results = json.loads(RESULTS.read_text("utf-8"))
    write_between_markers(session, TABLE, table_lines(results))
    write_between_markers(session, README, summary_lines(results))


def write_between_markers(session: nox.Session, path: Path, lines: Iterable[str]) -> None:
    """Put lines in place of what is between the two markers in a file."""
    text = path.read_text("utf-8")
    start, end = map(re.escape, MARKERS)
    if not re.search(f"{start}.*{end}", text, re.DOTALL):
        session.error(f"{path.name}: found no {MARKERS[0]} ... {MARKERS[1]}")
    whole = "\n".join([MARKERS[0], "", *lines, "", MARKERS[1]])
    path.write_text(re.sub(f"{start}.*{end}", lambda _: whole, text, flags=re.DOTALL), "utf-8")


def summary_lines(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the results and the catalogue come to, in two sentences."""
    # Here only, so that what must run on Python 3.10 does not need it.
    import tomllib

    patches = [tomllib.loads(path.read_text("utf-8")) for path in (ROOT / "patches").glob("*.toml")]
    targets = [target for patch in patches for target in patch.get("targets", ())]
    functions = {(target["module"], target["function"]) for target in targets}
    kinds = {next(iter(edit)) for target in targets for edit in target["edits"]}
    count = sum("id" in patch for patch in patches)
    passed = [result for result in results if result["outcome"] == "passed"]
    known = min((len(result["patches"]) for result in passed), default=count)
    older = f", with {known} of the patches" if known < count else ""
    yield (
        f"{count} patches change {len(functions)} functions by"
        f" {len(kinds)} kinds of edit ({', '.join(sorted(kinds))})."
    )
    yield (
        f"{len(passed)} of {len(results)} environments pass:"
        f" {len({result['torch'] for result in passed})} releases of torch,"
        f" {len({result['python'] for result in passed})} versions of Python,"
        f" {' and '.join(sorted({result['platform'] for result in passed}))}{older}."
    )


def table_lines(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The compatibility table, in Markdown."""
    yield f"| torch | Python | `{PATCH}` | its scenarios pinned | all scenarios pinned | tests |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for result in results:
        if "tests" not in result:
            cells = [result["torch"], result["python"], result["outcome"], "", "", ""]
        else:
            tests = result["tests"]
            failed = f", **{tests['failed']} failed**" if tests["failed"] else ""
            cells = [
                result["torch_build"],
                result["python_build"],
                State(result["patches"][PATCH]).words,
                *(
                    f"{n['before']} → {n['after']} of {n['scenarios']}"
                    for n in (result["named"], result["all"])
                ),
                f"{tests['passed']} passed{failed}, {tests['skipped']} skipped",
            ]
        yield f"| {' | '.join(cells)} |"


@nox.session(venv_backend="none")
def sources(session: nox.Session) -> None:
    """Record the sources of releases in patches/sources.json; read, never run."""
    for torch in session.posargs or RELEASES:
        with tempfile.TemporaryDirectory(prefix="sources-") as folder:
            fetch_sources(session, torch, Path(folder))
            session.run(
                *(sys.executable, "-m", "dynamo_cyclefix", "sources"),
                *("--root", folder, "--record"),
                env={"PYTHONPATH": str(ROOT), "DYNAMO_CYCLEFIX": "off"},
            )


def fetch_sources(session: nox.Session, torch: str, folder: Path) -> None:
    """Unpack the Python files of a release's macOS wheel, which is its smallest."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--python-version=3.11", f"--dest={folder}"),
        *("--platform=macosx_11_0_arm64", "--platform=macosx_14_0_arm64", f"torch=={torch}"),
    ]
    for _ in range(ATTEMPTS):
        # No constraint in the machine's own pip configuration may decide what is read.
        environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
        if not subprocess.run(command, env=environment).returncode:
            break
    else:
        session.error(f"torch {torch} could not be downloaded in {ATTEMPTS} attempts")
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
    wheel.unlink()


UPSTREAM_PACKAGES = ("expecttest", "hypothesis", "numpy", "parameterized", "pytest", "psutil")


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """Run PyTorch's own test files with the patches off and on; see tools/paired.py."""
    parser = argparse.ArgumentParser(prog="nox -s upstream --")
    parser.add_argument("path", type=Path, help="a checkout of PyTorch, or a folder of its tests")
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all below test/dynamo")
    parser.add_argument("--torch", help="the release; default: the one that runs this")
    parser.add_argument("--results", type=Path, default=Path("paired.json"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args(session.posargs)
    tests = options.path / "test" / "dynamo"
    folder = tests if tests.is_dir() else options.path
    arguments = [str(folder), *options.files, f"--results={options.results}"]
    arguments += [f"--table={options.table}"] * bool(options.table)
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        python = sys.executable
        if options.torch:
            python = make_environment(
                session, Path(scratch), f"torch=={options.torch}", *UPSTREAM_PACKAGES, str(ROOT)
            )
        session.run(python, str(ROOT / "tools" / "paired.py"), *arguments, external=True)


def make_environment(session: nox.Session, folder: Path, *packages: str) -> str:
    """The interpreter of a new environment with these packages, on CPython 3.11."""
    venv = folder / "venv"
    interpreter = str(venv / "bin" / "python")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    uv = shutil.which("uv", path=path)
    if uv is None:
        session.error("uv is not installed; install the extra `matrix`")
    session.run(uv, "venv", "--quiet", "--python", find_python("3.11"), str(venv), external=True)
    session.run(
        *(uv, "pip", "install", "--quiet", "--python", interpreter, *packages), external=True
    )
    return interpreter


# Libraries that use torch.compile and ship their tests in the sdist: what to install beside torch,
# and the test files to run.
CONSUMERS: dict[str, dict[str, Sequence[str]]] = {}


@nox.session(venv_backend="none")
def downstream(session: nox.Session) -> None:
    """Run the tests of libraries that use torch.compile, with the patches off and on."""
    for name in session.posargs or CONSUMERS:
        consumer = CONSUMERS[name]
        with tempfile.TemporaryDirectory(prefix="downstream-") as scratch:
            folder = Path(scratch)
            python = make_environment(session, folder, *consumer["packages"], str(ROOT))
            session.run(
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *(
                    "--no-binary=:all:",
                    "--no-build-isolation",
                    f"--dest={folder}",
                    *consumer["sdist"],
                ),
                external=True,
            )
            (sdist,) = folder.glob("*.tar.gz")
            shutil.unpack_archive(sdist, folder / "sdist")
            (root,) = (folder / "sdist").iterdir()
            arguments = [str(root), *consumer["files"], "--results=paired.json"]
            session.run(python, str(ROOT / "tools" / "paired.py"), *arguments, external=True)
