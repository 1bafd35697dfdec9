"""Features of rows that Spark's table operators made: through a common folder, and through Spark's shuffle.

    make bench-prepare                       # 8 days of 0.06 M generated clicks
    python -m bench.bench_prepare 0.01       # millions of rows a day

A day of `clicks` with each user's last items and each item's rates as features. The stage runs with `spark.scratch:
shared` and `own` in turn, in one Spark session that is warm, and must give the same files. The floor is the day
without table operators, whose rows are the lake's files. Measured are the seconds and the core-seconds of all
processes from the stage's start until the dataset is complete: to make the rows, to fit, to transform, to write.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bench_append import DS, headrace
from bench.report import Figure, publish
from headrace.config import Spec, build_spec, load_spec
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.lake.spark.session import session
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage
from headrace.stage.resources import ResourceUse

PREPARE: list[dict[str, Any]] = [
    {"history": {"keys": ["user_id"], "values": ["item_id"], "length": 20}},
    {"trailing": {"keys": ["item_id"], "windows": [3], "values": ["clicked"], "stats": ["count", "rate"]}},
]
WORKFLOW: list[dict[str, Any]] = [
    {"columns": ["item_id_history"], "ops": [{"categorify": {"vocabulary": "history"}}, {"pad": {"length": 20}}]},
    {"columns": ["item_id_count_3d", "item_id_clicked_rate_3d"], "ops": ["fill_missing", "normalize"]},
]
#: Measured runs of each route.
ROUNDS = 3


@dataclass(frozen=True)
class StageRun:
    """A measured run of the stage."""

    seconds: float
    core_seconds: float
    #: Digest of the dataset's files.
    digest: str


def main(millions: float) -> None:
    """Measure one size."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        home = Path(name)
        rows = ("--set", f"generate.rows_per_day={int(millions * 1e6)}")
        headrace(home, "generate", "clicks", "--until", DS, *rows)
        headrace(home, "run", "clicks", "--ds", DS, "--to", "ingest", *rows)
        data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
        specs = {"plain": build_spec(data)}
        data["features"]["prepare"] = PREPARE
        data["features"]["workflow"] += WORKFLOW
        for scratch in ("shared", "own"):
            data["spark"] = data.get("spark", {}) | {"scratch": scratch}
            specs[scratch] = build_spec(data)
        ws = Workspace(home)
        runs: dict[str, list[StageRun]] = {route: [] for route in specs}
        with session(specs["plain"].spark, ws, "bench-prepare"):
            for spec in specs.values():  # warm
                measured(ws, spec)
            for _ in range(ROUNDS):
                for route, spec in specs.items():
                    runs[route].append(measured(ws, spec))
    if len({run.digest for route in ("shared", "own") for run in runs[route]}) != 1:
        raise SystemExit("the two routes wrote other files")
    publish("prepare", [figure for route in ("shared", "own") for figure in figures(runs, route, millions)])


def figures(runs: dict[str, list[StageRun]], route: str, millions: float) -> list[Figure]:
    """Return the medians of a route, beside those of the day without table operators."""
    title = f"features, 8 days of {millions:g} M rows, scratch: {route}; floor: without table operators"
    return [
        Figure(
            title,
            statistics.median(getattr(run, attribute) for run in runs[route]),
            unit,
            floor=statistics.median(getattr(run, attribute) for run in runs["plain"]),
        )
        for attribute, unit in (("seconds", "s"), ("core_seconds", "core-s"))
    ]


def measured(ws: Workspace, spec: Spec) -> StageRun:
    """Run the stage anew until the dataset is complete."""
    moments = dict[str, tuple[float, float]]()
    use = ResourceUse.begin()
    start = time.perf_counter()

    def note(step: str) -> None:
        resources = use.used()
        assert resources is not None
        moments[step] = time.perf_counter() - start, resources.core_seconds

    ws.manifest(spec.pipeline, DS, "features").remove()
    manifest = run_stage(BuildFeatures(count_day, note), spec, ws, DS).manifest
    folder = ws.locate(manifest.output("dataset").name)
    digest = hashlib.sha256()
    for file in sorted(folder.files(), key=str):
        if file.name.endswith(".parquet"):
            digest.update(file.below(folder).encode() + file.read_bytes())
    return StageRun(*moments["write"], digest.hexdigest())


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.06)
