"""Commits to a Delta table without Spark, as its log has them. What Spark reads of them: test_delta_log.py."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, TransactionOvertaken, create_table
from headrace.storage import Location, local

FIELDS = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("id", "long"), ("ds", "string"))]


def a_field(name: str, **metadata: str) -> dict[str, Any]:
    return {"name": name, "type": "string", "nullable": True, "metadata": metadata}


def add(ds: str, name: str, rows: int = 1) -> dict[str, Any]:
    stats = json.dumps({"numRecords": rows})
    path = f"ds={ds}/{name}"
    return {"path": path, "partitionValues": {"ds": ds}, "size": 9, "modificationTime": 1, "dataChange": True} | {
        "stats": stats
    }


def live(folder: Location) -> dict[str, int]:
    """Return the rows by data file of the newest version."""
    log = DeltaLog(folder)
    assert log.version is not None
    return {f.path.name: f.rows or 0 for f in log.files(log.version) or ()}


def alter(folder: Location, version: int, *actions: dict[str, Any]) -> None:
    """Write a commit of another writer."""
    assert (folder / "_delta_log" / f"{version:020d}.json").put_new_text("".join(json.dumps(a) + "\n" for a in actions))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    table = local(tmp_path / "table")
    create_table(table, FIELDS, ["ds"])
    return table


def test_partitions_are_replaced(folder: Location) -> None:
    assert Transaction(folder).replace("ds", ["d1"], [add("d1", "a", 3)], "one") == 1
    assert Transaction(folder).replace("ds", ["d2"], [add("d2", "b", 4), add("d2", "c", 5)], "two") == 2
    assert live(folder) == {"a": 3, "b": 4, "c": 5}
    assert Transaction(folder).replace("ds", ["d1", "d3"], [add("d3", "d", 6)], "three") == 3
    assert live(folder) == {"b": 4, "c": 5, "d": 6}
    # Also where nothing changes: the commit's metadata is a record.
    assert Transaction(folder).replace("ds", ["d1"], [], "four") == 4
    assert [text for _, text in DeltaLog(folder).user_metadata()] == ["four", "three", "two", "one"]
    # A table that is there is not made again.
    create_table(folder, FIELDS[1:], ["ds"])
    assert DeltaLog(folder).columns() == {"id": "long", "ds": "string"}
    with pytest.raises(UserError, match="there is no Delta table"):
        Transaction(folder / "nowhere")


DAYS = st.sampled_from(["d1", "d2", "d3"])
LOADS = st.lists(st.tuples(st.sets(DAYS, min_size=1), st.integers(0, 2)), max_size=6)


@settings(max_examples=30, deadline=None)
@given(LOADS)
def test_any_sequence_of_loads(tmp_path_factory: pytest.TempPathFactory, loads: list[tuple[set[str], int]]) -> None:
    folder = local(tmp_path_factory.mktemp("log"))
    create_table(folder, FIELDS, ["ds"])
    expected: dict[str, set[str]] = {}
    for n, (days, files) in enumerate(loads):
        names = {ds: {f"{n}-{ds}-{k}" for k in range(files)} for ds in days}
        adds = [add(ds, name) for ds in sorted(days) for name in sorted(names[ds])]
        Transaction(folder).replace("ds", days, adds, "")
        expected |= names
    assert set(live(folder)) == {name for names in expected.values() for name in names}


def test_columns_are_added(folder: Location) -> None:
    fields = [*FIELDS, a_field("color"), a_field("ID")]
    Transaction(folder).replace("ds", ["d1"], [add("d1", "a")], "", fields)
    assert DeltaLog(folder).columns() == {"id": "long", "ds": "string", "color": "string"}
    metadata = next(a for a in DeltaLog(folder).actions(0) if "metaData" in a)["metaData"]
    after = next(a for a in DeltaLog(folder).actions(1) if "metaData" in a)["metaData"]
    assert {k: v for k, v in metadata.items() if k != "schemaString"} == {
        k: v for k, v in after.items() if k != "schemaString"
    }
    Transaction(folder).replace("ds", ["d1"], [add("d1", "b")], "", fields)
    assert not [a for a in DeltaLog(folder).actions(2) if "metaData" in a]


def test_a_commit_follows_those_of_others_that_it_does_not_rest_on(folder: Location) -> None:
    Transaction(folder).replace("ds", ["d1"], [add("d1", "a")], "")
    transaction = Transaction(folder)
    alter(folder, 2, {"commitInfo": {"operation": "WRITE"}}, {"add": add("d2", "b")})
    alter(folder, 3, {"commitInfo": {"operation": "VACUUM START"}})
    assert transaction.replace("ds", ["d1"], [add("d1", "c")], "") == 4
    assert set(live(folder)) == {"b", "c"}


@pytest.mark.parametrize(
    ("action", "changed"),
    [
        ({"add": add("d1", "b")}, "d1"),
        ({"remove": {"path": "ds=d1/a", "partitionValues": {"ds": "d1"}, "dataChange": True}}, "d1"),
        # A removal that does not say of which partition.
        ({"remove": {"path": "ds=d1/a", "dataChange": True}}, "d1"),
        ({"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}, "the table itself"),
        ({"metaData": {"id": "x"}}, "the table itself"),
    ],
)
def test_a_commit_is_refused_where_others_changed_what_it_rests_on(
    folder: Location, action: dict[str, Any], changed: str
) -> None:
    Transaction(folder).replace("ds", ["d1"], [add("d1", "a")], "")
    transaction = Transaction(folder)
    alter(folder, 2, {"commitInfo": {"operation": "UPDATE"}}, action)
    with pytest.raises(
        UserError, match=rf"UPDATE at version 2 has changed {changed} meanwhile; nothing of d1 was loaded"
    ):
        transaction.replace("ds", ["d1"], [add("d1", "c")], "")
    assert DeltaLog(folder).version == 2


def test_writers_at_once_take_turns(folder: Location) -> None:
    def load(n: int) -> int:
        return Transaction(folder).replace("ds", [f"d{n}"], [add(f"d{n}", str(n), n + 1)], "")

    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(load, range(16)))
    assert sorted(versions) == list(range(1, 17))
    assert live(folder) == {str(n): n + 1 for n in range(16)}


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"protocol": {"minWriterVersion": 7, "writerFeatures": ["rowTracking", "appendOnly"]}}, "write: rowTracking"),
        ({"protocol": {"minWriterVersion": 8}}, "writer version 8"),
        ({"metaData": {"configuration": {"delta.columnMapping.mode": "name"}}}, "has column mapping"),
        (
            {"metaData": {"schemaString": json.dumps({"fields": [a_field("x", **{"delta.invariants": "x > 1"})]})}},
            "column 'x' has delta.invariants",
        ),
        ({"metaData": {"configuration": {"delta.appendOnly": "true"}}}, "the table only grows"),
    ],
)
def test_tables_that_need_a_writer_who_knows_more(folder: Location, change: dict[str, Any], refusal: str) -> None:
    Transaction(folder).replace("ds", ["d1"], [add("d1", "a")], "")
    kind = next(iter(change))
    original = next(a[kind] for a in DeltaLog(folder).actions(0) if kind in a)
    alter(folder, 2, {kind: original | change[kind]})
    with pytest.raises(UserError, match=refusal):
        Transaction(folder).replace("ds", ["d1"], [], "")


def test_constraints_of_others_are_told(folder: Location) -> None:
    metadata = next(a["metaData"] for a in DeltaLog(folder).actions(0) if "metaData" in a)
    schema = {"type": "struct", "fields": [FIELDS[0] | {"nullable": False}, FIELDS[1]]}
    changed = {"schemaString": json.dumps(schema), "configuration": {"delta.constraints.few": "id < 9"}}
    alter(folder, 1, {"metaData": metadata | changed})
    assert Transaction(folder).constraints == {"few": "id < 9", "id is not null": "`id` IS NOT NULL"}


def test_names_that_a_table_cannot_have(tmp_path: Path) -> None:
    for names, refusal in ((["a", "A"], "two columns 'a'"), ([""], "a column ''")):
        with pytest.raises(UserError, match=refusal):
            create_table(local(tmp_path), [a_field(n) for n in names], [])
    assert DeltaLog(local(tmp_path)).version is None


def test_a_checkpoint_is_due_after_some_commits(folder: Location) -> None:
    """Also where every other commit is somebody's who writes none: the tenth may never be ours."""
    due = Transaction(folder).wants_checkpoint
    assert [v for v in range(25) if due(v)] == list(range(10, 25))
    (folder / "_delta_log" / f"{11:020d}.checkpoint.parquet").put_bytes(b"PAR1 all of the table's state PAR1")
    assert [v for v in range(25) if due(v)] == [10, 21, 22, 23, 24]


