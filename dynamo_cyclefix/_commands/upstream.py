"""The ``upstream`` command: what PyTorch's maintainers need to fix what a patch fixes."""

from __future__ import annotations

import argparse
import ast
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from dynamo_cyclefix import _installed
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._catalogue.gate import is_affected
from dynamo_cyclefix._catalogue.model import Catalogue, Patch, Target
from dynamo_cyclefix._errors import CatalogueError, CommandError, Refused
from dynamo_cyclefix._installed import TorchNotFound
from dynamo_cyclefix._rewriting import text

_STRIP = "`patch -p1` in the directory of the package applies it; `-w` hides what is only indented"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("patch", metavar="PATCH", help="id of a patch")
    parser.add_argument(
        "--only",
        choices=("reproduction", "diff"),
        help="print one part alone, to be run or applied",
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="take the torch package in this directory instead of the installed one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report, as Markdown; torch is read and not imported.

    Returns:
        0: it is printed; 1 (by an error): this torch has nothing of it; 2: it cannot be told.
    """
    try:
        catalogue = _catalogue.load()
        patch = catalogue.patches.get(arguments.patch)
        if patch is None:
            raise CommandError(
                f"found no patch {arguments.patch!r}, expected one of"
                f" {', '.join(sorted(catalogue.patches))}"
            )
        reproduction = _reproduction(patch)
        if arguments.only == "reproduction":
            if not reproduction:
                raise CommandError(f"{patch.id} has no reproduction", 1)
            print(reproduction, end="")
            return 0
        root = arguments.root or _installed.find()
        release = _installed.version(root)
        sites = [t for t in patch.targets if is_affected(release, t.affected)]
        diffs = "".join(_diffs(root, sites))
        if not diffs:
            raise CommandError(f"torch {release} has nothing of what {patch.id} fixes", 1)
    except (TorchNotFound, CatalogueError, Refused, OSError) as error:
        raise CommandError(str(error)) from error
    if arguments.only == "diff":
        print(diffs, end="")
    else:
        print("\n".join(_report(catalogue, patch, sites, root, release, reproduction, diffs)))
    return 0


def _reproduction(patch: Patch) -> str:
    file = _catalogue.directory().joinpath("reproductions").joinpath(f"{patch.id}.py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _path(root: Path, module: str) -> Path:
    """The file of a module, from the directory of the package."""
    path = Path(*module.split("."))
    return path / "__init__.py" if (root / path).is_dir() else path.with_suffix(".py")


def _diffs(root: Path, sites: Sequence[Target]) -> Iterator[str]:
    for module in dict.fromkeys(site.module for site in sites):
        path = _path(root, module)
        before = (root / path).read_text(encoding="utf-8")
        functions: dict[str, list[Target]] = {}
        for site in sites:
            if site.module == module:
                functions.setdefault(site.outermost, []).append(site)
        after = text.edited(before, functions)
        yield from difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            f"a/{path.as_posix()}",
            f"b/{path.as_posix()}",
        )


def _report(
    catalogue: Catalogue,
    patch: Patch,
    sites: Sequence[Target],
    root: Path,
    release: str,
    reproduction: str,
    diffs: str,
) -> Iterator[str]:
    yield from (f"# {patch.title}", "", patch.why.strip(), "")
    if patch.upstream:
        yield from (f"Upstream: {patch.upstream}", "")
    yield from ("## Reproduction", "")
    if reproduction:
        yield from ("```python", reproduction.rstrip("\n"), "```", "")
    else:
        # Other holders may keep, in that release, all that this one does.
        yield from ("None: no script shows this alone on the newest release that was seen.", "")
    yield from (f"## Where, and what to change (torch {release})", "")
    for site in sites:
        path = _path(root, site.module)
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        line = text.definition(tree, site.function).lineno
        yield f"- `{path.as_posix()}:{line}`, `{site.function}`"
        yield from (f"  - {edit.in_words()}" for edit in site.edits)
        yield f"  - releases: {_releases(catalogue, site)}"
    yield from ("", "## Diff", "", _STRIP, "", "````diff", diffs.rstrip("\n"), "````")


def _releases(catalogue: Catalogue, site: Target) -> str:
    """Those that were seen to have the site, and the specifier by which it is patched."""
    known = catalogue.sources.get(f"{site.module}:{site.outermost}", {})
    seen = {r for releases in known.values() for r in releases if is_affected(r, site.affected)}
    listed = ", ".join(sorted(seen, key=Version))
    return f"{listed} (patched where {site.affected})" if listed else str(site.affected)
