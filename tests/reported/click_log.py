"""A click log of three days for the reported inputs that are tables, and its rows as stages after ingest see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from headrace.config import Spec, TableSource
from headrace.config.workspace import Workspace
from headrace.lake.tables.declared import PinnedTable
from tests.reported.support import ingest

DAYS = ("2026-01-06", "2026-01-07", "2026-01-08")
#: Declared columns of `click_log`.
COLUMNS: list[dict[str, Any]] = [
    {"name": "event_id", "type": "bigint", "required": True},
    {"name": "ts", "type": "timestamp", "required": True},
    {"name": "user_id", "type": "bigint"},
    {"name": "price", "type": "double"},
    {"name": "clicked", "type": "int", "required": True},
]


def click_log(rows_per_day: int = 60) -> pd.DataFrame:
    """Return events of DAYS in the order of their times: `ts` is datetime64[us] without a zone, the rest numbers."""
    rng = np.random.default_rng(7)
    n = rows_per_day * len(DAYS)
    seconds = np.sort(rng.integers(0, 86_400, (len(DAYS), rows_per_day)), axis=1).ravel()
    day = np.repeat(np.array(DAYS, "datetime64[D]"), rows_per_day)
    return pd.DataFrame(
        {
            "event_id": np.arange(n),
            "ts": day.astype("datetime64[us]") + seconds.astype("timedelta64[s]"),
            "user_id": 100 + rng.integers(0, 9, n),
            "price": np.round(rng.lognormal(2, 1, n), 2),
            "clicked": rng.integers(0, 2, n).astype("int32"),
        }
    )


def by_day(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each day of DAYS."""
    return dict(zip(DAYS, (part for _, part in rows.groupby(rows.ts.dt.date)), strict=True))


def utc(rows: pd.DataFrame, **columns: pa.Array) -> pa.Table:
    """Return rows as an Arrow table: `ts` in microseconds of UTC, then further columns."""
    table = pa.Table.from_pandas(rows, preserve_index=False)
    times = table["ts"].cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC"))
    table = table.set_column(table.schema.get_field_index("ts"), "ts", times)
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def write_days(folder: Path, tables: dict[str, pa.Table], partition: str | None = None) -> None:
    """Write a file a day, below `partition=DAY` folders where a partition is named."""
    for day, table in tables.items():
        path = folder / f"part-{day}.parquet" if partition is None else folder / f"{partition}={day}" / "part.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)


def kept_rows(spark: SparkSession, spec: Spec, ws: Workspace, ds: str) -> pd.DataFrame:
    """Ingest a day; return the rows of all taken days that later stages read, by `event_id`."""
    manifest = ingest(spec, ws, ds).manifest
    assert isinstance(spec.source, TableSource)
    table, bad = manifest.outputs
    quarantine = (ws.quarantine(spec.pipeline), int(bad.version))
    pinned = PinnedTable.from_manifest(spec.source, spec.table, ds, manifest.facts, table.version, quarantine)
    rows = pinned.rows(spark, pinned.days).toPandas()
    return rows.sort_values("event_id", kind="stable").reset_index(drop=True)
