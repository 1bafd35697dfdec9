"""Commits by Spark under a lease: a later holder's refuse those of an earlier one, also in the middle of a write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

from headrace.lake.delta.compact import join_files
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, claim, create_table
from headrace.lake.delta.with_spark import save_delta
from headrace.storage import Fence, LeaseLost, Location, local


def writer(rows: DataFrame) -> DataFrameWriter:
    return rows.write.format("delta").mode("overwrite").partitionBy("ds").option("replaceWhere", "ds = 'd1'")


def rows(spark: SparkSession, n: int) -> DataFrame:
    return spark.range(n, n + 1).selectExpr("id", "'d1' AS ds")


def paused_while(rows: DataFrame, table: Location, later: Callable[[], object]) -> None:
    """Have a first holder's Spark job stand in the middle of its write, until a later one has done something."""
    folder = Path(str(table)).parent
    started, go = folder / "began", folder / "go"

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        started.touch()
        while not go.exists():
            time.sleep(0.02)
        yield from batches

    # One task: the other one's job needs a slot, too.
    slow = rows.coalesce(1).mapInArrow(wait, rows.schema)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(save_delta, writer(slow), table, Fence("l", 1))
        try:
            while not started.exists():
                assert not paused.done(), paused.result()
                time.sleep(0.02)
            later()
        finally:
            go.touch()
        with pytest.raises(LeaseLost, match="a later holder of the lease has committed since"):
            paused.result()


@pytest.mark.parametrize("later", ["with rows", "without"])
def test_of_two_first_commits_the_later_holders_stands(spark: SparkSession, tmp_path: Path, later: str) -> None:
    """There is no table yet when both holders begin."""
    table, new = local(tmp_path / "table"), Fence("l", 2)

    def commit_as_later_holder() -> None:
        if later == "with rows":
            assert save_delta(writer(rows(spark, 8)), table, new) == 0
        else:
            day = {"name": "ds", "type": "string", "nullable": True, "metadata": {}}
            assert create_table(table, [day], ["ds"], fence=new, configuration={})

    paused_while(rows(spark, 7), table, commit_as_later_holder)
    assert DeltaLog(table).version == 0
    assert save_delta(writer(rows(spark, 9)).option("mergeSchema", "true"), table, new) == 1
    assert [tuple(r) for r in spark.read.format("delta").load(str(table)).select("id", "ds").collect()] == [(9, "d1")]


def test_of_two_holders_the_later_one_commits(spark: SparkSession, tmp_path: Path) -> None:
    table = local(tmp_path / "table")
    old, new = Fence("l", 1), Fence("l", 2)

    def ids_in_table() -> list[int]:
        return [r["id"] for r in spark.read.format("delta").load(str(table)).collect()]

    # Several commits of one holder: none is taken for one that was made before. Others' say nothing.
    for n, fence in enumerate((old, old, Fence("other", 9), None, old)):
        assert save_delta(writer(rows(spark, n)), table, fence) == n
        assert ids_in_table() == [n]

    # Of another day: by its rows alone it would stand in nobody's way.
    paused_while(rows(spark, 7), table, lambda: Transaction(table, fence=new).replace("ds", ["d2"], [], "theirs"))
    assert ids_in_table() == [4]
    with pytest.raises(LeaseLost):
        save_delta(writer(rows(spark, 8)), table, old)
    assert DeltaLog(table).version == 5
    assert save_delta(writer(rows(spark, 9)), table, new) == 6
    assert ids_in_table() == [9]


def test_a_commit_that_delta_passes_over_is_noticed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later holder commits between the look at the log and the beginning of the write."""
    table = local(tmp_path / "table")
    save_delta(writer(rows(spark, 0)), table, Fence("l", 1))
    real = DataFrameWriter.save

    def save(self: DataFrameWriter, path: str) -> None:
        monkeypatch.setattr(DataFrameWriter, "save", real)
        Transaction(table, fence=Fence("l", 2)).replace("ds", ["d2"], [], "theirs")
        real(self, path)

    monkeypatch.setattr(DataFrameWriter, "save", save)
    with pytest.raises(LeaseLost):
        save_delta(writer(rows(spark, 1)), table, Fence("l", 1))
    assert DeltaLog(table).version == 1


@pytest.mark.parametrize("vectors", ["false", "true"])
@pytest.mark.parametrize("partitioned", [True, False])
def test_files_are_joined_by_the_holder_alone(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitioned: bool, vectors: str
) -> None:
    """Rows, their changes and older versions stay; a later holder's commit in between refuses the joined files."""
    table, old, new = local(tmp_path / "table"), Fence("l", 1), Fence("l", 2)
    for n in range(4):
        writing = rows(spark, 2 * n).unionAll(rows(spark, 2 * n + 1)).coalesce(1).write.format("delta").mode("append")
        writing = writing.partitionBy("ds") if partitioned else writing
        writing.option("delta.enableChangeDataFeed", "true").option("delta.enableDeletionVectors", vectors).save(
            str(table)
        )
    spark.sql(f"DELETE FROM delta.`{table}` WHERE id = 3")
    days: list[str | None] = ["d1"] if partitioned else [None]
    log = DeltaLog(table)

    def ids_in_table() -> list[int]:
        return sorted(r["id"] for r in spark.read.format("delta").load(str(table)).collect())

    join_files(table, days, 1 << 20, old)
    assert log.version == 5
    (file,) = log.files(5) or []
    assert (file.rows, file.deleted, file.vector) == (7, 0, "")
    assert ids_in_table() == [0, 1, 2, 4, 5, 6, 7]
    assert not any(a.data_change for c in log.commits() if c.version == 5 for a in (*c.adds, *c.removes))
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 5)
    assert feed.load(str(table)).count() == 0
    assert len(log.files(3) or []) == 4

    more = rows(spark, 9).write.format("delta").mode("append")
    (more.partitionBy("ds") if partitioned else more).save(str(table))
    files_before = set(table.files())
    real = Transaction.join

    def overtaken(self: Transaction, *arguments: Any) -> int:
        claim(table, new)
        return real(self, *arguments)

    monkeypatch.setattr(Transaction, "join", overtaken)
    with pytest.raises(LeaseLost, match="a later holder of the lease has committed since"):
        join_files(table, days, 1 << 20, old)
    assert log.version == 7
    assert log.files(7) == log.files(6)
    assert {f for f in set(table.files()) - files_before if f.suffix == ".parquet"} == set()
