"""Rows that Spark's table operators made, from the files they leave, beside the same rows from a frame.

    make bench-prepare                       # 8 days of 0.06 M generated clicks
    python -m bench.bench_prepare 0.01       # millions of rows a day

A day of `clicks` with each user's last items and each item's rates as features. Both routes fit, transform and write
the same rows, in turn, in one Spark session that is warm, and must give the same files. The floor is the day without
table operators, whose rows are the lake's files. Making the rows is the same work for both, and is not counted.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from bench.bench_append import DS, headrace
from bench.report import Figure, publish
from headrace.config import Spec, build_spec, load_spec
from headrace.config.workspace import Workspace
from headrace.features.build import run
from headrace.features.build.stage import BuildFeatures
from headrace.lake.spark.session import session
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage

PREPARE: list[dict[str, Any]] = [
    {"history": {"keys": ["user_id"], "values": ["item_id"], "length": 20}},
    {"trailing": {"keys": ["item_id"], "windows": [3], "values": ["clicked"], "stats": ["count", "rate"]}},
]
WORKFLOW: list[dict[str, Any]] = [
    {"columns": ["item_id_history"], "ops": [{"categorify": {"vocabulary": "history"}}, {"pad": {"length": 20}}]},
    {"columns": ["item_id_count_3d", "item_id_clicked_rate_3d"], "ops": ["fill_missing", "normalize"]},
]
#: Runs of each route.
ROUNDS = 3


def main(millions: float) -> None:
    """Measure one size."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        home = Path(name)
        rows = ("--set", f"generate.rows_per_day={int(millions * 1e6)}")
        headrace(home, "generate", "clicks", "--until", DS, *rows)
        headrace(home, "run", "clicks", "--ds", DS, "--to", "ingest", *rows)
        data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
        plain = build_spec(data)
        data["features"]["prepare"] = PREPARE
        data["features"]["workflow"] += WORKFLOW
        prepared = build_spec(data)
        ws = Workspace(home)
        taken: dict[str, list[float]] = {"files": [], "frame": [], "plain": []}
        digests = set[str]()
        with session(prepared.spark, ws, "bench-prepare"):
            for route in ("files", "frame", "plain"):  # warm
                seconds_of(ws, plain if route == "plain" else prepared, by_frame=route == "frame")
            for _ in range(ROUNDS):
                taken["plain"].append(seconds_of(ws, plain)[0])
                for route in ("files", "frame"):
                    seconds, digest = seconds_of(ws, prepared, by_frame=route == "frame")
                    taken[route].append(seconds)
                    digests.add(digest)
        if len(digests) != 1:
            raise SystemExit("the two routes wrote other files")
    files, frame, floor = (statistics.median(taken[route]) for route in ("files", "frame", "plain"))
    title = f"fit, transform and write, 8 days of {millions:g} M rows"
    publish(
        "prepare",
        [
            Figure(f"{title}; floor: without table operators; peer: from a frame", files, "s", floor=floor, peer=frame),
            Figure(f"{title}, from a frame", frame, "s", floor=floor),
        ],
    )


def seconds_of(ws: Workspace, spec: Spec, by_frame: bool = False) -> tuple[float, str]:
    """Run the stage anew; return the seconds from its rows to its dataset, and a digest of the dataset's files."""
    moments = dict[str, float]()

    def note(step: str) -> None:
        moments[step] = time.perf_counter()

    def noted(open_files: Callable[..., Any]) -> Callable[..., Any]:
        def day_files(*args: Any) -> Any:
            note("start")
            return nullcontext() if by_frame else open_files(*args)

        return day_files

    ws.manifest(spec.pipeline, DS, "features").remove()
    with mock.patch.object(run, "day_files", noted(run.day_files)):
        manifest = run_stage(BuildFeatures(count_day, note), spec, ws, DS).manifest
    folder = ws.locate(manifest.output("dataset").name)
    digest = hashlib.sha256()
    for file in sorted(folder.files(), key=str):
        if file.name.endswith(".parquet"):
            digest.update(file.below(folder).encode() + file.read_bytes())
    return moments["write"] - moments["start"], digest.hexdigest()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.06)
