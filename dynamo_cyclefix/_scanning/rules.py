"""What the scan looks for, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_cyclefix._catalogue.model import Key

RAISED_PARAMETER = "raised-parameter"
RAISED_LOCAL = "raised-local"
EXCEPT_ALIAS = "except-alias"
CAPTURED = "captured"
RETURNED = "returned"
TRACEBACK = "traceback"
STORED = "stored"

RULES: Mapping[str, str] = {
    RAISED_PARAMETER: "raises its own parameter and keeps it",
    RAISED_LOCAL: "raises an exception by the name of a local and keeps it",
    CAPTURED: "keeps an alias of a caught exception in a cell that nested code closes over",
    EXCEPT_ALIAS: "keeps an alias of a caught exception",
    RETURNED: "keeps an exception that another function of the module caught and returned",
    TRACEBACK: "keeps the traceback of a caught exception",
    STORED: "stores a caught or raised exception in a container, attribute, object or global",
}
"""Rule ids and what each finds. The first that applies to a name is the one that is reported."""


@dataclass(frozen=True)
class Finding:
    """One name of one function that can hold an exception whose traceback leads to its frame.

    Attributes:
        module: dotted module name.
        function: dotted name as in ``code.co_qualname``.
        name: the local or cell; dotted (``self.error``) when only an attribute holds the exception.
        file: path of the source file, as it was given.
        line: line on which the exception is raised, bound or stored.
        rule: one of `RULES`.
        detail: what was seen, in words.
        released: the function lets go of the name itself on every path.
    """

    module: str
    function: str
    name: str
    file: str
    line: int
    rule: str
    detail: str
    released: bool

    @property
    def key(self) -> Key:
        return self.module, self.function, self.name
