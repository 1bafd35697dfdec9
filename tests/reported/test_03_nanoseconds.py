"""Times in nanoseconds, which pandas writes by default, and types that Spark does not know at all.

Reported as https://github.com/NVIDIA/cudf-spark/issues/8086 and https://github.com/ClickHouse/clickhouse-java/issues/1161.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import ingest, pipeline


def test_what_pandas_writes(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Times of the top level, within a struct and a list are cut to microseconds, before 1970, too."""
    rows = click_log()
    extra = pd.Series(range(len(rows)), dtype="int64")
    times = (rows.ts.astype("datetime64[ns]") + pd.to_timedelta(extra, "ns")).where(
        rows.event_id != 5, pd.Timestamp("1969-12-31 23:59:59.999999001")
    )
    for day, part in by_day(rows).items():
        ns = pa.array(times[part.index], pa.timestamp("ns"))
        inner = pa.StructArray.from_arrays([ns.cast(pa.timestamp("ns", "UTC")), pa.array([1] * len(part))], ["at", "n"])
        path = tmp_path / "data" / f"dt={day}"
        path.mkdir(parents=True)
        table = pa.Table.from_pandas(part.assign(ts=times[part.index]), preserve_index=False)
        pq.write_table(table.append_column("inner", inner), path / "part.parquet")
        assert "timestamp[ns]" in str(pq.read_schema(path / "part.parquet").field("ts"))
    columns = [*COLUMNS, {"name": "at", "type": "timestamp", "path": "inner.at"}]
    source = {"format": "parquet", "path": str(tmp_path / "data")}
    actual = kept_rows(spark, pipeline(source, columns), ws, DAYS[2])
    expected = times.dt.floor("us").astype("datetime64[us]")
    assert actual.event_id.tolist() == rows.event_id.tolist()
    assert actual.ts.astype("datetime64[us]").tolist() == expected.tolist()
    assert actual["at"].astype("datetime64[us]").tolist() == expected.tolist()
    by_time = pipeline(source | {"day": {"time": "ts"}}, COLUMNS)
    seen = kept_rows(spark, by_time, Workspace(ws.home / "time"), DAYS[2])
    assert seen.event_id.tolist() == [i for i in rows.event_id if i != 5]


def odd_columns(rows: int) -> dict[str, pa.Array]:
    numbers = list(range(rows))
    return {
        "opening": pa.array(numbers, pa.time64("us")),
        "wide": pa.array(list(map(Decimal, numbers)), pa.decimal256(50, 2)),
        "shop": pa.array(
            [{"id": i, "opening": i} for i in numbers], pa.struct([("id", "int64"), ("opening", pa.time32("ms"))])
        ),
    }


def test_types_that_no_reader_has(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Not declared they are not read; declared they are refused, all in one message."""
    rows = click_log()
    tables = {day: utc(part, **odd_columns(len(part))) for day, part in by_day(rows).items()}
    write_days(tmp_path / "data", tables)
    source = {"format": "parquet", "path": str(tmp_path / "data"), "day": {"time": "ts"}}
    columns = [*COLUMNS, {"name": "shop_id", "type": "bigint", "path": "shop.id"}]
    actual = kept_rows(spark, pipeline(source, columns), ws, DAYS[2])
    assert actual.event_id.tolist() == rows.event_id.tolist()
    assert actual.shop_id.tolist() == [i % 60 for i in rows.event_id]
    odd = [{"name": "opening"}, {"name": "wide", "type": "double"}, {"name": "o", "path": "shop.opening"}]
    with pytest.raises(UserError) as refused:
        ingest(pipeline(source, [*COLUMNS, *odd]), Workspace(ws.home / "odd"), DAYS[2])
    text = str(refused.value)
    assert f"part-{DAYS[0]}.parquet: column 'opening' is time(microseconds)" in text
    assert "column 'wide' is decimal(50,2)" in text
    assert "column 'shop' is time(milliseconds)" in text
