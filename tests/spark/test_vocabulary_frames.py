"""Codes that Spark gives, and no process holds, are those that the driver gives of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.features.vocabulary import delta_table, frame_codes, keyed_tables, lookup
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.vocabulary.lookup import FileLookup, Lookup, MappedLookup, lookup_of
from headrace.features.vocabulary.restoration import SavedCopies
from headrace.lake.delta.log import DeltaLog
from headrace.storage import Location, local

RULES = {
    "b": VocabularyRule(),
    "a": VocabularyRule(max_size=9),
    "é": VocabularyRule(oov_buckets=3),
    "none": VocabularyRule(),
}


def counts(seed: int) -> pa.Table:
    """Values of three vocabularies, most of them alike in count or day; and of one that nobody asks for."""
    rng = np.random.default_rng(seed)
    rows = []
    for name in ("a", "b", "é", "other"):
        values = sorted({f"{'xé'[int(v) % 2]}{v}" for v in rng.integers(0, 60, 25)})
        rows += [
            {"name": name, "value": v, "count": int(rng.integers(1, 4)), "day": int(rng.integers(0, 3))} for v in values
        ]
    order = rng.permutation(len(rows))
    schema = pa.schema([("name", pa.string()), ("value", pa.string()), ("count", pa.int64()), ("day", pa.int64())])
    return pa.Table.from_pylist([rows[i] for i in order], schema)


def stored(path: Location) -> list[dict[str, object]]:
    """All rows of the newest version."""
    files = DeltaLog(path).plain_files(DeltaLog(path).version)
    assert files is not None
    rows = [row for f in files for row in pq.read_table(f.path.local_path()).to_pylist()]
    return sorted(rows, key=lambda r: (r["name"], r["code"]))


def test_codes_are_those_of_the_driver(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_codes, "PARTITION_VALUES", 4)
    monkeypatch.setattr(keyed_tables, "_GROUP_ROWS", 5)
    monkeypatch.setattr(delta_table, "_FILE_ROWS", 7)
    driver_path, spark_path = local(tmp_path / "here"), local(tmp_path / "there")

    def both(ds: str, seed: int, version: int | None = None) -> None:
        counted = counts(seed)
        expected = VocabularyTable(spark, driver_path, ds, version)
        tables = expected.update(counted, RULES)
        monkeypatch.setattr(delta_table, "driver_python_bytes", lambda spark: -1)
        actual = VocabularyTable(spark, spark_path, ds, version, local(tmp_path))
        with actual.in_background():
            lookups = actual.update(spark.createDataFrame(counted).repartition(3), RULES)
            actual.wait()
        assert lookups.keys() == tables.keys()
        for name, written in lookups.items():
            table = lookup_of(tables[name])
            assert isinstance(written, FileLookup)
            assert written.table.equals(table.table), name
            assert (len(written), written.cardinality) == (len(table), table.cardinality)
            pq.write_table(table.table, tmp_path / "one", 5, compression="zstd")
            assert written.path.read_bytes() == (tmp_path / "one").read_bytes()
        assert (actual.added, actual.version) == (expected.added, expected.version)
        assert stored(spark_path) == stored(driver_path)

    both("2026-01-03", 1)
    assert {r["name"] for r in stored(spark_path)} == {"a", "b", "é"}
    both("2026-01-03", 1)  # again: nothing is added
    with monkeypatch.context() as patch:  # texts of 4 bytes are long
        patch.setattr(frame_codes, "_BEGINNING", 0)
        patch.setattr(frame_codes, "PARTITION_VALUES", 20)
        patch.setattr(frame_codes, "PARTITION_BYTES", 40)
        both("2026-01-05", 2)
    both("2026-01-04", 3)  # an older day sees no more than it counted of the later one
    both("2026-01-03", 1, version=0)
    assert DeltaLog(spark_path).version == 2

    table = VocabularyTable(spark, spark_path, "2026-01-06")
    with pytest.raises(UserError, match="began with oov_buckets: 3"):
        table.update(spark.createDataFrame(counts(4)), {"é": VocabularyRule()})
    assert DeltaLog(spark_path).version == 2


def test_lost_files_are_made_again_with_what_spark_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several files of one commit: each has a place again, and the counts of the day's own values are as they were."""
    monkeypatch.setattr(delta_table, "_FILE_ROWS", 7)
    monkeypatch.setattr(delta_table, "driver_python_bytes", lambda spark: -1)
    path, saved = local(tmp_path / "v"), dict[str, dict[str, pa.Table]]()
    copies = SavedCopies(
        1, lambda: ((ds, name, table) for ds, tables in saved.items() for name, table in tables.items())
    )

    def update(ds: str, seed: int) -> None:
        table = VocabularyTable(spark, path, ds, scratch=local(tmp_path), copies=copies if saved else None)
        vocabularies = table.update(spark.createDataFrame(counts(seed)), RULES)
        saved[ds] = {name: lookup_of(vocabulary).table for name, vocabulary in vocabularies.items()}

    update("2026-01-03", 1)
    update("2026-01-04", 2)
    stored_before, codes = stored(path), dict(saved["2026-01-04"])
    commits = {commit.version: [add.path.local_path() for add in commit.adds] for commit in DeltaLog(path).commits()}
    lost = [*commits[0][:2], *commits[1][1:]]
    assert len(lost) > 3
    for file in lost:
        file.write_bytes(b"")
    update("2026-01-04", 2)
    assert saved["2026-01-04"] == codes
    after = stored(path)
    assert [row | {"count": 0} for row in after] == [row | {"count": 0} for row in stored_before]
    assert all(
        new["count"] == old["count"]
        for old, new in zip(stored_before, after, strict=True)
        if old["added_ds"][-1] == "4"
    )


