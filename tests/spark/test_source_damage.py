"""Source tables with files that are cut off, zeroed, gone or strangely named: one line each, and exit code 2."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.errors import UserError
from headrace.lake.spark.errors import exit_message
from headrace.workspace import Workspace
from tests.source_table_support import D1, D2, D3, arrow_rows, ingest, make_rows, make_spec

DAY = {"partition": {"partition": "dt"}, "time": {"time": "ts"}}


def written(folder: Path, name: str = "part") -> list[Path]:
    """A file for each day, below a partition of it."""
    files = []
    rows = make_rows()
    for day in (D1, D2, D3):
        path = folder / f"dt={day}" / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        of_day = rows[rows["dt"].astype(str) == day]
        pq.write_table(arrow_rows(of_day).drop_columns(["dt"]), path, compression="none")
        files.append(path)
    return files


def refusal(run: Callable[[], Any]) -> str:
    """The one line that a run ends with, its exit code being 2."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (what it is told as is tested)
        run()
    message = exit_message(caught.value)
    assert message is not None, repr(caught.value)[:500]
    assert message[1] == 2
    assert "\n" not in message[0]
    return message[0]


def damaged(data: bytes, how: str) -> bytes:
    half = len(data) // 2
    return {
        "cut": data[:half],
        "no footer": data[:-8],
        "no parquet": b"hello, I am no Parquet file",
        "zeroed": b"\0" * len(data),
        "empty": b"",
        "zeros within": data[:100] + b"\0" * half + data[100 + half :],
    }[how]


@pytest.mark.parametrize("how", ["cut", "no footer", "no parquet", "zeroed", "empty", "zeros within"])
def test_a_damaged_file_of_a_folder_is_named(spark: SparkSession, ws: Workspace, tmp_path: Path, how: str) -> None:
    for name, day in DAY.items():
        files = written(tmp_path / name)
        files[1].write_bytes(damaged(files[1].read_bytes(), how))
        spec = make_spec({"format": "parquet", "path": str(tmp_path / name), "day": day})
        assert str(files[1]) in refusal(lambda s=spec, n=name: ingest(s, Workspace(ws.home / n), D3))  # type: ignore[misc]


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "zeroed"])
def test_a_damaged_file_of_a_delta_table_is_named(spark: SparkSession, ws: Workspace, tmp_path: Path, how: str) -> None:
    path = tmp_path / "events"
    deltalake.write_deltalake(str(path), arrow_rows(make_rows()), partition_by=["dt"])
    (file,) = (path / f"dt={D2}").glob("*.parquet")
    data = file.read_bytes()
    file.unlink()
    if how != "gone":
        file.write_bytes(damaged(data, how))
    spec = make_spec({"format": "delta", "path": str(path), "day": {"partition": "dt"}})
    message = refusal(lambda: ingest(spec, ws, D3))
    assert str(file) in message
    assert how == "zeroed" or f"{path} cannot be read at version 0" in message


def test_a_torn_commit_of_a_source(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Other than of our own tables it is refused: nobody writes the source's last commit again."""
    path = tmp_path / "events"
    for day in (D1, D2):
        deltalake.write_deltalake(str(path), arrow_rows(make_rows(30, day=day)), mode="append")
    spec = make_spec({"format": "delta", "path": str(path), "day": {"time": "ts"}}, {"keys": []})
    commit = path / "_delta_log" / f"{1:020d}.json"
    whole = commit.read_bytes()
    for torn in (whole[:-100], b"", b"\0" * len(whole)):
        commit.write_bytes(torn)
        assert f"{commit} is damaged" in refusal(lambda: ingest(spec, ws, D2))
    commit.write_bytes(whole)
    assert ingest(spec, ws, D2).rows["kept"] > 0


def test_names_of_files(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """A colon is no end of a URI's scheme; what is no text is named."""
    written(tmp_path / "events", "at 12:30:00 100%")
    spec = make_spec({"format": "parquet", "path": str(tmp_path / "events"), "day": {"partition": "dt"}})
    assert ingest(spec, ws, D3).rows["kept"] == 300
    shutil.copy(
        tmp_path / "events" / f"dt={D1}" / "at 12:30:00 100%.parquet",
        os.fsencode(str(tmp_path / "events")) + b"/dt=2026-03-01/caf\xe9.parquet",
    )
    assert r"caf\xe9.parquet is not UTF-8" in refusal(lambda: ingest(spec, Workspace(ws.home / "x"), D3))


def test_a_landing_file_with_a_colon_in_its_name(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """That Spark reads, as it is told to trim fields."""
    rows = make_rows(30, day=D3)[["id", "click"]]
    rows.to_csv(tmp_path / "at 12:30.csv", index=False)
    source = {"format": "csv", "path": f"{tmp_path}/*.csv", "trim": True}
    columns = [{"name": "id", "type": "bigint"}, {"name": "click", "type": "int"}]
    table = {"columns": columns, "keys": [], "event_time": None, "expectations": {}}
    features = {"split": {"by": "position"}, "carried": [], "workflow": []}
    assert ingest(make_spec(source, table, features), ws, D3).rows["kept"] == 30


def test_columns_that_some_files_lack(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Files without one of the declared columns, or without any that is declared but the day's."""
    files = written(tmp_path / "events")
    few = pq.ParquetFile(files[0]).read()
    pq.write_table(few.select(["id", "ts", "click"]), files[0])
    pq.write_table(pa.table({"other": np.arange(7)}), files[2])
    columns = [{"name": "id", "type": "bigint"}, {"name": "user"}, {"name": "click", "type": "int"}]
    spec = make_spec(
        {"format": "parquet", "path": str(tmp_path / "events"), "day": {"partition": "dt"}},
        {"columns": columns, "keys": [], "event_time": None, "expectations": {}},
        {"split": {"by": "position"}, "carried": [], "workflow": []},
    )
    made = ingest(spec, ws, D3)
    assert made.rows["kept"] == 207
    with pytest.raises(UserError, match=rf"has no column 'ts' in dt={D3}/part\.parquet"):
        ingest(
            make_spec({"format": "parquet", "path": str(tmp_path / "events"), "day": {"time": "ts"}}),
            Workspace(ws.home / "time"),
            D3,
        )
