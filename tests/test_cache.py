"""Rewritten code that is kept on disk: when it counts, when not, and that nothing depends on it."""

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_child
from test_rewrite import SAMPLES, Sample

from dynamo_cyclefix import _rewriting, _store
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._errors import Refused
from dynamo_cyclefix._patching import cache
from dynamo_cyclefix._rewriting.edits import Release


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache is kept."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("dynamo_cyclefix.sample.*") if path.is_file()]


def rewrite(sample: Sample) -> _rewriting.Rewrite:
    """As at one start of an interpreter."""
    kept = cache.Cache("sample", sample.text)
    code = sample.live(sample.load()).__code__
    found = kept.rewrite(code, sample.target.outermost, [sample.target])
    kept.save()
    return found


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions whose code was derived rather than found."""
    names: list[str] = []
    original = _rewriting.rewrite

    def counting(*args: object) -> _rewriting.Rewrite:
        names.append(str(args[2]))
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(_rewriting, "rewrite", counting)
    return names


@pytest.mark.parametrize("name", SAMPLES)
def test_the_second_start_finds_what_the_first_derived(
    name: str, folder: Path, derived: list[str]
) -> None:
    first, second = rewrite(SAMPLES[name]), rewrite(SAMPLES[name])
    assert len(derived) == 1
    assert len(files(folder)) == 1
    assert _rewriting.differs(first.original, second.original) is None
    assert _rewriting.differs(first.replacement, second.replacement) is None
    assert (first.block, first.is_fixed) == (second.block, second.is_fixed) != ("", True)


def test_a_function_that_is_fixed_is_found_as_such(derived: list[str]) -> None:
    fixed = Sample("""
        def handle(error):
            try:
                raise error
            finally:
                del error
    """)
    assert rewrite(fixed).is_fixed
    assert rewrite(fixed).is_fixed
    assert len(derived) == 1


CHANGES = {
    "a line above": lambda text: f"x = 1\n{text}",
    "another body": lambda text: text.replace("raise error", "raise (error)"),
    "a comment in it": lambda text: text.replace("raise error", "raise error  # again"),
    "more of the same code": lambda text: text + "    pass\n",
    "a line below": lambda text: f"{text}x = 1\n",
}
PLAIN = Sample("def handle(error):\n    raise error\n")


@pytest.mark.parametrize("change", CHANGES)
def test_another_source_is_derived_anew(change: str, derived: list[str]) -> None:
    rewrite(PLAIN)
    changed = Sample(CHANGES[change](PLAIN.text))
    assert changed.text != PLAIN.text
    found = rewrite(changed)
    assert len(derived) == 2
    assert found.block in changed.text
    rewrite(changed)
    assert len(derived) == 2


def test_other_targets_are_derived_anew(derived: list[str]) -> None:
    rewrite(PLAIN)
    code = PLAIN.live(PLAIN.load()).__code__
    target = PLAIN.target._replace(edits=(Release(("error",), ("other",)),))
    cache.Cache("sample", PLAIN.text).rewrite(code, "handle", [target])
    assert len(derived) == 2


def test_code_that_is_not_of_the_source_is_refused_as_without_the_cache() -> None:
    rewrite(PLAIN)
    code = Sample(PLAIN.text.replace("raise error", "raise error from None")).load()["handle"]
    with pytest.raises(Refused, match="the source on disk is not what runs"):
        cache.Cache("sample", PLAIN.text).rewrite(code.__code__, "handle", [PLAIN.target])


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "no file", "a directory", "writer"])
def test_a_damaged_cache_is_made_anew(
    damage: str, folder: Path, derived: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(PLAIN)
    (file,) = files(folder)
    content = file.read_bytes()
    if damage == "writer":  # another version of the rewrite
        monkeypatch.setattr(cache, "_MADE_BY", b"another")
    elif damage == "changed":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if damage == "a directory":
            file.mkdir()
    assert not rewrite(PLAIN).is_fixed
    assert len(derived) == 2
    rewrite(PLAIN)
    assert len(derived) == (3 if damage == "a directory" else 2)
    assert len(files(folder)) == (damage != "a directory")  # and nothing temporary


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize(("source", "expected"), [(0o600, 0o600), (0o444, 0o644), (0o666, 0o644)])
def test_others_may_not_write_it_and_read_it_only_if_they_may_read_ours(
    source: int,
    expected: int,
    folder: Path,
    derived: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = folder / "dynamo_cyclefix" / "_store.py"
    ours.parent.mkdir()
    ours.touch()
    ours.chmod(source)
    monkeypatch.setattr(_store, "__file__", str(ours))
    rewrite(PLAIN)
    (file,) = files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == expected
    rewrite(PLAIN)
    assert len(derived) == 1


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this user a stranger to the file."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("what", ["file", "directory"])
@pytest.mark.parametrize(
    ("mode", "trusted"),
    [
        (0o755, {"file", "directory"}),
        (0o775, {"directory"}),  # as the umask of many has it; a member's file is that member's
        (0o757, set()),
        (0o1777, {"directory"}),
        (None, set()),
    ],
)
def test_what_others_may_have_written_is_not_read(
    what: str,
    mode: int | None,
    trusted: set[str],
    folder: Path,
    derived: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewrite(PLAIN)
    (file,) = files(folder)
    path = file if what == "file" else file.parent
    if mode is None:
        give_away(path, monkeypatch)
    else:
        path.chmod(mode)
    before = file.stat()
    rewrite(PLAIN)
    assert len(derived) == (1 if what in trusted else 2)
    if what == "directory":  # nothing is written into one that is not trusted
        assert file.stat() == before
    elif mode is not None:  # ours is there now
        rewrite(PLAIN)
        assert len(derived) == (1 if what in trusted else 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files that are root's")
def test_what_root_has_written_is_read(derived: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(PLAIN)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    rewrite(PLAIN)
    assert len(derived) == 1


def test_a_process_of_the_same_id_is_not_in_the_way(folder: Path) -> None:
    """In containers that share the directory every process is the first."""
    rewrite(PLAIN)
    (file,) = files(folder)
    file.unlink()
    other = file.with_name(f"{file.name}.{os.getpid()}")
    other.touch()
    rewrite(PLAIN)
    assert set(files(folder)) == {file, other}
    other.with_suffix(".0123456789abcdef").touch()
    assert _store.clear() >= 3  # and what is beside the package
    assert not files(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"co_name": "other"},
        {"co_filename": "other.py"},
        {"co_firstlineno": 7},
        {"co_freevars": ("other",)},
        {"co_flags": 0x23},
    ],
    ids=lambda change: "".join(change),
)
def test_a_replacement_is_checked_when_it_is_read(
    change: dict[str, Any], derived: list[str]
) -> None:
    good = rewrite(PLAIN).replacement
    digest, entries = _store.read("sample", cache._MADE_BY)
    ((key, (original, replacement, block)),) = entries.items()
    bad = replacement.replace(**change)
    assert _rewriting.differs(bad, replacement)
    _store.write("sample", (digest, {key: (original, bad, block)}), cache._MADE_BY)
    assert _rewriting.differs(rewrite(PLAIN).replacement, good) is None
    assert len(derived) == 2


@pytest.mark.parametrize("why", ["-B", "a file in the way", "no byte code"])
def test_where_nothing_can_be_written(
    why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "-B":
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
    elif why == "a file in the way":
        monkeypatch.setattr(sys, "pycache_prefix", str(folder / "file"))
        (folder / "file").write_text("here")
    else:
        monkeypatch.setattr(sys.implementation, "cache_tag", None)
    before = files(folder)
    assert not rewrite(PLAIN).is_fixed
    assert files(folder) == before


def test_the_catalogue_is_parsed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = toml.load()
    assert len(list(folder.rglob("dynamo_cyclefix.patches.*"))) == 1
    monkeypatch.setitem(sys.modules, "tomllib" if sys.version_info >= (3, 11) else "tomli", None)
    assert toml.load() == first
    # Another file, a changed one, a removed one: parsed again.
    files = sorted(Path(str(toml.directory())).glob("*.toml"))
    for change in ("\n", None):
        shutil.rmtree(folder / "patches", ignore_errors=True)
        shutil.copytree(files[0].parent, folder / "patches")
        changed = folder / "patches" / files[0].name
        changed.write_text(changed.read_text() + change) if change else changed.unlink()
        with pytest.raises(ImportError):
            toml.load(folder / "patches")


def test_it_is_kept_where_an_uninstallation_leaves_nothing_to_import() -> None:
    path = Path(_store._path("torch.fx")).relative_to(Path(sys.pycache_prefix or ""))
    package = Path(_store.__file__).parent
    assert Path("/", path).parent == package.parent
    assert path.name.startswith(f"{package.name}.torch.fx.{sys.implementation.cache_tag}")


START = """
import gc, json, os, sys, weakref
from dynamo_cyclefix import _rewriting, _store
sys.dont_write_bytecode = False
_store._path = lambda name: os.path.join({folder!r}, name)
derived, original = [], _rewriting.rewrite
def rewrite(source, code, qualname, targets):
    derived.append(qualname)
    return original(source, code, qualname, targets)
_rewriting.rewrite = rewrite
import torch, torch._dynamo
import dynamo_cyclefix

class Held: pass
def helper(mapping): return mapping["key"]
def user():
    held = Held()
    try: torch.compile(lambda x, m: helper(m) + x, backend="eager")(torch.ones(1), {{}})
    except KeyError: return weakref.ref(held)

gc.disable()
released = user()() is None
states = {{patch.id: patch.state.value for patch in dynamo_cyclefix.status().patches}}
print(json.dumps([len(derived), released, states]))
"""


def test_torch_runs_what_an_earlier_process_derived(folder: Path) -> None:
    code = START.format(folder=str(folder))
    first, second = (run_child(code).json for _ in range(2))
    assert first[0] > 5
    assert second == [0, *first[1:]]
    # The control: without the patches the frame is pinned, where torch is affected at all.
    off = run_child(code, DYNAMO_CYCLEFIX="off").json
    if first[2]["observed-exceptions"] == "applied":
        assert (off[1], first[1]) == (False, True)
    names = sorted(os.listdir(folder))
    assert not [name for name in names if not name.startswith(("torch.", "patches"))]
    assert not [name for name in names if re.search(r"\.[0-9a-f]{16}$", name)]  # nothing temporary