def test_files_are_added_as_versions_of_an_application(tmp_path: Path) -> None:
    folder = local(tmp_path / "added")
    assert create_table(folder, FIELDS, (), [add("d1", "a", 3)], "made", ("app", -1))
    assert not create_table(folder, FIELDS, (), [add("d1", "b")], "too late", ("app", -1))
    assert live(folder) == {"a": 3}
    assert [text for _, text in DeltaLog(folder).user_metadata()] == ["made"]
    transaction = Transaction(folder)
    # Others may be versions of other applications, and write files anew (OPTIMIZE); rows that they add were not read.
    alter(folder, 1, {"add": add("d1", "c", 4) | {"dataChange": False}}, {"txn": {"appId": "other", "version": 7}})
    assert transaction.append([add("d1", "d", 5)], "mine", ("app", 0)) == 2
    assert live(folder) == {"a": 3, "c": 4, "d": 5}
    assert DeltaLog(folder).application_version("app", 2) == 1
    # What rests on an older version meets that too.
    with pytest.raises(TransactionOvertaken, match="was changed at version 2"):
        Transaction(folder, 1).append([add("d1", "e")], "", ("app", 0))
    assert Transaction(folder, 2).append([add("d1", "e")], "", ("app", 1)) == 3


@pytest.mark.parametrize(
    "action",
    [
        {"txn": {"appId": "app", "version": 1}},
        {"metaData": {}},
        {"protocol": {}},
        # DELETE, RESTORE: what was read is no longer there.
        {"remove": {"path": "ds=d1/a", "partitionValues": {"ds": "d1"}, "dataChange": True}},
        {"remove": {"path": "ds=d1/a"}},
    ],
)
def test_an_append_that_was_overtaken_adds_nothing(tmp_path: Path, action: dict[str, Any]) -> None:
    folder = local(tmp_path / "added")
    create_table(folder, FIELDS, (), [add("d1", "a", 3)], "made", ("app", 0))
    transaction = Transaction(folder)
    alter(folder, 1, action)
    with pytest.raises(TransactionOvertaken, match="was changed at version 1"):
        transaction.append([add("d1", "b")], "", ("app", 1))
    assert DeltaLog(folder).version == 1


