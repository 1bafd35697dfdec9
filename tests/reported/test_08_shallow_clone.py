"""A shallow clone, whose log names files by absolute URIs, with partition values that paths must escape.

Reported as https://github.com/delta-io/delta-rs/issues/865 and https://github.com/delta-io/delta/pull/3208; a null in a
partition column as https://github.com/Eventual-Inc/Daft/pull/2344.
"""

from __future__ import annotations

from pathlib import Path

import deltalake
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.cli.scaffold.table_sample import delta_rows
from headrace.config.workspace import Workspace
from headrace.storage import local
from tests.reported.click_log import COLUMNS, DAYS, click_log, kept_rows, utc
from tests.reported.support import pipeline

VALUES = ["São Tomé", "Côte d'Ivoire", "a+b c", "100%", "x=y", "a#b?c", "a:b", None]


def test_rows_of_a_clone(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    rows = click_log()
    country = [VALUES[i % len(VALUES)] for i in rows.event_id]
    table = utc(rows, country=pa.array(country), dt=pa.array(rows.ts.dt.date))
    base, clone = tmp_path / "base", tmp_path / "clone"
    spark.createDataFrame(table).coalesce(1).write.format("delta").partitionBy("dt", "country").save(str(base))
    spark.sql(f"CREATE TABLE delta.`{clone}` SHALLOW CLONE delta.`{base}`")
    spark.sql(f"DELETE FROM delta.`{clone}` WHERE user_id = 103")
    for path, expected_rows in ((base, rows), (clone, rows[rows.user_id != 103])):
        source = {"format": "delta", "path": str(path), "day": {"partition": "dt"}}
        spec = pipeline(source, [*COLUMNS, {"name": "country"}])
        actual = kept_rows(spark, spec, Workspace(ws.home / path.name), DAYS[2])
        assert actual.event_id.tolist() == expected_rows.event_id.tolist()
        assert actual.country.tolist() == [country[i] for i in expected_rows.event_id]


def test_init_looks_at_a_null_of_a_partition(tmp_path: Path) -> None:
    values = pa.table({"user_id": list(range(60)), "country": [None, "NO", "SE"] * 20})
    deltalake.write_deltalake(str(tmp_path / "mini"), values, partition_by=["country"])
    sample = delta_rows(local(tmp_path / "mini"))
    assert sample.partitions == ("country",)
    assert sample.rows["country"].null_count == 20
