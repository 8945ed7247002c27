"""Scans the files of a torch that is installed or unpacked, without importing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dynamo_cyclefix._catalogue.model import Key, covering_patch
from dynamo_cyclefix._scanning.flow import scan_source
from dynamo_cyclefix._scanning.rules import Finding

PACKAGES = (
    "torch._dynamo",
    "torch._export",
    "torch.export",
    "torch._functorch",
    "torch._inductor",
    "torch._subclasses",
    "torch._higher_order_ops",
    "torch.fx",
)
"""The packages on torch.compile's and torch.export's path, which are scanned by default."""


class ScanError(Exception):
    """The scan could not run; the message says why in one line."""


@dataclass(frozen=True)
class Verdict:
    """A finding and what is known about it.

    Attributes:
        finding: the finding.
        verdict: ``open``, ``patched by <id>``, ``released by torch`` or ``explained``.
        reason: why an explained finding is left alone, else empty.
    """

    finding: Finding
    verdict: str
    reason: str = ""


def scan_package(
    root: Path,
    modules: Sequence[str] = PACKAGES,
    *,
    patched: Mapping[Key, str] = MappingProxyType({}),
    explained: Mapping[Key, str] = MappingProxyType({}),
) -> list[Verdict]:
    """Scan modules and packages of a torch source tree.

    Args:
        root: directory that holds the ``torch`` package.
        modules: dotted names of modules, or of packages, which are scanned with all that is below.
            A leading ``torch.`` may be left out.
        patched: id of the patch that covers a name.
        explained: why a name is no concern.

    Returns:
        A verdict for each finding, by file and line.

    Raises:
        ScanError: a module is not there, or cannot be read or parsed.
    """
    verdicts = []
    for path in _sources(root, modules):
        file = path.relative_to(root)
        parts = file.with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            findings = scan_source(path.read_text(encoding="utf-8"), module, file.as_posix())
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise ScanError(
                f"could not read {path}: {error}; scan with the Python that runs this torch"
            ) from error
        for finding in findings:
            patch = covering_patch(patched, finding.key)
            if patch is not None:
                verdicts.append(Verdict(finding, f"patched by {patch}"))
            elif finding.released:
                verdicts.append(Verdict(finding, "released by torch"))
            elif finding.key in explained:
                verdicts.append(Verdict(finding, "explained", explained[finding.key]))
            else:
                verdicts.append(Verdict(finding, "open"))
    return verdicts


def _sources(root: Path, modules: Sequence[str]) -> Iterator[Path]:
    found: dict[Path, None] = {}
    for name in modules:
        full = name if name.split(".")[0] == "torch" else f"torch.{name}"
        base = root.joinpath(*full.split("."))
        files = sorted(base.rglob("*.py")) or [base.with_suffix(".py")]
        if not files[0].is_file():
            raise ScanError(f"found no module {full} below {root}: give a dotted name of torch")
        found.update(dict.fromkeys(files))
    yield from found
