"""`headrace forget` in warehouses of files: rows that no published day has any more go, too; killed, it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.simulated_days import save
from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.jobs.housekeeping.forget.persons import Persons
from headrace.jobs.housekeeping.forget.places import warehouse_places
from headrace.jobs.housekeeping.workspace_state import WorkspaceState
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction
from headrace.publish.files import Record, StagedFiles
from headrace.publish.opening import open_target
from headrace.publish.tables.delta import DeltaTarget
from headrace.publish.tables.parquet import ParquetTarget
from headrace.publish.tables.spark_table import Records
from headrace.publish.target import Publication
from headrace.stage.manifest import Output
from headrace.storage import LeaseLost, Location, local
from tests.forget_support import put_rows
from tests.storage_support import Killed, faulty

DS, NEXT = "2026-01-10", "2026-01-11"
PERSONS = Persons("user_id", True, frozenset({"1", "9"}))
RECORD = Record("k", 4, "m", "s", [])


def scores(*users: int) -> pa.Table:
    columns = {"user_id": pa.array(users, pa.int64()), "item_id": pa.array([7] * len(users), pa.int64())}
    return pa.table({**columns, "rank": pa.array([1] * len(users), pa.int32())})


@cache
def spec_of(kind: str) -> Spec:
    return load_spec("clicks", [f"publish.warehouse.kind={kind}"])


def home(folder: Path, kind: str) -> tuple[Spec, Workspace]:
    spec, ws = spec_of(kind), Workspace(folder / "home")
    save(ws, DS, "score", {}, Output(kind="delta", name="lake/clicks/scores", version="1", rows=4))
    return spec, ws


def places(spec: Spec, ws: Workspace) -> Iterator[tuple[int, int, str | None]]:
    """Erase the persons; yield rows, files and the part not erased of each place."""
    for place in warehouse_places(WorkspaceState(spec, ws, datetime(2026, 1, 12, tzinfo=UTC)), PERSONS):
        assert place.act is not None
        yield place.rows, place.removed, place.act()


@contextmanager
def parquet(spec: Spec, ws: Workspace) -> Iterator[ParquetTarget]:
    with open_target(spec, ws) as target:
        assert isinstance(target, ParquetTarget)
        yield target


def publish(target: ParquetTarget, ds: str, token: str, *users: int) -> None:
    folder = local(Path(f"{target.ws.home}/staged/{ds}_{token}"))
    with (folder / "part-0.parquet").new_file() as path:
        pq.write_table(scores(*users), path)
    staged = StagedFiles(None, folder, ds, "k", None, len(users))  # type: ignore[arg-type]
    target.publish_files(staged, Record("k", len(users), "m", "s", []))


def users_of(folder: Location) -> list[int]:
    """Return the users in all files, also in those that no day lists."""
    by_file = [pq.ParquetFile(f).read()["user_id"].to_pylist() for f in Path(folder).rglob("*.parquet")]
    return sorted(user for users in by_file for user in users)


def test_a_folder_of_files_has_days_that_were_dropped_and_versions_before(tmp_path: Path) -> None:
    spec, ws = home(tmp_path, "parquet")
    with parquet(spec, ws) as target:
        publish(target, DS, "a", 1, 2)
        publish(target, NEXT, "b", 1, 3)
        publish(target, NEXT, "c", 4)  # again: those of before stay for readers
        target.drop_days([DS])
        assert target.rows_with("user_id", [1]) == {}
        assert users_of(target.folder) == [1, 1, 2, 3, 4]
        assert list(places(spec, ws)) == [(0, 2, "")]
        assert users_of(target.folder) == [4]
        assert target.rows_by_day() == {NEXT: 1}
        assert target.count(NEXT) == 1
        # Files of others alone stay where they are; those that were being written may have anybody.
        publish(target, NEXT, "d", 5)
        assert list(places(spec, ws)) == []
        assert users_of(target.folder) == [4, 5]
        (target.folder / f"ds={NEXT}" / "half" / "part-0.parquet").put_text("PAR1")
        assert list(places(spec, ws)) == [(0, 1, "")]
        assert list(places(spec, ws)) == []


def test_killed_at_every_call_a_folder_of_files_loses_them_at_last(tmp_path: Path) -> None:
    calls = 1
    while True:
        spec, ws = home(tmp_path / str(calls), "parquet")
        with parquet(spec, ws) as target:
            publish(target, DS, "a", 1, 2)
            publish(target, NEXT, "b", 3, 9)
        with faulty(calls, kills=True) as faults:
            with suppress(Killed):
                list(places(spec, ws))
        list(places(spec, ws))
        assert list(places(spec, ws)) == []
        assert users_of(target.folder) == [2, 3]
        assert target.rows_by_day() == {DS: 1, NEXT: 1}
        if faults.calls_made < calls:
            break
        calls += 1
    assert calls > 5


def delta(folder: Path) -> tuple[Spec, Workspace, DeltaTarget]:
    """Publish the day of persons, then again without them; the copy of the newest day, too."""
    spec, ws = home(folder, "delta")
    with open_target(spec, ws) as target:
        assert isinstance(target, DeltaTarget)
        for table in (target.folder, target.current):
            put_rows(table, DS, scores(1, 2, 3, 9))
            put_rows(table, DS, scores(2, 3, 4, 5))
        target.records.save(DS, RECORD)
    return spec, ws, target


def test_a_delta_table_has_files_of_older_versions(tmp_path: Path) -> None:
    spec, ws, target = delta(tmp_path)
    assert target.rows_with("user_id", [1, 9]) == {}
    ((rows, files, not_erased),) = places(spec, ws)
    assert (rows, not_erased) == (0, "")
    assert files >= 2
    assert list(places(spec, ws)) == []
    for table in (target.folder, target.current):
        assert set(users_of(table)) == {2, 3, 4, 5}
        assert '\\"user_id\\":1' not in "".join(f.read_text() for f in (table / "_delta_log").entries())
    assert target.rows_by_day() == {DS: 4}
    assert target.count(DS) == 4


def test_a_delta_table_whose_erasure_was_killed_before_files_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, ws, target = delta(tmp_path)
    put_rows(target.folder, NEXT, scores(1, 6))
    target.records.save(NEXT, Record("k", 2, "m", "s", []))
    commit = Transaction.rewrite

    def killed(*args: object) -> int:
        commit(*args)  # type: ignore[arg-type]
        raise Killed

    with monkeypatch.context() as m:
        m.setattr(Transaction, "rewrite", killed)
        with pytest.raises(Killed):
            list(places(spec, ws))
    assert target.rows_with("user_id", [1, 9]) == {}
    assert 1 in users_of(target.folder)
    list(places(spec, ws))
    assert list(places(spec, ws)) == []
    assert set(users_of(target.folder)) == {2, 3, 4, 5, 6}
    assert target.rows_by_day() == {DS: 4, NEXT: 1}


@pytest.mark.parametrize("ends", ["refused", "killed before the commit", "killed after it"])
def test_the_record_of_a_day_whose_erasure_did_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The record keeps the table's state until the commit; the same call mends what a killed one left."""
    spec, ws, target = delta(tmp_path)
    put_rows(target.folder, NEXT, scores(1, 6))
    target.records.save(NEXT, Record("k", 2, "m", "s", []))
    fault = LeaseLost("taken") if ends == "refused" else Killed()

    def fail(*args: object) -> None:
        raise fault

    with monkeypatch.context() as m:
        m.setattr(*((Records, "set_rows") if ends == "killed after it" else (Transaction, "rewrite")), fail)
        with pytest.raises(type(fault)):
            list(places(spec, ws))
    if ends != "killed after it":
        assert target.rows_by_day() == {DS: 4, NEXT: target.count(NEXT)} == {DS: 4, NEXT: 2}
    assert target.published(NEXT) == Publication("k", 2, [])
    assert len(list(places(spec, ws))) == 1
    assert target.rows_by_day() == {DS: 4, NEXT: target.count(NEXT)} == {DS: 4, NEXT: 1}
    assert list(places(spec, ws)) == []


