"""Rows as text, the way psql shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

from headrace.logs import visible


def psql_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as psql's aligned text: centred headings, numbers to the right, the count below."""
    foot = f"({len(rows)} row{'' if len(rows) == 1 else 's'})"
    if not rows:
        return foot
    columns = list(rows[0])
    headings = [visible(c) for c in columns]
    cells = [[visible(_text(row[c])) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(headings)]
    right = [all(_is_number(row[c]) for row in rows) for c in columns]
    lines = [
        " " + " | ".join(c.center(w) for c, w in zip(headings, widths, strict=True)).rstrip(),
        "-" + "-+-".join("-" * w for w in widths) + "-",
    ]
    for line in cells:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(line, widths, right, strict=True))
        lines.append((" " + " | ".join(padded)).rstrip())
    return "\n".join([*lines, foot])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")  # the fewest digits that read back as the same, as PostgreSQL's
    return value.isoformat() if isinstance(value, (date, datetime)) else str(value)
