"""What the test modules share: child interpreters."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from dynamo_cyclefix import _installed
from dynamo_cyclefix._catalogue.gate import is_affected
from dynamo_cyclefix._commands import verify as _verify

ROOT = Path(__file__).parent.parent

# In the child interpreters too: from 2.7 on Dynamo collects young garbage after each compile, so
# that a frame which a cycle pinned could look as if it had been released.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"

# What a shell starts in the background ignores interrupts, and so would all children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For programs that child interpreters run: whether a frame dies with its call.
RELEASED = """
import gc
import weakref

import torch


class Held:
    pass


def helper(x):
    raise KeyError("missing")


def released():
    import torch._dynamo  # else the compile does, and that keeps the frame (pytorch issue 195586)

    refs = []

    def user():
        held = Held()
        refs.append(weakref.ref(held))
        try:
            torch.compile(lambda x: helper(x), backend="eager")(torch.ones(1))
        except KeyError:
            pass
        else:
            raise AssertionError("no KeyError")

    gc.collect()
    gc.disable()
    try:
        user()
        return refs[0]() is None
    finally:
        gc.enable()
"""


@dataclass(frozen=True)
class Finished:
    """What a child interpreter left behind."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What the child printed, which is one JSON text."""
        return json.loads(self.stdout)


def run_child(
    code: str,
    *,
    options: Sequence[str] = (),
    path: Sequence[Path] = (),
    fails: bool = False,
    python: str = sys.executable,
    **env: str,
) -> Finished:
    """Run a program in an interpreter of its own.

    Args:
        code: the program; it may be indented.
        options: of the interpreter, such as ``-O``.
        path: directories that come before the checkout on ``sys.path``.
        fails: whether a nonzero exit status is what the test wants to see.
        python: the interpreter.
        env: environment variables, on top of this process's own without ``DYNAMO_CYCLEFIX*``.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMO_CYCLEFIX")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*path, ROOT)))
    finished = subprocess.run(
        [python, *options, "-c", textwrap.dedent(code)],
        env={**environment, **env},
        cwd=Path(__file__).parent,  # `-c` looks for modules here first: not in the checkout
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert bool(finished.returncode) is fails, finished.stdout + finished.stderr
    return Finished(finished.returncode, finished.stdout, finished.stderr)


def is_at_least(release: str) -> bool:
    """Whether the installed torch is this release or a newer one."""
    return is_affected(_installed.version(_installed.find()), SpecifierSet(f">={release}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--observed",
        type=Path,
        metavar="FILE",
        help="take the scenarios' runs from what `dynamo-cyclefix verify --json` printed",
    )


@pytest.fixture(scope="session")
def sides(pytestconfig: pytest.Config) -> tuple[_verify.Run, _verify.Run]:
    """Every scenario on the installed torch, with the patches off and on."""
    if file := pytestconfig.getoption("observed"):
        found = json.loads(file.read_text("utf-8"))
        off, on = (_verify.Run(**found[side]) for side in ("off", "on"))
    else:
        off, on = _verify.run_both()
    assert not off.error, off.error
    assert not on.error, on.error
    return off, on


def observation(side: _verify.Run, name: str) -> dict[str, Any]:
    """What a scenario showed; fails the test where it did not come to its end."""
    if name in side.failures:
        pytest.fail(side.failures[name])
    return side.observations[name]
