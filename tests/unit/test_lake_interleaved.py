"""Writers that read a Delta table and commit later, with commits of others in between: no row is lost or comes back."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.lake.delta.compact import join_files
from headrace.lake.delta.data_files import WrittenFile
from headrace.lake.delta.deletion_vectors import deleted_positions
from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.redact import redact_log
from headrace.lake.delta.transaction import Transaction, TransactionOvertaken, create_table
from headrace.lake.landing.load import commit_files
from headrace.storage import Location, local
from tests.delta_rows import (
    FIELDS,
    commit,
    data_file,
    encoded,
    inline_vector,
    live,
    live_rows,
    make_table,
    mark_deleted,
    rows_of,
    serialized,
)

DS = "2026-01-10"
USERS = ["anna", "berta", "carla"]


def drop_user(user: str) -> Change:
    def apply(rows: pa.Table) -> tuple[pa.Table, int]:
        stays = pa.array([value != user for value in rows["user"].to_pylist()], pa.bool_())
        remaining = rows.filter(stays)
        return remaining, rows.num_rows - remaining.num_rows

    return Change(("user",), apply)


def delete_row(table: Location, number: int) -> None:
    """DELETE FROM ... WHERE row = number, by a deletion vector."""
    for add in live(table):
        rows = pq.ParquetFile((table / add["path"]).local_path()).read()["row"].to_pylist()
        if number in (n for n, _ in rows_of(table, add)):
            mark_deleted(table, add, [rows.index(number)])
            return


def in_between(monkeypatch: pytest.MonkeyPatch, method: str, action: Callable[[], object]) -> None:
    """Have another writer commit after a transaction has read the table, right before its own commit; once."""
    real = getattr(Transaction, method)

    def later(self: Transaction, *args: Any, **more: Any) -> int:
        monkeypatch.setattr(Transaction, method, real)
        action()
        return int(real(self, *args, **more))

    monkeypatch.setattr(Transaction, method, later)


@pytest.fixture
def table(tmp_path: Path) -> Location:
    lake_table = local(tmp_path / "table")
    make_table(lake_table)
    first = [(n, USERS[n % 3]) for n in range(8)]
    commit(lake_table, {"add": data_file(lake_table, DS, first)})
    commit(lake_table, {"add": data_file(lake_table, DS, [(10, "anna"), (11, "berta")])})
    return lake_table


def files_of(table: Location) -> int:
    return sum(f.suffix == ".parquet" for f in table.files())


@pytest.mark.parametrize(
    ("concurrent", "expected"),
    [
        # A row that somebody deletes meanwhile stays deleted.
        (lambda t: delete_row(t, 1), [2, 4, 5, 7, 11]),
        # Rows that somebody adds meanwhile are looked at, too.
        (lambda t: commit(t, {"add": data_file(t, DS, [(20, "anna"), (21, "carla")])}), [1, 2, 4, 5, 7, 11, 21]),
        # Somebody's OPTIMIZE has put a file in the place of those that were read.
        (lambda t: join_files(t, [DS], 1 << 20, None), [1, 2, 4, 5, 7, 11]),
    ],
)
def test_an_erasure_rests_on_the_version_that_it_read(
    table: Location, monkeypatch: pytest.MonkeyPatch, concurrent: Callable[[Location], object], expected: list[int]
) -> None:
    in_between(monkeypatch, "rewrite", lambda: concurrent(table))
    result = erase(table, drop_user("anna"), "request", delete=True)
    assert result.left == []
    assert live_rows(table) == expected
    assert not erase(table, drop_user("anna"), "again", delete=True)
    # No byte of her is in any file, and no file is left that nothing names but for history's readers.
    for file in table.files():
        if file.suffix == ".parquet":
            assert "anna" not in pq.ParquetFile(file.local_path()).read()["user"].to_pylist()


def test_rows_that_a_deletion_vector_hides_go_too(table: Location) -> None:
    delete_row(table, 0)
    delete_row(table, 5)
    old = DeltaLog(table).version
    assert old is not None
    result = erase(table, drop_user("anna"), "request", delete=True)
    assert (result.rows, result.rewritten, result.left) == (3, 2, [])
    assert live_rows(table) == [1, 2, 4, 7, 11]
    assert not any(f.vector for f in DeltaLog(table).files(old + 1) or [])
    # A version before the vector is read with all rows of the others; one with it has lost its file, as by a VACUUM.
    files = [f.path for f in DeltaLog(table).files(3) or []]
    assert sorted(n for f in files for n in pq.ParquetFile(f.local_path()).read()["row"].to_pylist()) == [
        1,
        2,
        4,
        5,
        7,
        11,
    ]
    (record,) = [a["commitInfo"]["userMetadata"] for a in DeltaLog(table).actions(old + 1) if "commitInfo" in a]
    assert json.loads(record)["headrace.erasure"]["rows"] == {DS: 3}


def test_an_erasure_that_is_overtaken_every_time_says_so(table: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    real, n = Transaction.rewrite, iter(range(100, 200))

    def later(self: Transaction, *args: Any) -> int:
        commit(table, {"add": data_file(table, DS, [(next(n), "berta")])})
        return real(self, *args)

    monkeypatch.setattr(Transaction, "rewrite", later)
    with pytest.raises(UserError, match=r"was changed at version .* meanwhile; run again"):
        erase(table, drop_user("anna"), "request", delete=True)
    assert {0, 3, 6, 10} <= set(live_rows(table))


@pytest.mark.parametrize("joined", [1, 7, 10])
def test_joined_files_do_not_bring_back_a_deleted_row(
    table: Location, monkeypatch: pytest.MonkeyPatch, joined: int
) -> None:
    in_between(monkeypatch, "join", lambda: delete_row(table, joined))
    rows = live_rows(table)
    join_files(table, [DS], 1 << 20, None)
    assert live_rows(table) == [n for n in rows if n != joined]
    assert len(live(table)) == 1
    # Of the first attempt nothing is left: two files that were joined, and the one that they are.
    assert files_of(table) == 3


def test_a_day_that_was_planned_before_a_delete_is_not_replaced(table: Location) -> None:
    """Ingest looks for rows that others have deleted, reads landing files, and replaces the day."""
    read = DeltaLog(table).version
    assert read is not None

    def load(since: int, local_versions: set[int]) -> int:
        add = data_file(table, DS, [(n, USERS[n % 3]) for n in range(8)])
        file = WrittenFile(add, 8)
        return commit_files(None, table, [DS], [file], "{}", since=since, local=local_versions)  # type: ignore[arg-type]

    delete_row(table, 1)
    with pytest.raises(TransactionOvertaken, match=f"has changed {DS} meanwhile"):
        load(read, set())
    assert 1 not in live_rows(table)
    # What the run has committed itself, changes of other days and files that are only rewritten are no reason.
    read = DeltaLog(table).version
    assert read is not None
    version = load(read, set())
    commit(table, {"add": data_file(table, "2026-01-11", [(50, "berta")])})
    assert load(read, {version}) == version + 2
    read = version + 2
    commit(table, {"add": data_file(table, DS, [(51, "berta")]) | {"dataChange": False}})
    load(read, set())
    assert live_rows(table) == [*range(8), 50]


@pytest.mark.parametrize("kind", ["rows", "vector"])
def test_an_append_that_rests_on_rows_that_changed_is_refused(tmp_path: Path, kind: str) -> None:
    table = local(tmp_path / "codes")
    create_table(table, FIELDS[:2], [], [])
    add = data_file(table, "x", [(1, "anna"), (2, "berta")]) | {"partitionValues": {}}
    commit(table, {"add": add})
    transaction = Transaction(table)
    if kind == "rows":
        commit(table, {"add": data_file(table, "x", [(3, "carla")]) | {"partitionValues": {}}})
    else:
        mark_deleted(table, add, [1])
    with pytest.raises(TransactionOvertaken):
        transaction.append([data_file(table, "x", [(3, "dora")]) | {"partitionValues": {}}], "", ("app", -1))


def test_a_log_is_redacted_of_what_is_committed_meanwhile(table: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    real, late = DeltaLog.actions, iter([True])

    def actions(self: DeltaLog, version: int) -> Any:
        entries = real(self, version)
        if next(late, False):
            commit(table, {"add": data_file(table, DS, [(30, "anna")])})
        return entries

    monkeypatch.setattr(DeltaLog, "actions", actions)
    assert redact_log(table, {"user": lambda value, cut: value == "anna"}, delete=True) == 3
    assert not any("anna" in file.read_text() for file in (table / "_delta_log").entries() if file.suffix == ".json")


# --- any order -------------------------------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.sampled_from(USERS), min_size=1, max_size=4)),
    st.tuples(st.just("delete"), st.integers(0, 30)),
    st.tuples(st.just("forget"), st.sampled_from(USERS)),
    st.tuples(st.just("compact"), st.just("")),
)
CONCURRENT = STEPS.filter(lambda step: step[0] in ("append", "delete"))
HISTORY = st.lists(st.tuples(STEPS, st.lists(CONCURRENT, max_size=2)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(HISTORY)
def test_any_interleaving_of_writers(tmp_path_factory: pytest.TempPathFactory, history: list[Any]) -> None:
    """The reference is a model of rows: those that others commit during a step's commit come before the step."""
    table, model, numbers = local(tmp_path_factory.mktemp("table")), dict[int, str](), iter(range(1000))
    make_table(table)
    for users in (USERS, [*USERS, *USERS]):
        rows = [(next(numbers), user) for user in users]
        commit(table, {"add": data_file(table, DS, rows)})
        model.update(rows)

    def do(step: tuple[str, Any]) -> None:
        kind, value = step
        if kind == "append":
            rows = [(next(numbers), user) for user in value]
            commit(table, {"add": data_file(table, DS, rows)})
            model.update(rows)
        elif kind == "delete":
            if model:
                number = sorted(model)[value % len(model)]
                delete_row(table, number)
                del model[number]
        elif kind == "forget":
            assert erase(table, drop_user(value), "r", delete=True).left == []
            for number in [n for n, user in model.items() if user == value]:
                del model[number]
        else:
            join_files(table, [DS], 1 << 20, None)

    for step, concurrent in history:
        with pytest.MonkeyPatch.context() as patch:
            if step[0] in ("forget", "compact"):
                method = "rewrite" if step[0] == "forget" else "join"
                in_between(patch, method, partial(list, map(do, concurrent)))
            do(step)
        assert live_rows(table) == sorted(model)
        log = DeltaLog(table)
        assert log.version is not None
        assert sum(f.rows or 0 for f in log.files(log.version) or []) == len(model)
        if step[0] == "forget":
            for file in table.files():
                if file.suffix == ".parquet":
                    assert step[1] not in pq.ParquetFile(file.local_path()).read()["user"].to_pylist()


