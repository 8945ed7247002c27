"""Pytest plugin: the fixture `no_exception_cycles`.

Loading it costs the import of `dynamo_cyclefix` (which activates the patches, unless
``DYNAMO_CYCLEFIX=off``); the audit is imported when a test uses the fixture.
"""

# mypy: disallow-untyped-decorators=False
# pytest is not installed where the types are checked.

from contextlib import suppress
from logging import Formatter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from logging import LogRecord

    from dynamo_cyclefix import audit


class _NoExceptionCycles:
    def __init__(
        self, records: "Callable[[], list[LogRecord]]", objects: "Iterable[object]"
    ) -> None:
        self._records = records
        self._objects = objects

    def __enter__(self) -> "audit.watch":
        from dynamo_cyclefix import audit

        self._logged_before = list(self._records())
        self._watched = audit.watch(objects=self._objects)
        self._objects = ()
        return self._watched.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        __tracebackhide__ = True
        # Pytest keeps what is logged until the test ends, and torch logs exceptions.
        before = set(map(id, self._logged_before))
        for record in self._records():
            if id(record) not in before:
                # A record that cannot be formatted is not ours to complain of.
                with suppress(Exception):
                    _make_text(record)
        self._watched.__exit__(kind, error, traceback)
        report = self._watched.report
        if error is None and (report.cycles or report.alive or report.held):
            pytest.fail(str(report))


def _make_text(record: "LogRecord") -> None:
    """Have a log record keep what it says, and no longer the objects that it says it of."""
    record.msg, record.args = record.getMessage(), None
    if record.exc_info:
        record.exc_text = record.exc_text or Formatter().formatException(record.exc_info)
        record.exc_info = None


@pytest.fixture
def no_exception_cycles(
    request: pytest.FixtureRequest,
) -> "Callable[..., AbstractContextManager[audit.watch]]":
    """Fail the test if a block of it leaves an exception reference cycle.

    ::

        def test_malformed_input(no_exception_cycles):
            with no_exception_cycles():
                with pytest.raises(RuntimeError):
                    compiled(malformed)

        def test_a_request_is_let_go_of(no_exception_cycles):
            request = make_request()
            with no_exception_cycles(objects=[request]):
                compiled(request)
                del request

    Fails as well if one of `objects` is alive at the end of the block, though nothing of the
    test's refers to it any more.

    It fails as well if an exception of the block is still alive at its end, since its cycles can't
    be told then: ``pytest.raises(...) as info`` keeps it in `info`, so use ``match=`` or ``del``.
    What was logged in the block is kept as text alone. An exception that leaves the block passes.
    The target of ``as`` is a `dynamo_cyclefix.audit.watch`, whose `report` has the result.
    """
    if request.config.pluginmanager.hasplugin("logging-plugin"):
        caplog = request.getfixturevalue("caplog")
        return lambda objects=(): _NoExceptionCycles(lambda: caplog.records, objects)
    return lambda objects=(): _NoExceptionCycles(list, objects)
