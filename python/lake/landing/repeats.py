"""Rows that are one event: equal in `table.keys`. The first stays, in order of (day, file, line).

A row is dropped when an equal one comes before it on its own day; when an equal one was loaded on one of the
`late_days` days before it; or when one is in the table on one of the `late_days` days after it (which can be where a
day is loaded after the days that follow it). So no two rows of the table within `late_days` days of each other are
equal, whatever the order of loading. As SQL's UNIQUE has it, a row with a null in a key equals no other.

Hashes of the key columns, the same for equal keys however they were read, find the rows whose key may occur twice. Only
they are compared with each other. The hashes of a data file's rows stand in the folder of a load; those of any range
are read without the rest.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headrace.config.schema import quoted_names
from headrace.lake.delta.data_files import SOURCE_FILE, SOURCE_LINE
from headrace.lake.faults import GOOD
from headrace.storage import Location
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

if TYPE_CHECKING:  # Tasks that read lines import this module, but no classes of specs: they take long to make.
    from headrace.config import Table

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: Of the file's name: the same hashes in ascending order, of rows that have a key.
_SORTED = ".sorted.npy"


def key_hashes(columns: Sequence[pa.ChunkedArray | pa.Array]) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Return (hash, whether the row has a key: none of its columns is null) of key columns. int64, bool [rows].

    Raises:
        UserError: the library of column functions was not built.
    """
    seed: I64 | None = None
    has_key = np.ones(len(columns[0]), np.bool_)
    for column in columns:
        array = _single_array(column)
        if array.null_count:
            has_key &= array.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_decimal(array.type) or pa.types.is_list(array.type):
            array = pa.array([None if value is None else _key_text(value) for value in array.to_pylist()], pa.string())
        if pa.types.is_string(array.type):
            seed = xxhash64_strings(array, seed)
        else:
            seed = xxhash64_integers(_integers(array), seed)
    assert seed is not None
    return seed, has_key


def _single_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _key_text(value: Decimal | list[Any]) -> str:
    """Return a text that equal values have in common, decimals of whatever scale."""
    return json.dumps(value) if isinstance(value, list) else f"{value.normalize():f}"


def _integers(array: pa.Array) -> I64:
    """Return numbers, booleans and times as int64; doubles by their bits, 0.0 and -0.0 alike."""
    if pa.types.is_floating(array.type):
        values = pc.fill_null(array.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False) + 0.0
        return np.ascontiguousarray(values).view(np.int64)
    if pa.types.is_date(array.type):
        array = array.cast(pa.int32())
    numbers: I64 = pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return numbers


def save_hashes(folder: Location, hashes: Sequence[I64], keyed: Sequence[Mask]) -> str:
    """Save the hashes of a file's rows, given in pieces (headrace.lake.landing.repeats). Returns their name."""
    name = f"hashes-{uuid.uuid4()}.npz"
    every, of_key = np.concatenate([np.zeros(0, np.int64), *hashes]), np.concatenate([np.zeros(0, np.bool_), *keyed])
    with (folder / name).new_file() as place, open(place, "wb") as file:
        np.savez(file, hashes=every, keyed=of_key)
    ordered = every if of_key.all() else every[of_key]
    ordered.sort()
    save_array(folder / (name + _SORTED), ordered)
    return name


def save_array(place: Location, values: I64) -> None:
    """Save an array in NumPy's format, under just that name."""
    with place.new_file() as path, open(path, "wb") as file:
        np.save(file, values)


def load_hashes(folder: Location, name: str) -> tuple[I64, Mask]:
    """Return (hash, whether it has a key) of each row. int64, bool [rows]."""
    with np.load((folder / name).local_path()) as saved:
        return saved["hashes"], saved["keyed"]


