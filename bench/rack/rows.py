"""The table of what happened: a row for each scenario."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.storage import local
from headrace.workspace import checkout

HEAD = "| scenario | what was lost | seconds | undisturbed |\n|---|---|---:|---:|"


@dataclass(frozen=True)
class ScenarioResult:
    """Result of a scenario. That its end result is right was checked before."""

    scenario: str
    lost: str
    seconds: float
    #: Of the same without what happens in the scenario; of one without anything, of one machine.
    undisturbed: float

    def __str__(self) -> str:
        return f"| {self.scenario} | {self.lost} | {self.seconds:.0f} | {self.undisturbed:.0f} |"


def publish(rows: Sequence[ScenarioResult]) -> Path:
    """Put rows in place of their scenarios' in build/bench/rack.json, in one step, and print them."""
    path = checkout() / "build" / "bench" / "rack.json"
    previous = json.loads(path.read_text()) if path.is_file() else []
    table = {row["scenario"]: row for row in [*previous, *map(asdict, rows)]}
    local(path).put_text(json.dumps(list(table.values()), indent=1) + "\n")
    print("\n".join(["", HEAD, *map(str, rows)]), flush=True)
    return path
