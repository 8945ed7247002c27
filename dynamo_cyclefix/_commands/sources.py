"""The ``sources`` command: how a release's own functions compare with those seen before.

Reads a release's files and imports nothing of it: a wheel will do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType

from packaging.version import Version

from dynamo_cyclefix import _installed, _json, _rewriting
from dynamo_cyclefix._catalogue import gate as _gate
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._catalogue.model import Catalogue, Target
from dynamo_cyclefix._commands.scan import catalogued
from dynamo_cyclefix._errors import CatalogueError, CommandError, Refused
from dynamo_cyclefix._installed import TorchNotFound
from dynamo_cyclefix._patching.patcher import source_hash
from dynamo_cyclefix._scanning.package import PACKAGES, ScanError, Verdict, scan_package

SAME = "same source"
NEW = "new source, recognised"
UNKNOWN = "not recognised"
FIXED = "fixed"
UNAFFECTED = "not affected"


@dataclass(frozen=True)
class Finding:
    """What became of one outermost function: the verdict, why, and the hash of its source."""

    patch: str
    function: str
    verdict: str
    reason: str
    hash: str = ""


def compare(root: Path, catalogue: Catalogue) -> Iterator[Finding]:
    """Compare every target function of the release under ``root`` with the catalogue."""
    version = _installed.version(root)
    groups: dict[tuple[str, str, str], list[Target]] = defaultdict(list)
    for patch, target in catalogue.targets():
        groups[patch.id, target.module, target.outermost].append(target)
    for (patch_id, module, outermost), group in groups.items():
        key = f"{module}:{outermost}"
        affected = [t for t in group if _gate.is_affected(version, t.affected)]
        if not affected:
            fixed = _is_fixed(root, group[0])
            yield Finding(patch_id, key, FIXED if fixed else UNAFFECTED, f"in {version}")
            continue
        try:
            source, code = _read(root, module, outermost)
            rewritten = _rewriting.rewrite(source, code, outermost, affected)
            digest = source_hash(rewritten.block)
        except Refused as error:
            yield Finding(patch_id, key, UNKNOWN, str(error))
            continue
        seen_in = catalogue.sources.get(key, {}).get(digest, ())
        if rewritten.is_fixed:
            yield Finding(patch_id, key, FIXED, "the code releases the exception")
        elif seen_in:
            yield Finding(patch_id, key, SAME, f"as in {', '.join(seen_in)}", digest)
        else:
            yield Finding(patch_id, key, NEW, "passed every structural check", digest)


def _is_fixed(root: Path, target: Target) -> bool:
    try:
        source, code = _read(root, target.module, target.outermost)
        return _rewriting.is_fixed(source, code, target.outermost, target)
    except Refused:
        return False


def _read(root: Path, module: str, qualname: str) -> tuple[str, CodeType]:
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    try:
        source = path.read_text(encoding="utf-8")
        code = compile(source, str(path), "exec", dont_inherit=True)
    except (OSError, SyntaxError) as error:
        raise Refused(f"{module} cannot be read ({error})") from error
    for name in qualname.split("."):
        found = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
        if not found:
            raise Refused(f"{module} has no {qualname}")
        code = found[-1]
    return source, code


def record(path: Path, version: str, findings: list[Finding]) -> None:
    """Add the release's hashes to the file of known sources."""
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    release = Version(version).base_version
    for finding in findings:
        if finding.hash:
            releases = known.setdefault(finding.function, {}).setdefault(finding.hash, [])
            releases[:] = sorted({*releases, release}, key=Version)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def new_places(root: Path, catalogue: Catalogue) -> list[Verdict]:
    """What may hold an exception in this release, and no patch and no reason is for."""
    patched, explained = catalogued(catalogue, _installed.version(root), catalogue.patches)
    verdicts = scan_package(root, PACKAGES, patched=patched, explained=explained)
    return [verdict for verdict in verdicts if verdict.verdict == "open"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "wheel", nargs="?", type=Path, help="a wheel of torch (default: the installed torch)"
    )
    where.add_argument("--root", type=Path, help="directory that holds torch/")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--record", action="store_true", help="add the release to patches/sources.json (a checkout)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a verdict for each function; fail if an affected one is not recognised."""
    if arguments.wheel is None:
        return _run(arguments, arguments.root)
    with tempfile.TemporaryDirectory(prefix="dynamo-cyclefix-") as folder:
        try:
            with zipfile.ZipFile(arguments.wheel) as wheel:
                wheel.extractall(folder, [n for n in wheel.namelist() if n.endswith(".py")])
        except (OSError, zipfile.BadZipFile) as error:
            raise CommandError(f"{arguments.wheel} cannot be read as a wheel ({error})") from error
        return _run(arguments, Path(folder))


def _run(arguments: argparse.Namespace, root: Path | None) -> int:
    try:
        root = root or _installed.find()
        version = _installed.version(root)
        catalogue = _catalogue.load()
        findings = list(compare(root, catalogue))
        places = new_places(root, catalogue)
    except (TorchNotFound, ScanError, CatalogueError, Refused) as error:
        raise CommandError(str(error)) from error
    if arguments.record:
        folder = _catalogue.directory()
        if not isinstance(folder, Path):
            raise CommandError("patches/ is not a directory")
        record(folder / "sources.json", version, findings)
    if arguments.json:
        found = {
            "torch": version,
            "findings": [vars(finding) for finding in findings],
            "new_places": [asdict(place.finding) for place in places],
        }
        print(_json.document(found, indent=1))
    else:
        print(f"torch {version}")
        for finding in findings:
            print(f"{finding.patch}  {finding.function}: {finding.verdict} ({finding.reason})")
        for place in places:
            found_at = f"{place.finding.file}:{place.finding.line}"
            print(f"new place  {found_at} {place.finding.function} {place.finding.name}")
    unknown = [finding for finding in findings if finding.verdict == UNKNOWN]
    if unknown:
        raise CommandError(f"{len(unknown)} affected functions are not recognised", 1)
    return 0
