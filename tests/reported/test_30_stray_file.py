"""A file beside the data files that is no Parquet, and a partition column that the files have, too."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import ingest, pipeline


@pytest.mark.parametrize("day", [{"time": "ts"}, None, {"partition": "dt"}], ids=["time", "snapshot", "partition"])
def test_a_stray_file_is_named(spark: SparkSession, ws: Workspace, tmp_path: Path, day: dict[str, str] | None) -> None:
    rows = click_log()
    partition = None if day is None else day.get("partition")
    write_days(tmp_path / "data", {d: utc(part) for d, part in by_day(rows).items()}, partition)
    folder = tmp_path / "data" / (f"{partition}={DAYS[1]}" if partition else "")
    for hidden in ("_manifest.json", ".manifest.json"):
        (folder / hidden).write_text("{}")
    spec = pipeline({"format": "parquet", "path": str(tmp_path / "data"), "day": day}, COLUMNS)
    assert kept_rows(spark, spec, ws, DAYS[2]).event_id.tolist() == rows.event_id.tolist()
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read: it is no whole Parquet file") as refused:
        ingest(spec, ws, DAYS[2])
    assert "\n" not in str(refused.value)


def test_a_partition_column_that_files_have_too(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """The folder's name says the value, as in Spark."""
    rows = click_log()
    tables = {d: utc(part, dt=pa.array([1.5] * len(part))) for d, part in by_day(rows).items()}
    write_days(tmp_path / "data", tables, "dt")
    spec = pipeline(
        {"format": "parquet", "path": str(tmp_path / "data"), "day": {"partition": "dt"}}, [*COLUMNS, {"name": "dt"}]
    )
    actual = kept_rows(spark, spec, ws, DAYS[2])
    assert actual["dt"].tolist() == rows.ts.dt.date.astype(str).tolist()
