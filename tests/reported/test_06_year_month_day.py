"""Days as folders of year, month and day, with and without names, and hours below.

Reported as https://github.com/dbt-labs/dbt-external-tables/issues/123.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import deltalake
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc
from tests.reported.support import ingest, pipeline, read_table

#: How a day and an hour are spelled in folders, and what the spec says of it.
LAYOUTS: dict[str, tuple[Callable[[date, int], str], dict[str, Any]]] = {
    "named": (
        lambda d, h: f"year={d.year}/month={d.month:02d}/day={d.day:02d}/hour={h:02d}",
        {"partition": ["year", "month", "day"]},
    ),
    "short": (lambda d, h: f"Year={d.year}/Month={d.month}/Day={d.day}", {"partition": ["year", "month", "day"]}),
    "plain": (lambda d, h: f"{d:%Y/%m/%d}/{h:02d}", {"path": "{ds:%Y/%m/%d}"}),
    "digits": (lambda d, h: f"eu west/{d:%Y%m%d}", {"path": "*/{ds:%Y%m%d}"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_of_tables(spark: SparkSession, ws: Workspace, tmp_path: Path, layout: str) -> None:
    rows = click_log()
    folder, day = LAYOUTS[layout]
    for text, part in by_day(rows).items():
        for k, half in enumerate((part[::2], part[1::2])):
            path = tmp_path / "data" / folder(date.fromisoformat(text), 10 + k) / f"{k}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(utc(half), path)
    source = {"format": "parquet", "path": str(tmp_path / "data"), "day": day}
    spec = pipeline(source, COLUMNS, table={"keys": ["event_id"]})
    actual = kept_rows(spark, spec, ws, DAYS[1])
    until = rows[rows.ts < pd.Timestamp(DAYS[2])]
    assert actual.event_id.tolist() == until.event_id.tolist()
    assert actual.ds.tolist() == until.ts.dt.date.astype(str).tolist()
    assert ingest(spec, ws, DAYS[2]).manifest.rows["kept"] == 60


def test_partitions_of_a_delta_table(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Partitions are numbers: no digit more than they have."""
    rows = click_log()
    parts = {n: pa.array(getattr(rows.ts.dt, n), pa.int32()) for n in ("year", "month", "day")}
    deltalake.write_deltalake(str(tmp_path / "t"), utc(rows, **parts), partition_by=list(parts))
    source = {"format": "delta", "path": str(tmp_path / "t"), "day": {"partition": list(parts)}}
    actual = kept_rows(spark, pipeline(source, COLUMNS), ws, DAYS[1])
    assert actual.event_id.tolist() == rows.event_id[rows.ts < pd.Timestamp(DAYS[2])].tolist()


@pytest.mark.parametrize("path", ["logs/{ds:%Y/%m/%d}/*/*.json", "logs/{ds:%Y}/{ds:%m}/{ds:%d}/*/batch-*"])
def test_landing_files(spark: SparkSession, ws: Workspace, tmp_path: Path, path: str) -> None:
    rows = click_log()
    for text, part in by_day(rows).items():
        for hour, of_hour in part.groupby(part.ts.dt.hour):
            file = tmp_path / "logs" / f"{date.fromisoformat(text):%Y/%m/%d}" / f"{hour:02d}" / "batch-1.json"
            file.parent.mkdir(parents=True)
            lines = of_hour.assign(ts=of_hour.ts.dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
            lines.to_json(file, orient="records", lines=True)
    spec = pipeline({"format": "jsonl", "path": f"{tmp_path}/{path}"}, COLUMNS)
    ingest(spec, ws, DAYS[1])
    actual = read_table(spark, ws)
    until = rows[rows.ts < pd.Timestamp(DAYS[2])]
    assert sorted(actual.event_id) == until.event_id.tolist()
    assert actual.ds.value_counts().to_dict() == {DAYS[0]: 60, DAYS[1]: 60}
