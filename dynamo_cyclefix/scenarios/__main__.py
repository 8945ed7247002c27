"""Child process that runs scenarios and reports them as JSON lines on its standard output.

``{"event": "ready", "torch", "python", "scenarios": [{"name", "purpose", "patches", "applies"}]}``
comes first, then for each scenario ``{"event": "start", "name"}`` before it and
``{"event": "observed", "name", "observation"}`` after it, and ``{"event": "done", "status"}`` with
the child's ``status()`` last. Whether the patches are on is decided,
as in any program, by the environment and the import of ``dynamo_cyclefix``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import sys
import weakref
from collections.abc import Callable
from typing import Any

import dynamo_cyclefix  # patches torch, so it comes before torch

from . import Scenario, load_all, observe


def _channel(keep_stderr: bool) -> Any:
    """Return a stream on the original standard output; what torch prints cannot reach it."""
    channel = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if not keep_stderr:
        os.dup2(null, 2)
    os.close(null)
    return channel


def _warm_up() -> None:
    """Have everything imported that a compile needs, and keep it out of later collections.

    A full collection over all of torch costs some 300 ms, so what is alive is frozen here and
    after each scenario.
    """
    import torch
    from torch._dynamo.eval_frame import skip_code

    from ._recording import compiled

    compiled(torch.neg)(torch.ones(1))
    # Called when a weakly referenced object dies, which is sooner with the patches: Dynamo counts
    # such a frame once, if that is in a compiled call.
    weak: list[Any] = [
        weakref.WeakKeyDictionary(),
        weakref.WeakValueDictionary(),
        weakref.WeakSet(),
    ]
    for container in weak:
        skip_code(container._remove.__code__)
    gc.collect()
    gc.freeze()


def _selected(names: list[str], every: dict[str, Scenario], version: str) -> list[Scenario]:
    chosen = [every[name] for name in names] if names else list(every.values())
    return [found for found in chosen if found.applies(version)]


def main(argv: list[str] | None = None) -> int:
    """Run the scenarios named in ``argv`` (default: all that apply) and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_cyclefix.scenarios")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a scenario (default: all)")
    parser.add_argument("--stderr", action="store_true", help="keep what goes to standard error")
    arguments = parser.parse_args(argv)
    stderr = os.fdopen(os.dup(2), "w")
    channel = _channel(arguments.stderr)

    def emit(event: str, **fields: Any) -> None:
        channel.write(json.dumps({"event": event, **fields}) + "\n")
        channel.flush()

    try:
        _run(arguments.names, emit)
    except Exception as error:
        print(f"error: {error if type(error) is _CannotRunError else repr(error)}", file=stderr)
        return 2
    return 0


class _CannotRunError(Exception):
    """Nothing can be observed; the text says why."""


def _run(names: list[str], emit: Callable[..., None]) -> None:
    try:
        import torch
        import torch._dynamo
    except ImportError as error:
        raise _CannotRunError(f"torch cannot be imported ({error}): install it first") from error
    except Exception as error:
        raise _CannotRunError(f"torch cannot be imported: {error!r}") from error
    try:
        every = load_all()
    except Exception as error:
        raise _CannotRunError(
            f"no scenario runs on torch {torch.__version__}: {error!r}"
        ) from error
    unknown = [name for name in names if name not in every]
    if unknown:
        known = ", ".join(every)
        raise _CannotRunError(f"found no scenario {unknown[0]!r}, expected some of {known}")
    _warm_up()
    emit(
        "ready",
        torch=torch.__version__,
        python=platform.python_version(),
        scenarios=[
            {
                "name": found.name,
                "purpose": found.purpose,
                "patches": found.patches,
                "applies": found.applies(torch.__version__),
            }
            for found in every.values()
        ],
    )
    for found in _selected(names, every, torch.__version__):
        emit("start", name=found.name)
        emit("observed", name=found.name, observation=dataclasses.asdict(observe(found)))
        gc.freeze()
    emit("done", status=dataclasses.asdict(dynamo_cyclefix.status()))


if __name__ == "__main__":
    sys.exit(main())
