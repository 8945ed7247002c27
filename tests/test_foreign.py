"""Builds of torch that nobody has seen: altered copies of the installed one, each in a child.

A copy is a directory of links to the installed torch in which only the altered files are files of
its own, first on the path.  ``docs/foreign-builds.md`` says what is decided for each.
"""

import ast
import importlib.util
import io
import json
import marshal
import os
import re
import textwrap
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath

import pytest
from conftest import observation, run_child
from packaging.version import Version

from dynamo_cyclefix import scenarios
from dynamo_cyclefix._catalogue import gate as _gate
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._commands import verify as _verify
from dynamo_cyclefix._patching.state import State

TORCH = Path(importlib.util.find_spec("torch").origin).parent
VERSION = re.search(r"__version__ = '(.+)'", (TORCH / "version.py").read_text("utf-8"))[1]
CATALOGUE = _catalogue.load()
(TARGET,) = CATALOGUE.patches["observed-exceptions"].targets
CLASS, METHOD = TARGET.function.split(".")
MODULE = PurePath("_dynamo", "symbolic_convert.py")
CACHED = PurePath(importlib.util.cache_from_source(str(MODULE)))
SOURCELESS = MODULE.with_suffix(".pyc")
DOCUMENT = Path(__file__).parent.parent / "docs" / "foreign-builds.md"
NAMES = list(scenarios.load())
SCENARIOS = ("missing-key", "division-by-zero")

RECORDED = {r for releases in CATALOGUE.sources.get(TARGET.key, {}).values() for r in releases}
APPLIED = State.APPLIED if Version(VERSION).base_version in RECORDED else State.UNSEEN

needs_the_mistake = pytest.mark.skipif(
    not _gate.is_affected(VERSION, TARGET.affected), reason=f"torch {VERSION} is not affected"
)


# Texts


def source():
    return (TORCH / MODULE).read_text("utf-8")


def node_of(text, *names):
    found = ast.parse(text)
    for name in names:
        (found,) = (node for node in found.body if getattr(node, "name", "") == name)
    return found


def first_line(node):
    return min(part.lineno for part in (node, *node.decorator_list))


def inserted(text, line, addition, depth=0):
    """The text with an addition before a line, which is counted from 1."""
    lines = text.splitlines(keepends=True)
    lines.insert(line - 1, indented(addition, depth))
    return "".join(lines)


def indented(text, depth):
    return textwrap.indent(textwrap.dedent(text).strip("\n") + "\n", " " * depth)


def altered(alter):
    """The module with its handler changed, which ``alter`` gets as two lists of lines."""
    text = source()
    lines = text.splitlines(keepends=True)
    node = node_of(text, CLASS, METHOD)
    start, body, end = node.lineno - 1, node.body[0].lineno - 1, node.end_lineno
    lines[start:end] = alter(lines[start:body], lines[body:end])
    return "".join(lines)


def with_statements(statements):
    return altered(lambda head, body: [*head, indented(statements, 8), *body])


def with_decorator(decorator):
    text = altered(lambda head, body: [indented("@noted", 4), *head, *body])
    return inserted(text, first_line(node_of(text, CLASS)), decorator)


def with_the_fix(head, body):
    helper = "bubble_exception_to_interpreter"
    body = [re.sub(rf"\b{helper}\(\)", f"{helper}(raised_exception)", line) for line in body]
    return [
        *head,
        indented("try:", 8),
        *(" " * 4 * bool(line.strip()) + line for line in body),
        indented("finally:\n    del raised_exception", 8),
    ]


def with_override():
    text = source()
    methods = node_of(text, "InliningInstructionTranslator").body
    line = next(first_line(node) for node in methods if isinstance(node, ast.FunctionDef))
    override = f"""
        def {METHOD}(self, raised_exception):
            super().{METHOD}(raised_exception)
    """
    return inserted(text, line, override, 4)


def cached(text):
    """Compiled code that is loaded without a look at the source (PEP 552: a hash, unchecked)."""
    code = compile(text, str(TORCH / MODULE), "exec", dont_inherit=True)
    flags = (0b01).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + flags + bytes(8) + marshal.dumps(code)


# Builds


@dataclass(frozen=True)
class Build:
    """A torch, and what it gets.

    Attributes:
        state: of the patch.
        reason: a pattern for what ``status`` says about it.
        files: the files, by their path in the package, that are not the installed torch's; ``None``
            where it has none.
        before: a program that runs before the package is imported.
        after: a program that runs when torch has been patched.
        pinned: whether the scenarios pin the user's frame, with the patches off and on.
        strict: whether strict mode raises.
    """

    state: State
    reason: str
    files: Callable[[], dict[PurePath, bytes | None]] = dict
    before: str = ""
    after: str = ""
    pinned: tuple[bool, bool] = (True, False)
    strict: bool = False


