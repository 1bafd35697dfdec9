"""Rows that go from a Delta table for good."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from headrace.lake.delta import erase as module
from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction
from headrace.storage import Fence, LeaseLost, local
from tests.forget_support import put_rows
from tests.storage_faults import Killed

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
