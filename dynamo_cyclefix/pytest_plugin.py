"""Pytest plugin: the fixture `no_exception_cycles`.

Loading it costs the import of `dynamo_cyclefix` (which activates the patches, unless
``DYNAMO_CYCLEFIX=off``); the audit is imported when a test uses the fixture.
"""

# mypy: disallow-untyped-decorators=False
# pytest is not installed where the types are checked.

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from dynamo_cyclefix import audit


class _NoExceptionCycles:
    def __enter__(self) -> "audit.watch":
        from dynamo_cyclefix import audit

        self._watched = audit.watch()
        return self._watched.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        __tracebackhide__ = True
        self._watched.__exit__(kind, error, traceback)
        report = self._watched.report
        if error is None and (report.cycles or report.alive):
            pytest.fail(str(report))


@pytest.fixture
def no_exception_cycles() -> "Callable[[], AbstractContextManager[audit.watch]]":
    """Fail the test if a block of it leaves an exception reference cycle.

    ::

        def test_malformed_input(no_exception_cycles):
            with no_exception_cycles():
                with pytest.raises(RuntimeError):
                    compiled(malformed)

    It fails as well if an exception of the block is still alive at its end, since its cycles can't
    be told then: ``pytest.raises(...) as info`` keeps it in `info`, so use ``match=`` or ``del``.
    An exception that leaves the block passes. The target of ``as`` is a
    `dynamo_cyclefix.audit.watch`, whose `report` has the result.
    """
    return _NoExceptionCycles
