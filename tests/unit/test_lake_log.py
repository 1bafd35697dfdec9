"""Delta's log: what is read of it, and data files whose commit fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import BusyError, UserError
from headrace.errors.stores import StoreAway
from headrace.lake.delta.data_files import DataFileWriter, WrittenFile, remove_files
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.log_files import newest_checkpoint
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.lake.landing.load import forgotten_unless_refused
from headrace.lake.landing.load_history import row_counts
from headrace.storage import LeaseLost, Location, StoreRefused, local

SCHEMA = json.dumps(
    {
        "type": "struct",
        "fields": [
            {"name": "a", "type": "long", "nullable": True, "metadata": {}},
            {
                "name": "tags",
                "type": {"type": "array", "elementType": "string", "containsNull": True},
                "nullable": True,
                "metadata": {},
            },
        ],
    }
)


#: Of the `add` actions in a checkpoint.
KIND = pa.struct(
    [
        ("path", pa.string()),
        ("partitionValues", pa.map_(pa.string(), pa.string())),
        ("size", pa.int64()),
        ("stats", pa.string()),
    ]
)


def commit(folder: Path, version: int, *actions: dict[str, Any]) -> None:
    log = folder / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("".join(json.dumps(a) + "\n" for a in actions))


def add(folder: Path, path: str, ds: str, rows: int) -> dict[str, Any]:
    """An `add` action, and its file."""
    (folder / path.replace("%20", " ")).parent.mkdir(parents=True, exist_ok=True)
    (folder / path.replace("%20", " ")).write_bytes(b"x")
    stats = json.dumps({"numRecords": rows})
    return {"add": {"path": path, "partitionValues": {"ds": ds}, "size": 1, "stats": stats}}


def remove(path: str, ds: str | None, changes: bool = True) -> dict[str, Any]:
    """A `remove` action; without its partition's values where `ds` is None."""
    values = {} if ds is None else {"partitionValues": {"ds": ds}}
    return {"remove": {"path": path, "dataChange": changes, **values}}


def paths(log: DeltaLog, version: int) -> list[str] | None:
    files = log.files(version)
    return None if files is None else sorted(f.path.below(log.folder) for f in files)


def test_no_table(tmp_path: Path) -> None:
    log = DeltaLog(local(tmp_path / "none"))
    assert log.version is None
    assert not log.has(0)
    assert list(log.user_metadata()) == []
    assert log.columns() == {}
    assert log.files(0) is None
    assert list(log.commits()) == []
    log.check()


def test_replay(tmp_path: Path) -> None:
    commit(tmp_path, 0, {"metaData": {"schemaString": SCHEMA}})
    commit(tmp_path, 1, {"commitInfo": {"userMetadata": "one"}}, add(tmp_path, "ds=d1/a%20b.parquet", "d1", 3))
    commit(
        tmp_path,
        2,
        {"commitInfo": {}},
        add(tmp_path, "ds=d1/c.parquet", "d1", 4),
        {"remove": {"path": "ds=d1/a%20b.parquet"}},
    )
    log = DeltaLog(local(tmp_path))
    assert log.version == 2
    assert paths(log, 0) == []
    assert paths(log, 1) == ["ds=d1/a b.parquet"]
    assert paths(log, 2) == ["ds=d1/c.parquet"]
    assert list(log.user_metadata()) == [(1, "one")]
    columns = log.columns()
    assert columns["a"] == "long"
    assert json.loads(columns["tags"])["elementType"] == "string"


