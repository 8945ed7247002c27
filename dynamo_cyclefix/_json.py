"""The JSON that is printed for other programs; ``docs/json.md`` describes each document."""

from __future__ import annotations

import json
from collections.abc import Mapping

# Goes up when a key or a code that was there before is renamed, removed or means something else.
SCHEMA = 1


def document(content: Mapping[str, object], indent: int | None = None) -> str:
    """The text of one document, with the version of the schema first."""
    return json.dumps({"schema": SCHEMA, **content}, indent=indent)
