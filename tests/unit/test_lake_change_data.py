"""Times of commits, and whether changes can be read, by logs that are written by hand."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config import TableSource
from headrace.config.source import SourceDay
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog, commit_times, newest_until
from headrace.lake.landing.files import day_folders
from headrace.lake.tables.change_feed import VersionRange, check_feed
from headrace.lake.tables.delta import DeltaSnapshot
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.tables.parquet import arrow_reads
from headrace.lake.tables.snapshot import FIRST, LAST
from headrace.storage import local
from tests.unit.test_lake_log import SCHEMA, add, commit, remove

FEED = {"delta.enableChangeDataFeed": "true"}


def metadata(configuration: dict[str, str], schema: str = SCHEMA) -> dict[str, Any]:
    return {"metaData": {"schemaString": schema, "configuration": configuration, "partitionColumns": ["ds"]}}


def test_times_of_commits_ascend(tmp_path: Path) -> None:
    for version, seconds in enumerate((100, 300, 200, 301)):
        commit(tmp_path, version, metadata({}) if version == 0 else {"commitInfo": {"inCommitTimestamp": 7}})
        os.utime(tmp_path / "_delta_log" / f"{version:020d}.json", (seconds, seconds))
    log = DeltaLog(local(tmp_path))
    # A clock that went back: as Delta has it, a millisecond after the commit before.
    assert commit_times(log) == {0: 100_000, 1: 300_000, 2: 300_001, 3: 301_000}
    assert commit_times(log, 2) == {2: 200_000, 3: 301_000}
    times = commit_times(log)
    assert [newest_until(times, t) for t in (99_999, 100_000, 300_000, 300_001, 10**9)] == [None, 0, 1, 2, 3]
    # Where the table has them, timestamps in commits, whatever the files say.
    commit(
        tmp_path,
        4,
        {"commitInfo": {"inCommitTimestamp": 400_500}},
        metadata({"delta.enableInCommitTimestamps": "true"}),
    )
    commit(tmp_path, 5, {"commitInfo": {"inCommitTimestamp": 400_600}})
    assert commit_times(log, 4) == {4: 400_500, 5: 400_600}


def test_changes_that_cannot_be_read(tmp_path: Path) -> None:
    commit(tmp_path, 0, metadata(FEED))
    commit(tmp_path, 1, add(tmp_path, "a.parquet", "d1", 3))
    (tmp_path / "_change_data").mkdir()
    (tmp_path / "_change_data" / "c 1.parquet").write_bytes(b"x")
    # Where changes are recorded in files, the data files say nothing of them.
    cdc = {"cdc": {"path": "_change_data/c%201.parquet", "partitionValues": {}, "size": 1, "dataChange": False}}
    commit(tmp_path, 2, remove("a.parquet", "d1"), add(tmp_path, "b.parquet", "d1", 2), cdc)
    commit(tmp_path, 3, remove("b.parquet", "d1", changes=False), add(tmp_path, "c.parquet", "d1", 2))
    log = DeltaLog(local(tmp_path))

    def check(first: int = 1, last: int = 3) -> None:
        check_feed(log, "the table", first, last)

    def refused(message: str, first: int = 1, last: int = 3) -> None:
        with pytest.raises(UserError, match=message):
            check(first, last)

    check()
    (tmp_path / "b.parquet").unlink()  # OPTIMIZE rewrote it
    check()
    (tmp_path / "a.parquet").unlink()
    refused(r"a\.parquet, which has changes of version 1 of the table, is gone")
    check(2)
    (tmp_path / "_change_data" / "c 1.parquet").unlink()
    refused("c 1.parquet, which has changes of version 2", 2)
    check(3)
    commit(tmp_path, 4, metadata({}))
    refused("no change data feed of version 4", 3, 4)
    wider = json.loads(SCHEMA)
    wider["fields"].append({"name": "more", "type": "long", "nullable": True, "metadata": {}})
    commit(tmp_path, 5, metadata(FEED, json.dumps(wider)))
    check(5, 5)
    commit(tmp_path, 6, metadata(FEED))
    refused("column 'more' of the table was renamed, dropped or given another type after version 5", 5, 6)
    (tmp_path / "_delta_log" / f"{4:020d}.json").unlink()
    refused("no longer has version 4", 3, 5)


def test_ranges_of_versions() -> None:
    for text, first, last in (("..4", None, 4), ("5..9", 5, 9)):
        assert VersionRange.parse(text) == VersionRange(first, last)
        assert str(VersionRange(first, last)) == text
    with pytest.raises(UserError, match="by a partition or a time column before"):
        VersionRange.parse("sha256")


@pytest.mark.parametrize(("feature", "known"), [("mystery", False), ("catalogManaged", False), ("typeWidening", True)])
def test_reader_features_of_a_source(tmp_path: Path, feature: str, known: bool) -> None:
    protocol = {"minReaderVersion": 3, "readerFeatures": ["deletionVectors", feature]}
    commit(tmp_path, 0, {"protocol": protocol}, metadata({}), add(tmp_path, "a.parquet", "d1", 3))
    snapshot = DeltaSnapshot(TableSource(format="delta", path=str(tmp_path)), local(tmp_path), 0)
    if known:
        # Spark reads the rows; nobody takes the data file as it is.
        assert [f.name for f in snapshot.files] == ["a.parquet"]
        assert not snapshot.plain
    else:
        with pytest.raises(UserError, match=f"features that headrace does not read: {feature}; drop them"):
            _ = snapshot.files


def test_a_delta_table_with_columns_that_differ_in_case_alone(tmp_path: Path) -> None:
    """Neither Spark nor delta-rs writes one."""
    fields = [{"name": n, "type": "double", "nullable": True, "metadata": {}} for n in ("Price", "x", "price")]
    commit(tmp_path, 0, metadata({}, json.dumps({"type": "struct", "fields": fields})))
    snapshot = DeltaSnapshot(TableSource(format="delta", path=str(tmp_path)), local(tmp_path), 0)
    with pytest.raises(UserError, match="has columns 'Price' and 'price', which differ in case alone"):
        _ = snapshot.schema


def test_success_files_of_a_table(ws: Workspace) -> None:
    def folders(**source: Any) -> list[str]:
        table = TableSource(format="parquet", path="/lake/t", **source)
        return [str(f) for f in day_folders(table, ws, "2026-03-01")]

    assert folders() == ["/lake/t"]
    assert folders(day={"time": "ts"}) == ["/lake/t"]
    assert folders(day={"partition": "dt"}) == ["/lake/t/dt=2026-03-01", "/lake/t/dt=20260301"]


def test_files_that_arrow_cannot_open(tmp_path: Path) -> None:
    """Spark reads files of a newer writer, and their statistics are unknown. A file that is no Parquet has a fault."""
    source = TableSource(format="parquet", path=str(tmp_path), day=SourceDay(time="ts"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 written by another PAR1")
    snapshot = FolderSnapshot(source, local(tmp_path), "parquet")
    assert [(f.first, f.last) for f in snapshot.files] == [(FIRST, LAST)]
    assert not arrow_reads(snapshot.files)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 cut off")
    snapshot = FolderSnapshot(source, local(tmp_path), "parquet")
    assert [(f.first, f.last) for f in snapshot.files] == [(FIRST, LAST)]
    faults = snapshot.faults(cast(SparkSession, None), None)  # Spark is asked of other formats alone
    assert list(faults) == ["a.parquet"]
    assert faults["a.parquet"].startswith("it is no whole Parquet file: ")
    pq.write_table(pa.table({"ts": [datetime(2026, 3, 1, tzinfo=UTC)]}), tmp_path / "a.parquet")
    snapshot = FolderSnapshot(source, local(tmp_path), "parquet")
    assert [(f.first, f.last) for f in snapshot.files] == [("2026-03-01", "2026-03-01")]
    assert arrow_reads(snapshot.files)
