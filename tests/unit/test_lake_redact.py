"""Erasure in the lake: rows by key, values in the log, and rows of forgotten values that land again."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import TableColumn
from headrace.errors import UserError
from headrace.lake.delta import erase as module
from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.redact import exactly, is_value, redact_log
from headrace.lake.delta.transaction import Transaction
from headrace.lake.forgotten import BETWEEN, ForgottenValues, words_of
from headrace.lake.landing.blocks import Declaration, Part, TimeRange
from headrace.lake.landing.write_rows import PartCounts, ReadTask, SourceFile
from headrace.storage import Fence, LeaseLost, Location, local
from tests.forget_support import put_rows
from tests.storage_support import Killed, faulty

D1, D2 = "2026-01-10", "2026-01-11"
#: Of D1's file the smallest, of D2's the largest; the checkpoint alone tells of D1's.
REMOVED = [0, 14]
VALUES = {"n": exactly(frozenset(map(str, REMOVED)))}
PINNED = 2


def drop_removed(rows: pa.Table) -> tuple[pa.Table, int]:
    remaining = rows.filter(pc.invert(pc.is_in(rows["n"], pa.array(REMOVED, pa.int64()))))
    return remaining, rows.num_rows - remaining.num_rows


@pytest.mark.parametrize("tie", ["", "\x7f", "\U0010ffff"])
@pytest.mark.parametrize("key", ["a" * 40, "a" * 31 + "\U0001f600" * 4])
def test_texts_that_statistics_have_cut(key: str, tie: str) -> None:
    """Delta cuts the largest text after 32 units of UTF-16, and puts a character above the one that came there."""
    begin = key.encode("utf-16-le")[:64].decode("utf-16-le", "ignore")
    assert is_value(begin + tie, exactly(frozenset([key])))
    assert not is_value("b" + begin[1:] + tie, exactly(frozenset([key])))
    assert not is_value(begin[:20] + tie, exactly(frozenset([key])))


def test_texts_of_several_words(tmp_path: Path) -> None:
    """The words stand in a predicate, and in the statistics that a checksum's file repeats."""
    log, key = tmp_path / "t" / "_delta_log", "Ann, of: B"
    log.mkdir(parents=True)
    add = {"path": "a.parquet", "stats": json.dumps({"minValues": {"n": "A"}, "maxValues": {"n": key}})}
    commit_info = {"operation": "DELETE", "operationParameters": {"predicate": json.dumps([f"(n = '{key}')"])}}
    (log / f"{0:020d}.json").write_text(
        "".join(json.dumps(a) + "\n" for a in ({"add": add}, {"commitInfo": commit_info}))
    )
    (log / f"{0:020d}.crc").write_text(json.dumps({"numFiles": 1, "allFiles": [add]}))
    (log / f"{1:020d}.crc").write_text('{"numFiles"')  # cut off
    values = {"n": exactly(frozenset([key]))}
    assert redact_log(local(tmp_path / "t"), values, delete=False) == 3
    redact_log(local(tmp_path / "t"), values, delete=True)
    assert [f.name for f in log.iterdir()] == [f"{0:020d}.json"]
    assert key not in (log / f"{0:020d}.json").read_text()
    assert redact_log(local(tmp_path / "t"), values, delete=False) == 0


def trimmed(folder: Path) -> Location:
    """A table whose log begins with a checkpoint, after which a file of it was removed."""
    table = local(folder)
    for ds, start in ((D1, 0), (D2, 10)):
        put_rows(table, ds, pa.table({"n": pa.array(range(start, start + 5), pa.int64())}))
    DeltaTable(str(table)).create_checkpoint()
    put_rows(table, D1, pa.table({"n": pa.array([5, 6], pa.int64())}))
    for version in (0, 1):
        (table / "_delta_log" / f"{version:020d}.json").remove()
    return table


def rows_at(table: Location, version: int) -> list[int]:
    files = DeltaLog(table).plain_files(version)
    assert files is not None
    return sorted(n for f in files for n in pq.ParquetFile(f.path).read()["n"].to_pylist())