def test_a_version_that_people_have_brought_back_is_counted_without_them(tmp_path: Path) -> None:
    """RESTORE names files that are gone."""
    spec, ws, target = delta(tmp_path)
    put_rows(target.folder, NEXT, scores(1, 6))
    log = DeltaLog(target.folder)
    assert log.version is not None
    state = log.state(log.version, current=False)
    assert state is not None
    list(places(spec, ws))
    restored = "".join(json.dumps({"add": add}) + "\n" for add in state.adds if NEXT in str(add["path"]))
    assert log.version is not None
    removed = log.state(log.version, current=False)
    assert removed is not None
    for add in removed.adds:
        if NEXT in str(add["path"]):
            restored += json.dumps({"remove": {"path": add["path"], "dataChange": True}}) + "\n"
    (target.folder / "_delta_log" / f"{log.version + 1:020d}.json").put_text(restored)
    assert (target.count(NEXT), target.rows_with("user_id", [1, 9])) == (1, {})


def test_a_file_that_was_not_written_to_its_end_is_named(tmp_path: Path) -> None:
    spec, ws, target = delta(tmp_path)
    (target.folder / f"ds={DS}" / "half.parquet").put_text("PAR1")
    ((_, _, not_erased),) = places(spec, ws)
    assert not_erased is not None
    assert "half.parquet cannot be read" in not_erased
