"""One form for every benchmark's figures: each beside its floor and its peer where there is one. Benchmarks in parts.

A part runs in a process of its own and leaves its figures in a file of its own: one that is stopped loses only itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.config.installation import checkout
from headrace.storage import local


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


def checkout_version() -> str:
    """Return the commit, with a mark where files differ from it."""
    command = ["git", "-C", str(checkout()), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class FigureParts:
    """The parts of bench.bench_NAME, which measures one of them where it is called with `--in-process`."""

    name: str
    #: Has PART.json of each part that was measured.
    folder: Path

    @staticmethod
    def named(name: str) -> FigureParts:
        """Return the parts in a folder of build/bench."""
        return FigureParts(name, checkout() / "build" / "bench" / name)

    def measured(self) -> list[str]:
        """Return the parts that have figures, by name."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def figures(self, part: str) -> list[Figure]:
        """Return the figures that a part has measured."""
        rows = json.loads((self.folder / f"{part}.json").read_text(encoding="utf-8"))["figures"]
        return [Figure(row["name"], row["value"], row["unit"], row["floor"], row["peer"]) for row in rows]

    def save(self, part: str, figures: Sequence[Figure]) -> None:
        """Leave a part's figures."""
        record = {"code": checkout_version(), "figures": [f.row() for f in figures]}
        local(self.folder / f"{part}.json").put_text(json.dumps(record, indent=1) + "\n")

    def is_measured(self, part: str) -> bool:
        """Return whether this very code has left the part's figures."""
        path, version = self.folder / f"{part}.json", checkout_version()
        if not path.is_file() or version.endswith("-dirty"):
            return False
        return bool(json.loads(path.read_text(encoding="utf-8"))["code"] == version)

    def run(self, parts: Sequence[str], options: Sequence[str], resume: bool) -> int:
        """Measure parts, each in a process of its own. Returns how many failed.

        Args:
            parts: their names.
            options: further arguments of the bench.
            resume: leave out those that this very code has measured.
        """
        failed = 0
        for part in parts:
            if resume and self.is_measured(part):
                print(f"part {part}: measured already")
                continue
            command = [sys.executable, "-m", f"bench.bench_{self.name}", part, "--in-process", *options]
            process = subprocess.Popen(command, cwd=checkout())
            try:
                code = process.wait()
            finally:  # whoever stops this stops the part too
                process.terminate()
                process.wait()
            if code:
                print(f"part {part}: failed with {code}; the figures of the others stay")
                failed += 1
        return failed
