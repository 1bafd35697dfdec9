"""Null keys are no duplicates of each other; repeated ones are.

Reported as https://github.com/feast-dev/feast/issues/1693.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import ingest, pipeline, read_table


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_rows_without_a_key_stay(spark: SparkSession, ws: Workspace, tmp_path: Path, form: str) -> None:
    rows = click_log().astype({"event_id": "Int64", "user_id": "Int64"})
    rng = np.random.default_rng(4)
    rows.loc[rng.random(len(rows)) < 0.2, "event_id"] = None
    rows.loc[rng.random(len(rows)) < 0.1, "user_id"] = None
    rows.loc[[59, 119], "event_id"] = rows.event_id.dropna().iloc[0]  # of the day itself, and of the next one
    columns = [c | {"required": False} if c["name"] == "event_id" else c for c in COLUMNS]
    if form == "csv":
        for day, part in by_day(rows).items():
            part.assign(ts=part.ts.dt.strftime("%Y-%m-%dT%H:%M:%SZ")).to_csv(tmp_path / f"{day}.csv", index=False)
        source = {"format": "csv", "path": f"{tmp_path}/{{ds}}.csv"}
    else:
        write_days(tmp_path / "data", {day: utc(part) for day, part in by_day(rows).items()})
        source = {"format": "parquet", "path": str(tmp_path / "data"), "day": {"time": "ts"}}
    table = {"keys": ["event_id"], "event_time": "ts", "late_days": 1}
    spec = pipeline(source, columns, table=table)
    if form == "csv":
        ingest(spec, ws, DAYS[2])
        actual = read_table(spark, ws)
    else:
        actual = kept_rows(spark, spec, ws, DAYS[2])
    expected = rows.drop([59, 119])
    assert not expected.event_id.dropna().duplicated().any()
    assert int(actual.event_id.isna().sum()) == int(expected.event_id.isna().sum()) > 20
    assert sorted(actual.event_id.dropna()) == sorted(expected.event_id.dropna())
    assert int(actual.user_id.isna().sum()) == int(expected.user_id.isna().sum())
    key = ["ts", "price"]
    merged = expected[key].merge(actual[key], on=key, how="outer", indicator=True)
    assert set(merged["_merge"]) == {"both"}
    assert pd.Series(actual.ds).value_counts().to_dict() == expected.ts.dt.date.astype(str).value_counts().to_dict()
