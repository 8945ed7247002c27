"""The command line as a whole, and what other programs read of it."""

import argparse
import atexit
import inspect
import json
import re
import sys
import zipfile
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.version import Version

import dynamo_cyclefix
from dynamo_cyclefix import _installed, _json, _report
from dynamo_cyclefix._catalogue import toml
from dynamo_cyclefix._catalogue.model import Catalogue
from dynamo_cyclefix._commands import scan, sources, verify
from dynamo_cyclefix._commands.main import main
from dynamo_cyclefix._errors import CommandError
from dynamo_cyclefix._measuring import records
from dynamo_cyclefix._patching import status
from dynamo_cyclefix._patching.state import State
from dynamo_cyclefix._scanning.package import Finding

DOCS = Path(__file__).parent.parent / "docs"

atexit.unregister(_report.write)  # this process is asked for no report


# Messages and exit codes


@pytest.mark.parametrize("code", [1, 2])
def test_why_a_command_fails_is_one_line_and_its_exit_code(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        print("a table")
        raise CommandError("found nothing", code)

    monkeypatch.setattr(scan, "run", fail)
    assert main(["scan"]) == code
    assert capsys.readouterr() == ("a table\n", "dynamo-cyclefix scan: found nothing\n")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    return capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"dynamo-cyclefix {dynamo_cyclefix.__version__}\n"


@pytest.mark.parametrize("command", [[], ["status"], ["run"]])
def test_help_is_a_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "help", *command)
    assert text.startswith("usage: dynamo-cyclefix")
    assert text == printed(capsys, *command, "--help")


# States


def test_states_are_codes_for_programs_and_words_for_people() -> None:
    assert json.loads(_json.document({"state": State.UNSEEN})) == {
        "schema": _json.SCHEMA,
        "state": "applied-unseen",
    }
    assert State("applied-unseen") is State.UNSEEN
    assert State.UNSEEN.words == "applied, source not seen before"
    assert [s for s in State if s.in_place] == [s for s in State if s.startswith("applied")]


@pytest.mark.parametrize(
    ("states", "worst"),
    [
        ([State.APPLIED, State.REFUSED, State.FIXED], State.REFUSED),
        ([State.UNAFFECTED, State.WRAPPED, State.APPLIED], State.WRAPPED),
        ([State.FIXED, State.APPLIED, State.PENDING], State.APPLIED),
        ([State.DISABLED, State.FIXED], State.FIXED),
        ([State.DISABLED, State.DISABLED], State.DISABLED),
    ],
)
def test_the_report_names_the_worst_state_of_what_is_not_switched_off(
    states: list[State], worst: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = [SimpleNamespace(id=str(i), state=state) for i, state in enumerate(states)]
    found = SimpleNamespace(patches=patches, error="", torch="2.13.0")
    monkeypatch.setattr(dynamo_cyclefix, "_active", SimpleNamespace(activated_by="import"))
    monkeypatch.setattr(dynamo_cyclefix, "status", lambda: found, raising=False)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert _report._state()["state"] is worst


def test_what_activates_is_not_for_the_caller_to_say() -> None:
    parameters = inspect.signature(dynamo_cyclefix.activate).parameters
    assert list(parameters) == ["strict", "patches", "accept_unseen"]


# The table of verify

LINES = [
    ("scenario", "patch", "exception", "before", "after", "verdict"),
    ("[red]", "one, another-one", "KeyError", "pinned", "free", "released"),
    ("a-name-of-some-length", "-", "AnExceptionOfTheUser", "pinned", "failed", "crashed: exit 3"),
]


def test_the_table_with_rich() -> None:
    header, rule, *rows = verify._rich_table(LINES).splitlines()
    for line, row in zip(LINES, (header, *rows), strict=True):
        assert re.split(r"\s{2,}", row.strip()) == list(line)
    assert set(rule.strip()) <= {"─"}


def test_the_table_on_a_narrow_terminal_has_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    lines = verify._rich_table(LINES).splitlines()
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]
    assert max(map(len, lines)) <= 60
    assert "crashed:" in "".join(lines)


