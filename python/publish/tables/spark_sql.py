"""Values in Spark's SQL."""

from __future__ import annotations

from headrace.publish.target import Key


def literal(value: Key) -> str:
    """A key as a literal."""
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
