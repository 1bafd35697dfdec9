"""One time beyond the years that Python knows must not end the runs of all days.

Reported as https://github.com/scikit-hep/awkward/issues/4220: a footer with such statistics is an OverflowError.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import pipeline, read_table

#: The row whose milliseconds were taken for seconds, on the second day.
FAR = 77


def with_a_far_time(rows: pd.DataFrame) -> pa.Table:
    table = utc(rows)
    micros = table["ts"].cast(pa.int64()).to_numpy().copy()
    micros[rows.event_id.to_numpy() == FAR] *= 1_000
    index = table.schema.get_field_index("ts")
    return table.set_column(index, "ts", pa.array(micros).cast(pa.timestamp("us", "UTC")))


@pytest.mark.parametrize("day", [{"time": "ts"}, None, {"partition": "dt"}], ids=["time", "snapshot", "partition"])
def test_the_others_are_read(spark: SparkSession, ws: Workspace, tmp_path: Path, day: dict[str, str] | None) -> None:
    rows = click_log()
    partition = None if day is None else day.get("partition")
    write_days(tmp_path / "data", {d: with_a_far_time(part) for d, part in by_day(rows).items()}, partition)
    spec = pipeline({"format": "parquet", "path": str(tmp_path / "data"), "day": day}, COLUMNS)
    actual = kept_rows(spark, spec, ws, DAYS[2])
    assert actual.event_id.tolist() == [i for i in rows.event_id if i != FAR]
    assert actual.ts.tolist() == rows.ts[rows.event_id != FAR].tolist()
    bad = read_table(spark, ws, "quarantine")
    # By its time the row is of none of the days.
    year = str(np.datetime64(rows.ts[FAR].value // 1_000 * 1_000, "us"))[:5]
    far = [] if day == {"time": "ts"} else [f"ts: '+{year}-"]
    assert [reason[: len("ts: '+57988-")] for reason in bad._reason] == far
