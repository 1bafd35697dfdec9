"""Codes of vocabularies that no process holds: Spark compares, orders and numbers the values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.vocabulary.codes import VocabularyRule, began_otherwise
from headrace.lake.spark.exchange import bounded_batches, partition_keys

#: Rows that are looked at for a range of rows that are even, and characters of a text.
_SAMPLED, _COMPARED = 16, 1 << 16
#: A row's hash is less than its share of this: it is looked at.
_SHARES = 1 << 20


def size_ranges(frame: DataFrame, keys: Sequence[Column], text: Column | None, size: Column) -> DataFrame:
    """Return the rows in partitions that follow each other in the order of their keys.

    Args:
        frame: the rows.
        keys: what is compared first; not null.
        text: what is compared last, not null; None: the keys are all. Texts that begin with the same 65,536
            characters, and have the same keys, are in one partition.
        size: of a row; a partition has rows of about 1 together.
    """
    names = [f"k{i}" for i in range(len(keys))]
    compared = [key.alias(name) for key, name in zip(keys, names, strict=True)]
    begins = list(compared)
    if text is not None:
        compared.append(text.alias("text"))
        begins.append(F.substring(text, 1, _COMPARED).alias("text"))
    share = F.least(F.lit(1.0), size * _SAMPLED)
    few = F.pmod(F.xxhash64(*keys, *([] if text is None else [text])), F.lit(_SHARES)) < share * _SHARES
    sample = frame.where(few).select(*begins, (size / share).alias("size"))
    schema = sample.drop("size").schema
    sample = sample.repartition(1).sortWithinPartitions(*schema.names)
    with bounded_batches(frame.sparkSession):
        starts = sample.mapInArrow(FindStarts(tuple(names), text is not None).run, schema).toArrow()
    if not starts.num_rows:
        return frame.repartition(1)
    places = partition_keys(starts.num_rows + 1)
    starts_array = pa.StructArray.from_arrays(
        [column.combine_chunks() for column in starts.columns], fields=[starts.schema.field(n) for n in schema.names]
    )
    row = {
        "__starts": pa.ListArray.from_arrays(pa.array([0, len(starts_array)], pa.int32()), starts_array),
        "__places": pa.array([places], pa.list_(pa.int32())),
    }
    starts_row = F.broadcast(frame.sparkSession.createDataFrame(pa.table(row)))
    # How many ranges begin at the row or before it, by halves: the steps are powers of 2, the largest first.
    steps = [F.lit(1 << i) for i in reversed(range(starts.num_rows.bit_length()))]
    range_ = F.aggregate(
        F.array(*steps),
        F.lit(0),
        lambda position, step: F.when(
            F.get("__starts", position + step - 1) <= F.struct(*compared), position + step
        ).otherwise(position),
    )
    placed = frame.crossJoin(starts_row).withColumn("__place", F.get("__places", range_)).drop(*row)
    return placed.repartition(len(places), "__place").drop("__place")


@dataclass(frozen=True)
class FindStarts:
    """Task that finds where ranges begin, in sorted rows (keys, text where there is one, size)."""

    keys: tuple[str, ...]
    #: Whether rows have a text.
    text: bool

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """(keys, text where there is one) of the first rows; of a text its beginning."""
        last: list[Any] | None = None
        filled = 0.0
        for batch in batches:
            columns = [column.to_pylist() for column in batch.select(self.keys).columns]
            if self.text:
                columns.append(batch.column("text").cast(pa.binary()).to_pylist())
            starts = []
            for *row, size in zip(*columns, batch.column("size").to_pylist(), strict=True):
                if last is not None and filled + size > 1 and row != last:
                    starts.append(self._start(last, row))
                    filled = 0.0
                filled += size
                last = row
            if starts:
                arrays = [
                    pa.array(values, batch.schema.field(name).type)
                    for name, values in zip(self.keys, zip(*starts, strict=True), strict=False)
                ]
                if self.text:
                    # The beginning of what is no UTF-8 is none either.
                    arrays.append(pa.array([start[-1] for start in starts], pa.binary()).view(pa.string()))
                yield pa.RecordBatch.from_arrays(arrays, [*self.keys, *(["text"] if self.text else [])])

    def _start(self, last: list[Any], row: list[Any]) -> list[Any]:
        """Return a boundary at the row or before it, and after the last one."""
        if not self.text:
            return row
        return [*row[:-1], beginning(last[-1], row[-1]) if row[:-1] == last[:-1] else b""]


def beginning(previous: bytes, text: bytes) -> bytes:
    """Return the shortest beginning of a text, in whole characters, that is behind the text before it."""
    alike = min(len(previous), len(text))
    end = next((i for i in range(alike) if previous[i] != text[i]), alike) + 1
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end += 1
    return text[:end]


#: Values of a partition, and bytes of their texts: what the driver takes at once, and what a task sorts.
PARTITION_VALUES, PARTITION_BYTES = 1 << 18, 32 << 20
#: Characters by which texts are put into partitions: Spark brings a sample of them to the driver, some hundred of each
#: partition, however long they are.
_BEGINNING = 256
#: What texts of more bytes than that hold together, in partitions, above which they are looked at whole.
_LONG_PARTITIONS = 4
#: Which row of its partition a row is, in what `monotonically_increasing_id` gives.
_ROW_BITS = 33


@dataclass(frozen=True)
class GivenCodes:
    """Codes that a fit of a day assigns and sees."""

    #: (name, value, code, count) of all that the day sees, in order of name and code; `count` null where the code was
    #: given before.
    rows: DataFrame
    #: By vocabulary: values that this day's earlier fits added.
    earlier: Mapping[str, int]


@contextmanager
def codes_of(
    counted: DataFrame, known: DataFrame, rules: Mapping[str, VocabularyRule], ds: str, *, pinned: bool
) -> Iterator[GivenCodes]:
    """Return codes for the counted values that have none, which go on after the highest known one.

    Args:
        counted: (name, value, count, day): those that the rules' `min_count` leaves.
        known: (name, value, code, added_ds), of this and all other days.
        rules: of all vocabularies; rows of others are not looked at.
        ds: the day: of later days' values it sees those that it counted.
        pinned: no new code is given.

    Raises:
        UserError: a vocabulary began with another number of out-of-vocabulary buckets.
    """
    persisted_frames: list[DataFrame] = []

    def persisted(frame: DataFrame) -> DataFrame:
        persisted_frames.append(frame.persist(StorageLevel.DISK_ONLY))
        return persisted_frames[-1]

    names = list(rules)
    try:
        known = known.where(F.col("name").isin(names))
        ends_rows = known.groupBy("name").agg(F.min("code").alias("low"), F.max("code").alias("high")).collect()
        ends = {r["name"]: r for r in ends_rows}
        for name, end in ends.items():
            if end.low != rules[name].first_code:
                raise began_otherwise(name, end.low)
        highest = {name: ends[name].high if name in ends else rules[name].first_code - 1 for name in names}
        both = ["name", "value"]
        new = counted.where(F.col("name").isin(names)).join(known.select(*both), both, "left_anti")
        if pinned:
            new = new.where(F.lit(False))
        room = {
            name: max(size - (highest[name] - rule.first_code + 1), 0)
            for name, rule in rules.items()
            if (size := rule.max_size) is not None
        }
        by_count: list[str | Column] = [-F.col("count"), "value"]
        if room:
            ranks = ranked(persisted, new.where(F.col("name").isin(list(room))), by_count)
            few = ranks.where(F.col("rank") < of_name(room)).drop("rank")
            new = few.unionByName(new.where(~F.col("name").isin(list(room))))
        first = {name: code + 1 for name, code in highest.items()}
        new_codes = ranked(persisted, new, [F.col("day"), *by_count])
        new_codes = new_codes.select(*both, (F.col("rank") + of_name(first)).alias("code"), "count")
        counted_values = counted.select(*both, F.lit(True).alias("counted"))
        seen = known.join(counted_values, both, "left").where((F.col("added_ds") <= ds) | F.col("counted"))
        seen = seen.select(*both, "code", F.lit(None).cast("bigint").alias("count"))
        all_codes = persisted(ordered(seen.unionByName(new_codes), ["name", "code"]))
        earlier = known.where(F.col("added_ds") == ds).groupBy("name").count().collect()
        yield GivenCodes(all_codes, {r["name"]: r["count"] for r in earlier})
    finally:
        for frame in persisted_frames:
            frame.unpersist()


def of_name(numbers: Mapping[str, int]) -> Column:
    """Return the number of a row's vocabulary, `name`; null of others."""
    pairs = [F.lit(x).cast("bigint") if i else F.lit(x) for pair in numbers.items() for i, x in enumerate(pair)]
    return F.element_at(F.create_map(*pairs), F.col("name"))


