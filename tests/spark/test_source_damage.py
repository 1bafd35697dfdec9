"""Source tables with files that are cut off, zeroed, gone or strangely named: one line each, and exit code 2."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.cli.summary import data_lines
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.translate import exit_message
from headrace.quality.report.blocks import Cell, Day, ReportTable
from headrace.quality.report.data import data_quality
from tests.source_table_support import (
    D1,
    D2,
    D3,
    arrow_rows,
    dataset,
    expected,
    frame,
    ids,
    ingest,
    make_rows,
    make_spec,
)

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


def in_two_parts(spark: SparkSession, folder: Path, form: str, rows: pd.DataFrame) -> list[Path]:
    """Write rows as two files below each day's partition; return the second of D2."""
    even = F.col("id") % 2 == 0
    for part in (even, ~even):
        frame(spark, rows).where(part).coalesce(1).write.mode("append").format(form).partitionBy("dt").save(str(folder))
    (folder / "_SUCCESS").unlink()
    for checksum in folder.rglob(".*.crc"):
        checksum.unlink()
    return sorted((folder / f"dt={D2}").iterdir(), key=lambda f: f.stat().st_mtime_ns)


@pytest.mark.parametrize("form", ["orc", pytest.param("avro", marks=pytest.mark.slow)])
def test_a_damaged_file_of_another_folder_is_named(
    spark: SparkSession, ws: Workspace, tmp_path: Path, form: str
) -> None:
    """The file with the folder, once as the main source and once as a named one."""
    _, file = in_two_parts(spark, tmp_path / form, form, make_rows())
    content = file.read_bytes()
    source = {"format": form, "path": str(tmp_path / form), "day": {"partition": "dt"}}
    for how in ("cut", "no parquet", "zeroed", "empty", "zeros within"):
        file.write_bytes(damaged(content, how))
        message = refusal(partial(ingest, make_spec(source), Workspace(ws.home / how), D3))
        assert message.startswith(f"source: {form} {tmp_path / form}: {file} cannot be read: ")
        assert f"Nothing of {D2} was taken" in message
    other_table = {"columns": [{"name": "id", "type": "bigint"}], "keys": ["id"], "expectations": {}}
    spec = make_spec(
        source, {"expectations": {"max_bad_files": 1}}, sources={"seen": {"source": source, "table": other_table}}
    )
    message = refusal(lambda: ingest(spec, Workspace(ws.home / "named"), D3))
    assert message.startswith(f"sources.seen.source: {form} {tmp_path / form}: {file} cannot be read: ")
    assert message.endswith("(sources.seen.table.expectations.max_bad_files)")


#: Format, damage, and what a day is.
LEFT_OUT = [
    ("parquet", "cut", "time"),
    ("parquet", "zeros within", "partition"),
    ("orc", "zeroed", "partition"),
    ("orc", "zeros within", "partition"),
    ("avro", "no parquet", "partition"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "how", "day"), LEFT_OUT)
def test_the_day_goes_on_without_it_and_takes_it_when_it_comes_again(
    spark: SparkSession, ws: Workspace, tmp_path: Path, form: str, how: str, day: str
) -> None:
    rows = make_rows()
    other_file, file = in_two_parts(spark, tmp_path / form, form, rows)
    content = file.read_bytes()
    file.write_bytes(damaged(content, how))
    source = {"format": form, "path": str(tmp_path / form), "day": DAY[day], "changed_days": {"late": "refuse"}}
    spec = make_spec(source, {"expectations": {"max_bad_rate": 0.5, "max_bad_files": 1}})
    manifest = ingest(spec, ws, D3)
    read = rows[~((rows["dt"].astype(str) == D2) & (rows["id"] % 2 == 1))]
    assert manifest.rows == {"read": len(read), "kept": len(read), "quarantined": 0, "duplicates": 0}
    (bad,) = manifest.facts["bad_files"]
    assert (bad["file"], bad["table"]) == (f"dt={D2}/{file.name}", str(tmp_path / form))
    checks = [c for c in manifest.facts["expectations"] if c["name"] == "max_bad_files"]
    assert (D2, 1, 1, True) in [(c["ds"], c["value"], c["limit"], c["ok"]) for c in checks]
    warning = f"warning: file {bad['file']} of {bad['table']} was left out: {bad['reason']}"
    assert [line for line in data_lines({"ingest": manifest}, D3) if line] == [warning]
    blocks = data_quality(Day(spec, D3, {"ingest": manifest})).blocks
    (table,) = (b for b in blocks if isinstance(b, ReportTable) and b.title == "Files left out")
    assert table.rows == ((bad["ds"], Cell(bad["file"], code=True), bad["reason"]),)
    assert ids(dataset(spec, ws, D3)) == expected(read)
    assert ingest(spec, ws, D3).started == manifest.started  # nothing has changed

    # The other one, too: now the day has no file that can be read.
    other_content = other_file.read_bytes()
    other_file.write_bytes(other_content[:20])
    message = refusal(lambda: ingest(spec, ws, D3))
    assert str(other_file) in message
    assert str(file) in message
    other_file.write_bytes(other_content)
    file.write_bytes(content)
    manifest = ingest(spec, ws, D3)
    assert "bad_files" not in manifest.facts
    assert ids(dataset(spec, ws, D3)) == expected(rows)


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
    assert f"{path} cannot be read at version 0" in message


def test_a_torn_commit_of_a_source(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Other than of our own tables it is refused: nobody writes the source's last commit again."""
    path = tmp_path / "events"
    for day in (D1, D2):
        deltalake.write_deltalake(str(path), arrow_rows(make_rows(30, day=day)), mode="append")
    spec = make_spec({"format": "delta", "path": str(path), "day": {"time": "ts"}}, {"keys": []})
    commit = path / "_delta_log" / f"{1:020d}.json"
    content = commit.read_bytes()
    for torn in (content[:-100], b"", b"\0" * len(content)):
        commit.write_bytes(torn)
        assert f"{commit} is damaged" in refusal(lambda: ingest(spec, ws, D2))
    commit.write_bytes(content)
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
    """Spark reads this file, as it is told to trim fields."""
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
    table = pq.ParquetFile(files[0]).read()
    pq.write_table(table.select(["id", "ts", "click"]), files[0])
    pq.write_table(pa.table({"other": np.arange(7)}), files[2])
    columns = [{"name": "id", "type": "bigint"}, {"name": "user"}, {"name": "click", "type": "int"}]
    spec = make_spec(
        {"format": "parquet", "path": str(tmp_path / "events"), "day": {"partition": "dt"}},
        {"columns": columns, "keys": [], "event_time": None, "expectations": {}},
        {"split": {"by": "position"}, "carried": [], "workflow": []},
    )
    manifest = ingest(spec, ws, D3)
    assert manifest.rows["kept"] == 207
    with pytest.raises(UserError, match=rf"has no column 'ts' in dt={D3}/part\.parquet"):
        ingest(
            make_spec({"format": "parquet", "path": str(tmp_path / "events"), "day": {"time": "ts"}}),
            Workspace(ws.home / "time"),
            D3,
        )
