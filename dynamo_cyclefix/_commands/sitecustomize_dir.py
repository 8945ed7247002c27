"""The ``sitecustomize-dir`` command: what to put on ``PYTHONPATH``."""

from __future__ import annotations

import argparse
import json
import os


def directory() -> str:
    """Where the ``sitecustomize`` is that activates this package; it may be inside a zip file."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(package, "sitecustomize")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the directory."""
    print(json.dumps({"sitecustomize_dir": directory()}) if arguments.json else directory())
    return 0