def left(reason, **differences):
    return Build(State.REFUSED, reason, **{"pinned": (True, True), "strict": True, **differences})


def one_file(make):
    return lambda: {MODULE: make().encode()}


IMPORTED = f"""
    import pathlib
    import torch._dynamo.symbolic_convert as module
    owner = module.{CLASS}
    original = owner.{METHOD}
    code = original.__code__
    file = pathlib.Path(module.__file__)
"""
# What another program puts in the handler's place; it holds the exception itself.
REPLACEMENT = f"""
    def replacement(self, raised_exception):
        original(self, raised_exception)
    owner.{METHOD} = replacement
"""
WELL_BEHAVED = f"""
    import functools
    @functools.wraps(original)
    def replacement(self, raised_exception):
        try:
            original(self, raised_exception)
        finally:
            del raised_exception
    owner.{METHOD} = replacement
"""
DECORATOR = """
    import functools
    def noted(function):
        @functools.wraps(function)
        def note(self, raised_exception):
            try:
                function(self, raised_exception)
            finally:
                del raised_exception
        return note
"""
# How the start-up code of a program that was frozen into an archive finds its modules.
ARCHIVE = f"""
    import importlib.machinery, marshal, pathlib, sys, torch
    class Archive:
        file = pathlib.Path(torch.__file__).parent / {str(MODULE)!r}
        def find_spec(self, name, path=None, target=None):
            if name == {TARGET.module!r}:
                return importlib.machinery.ModuleSpec(name, self, origin=str(self.file))
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            module.__file__ = str(self.file)
            exec(marshal.loads(self.file.with_suffix(".bin").read_bytes()), vars(module))
    sys.meta_path.insert(0, Archive())
"""


def in_archive():
    code = compile(source(), str(MODULE), "exec", dont_inherit=True)
    return {MODULE: None, MODULE.with_suffix(".bin"): marshal.dumps(code)}


def in_zip():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MODULE.name, source())
    package = (TORCH / "_dynamo" / "__init__.py").read_text("utf-8")
    imports = (n for n in ast.parse(package).body if isinstance(n, ast.Import | ast.ImportFrom))
    line = next(n.lineno for n in imports if getattr(n, "module", "") != "__future__")
    package = inserted(package, line, "__path__.append(__path__[0] + '/part.zip')")
    return {
        MODULE: None,
        PurePath("_dynamo", "part.zip"): file.getvalue(),
        PurePath("_dynamo", "__init__.py"): package.encode(),
    }


BUILDS = {
    "unaltered": Build(APPLIED, "", one_file(source)),
    "cherry-picked fix": Build(
        State.FIXED,
        "the code releases the exception",
        lambda: {
            MODULE: altered(with_the_fix).encode(),
            PurePath("version.py"): (
                (TORCH / "version.py").read_text("utf-8").replace(VERSION, "2.14.1+vendor").encode()
            ),
        },
        pinned=(False, False),
    ),
    "extra argument": Build(
        State.UNSEEN,
        "passed every structural check",
        one_file(
            lambda: altered(
                lambda head, body: [head[0].replace(")", ", by=None)", 1), *head[1:], *body]
            )
        ),
    ),
    "renamed argument": left(
        "has no parameter or local 'raised_exception'",
        files=one_file(
            lambda: altered(
                lambda *parts: [
                    re.sub(r"\braised_exception\b", "escaping", line)
                    for part in parts
                    for line in part
                ]
            )
        ),
    ),
    "decorator that names what it wraps": Build(
        State.UNSEEN,
        r"beneath torch._dynamo.symbolic_convert.*note, which is not patched",
        one_file(lambda: with_decorator(DECORATOR)),
    ),
    "decorator that does not": left(
        "replaced by torch._dynamo.symbolic_convert.*note before us",
        files=one_file(lambda: with_decorator(DECORATOR.replace("@functools.wraps(function)", ""))),
    ),
    "second helper": left(
        "describe .* closes over 'raised_exception' too",
        files=one_file(
            lambda: with_statements("def describe():\n    return repr(raised_exception)")
        ),
    ),
    "extra statements": Build(
        State.UNSEEN,
        "passed every structural check",
        one_file(lambda: with_statements("self.escaped = getattr(self, 'escaped', 0) + 1")),
    ),
    "overridden in a subclass": Build(
        APPLIED,
        "overridden in torch.*[.]InliningInstructionTranslator, which is not patched",
        one_file(with_override),
        pinned=(True, True),
    ),
    "compiled only": Build(
        State.WRAPPED,
        "installed without its source",
        lambda: {MODULE: None, SOURCELESS: cached(source())},
    ),
    "source differs from the cached code": left(
        "the source on disk is not what runs",
        files=lambda: {
            MODULE: with_statements("self.escaped = True").encode(),
            CACHED: cached(source()),
        },
    ),
    "source edited after the import": left(
        "the source on disk is not what runs",
        files=one_file(source),
        before=f"{IMPORTED}    file.write_text('# edited' + chr(10) + file.read_text())",
    ),
    "source removed after the import": Build(
        State.WRAPPED,
        "no source of torch._dynamo.symbolic_convert can be read",
        one_file(source),
        before=f"{IMPORTED}    file.unlink()",
    ),
    "source that is no text": Build(
        State.WRAPPED,
        "no source of torch._dynamo.symbolic_convert can be read",
        lambda: {MODULE: source().encode() + b"# \xff\n", CACHED: cached(source())},
    ),
    "directory in the source's place": Build(
        State.WRAPPED,
        "installed without its source",
        lambda: {MODULE / "nothing": b"", SOURCELESS: cached(source())},
    ),
    "frozen into an archive": Build(State.WRAPPED, "no source of", in_archive, before=ARCHIVE),
    "zipped with its source": Build(APPLIED, "", in_zip),
    "replaced by a tool before us": left(
        "replaced by __main__.replacement before us", before=IMPORTED + REPLACEMENT
    ),
    "wrapped by a tool before us": Build(
        APPLIED,
        "beneath __main__.replacement, which is not patched",
        before=IMPORTED + WELL_BEHAVED,
    ),
    "replaced by a tool after us": left(
        "replaced since by another program", after=IMPORTED + REPLACEMENT
    ),
    "code exchanged by a tool after us": left(
        "replaced since by another program: its code was exchanged",
        before=IMPORTED,
        after=f"owner.{METHOD}.__code__ = code",
        strict=False,
    ),
}


