"""A range of days in one pass is what the days are one by one, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as pads
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec, load_spec
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.jobs.stages import days_of, execution_order
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.stage import Ingest
from headrace.stage import Stage, run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import Location
from scripts.attribution_days import write_days
from tests.ingest_support import jsonl, put

DAYS = [f"2026-03-0{n}" for n in range(1, 7)]
DAY = pd.Timedelta(days=1)
STAGES: dict[str, Stage] = {"ingest": Ingest(), "features": BuildFeatures()}


def make_spec() -> Spec:
    columns = [{"name": "id", "type": "bigint"}, {"name": "user"}, {"name": "ts", "type": "timestamp"}]
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "shown/{ds}/*"},
            "table": {"columns": columns, "keys": ["id"], "event_time": "ts", "expectations": {"max_bad_rate": 1}},
            "sources": {
                "clicks": {
                    "source": {"format": "jsonl", "path": "clicks/{ds}/*"},
                    "table": {"columns": columns, "event_time": "ts"},
                }
            },
            "features": {
                "label": "clicked",
                "window_days": 2,
                "split": {"by": "time"},
                "min_row_groups": 1,
                "carried": ["id"],
                "prepare": [
                    {"attribution": {"from": "clicks", "keys": ["id"], "within": "2 hours", "add": "clicked"}},
                    {"trailing": {"from": "clicks", "keys": ["user"], "windows": [1]}},
                ],
                "workflow": [
                    {"columns": ["user"], "ops": ["categorify"]},
                    {"columns": ["user_clicks_count_1d"], "ops": ["normalize"]},
                ],
            },
        }
    )


def deliver(ws: Workspace) -> None:
    """Each day brings new users, rows of the day before, some of them again, and bad ones."""
    for k, ds in enumerate(DAYS):
        previous_day = DAYS[max(k - 1, 0)]
        impressions = [
            {"id": 100 * k + i, "user": f"u{(7 * i) % (4 + 3 * k)}", "ts": f"{ds}T{i:02d}:15:00Z"} for i in range(24)
        ]
        late = [{"id": 100 * k + 50 + i, "user": f"u{i}", "ts": f"{previous_day}T12:00:00Z"} for i in range(3)]
        duplicates = [{"id": 100 * max(k - 1, 0) + 3, "user": "twice", "ts": f"{previous_day}T03:15:00Z"}]
        put(ws, f"shown/{ds}/a.json", jsonl([*impressions, *late, *duplicates, f"bad {k}"]))
        clicks = [{**row, "ts": row["ts"].replace(":15:", ":40:")} for row in impressions[:: 2 + k % 2]]
        put(ws, f"clicks/{ds}/a.json", jsonl(clicks))


def rows_of(spark: SparkSession, table: Location) -> list[str]:
    return sorted(map(str, spark.read.format("delta").load(str(table)).collect()))


def test_a_range_is_what_its_days_are(spark: SparkSession, tmp_path: Path) -> None:
    one_by_one, together = (Workspace(tmp_path / name) for name in ("a", "b"))
    deliver(one_by_one)
    deliver(together)
    compare(spark, make_spec(), DAYS[3:], one_by_one, together, ("events", "quarantine", "clicks", "vocabulary"))


def test_a_range_of_the_shipped_attribution(spark: SparkSession, tmp_path: Path) -> None:
    """The pipeline is as shipped, but for the rows that a day of the sample has at least."""
    spec = load_spec("attribution", ["table.expectations.min_rows=1", "features.min_row_groups=1"])
    one_by_one, together = (Workspace(tmp_path / name) for name in ("a", "b"))
    write_sample(tmp_path / "sample.csv")
    for ws in (one_by_one, together):
        assert {log for log, _ in write_days(tmp_path / "sample.csv", ws)} == {"clicks", "installs"}
    days = ["2017-11-08", "2017-11-09"]
    compare(spark, spec, days, one_by_one, together, ("events", "installs", "vocabulary"))
    # A click's label is known a day later, and counted here from the one file that has both.
    clicks = pd.read_csv(tmp_path / "sample.csv", parse_dates=["click_time", "attributed_time"])
    for ds in days:
        manifest = Manifest.load(together.manifest("attribution", ds, "features"))
        assert manifest is not None
        day = pd.Timestamp(ds) - pd.Timedelta(days=1)
        of_day = clicks[clicks["click_time"].dt.floor("D") == day]
        valid = pads.dataset(together.home / manifest.output("dataset").name / "valid", format="parquet").to_table()
        assert valid.num_rows == len(of_day)
        assert (
            sum(valid.column("installed").to_pylist()) == (of_day["attributed_time"] - of_day["click_time"] < DAY).sum()
        )


def write_sample(path: Path) -> None:
    """Four days of clicks in TalkingData's form, each of a device of its own; installs up to 30 hours later."""
    rng = np.random.default_rng(3)
    lines = ["ip,app,device,os,channel,click_time,attributed_time,is_attributed"]
    for k, second in enumerate(np.sort(rng.integers(0, 4 * 86_400, 800))):
        click_time = pd.Timestamp("2017-11-06") + pd.Timedelta(seconds=int(second))
        installed = click_time + pd.Timedelta(seconds=int(rng.integers(60, 30 * 3_600))) if rng.random() < 0.2 else None
        attributed = installed is not None and installed < pd.Timestamp("2017-11-10")
        ip, app, channel = rng.integers(0, (40, 12, 8))
        lines.append(
            f"{ip},{app},{k},{k % 5},{channel},{click_time},{installed if attributed else ''},{int(attributed)}"
        )
    path.write_text("\n".join(lines) + "\n")


def compare(
    spark: SparkSession, spec: Spec, days: list[str], one_by_one: Workspace, together: Workspace, tables: Sequence[str]
) -> None:
    """Run days both ways, with the same landing files: the same tables and datasets."""
    for ds in days:
        for stage in STAGES.values():
            run_stage(stage, spec, one_by_one, ds)
    loads = []
    for name, ds in execution_order(list(STAGES), days_of(spec, days[0], days[-1]), spec):
        run_stage(STAGES[name], spec, together, ds)
        if name == "ingest":
            loads.append((ds, DeltaLog(together.events(spec.pipeline)).version))
    # One pass loads the first day and those before it, the next all others.
    assert [ds for ds, _ in loads] == [days[0], days[-1], *days[1:-1]]
    assert len({version for _, version in loads[1:]}) == 1

    for name in tables:
        assert rows_of(spark, together.table(spec.pipeline, name)) == rows_of(
            spark, one_by_one.table(spec.pipeline, name)
        ), name
    for ds in days:
        a, b = (Manifest.load(ws.manifest(spec.pipeline, ds, "features")) for ws in (one_by_one, together))
        assert a is not None
        assert b is not None
        assert a.rows == b.rows
        assert {k: v for k, v in a.facts.items() if k != "vocabulary_version"} == {
            k: v for k, v in b.facts.items() if k != "vocabulary_version"
        }
        for split in ("train", "valid"):
            assert files(one_by_one, a, split) == files(together, b, split)
    assert all(run_stage(STAGES[name], spec, together, ds).skipped for ds in days for name in STAGES)


def files(ws: Workspace, manifest: Manifest, split: str) -> dict[str, Any]:
    folder = ws.home / manifest.output("dataset").name / split
    contents = {p.name: p.read_bytes() for p in sorted(folder.glob("*.parquet"))}
    assert pads.dataset(folder, format="parquet").count_rows() == manifest.rows[split] > 0
    return contents
