"""The terminal: one console for people, one for errors, log lines that do not break a progress bar, tables."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from headrace import logs
from headrace.logs import visible


class _SafeConsole(Console):
    """A console that shows control characters of whatever it is given (headrace.logs.visible)."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render text as rich does, with control characters made visible."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; what rich itself writes to the terminal (`control`: moves of the cursor) stays."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


#: Results. Output that is not a terminal (a pipe, a log) is not cut at 80 columns: half a name helps nobody.
out: Console = _SafeConsole(highlight=False, soft_wrap=False)
if not out.is_terminal:
    out = _SafeConsole(highlight=False, width=400)
err: Console = _SafeConsole(stderr=True, highlight=False)


def table(*headings: str, title: str | None = None) -> Table:
    """Return an empty table in the house style. Headings that start with `>` are of numbers, aligned right."""
    new_table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold"
    )
    for heading in headings:
        new_table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return new_table


def plain(text: str, style: str | Style = "") -> Text:
    """Return a text without markup and with visible control characters, for names that data or people have given."""
    return Text(visible(text), style)


def print_json(value: Any) -> None:
    """For programs: one JSON document on standard output, its field names as docs/commands.md has them."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    # As JSON writes them, where `json` leaves them as they are.
    escaped = "".join(c if visible(c) == c else f"\\u{ord(c):04x}" for c in text)
    out.print(escaped, markup=False, soft_wrap=True)


def log_to_screen() -> None:
    """Show INFO lines of headrace, warnings of everything else."""
    logs.configure(None if logs.is_json() else _Lines(), level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.INFO)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.print(self.format(record), markup=False)


def psql_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as psql's aligned text: centred headings, numbers to the right, the count below."""
    foot = f"({len(rows)} row{'' if len(rows) == 1 else 's'})"
    if not rows:
        return foot
    columns = list(rows[0])
    headings = [visible(c) for c in columns]
    cells = [[visible(_cell_text(row[c])) for c in columns] for row in rows]
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


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")  # the fewest digits that read back as the same, as PostgreSQL's
    return value.isoformat() if isinstance(value, (date, datetime)) else str(value)
