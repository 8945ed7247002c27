"""The ``sitecustomize-dir`` command: what to put on ``PYTHONPATH``."""

from __future__ import annotations

import argparse
import os

from dynamo_cyclefix import _json


def directory() -> str:
    """Where the ``sitecustomize`` is that activates this package; it may be inside a zip file."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(package, "sitecustomize")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the directory."""
    found = {"sitecustomize_dir": directory()}
    print(_json.document(found) if arguments.json else directory())
    return 0
