"""The environment variables: what they may say, and that every place hears the same."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import run_child

import dynamo_cyclefix
from dynamo_cyclefix import _settings
from dynamo_cyclefix._commands import status, verify
from dynamo_cyclefix._errors import CommandError

# Written in another way, and meaning the same.
SPELLINGS = {
    "strict": ["strict", "STRICT", " strict ", "Strict\n"],
    "off": ["off", "OFF", " Off"],
    "on": ["on", "", " ", "ON ", "maybe", "stric"],
}
MODES = [(spelling, mode) for mode, spellings in SPELLINGS.items() for spelling in spellings]


@pytest.mark.parametrize(("said", "mode"), MODES)
def test_mode(said: str, mode: str) -> None:
    assert _settings.Settings({"DYNAMO_CYCLEFIX": said}).mode == mode


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, ("on", "", False, False, "")),
        ({"_UNSEEN": " Accept "}, ("on", "", True, False, "")),
        ({"_UNSEEN": "yes"}, ("on", "", False, False, "")),
        ({"_REPORT": "1 "}, ("on", "", False, True, "")),
        ({"_REPORT": "0"}, ("on", "", False, False, "")),
        (
            {"_REPORT": "", "_PATCHES": " a, b ", "_ACTIVATED_BY": " run"},
            ("on", "a, b", False, False, "run"),
        ),
    ],
)
def test_the_others(said: Mapping[str, str], expected: tuple[Any, ...]) -> None:
    found = _settings.Settings({f"DYNAMO_CYCLEFIX{name}": text for name, text in said.items()})
    assert (
        found.mode,
        found.patches,
        found.accept_unseen,
        found.report,
        found.activated_by,
    ) == expected


# Every place that asks, in a process without torch.
PLACES = """
    import json
    import dynamo_cyclefix
    from dynamo_cyclefix import _report
    by_import = dynamo_cyclefix._active
    dynamo_cyclefix.deactivate()
    off = _report._state().get("reason")
    dynamo_cyclefix.activate()
    by_activate = dynamo_cyclefix._active
    found = [f and (f.strict, f.accept_unseen) for f in (by_import, by_activate)]
    print(json.dumps([*found, off]))
"""


@pytest.mark.parametrize(
    ("said", "mode"), [(s, m) for s, m in MODES if s not in ("maybe", "stric")]
)
def test_every_place_hears_the_same_mode(
    said: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = {"DYNAMO_CYCLEFIX_UNSEEN": "ACCEPT ", "DYNAMO_CYCLEFIX_REPORT": " 1"}
    finished = run_child(PLACES, DYNAMO_CYCLEFIX=said, **unseen)
    active = None if mode == "off" else [mode == "strict", True]
    assert finished.json == [active, active, f"not active (DYNAMO_CYCLEFIX={mode})"]
    (line,) = finished.stderr.splitlines()  # the report, and no warning
    assert line.startswith("dynamo-cyclefix: {")

    monkeypatch.setenv("DYNAMO_CYCLEFIX", said)
    asked: list[Any] = []
    monkeypatch.setattr(verify, "run_scenarios", lambda environment, *_: asked.append(environment))
    verify.run_both()
    on = "strict" if mode == "strict" else "on"
    assert sorted(e["DYNAMO_CYCLEFIX"] for e in asked) == sorted(["off", on])

    monkeypatch.setattr(dynamo_cyclefix, "_active", None)
    monkeypatch.setattr(status, "load_torch", lambda: None)
    with pytest.raises(CommandError, match=rf"^not active \(DYNAMO_CYCLEFIX={mode}\)$"):
        status.run(argparse.Namespace(require=None, json=True))


WARNINGS = """
    import json, logging
    texts = []
    class Recording(logging.Handler):
        def emit(self, record):
            texts.append([record.levelname, record.getMessage()])
    logging.getLogger("dynamo_cyclefix").addHandler(Recording())
    import dynamo_cyclefix
    for _ in range(2):
        dynamo_cyclefix.activate()
    print(json.dumps(texts))
"""


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "DYNAMO_CYCLEFIX",
            "Maybe",
            "DYNAMO_CYCLEFIX='Maybe' is unknown, expected on, off or strict; it counts as on",
        ),
        (
            "DYNAMO_CYCLEFIX_UNSEEN",
            "yes",
            "DYNAMO_CYCLEFIX_UNSEEN='yes' is unknown, expected refuse or accept;"
            " it counts as refuse",
        ),
        (
            "DYNAMO_CYCLEFIX_REPORT",
            "true",
            "DYNAMO_CYCLEFIX_REPORT='true' is unknown, expected 0 or 1; it counts as 0",
        ),
        (
            "DYNAMO_CYCLEFIX_PATCH",
            "-export-errors",
            "DYNAMO_CYCLEFIX_PATCH is unknown and ignored, expected one of DYNAMO_CYCLEFIX,"
            " DYNAMO_CYCLEFIX_PATCHES, DYNAMO_CYCLEFIX_UNSEEN, DYNAMO_CYCLEFIX_REPORT,"
            " DYNAMO_CYCLEFIX_ACTIVATED_BY",
        ),
        ("DYNAMO_CYCLEFIX_PATCHES", "-export-errors", None),
        ("DYNAMO_CYCLEFIX_ACTIVATED_BY", "run", None),
        ("MY_DYNAMO_CYCLEFIX", "maybe", None),
    ],
)
def test_what_is_misspelt_is_said_once(name: str, value: str, text: str | None) -> None:
    assert run_child(WARNINGS, **{name: value}).json == [["WARNING", text]] * bool(text)


@pytest.mark.parametrize(
    ("said", "way"), [(None, "sitecustomize"), (" ", "sitecustomize"), ("run ", "run")]
)
def test_the_way_that_sitecustomize_tells(said: str | None, way: str) -> None:
    folder = Path(dynamo_cyclefix.__file__).parent / "sitecustomize"
    variables = {} if said is None else {"DYNAMO_CYCLEFIX_ACTIVATED_BY": said}
    program = (
        "import json, dynamo_cyclefix; print(json.dumps(dynamo_cyclefix._active.activated_by))"
    )
    assert run_child(program, path=[folder], **variables).json == way
