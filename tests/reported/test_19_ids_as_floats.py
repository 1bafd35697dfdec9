"""Integers that are doubles in a table, because some are missing: 100054.0 is an id.

Reported as https://github.com/transferwise/pipelinewise-target-snowflake/issues/404; texts such as `100054.0` are
another file's.
"""

from __future__ import annotations

import re
from pathlib import Path

import deltalake
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import pipeline, read_table


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_doubles_without_fraction_are_integers(spark: SparkSession, ws: Workspace, tmp_path: Path, form: str) -> None:
    rows = click_log()
    ids = rows.user_id.astype("float64").where(rows.event_id % 9 != 0)
    ids[[10, 20, 30, 40]] = [1.5, 2.0**63, float("inf"), -(2.0**53)]
    path = tmp_path / "data"
    if form == "parquet":
        tables = {d: utc(p.assign(user_id=ids[p.index])) for d, p in by_day(rows).items()}
        # Missing ones are null in one file and NaN in another.
        part = rows[rows.index < 60]
        values = pa.array(ids[part.index].to_numpy(), from_pandas=False)
        tables[DAYS[0]] = tables[DAYS[0]].set_column(2, "user_id", values)
        write_days(path, tables)
    else:
        deltalake.write_deltalake(str(path), utc(rows.assign(user_id=ids)))
    source = {"format": form, "path": str(path), "day": {"time": "ts"}}
    actual = kept_rows(spark, pipeline(source, COLUMNS), ws, DAYS[2])
    good = ~np.isin(rows.event_id, [10, 20, 30])
    assert actual.event_id.tolist() == rows.event_id[good].tolist()
    expected = [None if pd.isna(i) else int(i) for i in ids[good]]
    assert [None if pd.isna(i) else int(i) for i in actual.user_id] == expected
    values = [re.fullmatch(r"user_id: '(.+)' is not a bigint", r) for r in read_table(spark, ws, "quarantine")._reason]
    assert sorted(float(value[1]) for value in values if value) == [1.5, 2.0**63, float("inf")]