def test_checkpoint_stands_for_commits_that_are_gone(tmp_path: Path) -> None:
    entry = add(tmp_path, "ds=d1/a.parquet", "d1", 3)["add"]
    commit(tmp_path, 3, add(tmp_path, "ds=d2/b.parquet", "d2", 4))
    table = pa.table(
        {
            "add": pa.array([entry | {"partitionValues": [("ds", "d1")]}, None], KIND),
            "metaData": pa.array([None, {"schemaString": SCHEMA}], pa.struct([("schemaString", pa.string())])),
        }
    )
    pq.write_table(table, tmp_path / "_delta_log" / f"{2:020d}.checkpoint.parquet")
    log = DeltaLog(local(tmp_path))
    assert paths(log, 3) == ["ds=d1/a.parquet", "ds=d2/b.parquet"]
    assert log.columns()["a"] == "long"
    assert not log.has(2)
    assert paths(log, 1) is None
    assert row_counts(log, 3, {"d1", "d2", "d3"}) == {"d1": 3, "d2": 4}
    (tmp_path / "ds=d1/a.parquet").unlink()
    assert row_counts(log, 3, {"d1"}) is None
    assert row_counts(log, 3, {"d2"}) == {"d2": 4}


VECTOR = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40}


@pytest.mark.parametrize("hint", [None, 3, 4, 5, 9, "torn"])
@pytest.mark.parametrize("torn", [0, 1, 3])
def test_the_newest_version_whatever_the_last_checkpoint_says(
    hint: int | str | None, torn: int, tmp_path: Path
) -> None:
    """`_last_checkpoint` may be gone, damaged, or, in a log that came back from a backup, newer than all commits."""
    log, files = DeltaLog(local(tmp_path)), tmp_path / "_delta_log"
    for version in range(6):
        commit(tmp_path, version, {"metaData": {"schemaString": SCHEMA}} if version == 0 else {"commitInfo": {}})
    for version in range(6 - torn, 6):
        (files / f"{version:020d}.json").write_bytes(b"")
    if hint is not None:
        (files / "_last_checkpoint").write_text('{"vers' if hint == "torn" else json.dumps({"version": hint}))
    assert log.version == 5 - torn == max(log.versions())
    assert log.versions(3) == {v for v in log.versions() if v >= 3}
    assert [c.version for c in log.commits(1)] == list(range(5 - torn, 1, -1))


def test_a_newest_checkpoint_that_is_not_whole_is_passed_by(tmp_path: Path) -> None:
    files = tmp_path / "_delta_log"
    commit(tmp_path, 0, {"commitInfo": {}})
    for version in (2, 4):
        pq.write_table(pa.table({"add": pa.array([None], KIND)}), files / f"{version:020d}.checkpoint.parquet")
    (files / "_last_checkpoint").write_text('{"version": 4}')
    assert [newest.version for n in (5, 4, 3) if (newest := newest_checkpoint(local(files), n))] == [4, 4, 2]
    (files / f"{4:020d}.checkpoint.parquet").write_bytes(b"")
    assert [newest.version for n in (5, 4, 3) if (newest := newest_checkpoint(local(files), n))] == [2, 2, 2]


