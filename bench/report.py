"""One form for every benchmark's figures: each beside its floor and its peer where there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.storage import local
from headrace.workspace import checkout


@dataclass(frozen=True)
class Figure:
    """One measurement. `floor` and `peer` are in the same unit, from the same run; ratios are value / that."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    peer: float | None = None

    def row(self) -> dict[str, object]:
        """Return the JSON form."""
        ratios = {
            "ratio_to_floor": None if not self.floor else round(self.value / self.floor, 4),
            "ratio_to_peer": None if not self.peer else round(self.value / self.peer, 4),
        }
        fields = asdict(self)
        return {k: {**fields, **ratios}[k] for k in _COLUMNS}


_WIDTH = 200
_COLUMNS = ("name", "value", "unit", "floor", "ratio_to_floor", "peer", "ratio_to_peer")


def publish(bench: str, figures: Sequence[Figure]) -> Path:
    """Write build/bench/<bench>.json in one step and print the table."""
    rows = [f.row() for f in figures]
    path = checkout() / "build" / "bench" / f"{bench}.json"
    local(path).put_text(json.dumps(rows, indent=1) + "\n")
    table = Table(title=f"bench {bench}")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("name", "unit") else "right")
    for row in rows:
        table.add_row(*(_show(row[c]) for c in _COLUMNS))
    console = Console()
    # In a file or a pipe nobody's window is narrow.
    (console if console.is_terminal else Console(width=_WIDTH)).print(table)
    return path


def _show(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
