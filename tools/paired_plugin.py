"""The pytest plugin of one arm of ``paired.py``: tells of each test as it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import dynamo_cyclefix  # before torch
from dynamo_cyclefix.scenarios._observe import stable

EVENTS = Path(os.environ["PAIRED_EVENTS"])
SELECTION = json.loads(Path(os.environ["PAIRED_SELECTION"]).read_text())


def emit(event: str, **fields: object) -> None:
    with EVENTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, **fields}) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    only, done = SELECTION["only"], set(SELECTION["done"])
    items[:] = [i for i in items if i.nodeid not in done and (only is None or i.nodeid in only)]


def pytest_runtest_logstart(nodeid: str) -> None:
    emit("start", test=nodeid)


_results: dict[str, dict[str, str]] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore
    outcome = yield
    report = outcome.get_result()
    result = _results.setdefault(item.nodeid, {"outcome": "passed"})
    if report.outcome != "passed" and result["outcome"] == "passed":
        result["outcome"] = (
            report.outcome if report.when == "call" else f"{report.outcome} in {report.when}"
        )
        if call.excinfo is not None:
            result["type"] = call.excinfo.type.__qualname__
            try:
                result["message"] = stable(str(call.excinfo.value))
            except Exception as error:
                result["message"] = f"cannot be shown: {type(error).__name__}"


def pytest_runtest_logfinish(nodeid: str) -> None:
    emit("result", test=nodeid, result=_results.get(nodeid, {"outcome": "none"}))


def pytest_sessionfinish() -> None:
    found = dynamo_cyclefix.status()
    emit("patches", active=found.active, states={p.id: p.state.value for p in found.patches})
    emit("end")