def hashes_of_share(folder: Location, name: str, share: int, shares: int) -> I64:
    """Return the hashes of rows with a key in one of `shares` equal ranges of all hashes; int64, ascending, mapped."""
    ordered = np.load((folder / (name + _SORTED)).local_path(), mmap_mode="r")
    first, last = (
        len(ordered) if k == shares else int(np.searchsorted(ordered, np.int64(k * (1 << 64) // shares - (1 << 63))))
        for k in (share, share + 1)
    )
    hashes: I64 = ordered[first:last]
    return hashes


_NEVER = -(1 << 30)
_DAYS = "struct<last:int,dropped:array<int>>"
#: The hashes that may be there twice, in the folder of a load: int64, sorted.
REPEATED = "repeated.npy"


def repeated_rows(rows: DataFrame, loaded: DataFrame | None, table: Table) -> DataFrame:
    """Return the good rows to drop.

    Args:
        rows: rows to load (headrace.lake.landing.arrow_rows.ArrowRows.good_rows), or of a table's days.
        loaded: the keys and `ds` of rows that are in the table already and stay, from the days within `late_days` of
            those of `rows`; None: days are not compared with each other (snapshots).
        table: keys and late_days.

    Returns:
        `_ds`, `_file`, `_line`, `_copy`.
    """
    keys = quoted_names(table.keys)
    named = [F.col(k).alias(f"k{i}") for i, k in enumerate(keys)]
    day = F.datediff(F.col("_ds").cast("date"), F.lit("1970-01-01").cast("date")).alias("day")
    position = ["_ds", "_file", "_line", "_copy"]
    new_rows = rows.where(F.col("_state") == GOOD).select(*named, day, F.lit(False).alias("kept"), *position)
    everything = new_rows
    if loaded is not None:
        then = F.datediff(F.col("ds").cast("date"), F.lit("1970-01-01").cast("date")).alias("day")
        no_position = [F.lit(None).cast(dict(new_rows.dtypes)[c]).alias(c) for c in position]
        everything = new_rows.unionByName(loaded.select(*named, then, F.lit(True).alias("kept"), *no_position))
    k = [f"k{i}" for i in range(len(keys))]
    everything = everything.dropna(subset=k).withColumn("hash", F.xxhash64(*k))
    # Most keys are there once: only 8 bytes of each row are shuffled to find those that are not.
    repeated = everything.groupBy("hash").count().where("count > 1").select("hash")
    suspects = everything.join(repeated, "hash", "left_semi")
    in_order = Window.partitionBy(*k, "day").orderBy(F.desc("kept"), "_file", "_line", "_copy")
    suspects = suspects.select("*", F.row_number().over(in_order).alias("nth"))
    repeat = (F.col("nth") > 1) & ~F.col("kept")
    if loaded is not None and table.late_days:
        of_key = Window.partitionBy(*k)
        first = F.when(F.col("nth") == 1, F.struct("day", "kept"))
        suspects = suspects.select("*", F.sort_array(F.collect_list(first).over(of_key)).alias("days"))
        repeat = repeat | (~F.col("kept") & _on_another_day(table.late_days))
    return suspects.where(repeat).select(*position)


def _on_another_day(late_days: int) -> Column:
    """Return whether the row's `day` is one on which its key, which occurs on `days`, is a repetition."""
    start = F.struct(F.lit(_NEVER).alias("last"), F.array().cast("array<int>").alias("dropped")).cast(_DAYS)

    def step(state: Column, occurrence: Column) -> Column:
        kept_state = F.struct(occurrence["day"].alias("last"), state["dropped"].alias("dropped"))
        dropped = F.struct(
            state["last"].alias("last"), F.array_append(state["dropped"], occurrence["day"]).alias("dropped")
        )
        near = occurrence["day"] - state["last"] <= late_days
        return F.when(~occurrence["kept"] & near, dropped).otherwise(kept_state).cast(_DAYS)

    is_after_kept = F.array_contains(F.aggregate("days", start, step)["dropped"], F.col("day"))
    after = F.exists(
        "days",
        lambda occurrence: (
            occurrence["kept"] & (occurrence["day"] > F.col("day")) & (occurrence["day"] - F.col("day") <= late_days)
        ),
    )
    return (F.size("days") > 1) & (is_after_kept | after)


@dataclass(frozen=True)
class KeyedFile:
    """A Parquet file with key columns."""

    path: Location
    #: The day of its rows.
    ds: str = ""
    #: Whether it has rows that were judged one by one, good and bad ones.
    is_typed: bool = False
    #: The name of the hashes of its rows (headrace.lake.landing.repeats).
    hashes: str = ""


@dataclass(frozen=True)
class HashTask:
    """Hashes the keys of data files; yields the names of the hashes."""

    files: tuple[KeyedFile, ...]
    keys: tuple[str, ...]
    folder: Location

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        keyed_file = self.files[number]
        file = pq.ParquetFile(keyed_file.path.local_path(), coerce_int96_timestamp_unit="us")
        # A data file that is older than a column has no keys.
        groups = file.num_row_groups if set(self.keys) <= set(file.schema_arrow.names) else 0
        hashes_of_groups: list[I64] = []
        keyed: list[Mask] = []
        for group in range(groups):
            state = ["_state"] if keyed_file.is_typed else []
            table = file.read_row_group(group, columns=[*self.keys, *state], use_threads=False)
            if keyed_file.is_typed:
                table = table.filter(pc.equal(table.column("_state"), GOOD))
            if table.num_rows:
                hashes, has_key = key_hashes([table.column(k) for k in self.keys])
                hashes_of_groups.append(hashes)
                keyed.append(has_key)
        yield {"file": number, "hashes": save_hashes(self.folder, hashes_of_groups, keyed)}


@dataclass(frozen=True)
class RepeatTask:
    """Finds the hashes of one share of all: there twice among rows to load, or there and in the table."""

    new: tuple[str, ...]
    loaded: tuple[str, ...]
    folder: Location
    #: Ranges of hashes of one length: memory is that of the largest, about as many hashes in each.
    shares: int

    def __call__(self, share: int) -> Iterator[dict[str, Any]]:
        new_hashes = np.concatenate([np.zeros(0, np.int64), *(self._hashes(name, share) for name in self.new)])
        new_hashes.sort()
        repeated_parts = [new_hashes[1:][new_hashes[1:] == new_hashes[:-1]]]
        for name in self.loaded if len(new_hashes) else ():
            loaded = self._hashes(name, share)
            place = np.minimum(np.searchsorted(new_hashes, loaded), len(new_hashes) - 1)
            repeated_parts.append(loaded[new_hashes[place] == loaded])
        repeated = np.unique(np.concatenate(repeated_parts))
        path = self.folder / f"repeated-{uuid.uuid4()}.npy"
        save_array(path, repeated)
        yield {"hashes": len(repeated), "path": path.name}

    def _hashes(self, name: str, share: int) -> I64:
        return hashes_of_share(self.folder, name, share, self.shares)


@dataclass(frozen=True)
class SuspectTask:
    """Copies the keys and places of rows whose hash is there twice, of one data file."""

    files: tuple[KeyedFile, ...]
    keys: tuple[str, ...]
    #: By day and name, the number of a landing file; None: rows of the table, which have `ds` in place of a place.
    numbers: Mapping[tuple[str, str], int] | None
    folder: Location
    #: Of the data files that are written now; older ones may have narrower types.
    schema: pa.Schema

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        file = self.files[number]
        hashes, keyed = load_hashes(self.folder, file.hashes)
        repeated = np.load((self.folder / REPEATED).local_path(), mmap_mode="r")
        place = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
        rows = np.flatnonzero((repeated[place] == hashes) & keyed)
        if not len(rows):
            return
        table = self._take(file, rows)
        path = self.folder / f"suspects-{uuid.uuid4()}.parquet"
        with path.new_file() as local:
            pq.write_table(table, local, store_schema=False)
        yield {"path": path.name}

    def _take(self, file: KeyedFile, rows: I64) -> pa.Table:
        place = [] if self.numbers is None else [SOURCE_FILE, SOURCE_LINE]
        parquet = pq.ParquetFile(file.path.local_path(), coerce_int96_timestamp_unit="us")
        taken, first_row = [], 0
        for group in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(group).num_rows
            rows_of_group = rows[(rows >= first_row) & (rows < first_row + count)] - first_row
            first_row += count
            if len(rows_of_group):
                table = parquet.read_row_group(group, columns=[*self.keys, *place], use_threads=False)
                taken.append(table.take(pa.array(rows_of_group)))
        table = pa.concat_tables(taken)
        for k, name in enumerate(self.keys):
            table = table.set_column(k, name, table.column(name).cast(self.schema.field(name).type))
        ds = pa.array([file.ds] * table.num_rows, pa.string())
        if self.numbers is None:
            return table.append_column("ds", ds)
        names = table.column(SOURCE_FILE).to_pylist()
        numbers = pa.array([self.numbers[file.ds, name] for name in names], pa.int32())
        line = table.column(SOURCE_LINE)
        table = table.select(list(self.keys))
        for name, column in (("_ds", ds), ("_file", numbers), ("_line", line)):
            table = table.append_column(name, column)
        return table
