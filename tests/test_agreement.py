"""The rewrite and the scan, two engines that share no code, check each other.

On the functions that the catalogue names, and on Python's own library, which nobody wrote for us.
"""

import ast
import importlib.util
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
from packaging.specifiers import SpecifierSet

from dynamo_cyclefix import _installed, _rewriting
from dynamo_cyclefix._catalogue import gate, toml
from dynamo_cyclefix._catalogue.model import Target
from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._rewriting import LOCALS, units
from dynamo_cyclefix._rewriting.edits import Release
from dynamo_cyclefix._rewriting.rewrite import apply
from dynamo_cyclefix._scanning.package import Finding, scan_source


def code_of(source: str, qualname: str) -> CodeType:
    code = compile(source, "module.py", "exec", dont_inherit=True)
    for name in qualname.split("."):
        *_, code = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code


def is_in(finding: Finding, function: str) -> bool:
    return f"{finding.function}.".startswith(f"{function}.")


def held_after(source: str, targets: list[Target]) -> list[Finding]:
    """What the scan lists in the targets, which are of one function, once they are rewritten."""
    outermost = targets[0].outermost
    code = code_of(source, outermost)
    assert not _rewriting.rewrite(source, code, outermost, targets).is_fixed
    _, unit, node = units.module_unit(source, code, outermost)
    apply(node, outermost, targets)
    return [
        finding
        for finding in scan_source(ast.unparse(unit), targets[0].module, "module.py")
        if not finding.released and any(is_in(finding, t.function) for t in targets)
    ]


# ---- the catalogue -------------------------------------------------------------------------------

GROUPS: dict[tuple[str, str], list[Target]] = defaultdict(list)
if importlib.util.find_spec("torch"):
    ROOT = _installed.find()
    for _, affected in toml.load().targets():
        if gate.is_affected(_installed.version(ROOT), affected.affected):
            GROUPS[affected.module, affected.outermost].append(affected)


@pytest.mark.parametrize(("module", "function"), GROUPS, ids=lambda part: part)
def test_what_a_patch_rewrites_scans_clean(module: str, function: str) -> None:
    targets = GROUPS[module, function]
    if not any(isinstance(edit, Release) for target in targets for edit in target.edits):
        pytest.skip("what is not a local of the function is not the scan's")
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    source = path.read_text("utf-8")
    before = scan_source(source, module, "module.py")
    for target in targets:  # the control
        assert any(is_in(f, target.function) and not f.released for f in before)
    assert held_after(source, targets) == []


# ---- Python's library ----------------------------------------------------------------------------


OTHERS = {
    *("site-packages", "dist-packages", "test", "tests"),
    *("encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
}


def library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not OTHERS.intersection(parts):
            yield path


def test_the_library_of_python_is_released_or_refused_with_a_reason() -> None:
    released: list[str] = []
    refused: dict[str, str] = {}
    for path in library():
        try:
            source = path.read_text("utf-8")
            findings = [f for f in scan_source(source, path.stem, str(path)) if not f.released]
        except (SyntaxError, UnicodeDecodeError):
            continue
        names: dict[str, list[str]] = defaultdict(list)
        for finding in findings:
            names[finding.function].append(finding.name)
        for function, held in names.items():
            target = Target(path.stem, function, (Release(tuple(held)),), SpecifierSet())
            where = f"{path}:{function}"
            try:
                assert held_after(source, [target]) == [], where
            except Refused as error:
                refused[where] = str(error)
                assert refused[where]
            else:
                released.append(where)
    print(f"Python {sys.version.split()[0]}: {len(released)} released, {len(refused)} refused")
    assert len(released) > 30
