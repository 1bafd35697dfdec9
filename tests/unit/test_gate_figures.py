"""What is measured of models that are judged: their size, and what it is when they give no numbers."""

from __future__ import annotations

from pathlib import Path

from bench.simulated_days import day, run_day
from headrace.gate.evaluate import ModelResult
from headrace.gate.figures import told_of
from headrace.workspace import Workspace


def test_a_model_of_changed_rows_is_as_large_as_all_that_it_lies_upon(tmp_path: Path) -> None:
    ws, days = Workspace(tmp_path), [day(n) for n in range(3)]
    for n, ds in enumerate(days):
        run_day(ws, ds, size=5, base=days[n - 1] if n else None)
    folders = [ws.model("clicks", ds, f"train-{ds}") / "model" for ds in days]
    sizes = [sum(p.stat().st_size for p in f.local_path().rglob("*") if p.is_file()) for f in folders]
    told = [told_of(f, ModelResult({}, 0, {}, []), ("valid",), 64, None) for f in folders]
    assert [t["bytes"] for t in told] == [sum(sizes[: n + 1]) for n in range(3)]
