"""How: from a function's source and a list of edits to the code object that runs instead.

Pure: text and code objects in, code objects out; nothing here looks at or changes the process.
``units`` cuts a function out of its module, ``compare`` tells whether it is what runs, ``scopes``
knows its names, ``edits`` has the kinds of edit, and ``derive`` puts them together.  Imports
nothing of the package but the errors; everything else may import it.
"""

from dynamo_cyclefix._rewriting.compare import changes, differs
from dynamo_cyclefix._rewriting.derive import Rewrite, is_fixed, rewrite, unparsed
from dynamo_cyclefix._rewriting.units import LOCALS, is_method, nested

__all__ = [
    "LOCALS",
    "Rewrite",
    "changes",
    "differs",
    "is_fixed",
    "is_method",
    "nested",
    "rewrite",
    "unparsed",
]
