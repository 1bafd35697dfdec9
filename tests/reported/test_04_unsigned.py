"""Unsigned ids of 64 bits, as ClickHouse, Polars and NumPy write them.

Reported as https://github.com/bytedance/bolt/issues/754 and https://github.com/src-d/identity-matching/pull/19.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import pipeline, read_table


def test_ids_of_64_bits_without_sign(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    rows = click_log()
    ids = np.random.default_rng(3).integers(0, 2**63, len(rows), dtype="uint64")
    ids[[3, 70, 140]] = [2**63, 2**64 - 1, 2**63 - 1]
    tables = {d: utc(p, device=pa.array(ids[p.index], pa.uint64())) for d, p in by_day(rows).items()}
    write_days(tmp_path / "data", tables)
    source = {"format": "parquet", "path": str(tmp_path / "data"), "day": {"time": "ts"}}
    for type_, convert in (("string", str), ("decimal(20,0)", lambda i: Decimal(int(i)))):
        spec = pipeline(source, [*COLUMNS, {"name": "device", "type": type_}])
        actual = kept_rows(spark, spec, Workspace(ws.home / type_[:3]), DAYS[2])
        assert actual.device.tolist() == list(map(convert, ids))
    actual = kept_rows(spark, pipeline(source, [*COLUMNS, {"name": "device", "type": "bigint"}]), ws, DAYS[2])
    fits = ids < 2**63
    assert actual.event_id.tolist() == rows.event_id[fits].tolist()
    assert actual.device.tolist() == [int(i) for i in ids[fits]]
    reasons = sorted(read_table(spark, ws, "quarantine")._reason)
    assert reasons == [f"device: '{2**64 - 1}' is not a bigint", f"device: '{2**63}' is not a bigint"]
