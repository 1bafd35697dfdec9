"""Rows in ranges of about even size, where texts are long.

Spark's own range partitioning counts rows, however long they are, and brings a sample of what it compares to the
driver. Here a task puts a sample, in which long rows are more often, into order and finds where ranges begin: what
reaches the driver of a text is as much as tells it from the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.arrow_batches import bounded_batches
from headrace.lake.partition_keys import partition_keys

#: Rows that are looked at for a range of rows that are even, and characters of a text.
_SAMPLED, _COMPARED = 16, 1 << 16
#: A row's hash is less than its share of this: it is looked at.
_SHARES = 1 << 20


def size_ranges(frame: DataFrame, keys: Sequence[Column], text: Column | None, size: Column) -> DataFrame:
    """The rows in partitions that follow each other in the order of their keys.

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
    found = pa.StructArray.from_arrays(
        [column.combine_chunks() for column in starts.columns], fields=[starts.schema.field(n) for n in schema.names]
    )
    row = {
        "__starts": pa.ListArray.from_arrays(pa.array([0, len(found)], pa.int32()), found),
        "__places": pa.array([places], pa.list_(pa.int32())),
    }
    found_row = F.broadcast(frame.sparkSession.createDataFrame(pa.table(row)))
    # How many ranges begin at the row or before it, by halves: the steps are powers of 2, the largest first.
    steps = [F.lit(1 << i) for i in reversed(range(starts.num_rows.bit_length()))]
    range_ = F.aggregate(
        F.array(*steps),
        F.lit(0),
        lambda at, step: F.when(F.get("__starts", at + step - 1) <= F.struct(*compared), at + step).otherwise(at),
    )
    placed = frame.crossJoin(found_row).withColumn("__place", F.get("__places", range_)).drop(*row)
    return placed.repartition(len(places), "__place").drop("__place")


@dataclass(frozen=True)
class FindStarts:
    """In a task: where ranges begin, of rows (keys, text where there is one, size) in their order."""

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
        """What is at the row or before it, and behind the last one."""
        if not self.text:
            return row
        return [*row[:-1], beginning(last[-1], row[-1]) if row[:-1] == last[:-1] else b""]


def beginning(before: bytes, text: bytes) -> bytes:
    """The shortest beginning of a text, in whole characters, that is behind the text before it."""
    alike = min(len(before), len(text))
    end = next((i for i in range(alike) if before[i] != text[i]), alike) + 1
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end += 1
    return text[:end]
