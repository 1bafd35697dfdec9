"""The terminal: one console for people, one for errors, log lines that do not break a progress bar, tables."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
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


#: Columns of output that is not a terminal (a pipe, a log): no line of it is wrapped or cut.
_UNLIMITED = 1_000_000
#: Results.
out: Console = _SafeConsole(highlight=False, soft_wrap=False)
if not out.is_terminal:
    out = _SafeConsole(highlight=False, width=_UNLIMITED)
err: Console = _SafeConsole(stderr=True, highlight=False)

#: Blanks behind each column.
_GAP = 3


class _FittingTable(Table):
    """A table that fits the terminal and loses nothing.

    Cells are wrapped between words. Where the longest words are wider than the terminal together, each row is a list of
    `heading  value`, and a value is folded.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or its rows as lists."""
        ranges = [self._range(column, console, options) for column in self.columns]
        widths = _shared_widths(ranges, options.max_width - _GAP * len(self.columns))
        if widths is None:
            yield from self._rows_as_lists(console, options.max_width)
            return
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _range(self, column: Column, console: Console, options: ConsoleOptions) -> tuple[int, int]:
        """Return the widths of a column's longest word and of its longest line."""
        unlimited = options.update_width(_UNLIMITED)
        measured = [Measurement.get(console, unlimited, cell) for cell in (column.header, *column.cells)]
        return max(m.minimum for m in measured), max(m.maximum for m in measured)

    def _rows_as_lists(self, console: Console, width: int) -> Iterator[RenderableType]:
        if self.title is not None:
            yield self.title if isinstance(self.title, Text) else console.render_str(str(self.title), style="italic")
        headings = [_as_text(column.header, console) for column in self.columns]
        heading_width = max(1, min(max(heading.cell_len for heading in headings), width // 3))
        for number, row in enumerate(zip(*(column.cells for column in self.columns), strict=True)):
            rows = Table.grid(padding=(0, 2, 0, 0))
            rows.add_column(width=heading_width, overflow="fold", style="bold")
            rows.add_column(width=max(1, width - heading_width - 4), overflow="fold")
            for heading, cell in zip(headings, row, strict=True):
                if _as_text(cell, console).plain:
                    rows.add_row(heading, cell)
            yield Text() if number else Text(end="")
            yield rows


def _as_text(cell: RenderableType, console: Console) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))


def _shared_widths(ranges: Sequence[tuple[int, int]], room: int) -> list[int] | None:
    """Share columns of a terminal among columns of a table.

    Args:
        ranges: of each column the least width and the greatest that it can use.
        room: columns of the terminal.

    Returns:
        the widths, as large as there is room, the narrowest needs first; None: there is no room for the least widths.
    """
    spare = room - sum(least for least, _ in ranges)
    if spare < 0:
        return None
    widths = [least for least, _ in ranges]
    waiting = sorted(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0])
    for position, i in enumerate(waiting):
        growth = min(ranges[i][1] - ranges[i][0], spare // (len(waiting) - position))
        widths[i] += growth
        spare -= growth
    return widths


def table(*headings: str, title: str | None = None) -> Table:
    """Return an empty table in the house style, which fits the terminal that it is printed on.

    Headings that start with `>` are of numbers, aligned right.
    """
    new_table = _FittingTable(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold"
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


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as `psql_table` writes them; on a terminal not wider than it."""
    out.print(psql_table(rows, out.width if out.is_terminal else _UNLIMITED), markup=False, soft_wrap=True)


def psql_table(rows: Sequence[Mapping[str, Any]], width: int = _UNLIMITED) -> str:
    """Return rows as psql's aligned text: centred headings, numbers to the right, the count below.

    Args:
        rows: all with the columns of the first.
        width: of the terminal; rows that are wider are lists of columns, as psql expands them, with long values folded.
    """
    foot = f"({len(rows)} row{'' if len(rows) == 1 else 's'})"
    if not rows:
        return foot
    columns = list(rows[0])
    headings = [visible(c) for c in columns]
    cells = [[visible(_cell_text(row[c])) for c in columns] for row in rows]
    widths = [max(cell_len(c), *(cell_len(line[i]) for line in cells)) for i, c in enumerate(headings)]
    if sum(widths) + 3 * len(widths) - 1 > width:
        return "\n".join([*_expanded(headings, cells, width), foot])
    right = [all(_is_number(row[c]) for row in rows) for c in columns]
    lines = [
        " " + " | ".join(_centred(c, w) for c, w in zip(headings, widths, strict=True)).rstrip(),
        "-" + "-+-".join("-" * w for w in widths) + "-",
    ]
    for line in cells:
        padded = (_padded(t, w, w - cell_len(t) if r else 0) for t, w, r in zip(line, widths, right, strict=True))
        lines.append((" " + " | ".join(padded)).rstrip())
    return "\n".join([*lines, foot])


def _padded(text: str, width: int, left: int) -> str:
    """Return a text with so many blanks before it, and behind it as many as make it so wide."""
    return " " * left + text + " " * (width - left - cell_len(text))


def _centred(text: str, width: int) -> str:
    blanks = width - cell_len(text)
    return _padded(text, width, blanks // 2 + (blanks & width & 1))


def _expanded(headings: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield rows in psql's expanded form: a line for each column, further lines for the rest of a long value."""
    # A character may take two columns.
    heading_width = max(2, min(max(map(cell_len, headings)), width // 3))
    value_width = max(2, width - heading_width - 3)
    for number, row in enumerate(cells, 1):
        title = f"-[ RECORD {number} ]"
        yield (title + "-" * max(0, heading_width + 1 - len(title)))[:width]
        for heading, cell in zip(headings, row, strict=True):
            # A character may take two columns.
            names, values = (
                chop_cells(t, w) or [""] for t, w in ((heading, max(2, heading_width)), (cell, value_width))
            )
            for i in range(max(len(names), len(values))):
                name, value = (parts[i] if i < len(parts) else "" for parts in (names, values))
                yield f"{_padded(name, heading_width, 0)} | {value}".rstrip()


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