def copy_links(original, copy, own):
    """Link all of a directory but what leads to the paths in ``own``."""
    copy.mkdir(parents=True)
    for entry in original.iterdir():
        inside = [PurePath(*path.parts[1:]) for path in own if path.parts[0] == entry.name]
        if entry.name == "__pycache__":
            # Not a link, or code that is cached later would land in the installed torch.
            (copy / entry.name).mkdir()
            for file in entry.iterdir():
                if file.name.partition(".")[0] not in {path.stem for path in own}:
                    (copy / entry.name / file.name).symlink_to(file)
        elif not inside:
            (copy / entry.name).symlink_to(entry)
        elif entry.is_dir() and PurePath() not in inside:
            copy_links(entry, copy / entry.name, inside)


def make_copy(folder, files):
    copy_links(TORCH, folder / "torch", list(files))
    for path, content in files.items():
        file = folder / "torch" / path
        if content is not None:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)


PROGRAM = """
import json
{before}
import dynamo_cyclefix
import torch
import torch._dynamo.symbolic_convert as module
{after}
import dataclasses
import logging
from dynamo_cyclefix import scenarios

every = scenarios.load()
seen = {{name: dataclasses.asdict(scenarios.observe(every[name])) for name in {names}}}
value = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist()
(patch,) = (p for p in dynamo_cyclefix.status().patches if p.id == "observed-exceptions")
active = dynamo_cyclefix._active
replaced = [patch_id for patch_id, _ in active.activation.patcher().changes()] if active else []
strict = ""
logging.disable(logging.WARNING)
try:
    dynamo_cyclefix.activate(strict=True, accept_unseen=True, patches=patch.id)
except dynamo_cyclefix.PatchError as error:
    strict = str(error)
print(json.dumps({{
    "files": [torch.__file__, module.__file__],
    "seen": seen,
    "value": value,
    "state": patch.state,
    "reason": patch.reason,
    "replaced": patch.id in replaced,
    "strict": strict,
}}))
"""


@needs_the_mistake
@pytest.mark.parametrize("name", list(BUILDS))
def test_foreign_build(name, tmp_path):
    build = BUILDS[name]
    before, after = textwrap.dedent(build.before), textwrap.dedent(build.after)
    program = PROGRAM.format(before=before, after=after, names=SCENARIOS)

    def run(mode):
        make_copy(tmp_path / mode, build.files())
        finished = run_child(program, path=[tmp_path / mode], DYNAMO_CYCLEFIX=mode)
        seen = json.loads(finished.stdout.splitlines()[-1])
        assert all(file.startswith(str(tmp_path / mode / "torch")) for file in seen["files"])
        return seen, finished.stderr.count("patch observed-exceptions not applied")

    with ThreadPoolExecutor(2) as pool:
        (off, _), (on, warnings) = pool.map(run, ("off", "on"))
    assert on["state"] == build.state
    assert re.search(build.reason, on["reason"])
    for side, pinned in zip((off, on), build.pinned, strict=True):
        assert side["value"] == [2.0, 2.0]
        for scenario in SCENARIOS:
            assert side["seen"][scenario]["pinned"] is pinned
            assert side["seen"][scenario]["freed"]
    # Left means left: nothing of ours is in it, which is said once, and refused in strict mode.
    assert on["replaced"] is (build.state not in (State.FIXED, State.REFUSED) or bool(build.after))
    assert warnings == (build.state == State.REFUSED and not build.after)
    assert bool(on["strict"]) is build.strict


