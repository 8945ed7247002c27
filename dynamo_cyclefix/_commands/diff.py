"""The ``diff`` command: the user's own functions against what runs instead."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator

import dynamo_cyclefix
from dynamo_cyclefix import _rewriting
from dynamo_cyclefix._commands.loading import load_torch
from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._patching import session as _activation
from dynamo_cyclefix._patching.patcher import source_of
from dynamo_cyclefix._patching.replacement import Replacement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("patches", nargs="*", metavar="PATCH", help="ids of patches (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print one unified diff for each function that was rewritten."""
    load_torch()
    known = {patch.id for patch in dynamo_cyclefix.status().patches}
    if unknown := sorted(set(arguments.patches) - known):
        raise CommandError(
            f"found no patch {unknown[0]!r}, expected some of {', '.join(sorted(known))}"
        )
    patcher = _activation.patcher()
    found = False
    for patch_id, change in patcher.changes() if patcher else ():
        if not arguments.patches or patch_id in arguments.patches:
            found = True
            print(f"# {patch_id}: comments and pure changes of indentation are left out")
            if isinstance(change, Replacement):
                print("\n".join(_diff(change)))
            else:
                print(f"# {change.targets[0].key} runs inside a wrapper: its source is missing")
    if not found:
        raise CommandError("nothing was rewritten; see status", 1)
    return 0


def _diff(change: Replacement) -> Iterator[str]:
    module = sys.modules[change.targets[0].module]
    code, outermost = change.original, change.targets[0].outermost
    texts = _rewriting.unparsed(source_of(module), code, outermost, change.targets)
    before, after = (text.splitlines() for text in texts)
    yield f"--- {code.co_filename}:{code.co_firstlineno} {outermost}"
    yield f"+++ {outermost} as it runs"
    matcher = difflib.SequenceMatcher(
        None, [line.strip() for line in before], [line.strip() for line in after], autojunk=False
    )
    for group in matcher.get_grouped_opcodes():
        first, last = group[0], group[-1]
        yield f"@@ -{first[1] + 1},{last[2] - first[1]} +{first[3] + 1},{last[4] - first[3]} @@"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (f" {line}" for line in after[j1:j2])
            else:
                yield from (f"-{line}" for line in before[i1:i2])
                yield from (f"+{line}" for line in after[j1:j2])