# --- deletion vectors ------------------------------------------------------------------------------------------------

POSITIONS = st.sets(
    st.one_of(st.integers(0, 100), st.integers(65_500, 65_600), st.integers(2**32 - 5, 2**32 + 5)), max_size=80
)


@settings(max_examples=100, deadline=None)
@given(POSITIONS)
def test_positions_of_arrays(positions: set[int]) -> None:
    add = {"path": "x", "deletionVector": inline_vector(sorted(positions))}
    assert deleted_positions(local(Path()), add).tolist() == sorted(positions)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 5_000)), min_size=1, max_size=4), st.booleans())
def test_positions_of_runs_and_of_bits(spans: list[tuple[int, int]], as_runs: bool) -> None:
    """One container of 65,536 values, as (start, length - 1) or as bits."""
    values = np.unique(np.concatenate([np.arange(a, min(a + n + 1, 65_536)) for a, n in spans]))
    edges = np.flatnonzero(np.diff(values) > 1)
    runs = [(int(part[0]), len(part) - 1) for part in np.split(values, edges + 1)]
    header = struct.pack("<HH", 3, len(values) - 1)
    if as_runs:
        body = struct.pack("<IB", 12347, 1) + header + struct.pack("<H", len(runs))
        body += b"".join(struct.pack("<HH", *run) for run in runs)
    elif len(values) > 4096:
        bits = np.zeros(65_536, np.bool_)
        bits[values] = True
        body = struct.pack("<II", 12346, 1) + header + b"\0" * 4 + np.packbits(bits, bitorder="little").tobytes()
    else:
        body = struct.pack("<II", 12346, 1) + header + b"\0" * 4 + values.astype("<u2").tobytes()
    data = struct.pack("<iqI", 1681511377, 1, 0) + body
    vector = {"storageType": "i", "pathOrInlineDv": encoded(data + b"\0" * (-len(data) % 4)), "sizeInBytes": len(data)}
    add = {"path": "x", "deletionVector": vector | {"cardinality": len(values)}}
    assert deleted_positions(local(Path()), add).tolist() == (values + 3 * 65_536).tolist()


def test_a_vector_in_a_file_and_one_that_is_damaged(tmp_path: Path) -> None:
    # The name is the example of Delta's protocol document.
    file = tmp_path / "ab" / "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    file.parent.mkdir()
    data = serialized([1, 5, 70_000])
    file.write_bytes(b"\1" + struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 1, "sizeInBytes": len(data)}
    add: dict[str, Any] = {"path": "x", "deletionVector": vector | {"cardinality": 3}}
    assert deleted_positions(local(tmp_path), add).tolist() == [1, 5, 70_000]
    for change, message in (
        ({"cardinality": 4}, "has 3 rows, and the log says 4"),
        ({"sizeInBytes": 9}, "has not the 9 bytes"),
        ({"storageType": "q"}, "storage type 'q' is not known"),
        ({"offset": 9_000}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            deleted_positions(local(tmp_path), add | {"deletionVector": add["deletionVector"] | change})
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"the checksum in .* is another one"):
        deleted_positions(local(tmp_path), add)
    file.unlink()
    with pytest.raises(UserError, match="No such file"):
        deleted_positions(local(tmp_path), add)