def test_an_append_follows_a_rewrite_of_files(tmp_path: Path) -> None:
    folder = local(tmp_path / "added")
    create_table(folder, FIELDS, (), [add("d1", "a", 3)], "made", ("app", 0))
    transaction = Transaction(folder)
    removal = {"path": "ds=d1/a", "partitionValues": {"ds": "d1"}, "dataChange": False}
    alter(folder, 1, {"remove": removal}, {"add": add("d1", "compact", 3) | {"dataChange": False}})
    assert transaction.append([add("d1", "b", 2)], "", ("app", 1)) == 2
    assert live(folder) == {"compact": 3, "b": 2}


def test_nothing_is_added_to_a_table_with_partitions(folder: Location) -> None:
    with pytest.raises(UserError, match="has partitions"):
        Transaction(folder).append([add("d1", "a")], "", ("app", -1))
    assert DeltaLog(folder).version == 0


def test_of_many_that_append_at_once_each_is_one_version_of_the_application(tmp_path: Path) -> None:
    folder = local(tmp_path / "added")

    def append(k: int) -> int:
        for _ in range(100):
            log = DeltaLog(folder)
            version = log.version
            try:
                if version is None:
                    if create_table(folder, FIELDS, (), [add("d1", f"{k}")], "", ("app", -1)):
                        return 0
                    continue
                last = log.application_version("app", version)
                return Transaction(folder, version).append(
                    [add("d1", f"{k}")], "", ("app", -1 if last is None else last)
                )
            except TransactionOvertaken:
                continue
        raise AssertionError("overtaken every time")

    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(append, range(8)))
    assert sorted(versions) == list(range(8))
    assert set(live(folder)) == {str(k) for k in range(8)}
    assert [DeltaLog(folder).application_version("app", v) for v in range(8)] == list(range(8))