def ordered(frame: DataFrame, by: Sequence[str | Column], text: str = "value") -> DataFrame:
    """Return the rows in order, in so many partitions that each is small.

    Args:
        frame: the rows.
        by: in ascending order, not null.
        text: the column that may be long; the last of `by`, or not in it.
    """
    size = F.octet_length(text)
    rows, bytes_, long = frame.agg(F.count(F.lit(1)), F.sum(size), F.sum(F.when(size > _BEGINNING, size))).collect()[0]
    if (long or 0) > _LONG_PARTITIONS * PARTITION_BYTES:
        # Partitions of as many rows may have any size: where long texts stand together, or many begin alike.
        keys = [F.col(c) if isinstance(c, str) else c for c in by]
        last = keys.pop() if isinstance(by[-1], str) and by[-1] == text else None
        share = F.lit(1 / PARTITION_VALUES) + F.coalesce(size, F.lit(0)) / F.lit(float(PARTITION_BYTES))
        return size_ranges(frame, keys, last, share).sortWithinPartitions(*by)
    partitions = max(1, -(-rows // PARTITION_VALUES), -(-(bytes_ or 0) // PARTITION_BYTES))
    # Texts that begin otherwise are in the order of their beginnings; those that begin alike are in one partition.
    frame = frame.repartitionByRange(
        partitions, *(F.substring(text, 1, _BEGINNING) if isinstance(c, str) and c == text else c for c in by)
    )
    return frame.sortWithinPartitions(*by)


def ranked(persisted: Callable[[DataFrame], DataFrame], frame: DataFrame, by: Sequence[str | Column]) -> DataFrame:
    """Return the rows with `rank`: where a row stands among those of its `name`, from 0, in the order of `by` (no
    ties).
    """
    # Looked at twice: partitions must be the same ones.
    rows = persisted(ordered(frame, [F.col("name"), *by]))
    place = rows.withColumn("partition", F.spark_partition_id()).withColumn(
        "rank", F.monotonically_increasing_id().bitwiseAND((1 << _ROW_BITS) - 1)
    )
    cells = place.groupBy("partition", "name").agg(F.count(F.lit(1)).alias("rows")).collect()
    # Rows of a partition are by name: its first row of a name has those of smaller names before it.
    rows_of_partition, of_name_, starts = dict[int, int](), dict[str, int](), list[tuple[int, str, int]]()
    for cell in sorted(cells, key=lambda c: (c.partition, c["name"].encode())):
        name = cell["name"]
        starts.append((cell.partition, name, of_name_.get(name, 0) - rows_of_partition.get(cell.partition, 0)))
        rows_of_partition[cell.partition] = rows_of_partition.get(cell.partition, 0) + cell.rows
        of_name_[name] = of_name_.get(name, 0) + cell.rows
    shift = frame.sparkSession.createDataFrame(starts, "partition int, name string, shift bigint")
    joined = place.join(F.broadcast(shift), ["partition", "name"])
    return joined.withColumn("rank", F.col("rank") + F.col("shift")).drop("partition", "shift")
