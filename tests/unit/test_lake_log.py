"""A Delta log read without Spark, and the load history in it. Logs are written by hand, to the protocol's document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest import load_history
from headrace.lake.landing import LandingDay, LandingFile
from headrace.storage import local

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


def commit(folder: Path, version: int, *actions: dict[str, Any]) -> None:
    log = folder / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("".join(json.dumps(a) + "\n" for a in actions))


def add(folder: Path, path: str, ds: str, rows: int) -> dict[str, Any]:
    """An `add` action, and its file."""
    (folder / path.replace("%20", " ")).parent.mkdir(parents=True, exist_ok=True)
    (folder / path.replace("%20", " ")).write_bytes(b"x")
    return {"add": {"path": path, "partitionValues": {"ds": ds}, "stats": json.dumps({"numRecords": rows})}}


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
    kept = add(tmp_path, "ds=d1/a.parquet", "d1", 3)["add"]
    commit(tmp_path, 3, add(tmp_path, "ds=d2/b.parquet", "d2", 4))
    kind = pa.struct(
        [("path", pa.string()), ("partitionValues", pa.map_(pa.string(), pa.string())), ("stats", pa.string())]
    )
    table = pa.table(
        {
            "add": pa.array([kept | {"partitionValues": [("ds", "d1")]}, None], kind),
            "metaData": pa.array([None, {"schemaString": SCHEMA}], pa.struct([("schemaString", pa.string())])),
        }
    )
    pq.write_table(table, tmp_path / "_delta_log" / f"{2:020d}.checkpoint.parquet")
    log = DeltaLog(local(tmp_path))
    assert paths(log, 3) == ["ds=d1/a.parquet", "ds=d2/b.parquet"]
    assert log.columns()["a"] == "long"
    assert not log.has(2)
    assert paths(log, 1) is None
    assert load_history.row_counts(log, 3, {"d1", "d2", "d3"}) == {"d1": 3, "d2": 4}
    (tmp_path / "ds=d1/a.parquet").unlink()
    assert load_history.row_counts(log, 3, {"d1"}) is None
    assert load_history.row_counts(log, 3, {"d2"}) == {"d2": 4}


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


def entry(ds: str, **more: Any) -> load_history.LoadRecord:
    return load_history.LoadRecord(
        **(
            {"ds": ds, "key": "k", "declared": "D", "judged": "J", "files": [[f"{ds}.gz", 1, 2]], "rows": {"kept": 5}}
            | more
        )
    )


def day(ds: str, mtime: int = 2) -> LandingDay:
    return LandingDay(ds, (LandingFile(f"{ds}.gz", Path(f"/{ds}.gz"), 1, mtime),))


def loaded(folder: Path, *entries: load_history.LoadRecord) -> DeltaLog:
    for version, e in enumerate(entries):
        commit(
            folder,
            version,
            {"commitInfo": {"userMetadata": e.metadata()}},
            add(folder, f"ds={e.ds}/{version}.parquet", e.ds, e.rows["kept"]),
            *({"remove": {"path": f"ds={e.ds}/{v}.parquet"}} for v in range(version) if entries[v].ds == e.ds),
        )
    return DeltaLog(local(folder))


def todo(log: DeltaLog, *days: LandingDay, declared: str = "D", judged: str = "J") -> tuple[list[str], set[str]]:
    found, owed = load_history.pending(days, load_history.read(log), declared, judged, log)
    return [d.ds for d in found], owed


def test_load_history_newest_record_counts_and_others_commits_are_ignored(tmp_path: Path) -> None:
    log = loaded(tmp_path, entry("d1"), entry("d2"), entry("d1", key="k2", rows={"kept": 7}))
    commit(tmp_path, 3, {"commitInfo": {"userMetadata": "not ours"}})
    commit(tmp_path, 4, {"commitInfo": {"userMetadata": '{"theirs": 1}'}})
    found = load_history.read(log)
    assert {ds: (e.key, e.version) for ds, e in found.items()} == {"d1": ("k2", 2), "d2": ("k", 1)}
    assert found["d1"] == entry("d1", key="k2", rows={"kept": 7}, version=2)


def test_pending(tmp_path: Path) -> None:
    log = loaded(tmp_path, entry("d1"), entry("d2"))
    assert todo(log, day("d1"), day("d2")) == ([], set())
    assert todo(log, day("d1"), day("d3")) == (["d3"], set())
    assert todo(log, day("d1", mtime=3), day("d2")) == (["d1"], set())
    assert todo(log, day("d1"), day("d2"), declared="E") == (["d1", "d2"], set())
    # Expectations that only stop a day are asked of the run's own day alone.
    assert todo(log, day("d1"), day("d2"), judged="K") == (["d2"], set())
    (tmp_path / "ds=d1/0.parquet").unlink()
    assert todo(log, day("d1"), day("d2")) == (["d1"], set())


def test_pending_after_a_kill_between_a_replaced_day_and_those_it_owes(tmp_path: Path) -> None:
    log = loaded(tmp_path, entry("d1"), entry("d2"), entry("d3"), entry("d1", then=["d2", "d3"]), entry("d2"))
    assert todo(log, day("d1")) == ([], {"d3"})
    assert todo(log, day("d1"), day("d3")) == (["d3"], set())