def erased(table: Location) -> None:
    assert erase(table, Change(("n",), drop_removed), "request", delete=True).left == []
    redact_log(table, VALUES, delete=True)


def test_an_older_version_that_rests_on_a_checkpoint(tmp_path: Path) -> None:
    table = trimmed(tmp_path / "t")
    assert rows_at(table, PINNED) == [*range(5), *range(10, 15)]
    assert redact_log(table, VALUES, delete=False) == 3  # the checkpoint, the commits that added D2 and removed D1
    erased(table)
    assert rows_at(table, PINNED) == [1, 2, 3, 4, 10, 11, 12, 13]
    assert rows_at(table, DeltaLog(table).version or 0) == [5, 6, 10, 11, 12, 13]
    assert redact_log(table, VALUES, delete=False) == 0
    # By another reader: the same files as before, with the statistics of others.
    (checkpoint,) = Path(table / "_delta_log").glob("*.checkpoint.parquet")
    stats = [a["stats"] for a in pq.read_table(checkpoint)["add"].to_pylist() if a]
    assert sorted('"minValues":{}' in s.replace(" ", "") for s in stats) == [True, True]
    assert len(DeltaTable(str(table)).file_uris()) == 2


def test_killed_at_every_call(tmp_path: Path) -> None:
    trimmed(tmp_path / "made")
    calls = 1
    while True:
        shutil.copytree(tmp_path / "made", tmp_path / str(calls))
        table = local(tmp_path / str(calls))
        with faulty(calls, kills=True) as faults, suppress(Killed):
            erased(table)
        assert {1, 2, 3, 4, 10, 11, 12, 13} <= {*rows_at(table, PINNED)} <= {*range(5), *range(10, 15)}
        erased(table)
        assert rows_at(table, PINNED) == [1, 2, 3, 4, 10, 11, 12, 13], calls
        assert redact_log(table, VALUES, delete=False) == 0
        if faults.calls_made < calls:
            break
        calls += 1
    assert calls > 10


DS = "2026-01-10"


def drop_value(value: int) -> Change:
    def apply(rows: pa.Table) -> tuple[pa.Table, int]:
        remaining = rows.filter(pc.not_equal(rows["n"], value))
        return remaining, rows.num_rows - remaining.num_rows

    return Change(("n",), apply)


