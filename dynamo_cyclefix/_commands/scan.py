"""The ``scan`` command: places in a torch that can still hold an exception."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dynamo_cyclefix import _installed, _json
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._catalogue.model import Catalogue, Key
from dynamo_cyclefix._errors import CatalogueError, CommandError, PatchError, Refused
from dynamo_cyclefix._installed import TorchNotFound
from dynamo_cyclefix._patching import session as _activation
from dynamo_cyclefix._scanning.package import (
    PACKAGES,
    ScanError,
    Verdict,
    scan_package,
)

_KINDS = ("open", "patched", "released", "explained")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "modules",
        nargs="*",
        default=PACKAGES,
        metavar="MODULE",
        help="dotted name of a module or package of torch (default: the compile path)",
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="scan the torch package in this directory, such as an unpacked wheel, instead of the "
        "installed one",
    )
    parser.add_argument("--all", action="store_true", help="list what torch itself releases, too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def catalogued(
    catalogue: Catalogue, release: str, enabled: Collection[str]
) -> tuple[dict[Key, str], dict[Key, str]]:
    """What the catalogue says of a release: the names that patches cover, those it explains."""
    patched = {k: patch for k, patch in catalogue.covering(release).items() if patch in enabled}
    explained = {(e.module, e.function, e.name): e.reason for e in catalogue.explained}
    return patched, explained


def run(arguments: argparse.Namespace) -> int:
    """Print the table or JSON; a patch that is switched off in this process covers nothing.

    Returns:
        0: nothing is open; 1: something is; 2: there was nothing to scan.
    """
    try:
        root = arguments.root or _installed.find()
        release = _installed.version(root)
        patcher = _activation.patcher()
        patched, explained = catalogued(
            _catalogue.load(), release, patcher.enabled if patcher else ()
        )
        verdicts = scan_package(root, arguments.modules, patched=patched, explained=explained)
    except (TorchNotFound, ScanError, CatalogueError, PatchError, Refused) as error:
        raise CommandError(str(error)) from error
    counts = Counter(verdict.verdict.split(" by ")[0] for verdict in verdicts)
    if arguments.json:
        print(_json.document(_document(release, root, verdicts, counts), indent=2))
    else:
        for verdict in verdicts:
            if arguments.all or not verdict.verdict.startswith("released"):
                print(_line(verdict))
        summary = ", ".join(f"{counts[kind]} {kind}" for kind in _KINDS)
        print(f"torch {release} in {root}: {summary}")
    return 1 if counts["open"] else 0


def _line(verdict: Verdict) -> str:
    finding = verdict.finding
    text = f"{finding.file}:{finding.line} {finding.function} {finding.name} {finding.rule}"
    return f"{text}: {verdict.verdict}: {verdict.reason or finding.detail}"


def _document(
    release: str, root: Path, verdicts: Sequence[Verdict], counts: Mapping[str, int]
) -> dict[str, object]:
    return {
        "torch": release,
        "root": str(root),
        "counts": {kind: counts.get(kind, 0) for kind in _KINDS},
        "findings": [
            {**asdict(verdict.finding), "verdict": verdict.verdict, "reason": verdict.reason}
            for verdict in verdicts
        ],
    }