def test_rows_that_a_deletion_vector_marks_are_not_counted(tmp_path: Path) -> None:
    commit(tmp_path, 0, add(tmp_path, "a.parquet", "d1", 9), add(tmp_path, "b.parquet", "d1", 4))
    marked = add(tmp_path, "a.parquet", "d1", 9)
    marked["add"]["deletionVector"] = VECTOR | {"cardinality": 2}
    # In either order: a file and its vector are one key of the log.
    commit(tmp_path, 1, marked, {"remove": {"path": "a.parquet"}})
    more = add(tmp_path, "a.parquet", "d1", 9)
    more["add"]["deletionVector"] = VECTOR | {"offset": 44, "cardinality": 5}
    commit(tmp_path, 2, {"remove": {"path": "a.parquet", "deletionVector": VECTOR | {"cardinality": 2}}}, more)
    log = DeltaLog(local(tmp_path))
    for version, rows in ((0, 9), (1, 7), (2, 4)):
        files = log.files(version)
        assert files is not None
        assert sorted((f.path.name, f.rows, f.deleted) for f in files) == [
            ("a.parquet", rows, 9 - rows),
            ("b.parquet", 4, 0),
        ]
    assert log.plain_files(0) is not None
    assert log.plain_files(1) is None
    assert row_counts(log, 2, {"d1"}) == {"d1": 8}
    assert [(c.version, len(c.adds), len(c.removes)) for c in log.commits(after=0)] == [(2, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("protocol", "configuration", "message"),
    [
        ({"minReaderVersion": 4}, {}, "asks for reader version 4"),
        (
            {"minReaderVersion": 3, "readerFeatures": ["deletionVectors", "variantType", "typeWidening-preview"]},
            {},
            "features that headrace does not read: typeWidening-preview, variantType; drop them",
        ),
        ({"minReaderVersion": 2}, {"delta.columnMapping.mode": "name"}, "delta.columnMapping.mode = name"),
        (
            {"minReaderVersion": 3, "readerFeatures": ["columnMapping"]},
            {"delta.columnMapping.mode": "id"},
            "delta.columnMapping.mode = id",
        ),
    ],
)
def test_tables_that_would_be_read_wrongly_are_refused(
    tmp_path: Path, protocol: dict[str, Any], configuration: dict[str, str], message: str
) -> None:
    commit(tmp_path, 0, {"protocol": {"minReaderVersion": 1}}, {"metaData": {"schemaString": SCHEMA}})
    commit(tmp_path, 1, add(tmp_path, "a.parquet", "d1", 1))
    log = DeltaLog(local(tmp_path))
    log.check()
    commit(tmp_path, 2, {"protocol": protocol}, {"metaData": {"schemaString": SCHEMA, "configuration": configuration}})
    for read in (log.check, log.columns, lambda: log.files(2), lambda: log.plain_files(2)):
        with pytest.raises(UserError, match=re.escape(message)):
            read()
    assert paths(log, 1) == ["a.parquet"]


def test_known_features_are_read(tmp_path: Path) -> None:
    features = ["columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"]
    commit(
        tmp_path,
        0,
        {"protocol": {"minReaderVersion": 3, "readerFeatures": features}},
        {"metaData": {"schemaString": SCHEMA, "configuration": {"delta.columnMapping.mode": "none"}}},
        add(tmp_path, "a.parquet", "d1", 1),
    )
    assert paths(DeltaLog(local(tmp_path)), 0) == ["a.parquet"]


def test_data_files_elsewhere(tmp_path: Path) -> None:
    data_path = tmp_path / "there" / "a b.parquet"
    commit(
        tmp_path, 0, {"add": {"path": f"file://{str(data_path).replace(' ', '%20')}", "partitionValues": {}, "size": 1}}
    )
    files = DeltaLog(local(tmp_path)).files(0)
    assert files is not None
    assert [f.path for f in files] == [local(data_path)]
    commit(tmp_path, 1, {"add": {"path": "wasb://bucket/a.parquet", "partitionValues": {}, "size": 1}})
    with pytest.raises(UserError, match=r"has a data file at wasb://bucket/a\.parquet"):
        DeltaLog(local(tmp_path)).files(1)


def test_checkpoints_in_parts_and_with_sidecars(tmp_path: Path) -> None:
    log, folder = DeltaLog(local(tmp_path)), tmp_path / "_delta_log"
    commit(tmp_path, 2, add(tmp_path, "c.parquet", "d1", 4))
    adds = [add(tmp_path, f"{name}.parquet", "d1", 3)["add"] for name in "ab"]
    rows = [a | {"partitionValues": list(a["partitionValues"].items())} for a in adds]
    for part, row in enumerate(rows, 1):
        if part == 2:  # half of it is none at all
            assert log.files(2) is None
        pq.write_table(
            pa.table({"add": pa.array([row], KIND)}), folder / f"{1:020d}.checkpoint.{part:010d}.{2:010d}.parquet"
        )
    assert paths(log, 2) == ["a.parquet", "b.parquet", "c.parquet"]
    for part in (1, 2):
        (folder / f"{1:020d}.checkpoint.{part:010d}.{2:010d}.parquet").unlink()
    # Statistics as a struct, as some writers have them.
    parsed = pa.struct([*list(KIND)[:3], pa.field("stats_parsed", pa.struct([("numRecords", pa.int64())]))])
    row = {k: v for k, v in rows[0].items() if k != "stats"} | {"stats_parsed": {"numRecords": 7}}
    path = folder / f"{1:020d}.checkpoint.parquet"
    pq.write_table(pa.table({"add": pa.array([row, None], parsed)}), path)
    files = log.files(1)
    assert files is not None
    assert [(f.path.name, f.rows, f.size) for f in files] == [("a.parquet", 7, 1)]
    path.unlink()
    # V2: actions in a JSON file, data files in a sidecar.
    (folder / "_sidecars").mkdir()
    pq.write_table(pa.table({"add": pa.array(rows, KIND)}), folder / "_sidecars" / "x.parquet")
    top = [
        {"checkpointMetadata": {"version": 1}},
        {"metaData": {"schemaString": SCHEMA}},
        {"protocol": {"minReaderVersion": 3, "readerFeatures": ["v2Checkpoint"]}},
        {"sidecar": {"path": "x.parquet", "sizeInBytes": 1, "modificationTime": 1}},
    ]
    name = f"{1:020d}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11"
    (folder / f"{name}.json").write_text("".join(json.dumps(a) + "\n" for a in top))
    assert paths(log, 2) == ["a.parquet", "b.parquet", "c.parquet"]
    assert log.columns()["a"] == "long"


def test_what_an_application_wrote_last(tmp_path: Path) -> None:
    txn = [{"txn": {"appId": name, "version": v}} for name, v in (("a", 3), ("b", 9), ("a", 4))]
    for version, action in enumerate([*txn, {"commitInfo": {}}], start=1):
        commit(tmp_path, version, action)
    log = DeltaLog(local(tmp_path))
    assert [log.application_version("a", version) for version in (1, 2, 3, 4)] == [3, 3, 4, 4]
    assert (log.application_version("b", 1), log.application_version("c", 4)) == (None, None)
    # Of a checkpoint, where the commit is gone.
    kind = pa.struct([("appId", pa.string()), ("version", pa.int64())])
    table = pa.table({"txn": pa.array([{"appId": "c", "version": 7}, None], kind)})
    pq.write_table(table, tmp_path / "_delta_log" / f"{1:020d}.checkpoint.parquet")
    assert [log.application_version("c", version) for version in (0, 4)] == [None, 7]


DAY = "2026-03-01"


@pytest.fixture
def table(tmp_path: Path) -> Location:
    folder = local(tmp_path / "table")
    types = {"id": "long", "ds": "string"}
    create_table(folder, [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in types.items()], ["ds"])
    return folder


def _written(table: Location, first: int) -> WrittenFile:
    schema = pa.schema([("id", pa.int64())])
    writer = DataFileWriter(table, DAY, schema, "snappy")
    writer.add(pa.table({"id": [first, first + 1]}, schema=schema))
    data_file = writer.close()
    assert data_file is not None
    return data_file


@pytest.mark.parametrize(
    "error",
    [StoreAway("no answer"), StoreRefused("the token has expired"), OSError(5, "fsync"), KeyboardInterrupt()],
    ids=lambda e: type(e).__name__,
)
def test_files_of_a_commit_whose_answer_is_lost_stay(error: BaseException, table: Location) -> None:
    committed_file, extra_file = _written(table, 0), _written(table, 10)
    written = [committed_file, extra_file]

    def commit() -> None:
        with forgotten_unless_refused(written, [committed_file]):
            Transaction(table).replace("ds", [DAY], [committed_file.add_action()], "{}")
            raise error

    with pytest.raises(type(error)):
        commit()
    remove_files(table, written)
    assert (table / committed_file.path).exists()
    assert not (table / extra_file.path).exists()


@pytest.mark.parametrize("error", [UserError("a constraint is broken"), BusyError("another writer"), LeaseLost("lost")])
def test_files_of_a_refused_commit_go(error: UserError, table: Location) -> None:
    refused_file = _written(table, 0)
    written = [refused_file]

    def commit() -> None:
        with forgotten_unless_refused(written, [refused_file]):
            raise error

    with pytest.raises(type(error)):
        commit()
    remove_files(table, written)
    assert not (table / refused_file.path).exists()
