"""Names and values in Spark's SQL."""

from __future__ import annotations

from headrace.publish.target import Key


def quoted(name: str) -> str:
    """An identifier."""
    return "`" + name.replace("`", "``") + "`"


def literal(value: Key) -> str:
    """A key as a literal."""
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
