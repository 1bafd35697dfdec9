"""The terminal: one console for people, one for errors, and log lines that do not break a progress bar."""

from __future__ import annotations

import json
import logging
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace import logs

#: Results. Output that is not a terminal (a pipe, a log) is not cut at 80 columns: half a name helps nobody.
out = Console(highlight=False, soft_wrap=False)
if not out.is_terminal:
    out = Console(highlight=False, width=400)
err = Console(stderr=True, highlight=False)


def table(*headings: str, title: str | None = None) -> Table:
    """An empty table in the house style. Headings that start with `>` are of numbers, to the right."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for heading in headings:
        made.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return made


def print_json(value: Any) -> None:
    """For programs: one JSON document on standard output, its field names as docs/commands.md has them."""
    out.print(json.dumps(value, indent=1, ensure_ascii=False), markup=False, soft_wrap=True)


def log_to_screen() -> None:
    """Show INFO lines of headrace, warnings of everything else."""
    logs.configure(None if logs.is_json() else _Lines(), level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.INFO)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.print(self.format(record), markup=False)
