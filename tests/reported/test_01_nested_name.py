"""Statistics of a nested field of the same name must not stand for those of the column that says the day.

Reported as https://github.com/apache/datafusion/issues/8335: rows were pruned by the bounds of `context.ts`.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import pipeline


def sent_a_day_later(rows: pd.DataFrame) -> pa.Table:
    """Rows behind a struct, a list and a map that have a field `ts` of the day after, or are called so."""
    table = utc(rows)
    sent = pa.array((rows.ts + pd.Timedelta(days=1)).to_numpy(), pa.timestamp("us")).cast(pa.timestamp("us", "UTC"))
    context = pa.StructArray.from_arrays([sent, pa.array(["app"] * len(rows))], ["TS", "sdk"])
    offsets = pa.array(np.arange(len(rows) + 1, dtype="int32"))
    items = pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays([sent], ["ts"]))
    names = ["context", "items", "context.ts", *table.column_names]
    return pa.table([context, items, sent, *table.columns], names=names)


@pytest.mark.parametrize("files_a_day", [1, 4])
def test_every_row_of_a_day_is_read(spark: SparkSession, ws: Workspace, tmp_path: Path, files_a_day: int) -> None:
    rows = click_log()
    for day, part in by_day(rows).items():
        for number, positions in enumerate(np.array_split(np.arange(len(part)), files_a_day)):
            write_days(tmp_path / "data" / str(number), {day: sent_a_day_later(part.iloc[positions])})
    spec = pipeline({"format": "parquet", "path": str(tmp_path / "data"), "day": {"time": "ts"}}, COLUMNS)
    actual = kept_rows(spark, spec, ws, DAYS[1])
    until = rows[rows.ts < datetime.fromisoformat(DAYS[2])]
    assert actual.event_id.tolist() == until.event_id.tolist()
    assert actual.ts.tolist() == until.ts.tolist()
    assert actual.ds.value_counts().to_dict() == until.ts.dt.date.astype(str).value_counts().to_dict()
