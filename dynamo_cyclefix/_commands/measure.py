"""The `measure` command: what the patches buy on this torch, for a given workload.

Nothing but the standard library is imported until the command runs: its libraries come with the
extra `measure`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._measuring.memory import size

_LIBRARIES = ("matplotlib", "numpy", "psutil", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `measure`."""
    parser.add_argument(
        "--workload",
        default="malformed",
        help="malformed: wrongly shaped requests to one compiled model; fresh: freshly compiled "
        "functions whose helper raises; mixed: both among good requests; cond: freshly "
        "compiled functions that call torch.cond, and export: strict exports, of which all "
        "succeed; or module:function of your own (default: %(default)s)",
    )
    parser.add_argument("--requests", type=_positive, default=100, help="default: %(default)s")
    parser.add_argument(
        "--error-rate",
        type=_rate,
        help="part of the requests that makes Dynamo raise (default: 0.2 for mixed, 1 for others)",
    )
    parser.add_argument(
        "--buffer",
        type=size,
        default=size("32MiB"),
        metavar="SIZE",
        help="what the caller's frame of each request holds, or its input (default: 32MiB)",
    )
    parser.add_argument("--backend", default="eager", help="of torch.compile (default: eager)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--gc-threshold",
        type=_thresholds,
        metavar="N[,N[,N]]",
        help="of the cyclic collector (default: Python's own)",
    )
    parser.add_argument(
        "--collect-every",
        type=int,
        default=10,
        metavar="N",
        help="requests between two gc.collect() calls in the arm that shows this workaround; "
        "0 leaves the arm out (default: %(default)s)",
    )
    parser.add_argument(
        "--control",
        choices=("off", "on"),
        default="off",
        help="patches in the control; 'on' checks the instrument, which must then find no "
        "difference (default: off)",
    )
    parser.add_argument(
        "--memory-limit",
        type=size,
        metavar="SIZE",
        help="restart a worker that uses more, as an orchestrator does",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - for stdout")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the samples")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="a .png or .svg file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained report")


def run(arguments: argparse.Namespace) -> int:
    """Measure, report and judge.

    Returns:
        0: memory and frames grow in the control and not with the patches; 1: it does not hold; 2:
        the control did not grow either, or it could not be measured; 130: interrupted.
    """
    missing = [name for name in (*_LIBRARIES, "torch") if importlib.util.find_spec(name) is None]
    if "torch" in missing:
        raise CommandError("torch is not installed in this environment")
    if missing:
        raise CommandError(
            f"{', '.join(missing)} not found; install the extra: "
            "pip install 'dynamo-cyclefix[measure]'"
        )
    from dynamo_cyclefix._measuring import experiment

    return experiment.run(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate above 0 and up to 1")
    return rate


def _thresholds(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) > 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not one to three numbers such as 700,10,10")
    return [int(part) for part in parts]


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} ends neither with .png nor with .svg")
    return path
