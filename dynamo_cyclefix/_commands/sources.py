"""The ``sources`` command: how a release's own functions compare with those seen before.

Reads a release's files and imports nothing of it: a wheel unpacked into a directory will do.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from packaging.version import Version

from dynamo_cyclefix import _installed, _json, _rewriting
from dynamo_cyclefix._catalogue import gate as _gate
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._catalogue.model import Catalogue, Target
from dynamo_cyclefix._errors import CatalogueError, CommandError, Refused
from dynamo_cyclefix._installed import TorchNotFound
from dynamo_cyclefix._patching.patcher import source_hash

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--root", type=Path, help="directory that holds torch/ (default: the installed one)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--record", action="store_true", help="add the release to patches/sources.json (a checkout)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a verdict for each function; fail if an affected one is not recognised."""
    try:
        root = arguments.root or _installed.find()
        version = _installed.version(root)
        findings = list(compare(root, _catalogue.load()))
    except (TorchNotFound, CatalogueError, Refused) as error:
        raise CommandError(str(error)) from error
    if arguments.record:
        folder = _catalogue.directory()
        if not isinstance(folder, Path):
            raise CommandError("patches/ is not a directory")
        record(folder / "sources.json", version, findings)
    if arguments.json:
        found = {"torch": version, "findings": [vars(f) for f in findings]}
        print(_json.document(found, indent=1))
    else:
        print(f"torch {version}")
        for finding in findings:
            print(f"{finding.patch}  {finding.function}: {finding.verdict} ({finding.reason})")
    unknown = [finding for finding in findings if finding.verdict == UNKNOWN]
    if unknown:
        raise CommandError(f"{len(unknown)} affected functions are not recognised", 1)
    return 0