def test_the_table_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    row = verify.Row("missing-key", ("one", "two"), "KeyError", "pinned", "free", "released")
    ready = {"torch": "2.13.0", "python": "3.11.7"}
    states = {"patches": [{"id": "one", "state": "applied-unseen"}]}
    verify._print([row], verify.Run(ready=ready), verify.Run(status=states))
    header, line, patch, _ = capsys.readouterr().out.splitlines()
    assert header == "scenario     patch     exception  before  after  verdict"
    assert line == "missing-key  one, two  KeyError   pinned  free   released"
    assert patch == "patch one: applied, source not seen before"


# The page on JSON


def section(title: str) -> str:
    text = (DOCS / "json.md").read_text("utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_pages_have_every_state() -> None:
    rows = [f"| `{state.value}` | {state.words} |" for state in State]
    assert "\n".join(rows) in section("States")
    assert f"`schema`, is {_json.SCHEMA}." in (DOCS / "json.md").read_text("utf-8")
    for state in State:
        assert f"| `{state.value}` |" in (DOCS / "operating.md").read_text("utf-8")


def names(*types: type) -> list[str]:
    return [field.name for kind in types for field in fields(kind)]


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("status", names(status.Status, status.PatchStatus, status.TargetStatus)),
        ("verify", [*names(verify.Row, verify.Run), "problem", "table", "off", "on"]),
        ("scan", [*names(Finding), *scan._KINDS, "torch", "root", "counts", "findings"]),
        ("sources", [*names(sources.Finding), "torch", "findings", "new_places"]),
        ("measure", ["settings", "verdict", "summaries", *names(records.Run, records.Worker)]),
    ],
)
def test_the_page_has_every_key(title: str, keys: list[str]) -> None:
    assert not [key for key in keys if f"`{key}`" not in section(title)]


@pytest.mark.parametrize("command", ["autostart status", "sitecustomize-dir"])
def test_the_page_has_every_key_that_is_printed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*command.split(), "--json"])
    keys = json.loads(capsys.readouterr().out)
    assert keys.pop("schema") == _json.SCHEMA
    assert keys
    assert not [key for key in keys if f"`{key}`" not in section(command.split()[0])]


# A release that is not installed


def test_a_wheel_is_compared_with_a_record_that_ends_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = _installed.find()
    wheel = tmp_path / "torch.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        # What has targets, or is scanned.
        packages = "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "fx"
        for package in (*packages, "_subclasses", "export"):
            for path in sorted((root / "torch" / package).rglob("*.py")):
                archive.write(path, path.relative_to(root))
        archive.write(root / "torch" / "version.py", "torch/version.py")
    release = _installed.version(root).partition("+")[0]
    whole = toml.load()

    def told(catalogue: Catalogue) -> tuple[dict[str, str], list[str]]:
        monkeypatch.setattr(toml, "load", lambda: catalogue)
        assert main(["sources", str(wheel), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        verdicts = {found["function"]: found["verdict"] for found in document["findings"]}
        return verdicts, [place["function"] for place in document["new_places"]]

    known, places = told(whole)
    assert sources.NEW not in known.values()
    assert not places
    # For each function, the sources that an earlier release had.
    before = {
        function: {
            digest: releases
            for digest, releases in seen.items()
            if any(Version(known) < Version(release) for known in releases)
        }
        for function, seen in whole.sources.items()
    }
    # A place that no patch is for, as in a release that adds one.
    others = {i: patch for i, patch in whole.patches.items() if i != "fake-tensor-errors"}
    cut, places = told(whole._replace(sources=before, patches=others))
    assert places
    new = {
        function
        for function, seen in whole.sources.items()
        if any(release in seen[digest] for digest in seen.keys() - before[function].keys())
    }
    assert new & cut.keys()
    assert cut == {f: sources.NEW if f in new else known[f] for f in cut}


def test_what_is_no_wheel_is_said_to_be_none(tmp_path: Path, capsys) -> None:
    path = tmp_path / "torch.whl"
    path.write_text("no archive")
    assert main(["sources", str(path)]) == 2
    assert "cannot be read as a wheel" in capsys.readouterr().err