def partitions_of(frame: DataFrame) -> list[list[Row]]:
    """Rows in their order, by partition."""
    partitions = list[list[Row]]()
    for row in frame.withColumn("partition", F.spark_partition_id()).collect():
        if not partitions or partitions[-1][0].partition != row.partition:
            partitions.append([])
        partitions[-1].append(row)
    return partitions


def test_long_texts_are_in_order_in_even_partitions(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that begin alike, and long ones that stand together among short ones."""
    rng = np.random.default_rng(5)
    alike = [f"{'same ' * 60}é{i} {'y' * int(rng.integers(50, 100))}" for i in rng.permutation(200)]
    alike += [alike[0][:n] for n in range(301, 330)]  # one begins as the other
    short = [f"{'az'[i % 2]}{i}" for i in range(2_000)]
    long = [f"long {i} {'日' * 1_000}" for i in range(20)]
    rows = [("v", text) for text in (*alike, *short, *long)] + [("w", text) for text in short[:100]]
    rows = [(name, text, i) for i, (name, text) in enumerate(rows)]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    frame = spark.createDataFrame(pa.table(dict(zip(("name", "value", "code"), zip(*rows, strict=True), strict=True))))
    monkeypatch.setattr(frame_codes, "PARTITION_VALUES", 500)
    monkeypatch.setattr(frame_codes, "PARTITION_BYTES", 8_000)
    orders: list[tuple[list[str | Column], Callable[[tuple[str, str, int]], Any]]] = [
        (["name", "value"], lambda r: (r[0], r[1].encode())),
        (["name", "code"], lambda r: (r[0], r[2])),
        (["name", -F.col("code") % 7, "value"], lambda r: (r[0], -(r[2] % 7), r[1].encode())),
    ]
    for by, key in orders:
        partitions = partitions_of(frame_codes.ordered(frame.repartition(3), by))
        expected = sorted(rows, key=key)
        assert [(r.name, r.value, r.code) for part in partitions for r in part] == expected
        weights = [sum(1 / 500 + len(r.value.encode()) / 8_000 for r in part) for part in partitions]
        # A row of 3,000 bytes more or less, and what a sample does not know.
        assert max(weights) < 2, by
        assert len(partitions) < 2.5 * sum(weights)


def test_texts_are_looked_at_whole_where_they_are_long(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are short, or few, cost no further pass."""
    calls = list[int]()

    def noted(frame: DataFrame, *args: Any) -> DataFrame:
        calls.append(frame.count())
        return frame

    monkeypatch.setattr(frame_codes, "size_ranges", noted)
    monkeypatch.setattr(frame_codes, "PARTITION_BYTES", 1_000)
    for length, rows, sees in ((256, 100, 0), (257, 15, 0), (257, 16, 16)):
        texts = pa.table({"value": [f"{i:0{length}}" for i in range(rows)]})
        frame_codes.ordered(spark.createDataFrame(texts), ["value"])
        assert sum(calls) == sees


def test_known_values_are_counted_behind_deletion_vectors(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes no more than it may, also of a table whose files have rows that are no more."""
    path, rules = local(tmp_path / "v"), {"a": VocabularyRule()}
    known = {"name": ["a"] * 9, "value": [f"x{i}" for i in range(9)], "count": [2] * 9, "day": [0] * 9}
    VocabularyTable(spark, path, "2026-01-03").update(pa.table(known), rules)
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE value = 'x4'")
    version = DeltaLog(path).version
    assert version is not None
    assert DeltaLog(path).plain_files(version) is None
    counted = spark.createDataFrame(pa.table({"name": ["a"], "value": ["new"], "count": [1], "day": [0]}))

    def held_bytes(values: int, spark: SparkSession) -> int:
        return values * delta_table._VALUE_BYTES + (8 * len("x0") + len("new")) * delta_table._TEXTS

    # 8 known ones and the counted one.
    for most, by_spark in ((8, True), (9, False)):
        monkeypatch.setattr(delta_table, "driver_python_bytes", partial(held_bytes, most))
        vocabulary = VocabularyTable(spark, path, "2026-01-04", version, local(tmp_path)).update(counted, rules)["a"]
        assert isinstance(vocabulary, FileLookup) == by_spark
        assert lookup_of(vocabulary).table.column("value").to_pylist() == [f"x{i}" for i in range(9) if i != 4]


@pytest.mark.parametrize("as_frame", [True, False])
def test_long_texts_are_given_codes_by_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_frame: bool
) -> None:
    """Spark gives the codes if counted and known texts are more than a column holds, whoever has counted them."""
    counted, path = counts(1), local(tmp_path / "v")
    values = counted.column("value")
    text_bytes = sum(len(v.encode()) for v in values.to_pylist()) if as_frame else values.nbytes
    monkeypatch.setattr(delta_table, "MOST_TEXT_IN_DRIVER", text_bytes)

    def assign(ds: str) -> Mapping[str, pa.Table | Lookup]:
        table = VocabularyTable(spark, path, ds, scratch=local(tmp_path / "scratch"))
        return table.update(spark.createDataFrame(counted) if as_frame else counted, RULES)

    first, second = assign("2026-01-03"), assign("2026-01-04")
    assert {type(vocabulary) for vocabulary in first.values()} == {pa.Table}
    assert {type(vocabulary) for vocabulary in second.values()} == {FileLookup}
    for name, table in first.items():
        assert lookup_of(second[name]).table.equals(lookup_of(table).table)


def test_a_mapped_vocabulary_is_made_by_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_BATCH_ROWS", 6)
    table = pa.table({"value": [f"v{i * i}" for i in range(20)], "code": pa.array(range(2, 22), pa.int64())})
    in_memory = Lookup(table)
    for groups in (6, 4, 20):
        pq.write_table(in_memory.table, tmp_path / "file", groups)
        folder = local(tmp_path / str(groups))
        folder.make_dir()
        MappedLookup.write_file(tmp_path / "file", folder)
        mapped = MappedLookup(folder)
        values = pa.array(["v4", "v5", "v361", None, "v0"])
        assert mapped.codes(values).tolist() == in_memory.codes(values).tolist() == [4, 1, 21, 0, 2]
        assert mapped.table.combine_chunks().equals(in_memory.table)