def test_another_erasure_after_one_that_was_killed_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was to take the place of the live one has rows to go itself, and is replaced before it is live."""
    table = local(tmp_path / "t")
    put_rows(table, DS, pa.table({"n": pa.array(range(5), pa.int64())}))

    def killed(*_: object) -> int:
        raise Killed

    with monkeypatch.context() as m:
        m.setattr(module.Transaction, "rewrite", killed)
        with pytest.raises(Killed):
            erase(table, drop_value(1), "first", delete=True)
    result = erase(table, drop_value(2), "second", delete=True)
    assert (result.left, result.rewritten) == ([], 1)
    log = DeltaLog(table)
    assert log.version is not None
    live = [pq.ParquetFile(Path(f.path)).read()["n"].to_pylist() for f in log.files(log.version) or []]
    assert live == [[0, 3, 4]]
    # What the commit says went, of both; and the versions before are read without them.
    (metadata,) = [a["commitInfo"]["userMetadata"] for a in log.actions(log.version) if "commitInfo" in a]
    assert f'"{DS}": 2' in metadata
    assert [f.rows for f in log.files(log.version - 1) or []] == [3]
    assert [pq.ParquetFile(f).metadata.num_rows for f in Path(table).rglob("*.parquet")] == [3]
    for value in (1, 2):
        assert not erase(table, drop_value(value), "again", delete=True)


def test_a_run_that_stood_still_does_not_name_files_that_went(tmp_path: Path) -> None:
    """The run had written a file with rows to go, and no commit; no file of the table had to be written again."""
    table = local(tmp_path / "t")
    put_rows(table, DS, pa.table({"n": pa.array([5], pa.int64())}))
    transaction = Transaction(table, fence=Fence("l", 1))
    left = table / f"ds={DS}" / "left.parquet"
    with left.new_file() as path:
        pq.write_table(pa.table({"n": pa.array([1], pa.int64())}), path)
    result = erase(table, drop_value(1), "request", delete=True, fence=Fence("l", 2))
    assert (result.removed, result.rewritten, left.is_file()) == (1, 0, False)
    with pytest.raises(LeaseLost):
        transaction.replace("ds", [DS], [], "")


COLUMNS = (TableColumn(name="user", type="bigint"), TableColumn(name="note"))


def listed(column: str, *texts: str) -> ForgottenValues:
    return ForgottenValues.new().having(column, texts)


@given(st.lists(st.text(max_size=4) | st.none()), st.sets(st.text(max_size=4), min_size=1))
def test_masks_are_those_of_plain_sets(values: list[str | None], forgotten: set[str]) -> None:
    mask = listed("c", *forgotten).mask("c", pa.array(values, pa.string()))
    assert mask.tolist() == [v in forgotten for v in values]


def test_hashes_are_of_salt_column_and_text(tmp_path: Path) -> None:
    forgotten = listed("user", "17")
    assert forgotten.columns["user"] == (hashlib.sha256(f"{forgotten.salt}/user/17".encode()).hexdigest(),)
    assert forgotten.having("user", ["17"]) == forgotten
    assert forgotten.words == {}
    assert listed("user", "17").columns != forgotten.columns  # another salt
    file = local(tmp_path / "values.json")
    assert ForgottenValues.load(file) is None
    for values in (forgotten, forgotten.having("note", ["Ann B. Lee", "x|y", "(z)", "--", "w", "::"])):
        file.put_text(values.to_text())
        assert ForgottenValues.load(file) == values
    assert values.words == {"note": (1, 2, 3)}
    assert len(values.columns["note"]) == 6 + 3
    # A value that has the same words is another one.
    assert values.mask("note", pa.array(["Ann B. Lee", "Ann,B.,Lee", "z", "(z)", "x"])).tolist() == [1, 0, 0, 1, 0]
    file.put_text("{")
    with pytest.raises(UserError, match="whose rows must not be loaded again"):
        ForgottenValues.load(file)


def test_a_task_leaves_their_rows_out(tmp_path: Path) -> None:
    users = np.random.default_rng(1).integers(-3, 9, 500)
    users[7] = 5
    lines = [json.dumps({"user": int(u), "note": f"n{i}"}) for i, u in enumerate(users)]
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    schema = pa.schema(
        [("user", pa.int64()), ("note", pa.string()), ("_source_file", pa.string()), ("_source_line", pa.int64())]
    )
    task = ReadTask(
        ((Part(0, local(tmp_path / "a.jsonl")),),),
        {0: SourceFile("2026-01-01", "a.jsonl", TimeRange(None, 0), None)},
        Declaration(COLUMNS, (), "UTC", {}, {}, None),
        False,
        (),
        local(tmp_path / "table"),
        schema,
        local(tmp_path / "scratch"),
        "zstd",
        listed("user", "-3", "5"),
    )
    (result,) = task(0)
    counts = PartCounts(**result["parts"][0])
    is_forgotten = np.isin(users, [-3, 5])
    assert (counts.lines, counts.forgotten, counts.good, counts.judged["good"]) == (
        500,
        is_forgotten.sum(),
        (~is_forgotten).sum(),
        0,
    )
    rows = pq.read_table(tmp_path / "table" / result["data"]["add"]["path"], partitioning=None)
    assert rows["user"].to_pylist() == users[~is_forgotten].tolist()
    assert rows["_source_line"].to_pylist() == (np.flatnonzero(~is_forgotten) + 1).tolist()


@given(st.text("aé,;| \t\x1c\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b", max_size=9))
def test_words_are_the_same_in_java_and_python(text: str) -> None:
    """Spark splits lines by Java's regular expressions, whose `\\s` has blanks of ASCII alone."""
    assert words_of(text) == re.split(BETWEEN, text, flags=re.ASCII)
    assert all(word == "".join(word.split()) for word in words_of(text))
