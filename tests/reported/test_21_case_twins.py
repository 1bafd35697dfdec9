"""Columns whose names differ in case alone.

Reported as https://github.com/duckdb/duckdb/issues/13053 and https://github.com/databrickslabs/overwatch/issues/419.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.errors import UserError
from headrace.workspace import Workspace
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import ingest, pipeline

USER: dict[str, Any] = {"name": "userId", "type": "bigint"}


def twins(rows: pd.DataFrame) -> pa.Table:
    """`userId` and `userid`, and the same in a struct."""
    named = rows.rename(columns={"user_id": "userId"})
    app = pa.array([f"app-{u}" for u in rows.user_id])
    inner = pa.StructArray.from_arrays([app, pa.array(rows.user_id)], ["Id", "id"])
    return utc(named, userid=app, inner=inner)


def declared(*users: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(c for c in COLUMNS if c["name"] != "user_id"), *users]


@pytest.mark.parametrize("day", [{"time": "ts"}, {"partition": "dt"}], ids=["time", "partition"])
def test_the_declared_spelling_is_read(spark: SparkSession, ws: Workspace, tmp_path: Path, day: dict[str, str]) -> None:
    rows = click_log()
    tables = {d: twins(part) for d, part in by_day(rows).items()}
    write_days(tmp_path / "data", tables, day.get("partition"))
    source = {"format": "parquet", "path": str(tmp_path / "data"), "day": day}
    columns = declared(USER, {"name": "inner_id", "type": "bigint", "path": "inner.id"})
    found = kept_rows(spark, pipeline(source, columns), ws, DAYS[2])
    assert found.event_id.tolist() == rows.event_id.tolist()
    assert found.userId.tolist() == rows.user_id.tolist() == found.inner_id.tolist()
    assert found.ts.tolist() == rows.ts.tolist()
    other = kept_rows(spark, pipeline(source, declared({"name": "userid"})), Workspace(ws.home / "o"), DAYS[2])
    assert other.userid.tolist() == [f"app-{u}" for u in rows.user_id]


def test_what_may_mean_either_is_refused(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    rows = click_log()
    write_days(tmp_path / "data", {d: twins(part) for d, part in by_day(rows).items()})
    source = {"format": "parquet", "path": str(tmp_path / "data")}
    with pytest.raises(UserError, match="'USERID' may mean 'userId' or 'userid'"):
        ingest(pipeline(source, declared({"name": "USERID"})), ws, DAYS[2])
    both = declared(USER, {"name": "app", "path": "userid"})
    with pytest.raises(UserError, match="columns 'userId' and 'userid' differ in case alone"):
        ingest(pipeline(source, both), Workspace(ws.home / "both"), DAYS[2])
    # A file that has the other one alone.
    lone = twins(by_day(rows)[DAYS[1]]).drop_columns(["userId"])
    pq.write_table(lone, tmp_path / "data" / f"part-{DAYS[1]}.parquet")
    with pytest.raises(UserError, match=rf"part-{DAYS[1]}\.parquet has none that is spelled 'userId'"):
        ingest(pipeline(source, declared(USER)), Workspace(ws.home / "lone"), DAYS[2])


def test_a_name_that_changes_its_case(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Without twins names are matched without case, file by file."""
    rows = click_log()
    tables = {d: utc(part) for d, part in by_day(rows).items()}
    tables[DAYS[1]] = tables[DAYS[1]].rename_columns([n.title() for n in tables[DAYS[1]].column_names])
    write_days(tmp_path / "data", tables)
    source = {"format": "parquet", "path": str(tmp_path / "data"), "day": {"time": "ts"}}
    found = kept_rows(spark, pipeline(source, COLUMNS), ws, DAYS[2])
    for name in ("event_id", "user_id", "price", "clicked"):
        assert found[name].tolist() == rows[name].tolist()