@pytest.mark.parametrize("name", list(BUILDS))
def test_the_document_tells_the_outcome(name):
    (row,) = (r for r in DOCUMENT.read_text("utf-8").splitlines() if r.startswith(f"| {name} |"))
    told = row.split("|")[2].strip()
    state = BUILDS[name].state
    assert told == state.words or (told == "applied" and state == APPLIED)


# The wrapper, forced: the sources of the installed torch are hidden from a child

HIDING = """
from importlib.machinery import SourceFileLoader
get_source = SourceFileLoader.get_source
def hide(self, name):
    return None if name.startswith("torch.") else get_source(self, name)
SourceFileLoader.get_source = hide
"""
OURS = re.compile(r"[/\\]dynamo_cyclefix[/\\]_patching[/\\]wrapper\.py")
# Where a text lists frames (that of 2.8's `ConstraintViolationError`): ours, and those that are not
# of Python, some of which are wrapt's.
LISTED = re.compile(
    rf""" *File \\?"[^"]*{OURS.pattern}\\?", line \d+, in \w+(\n|\\n).*?(\n|\\n)"""
    r"""| *File \\?"(?!<|[^"]*\.py\\?")[^"]*", line \d+, in .*?(\n|\\n)"""
)


@pytest.fixture(scope="module")
def hidden(sides, tmp_path_factory):
    """The scenarios with the patches off; and on, with no source to read."""
    folder = tmp_path_factory.mktemp("hiding")
    (folder / "sitecustomize.py").write_text(HIDING, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    on = _verify.run_scenarios({"DYNAMO_CYCLEFIX": "on", "PYTHONPATH": path})
    assert not on.error, on.error
    return sides[0], on


@pytest.mark.matrix
@needs_the_mistake
@pytest.mark.parametrize("name", NAMES)
def test_the_wrapper_releases_frames(hidden, name):
    off, on = hidden
    before, after = (observation(side, name) for side in (off, on))
    states = {patch["id"]: patch["state"] for patch in on.status["patches"]}
    assert states["observed-exceptions"] == State.WRAPPED
    (claims,) = (found["patches"] for found in on.ready["scenarios"] if found["name"] == name)
    if not before["pinned"]:
        assert not after["pinned"]
        pytest.skip("the control pins nothing on this release")
    if "observed-exceptions" not in claims or State.REFUSED in {states[patch] for patch in claims}:
        pytest.skip("not the wrapper's")
    own_args = "AsPythonConstantNotImplementedError" in after["garbage_types"]
    if own_args and states["unsupported-constants"] == State.REFUSED:
        pytest.skip("torch 2.7's exception that holds itself: no wrapper can cut that")
    assert not after["pinned"]
    assert after["garbage_frames"] == 0
    assert after["garbage_exceptions"] == 0


@pytest.mark.matrix
@needs_the_mistake
@pytest.mark.parametrize("name", NAMES)
def test_the_wrapper_changes_nothing_else(hidden, name):
    off, on = hidden
    before, after = (observation(side, name) for side in (off, on))
    for aspect in ("outcome", "warnings", "counters", "graphs"):
        assert without_ours(after[aspect]) == without_ours(before[aspect])


@pytest.mark.matrix
@needs_the_mistake
def test_without_its_source_a_patch_is_refused_or_a_wrapper(sides, hidden):
    found = {patch["id"]: patch for patch in hidden[1].status["patches"]}
    for patch in sides[1].status["patches"]:
        if State(patch["state"]).in_place:
            without = found[patch["id"]]
            assert without["state"] in (State.WRAPPED, State.REFUSED), without
            assert "replaced since" not in without["reason"], without


def without_ours(found):
    """What was seen, save for the wrapper's frame in tracebacks and in texts that list frames."""
    if isinstance(found, str):
        return LISTED.sub("", found)
    if isinstance(found, list):
        return [
            without_ours(i) for i in found if not (isinstance(i, list) and OURS.search(str(i[0])))
        ]
    if isinstance(found, dict):
        return {without_ours(key): without_ours(value) for key, value in found.items()}
    return found
