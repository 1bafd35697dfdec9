"""Vocabularies that only grow: a Delta table of (name, value) -> code, codes given once and never changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.features.ops.base import ValueColumn, VocabularyRule
from headrace.features.vocabulary import lookup
from headrace.lake.delta.log import DeltaLog
from headrace.storage import local

_LOG = logging.getLogger("headrace.features")

#: The Delta table.
_ROWS = pa.schema(
    [
        ("name", pa.string()),
        ("value", pa.string()),
        ("code", pa.int64()),
        ("count", pa.int64()),
        ("added_ds", pa.string()),
    ]
)
_ROWS_A_FILE = 2_000_000
#: Vocabularies that are given codes at once.
_THREADS = 4


class Vocabularies(Protocol):
    """Where codes are kept from one fit to the next."""

    def update(self, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        """Give codes to the values that have none yet; return each vocabulary as (value, code), in order of code.

        Args:
            counts: (name string, value string, count bigint, day), a row a value, those below min_count left out.
            rules: of all vocabularies; one without any value comes out empty.
        """
        ...


class VocabularyTable:
    """All vocabularies of a pipeline in one append-only Delta table (name, value, code, count, added_ds).

    Codes start at 2 (behind the out-of-vocabulary buckets, if there are more than one) and have no gaps in the table;
    new ones go on where the highest ended, in order of (first day seen, count, most first, value). All that one fit
    adds is one commit. Repeating a fit adds nothing, since its values are there: a run that was killed after the commit
    heals by itself. The caller holds the run lock.

    What a fit of day `ds` sees is the values added by fits up to `ds`, and those it counted itself. So a rerun of an
    old day gives the result that it gave, and learns nothing from the days after it.
    """

    def __init__(self, spark: SparkSession, path: Path, ds: str) -> None:
        self._spark, self._path, self._ds = spark, str(path), ds
        #: The table's version that the last `update` pinned.
        self.version: int | None = None
        #: Values in each vocabulary that were added by this day's fits.
        self.added: dict[str, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def update(self, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        """See `Vocabularies.update`.

        The tables end up in this process in any case, so codes are given out here, in Arrow: one Spark job to count,
        one to read what there is, one to append.
        """
        counted = counts if isinstance(counts, pa.Table) else counts.toArrow()
        there = self._read()

        def one(name: str) -> tuple[pa.Table, pa.Table, int]:
            """(rows to append, value and code of all that this day sees, how many of them are this day's)."""
            mine, known = _named(counted, name), _named(there, name)
            new = _give_codes(name, mine, known, rules[name])
            # Known before this day, or counted now (a later day may have given the code).
            seen = known.filter(
                pc.or_(
                    pc.less_equal(known.column("added_ds"), self._ds),
                    pc.is_in(known.column("value"), mine.column("value")),
                )
            )
            parts = [t.select(["value", "code"]).cast(lookup.SCHEMA) for t in (seen, new)]
            # A rerun finds its own values there; they are this day's all the same.
            mine_before = int(pc.sum(pc.equal(known.column("added_ds"), self._ds)).as_py() or 0)
            # New codes go on after the known ones, and are in order.
            whole = pa.concat_tables([parts[0].sort_by("code"), parts[1]]).combine_chunks()
            return _rows(name, new, self._ds), whole, mine_before + new.num_rows

        pinned, appended = {}, []
        # Ordering a million texts takes a second; Arrow does it without Python's lock.
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, (new, whole, added) in zip(rules, pool.map(one, rules), strict=True):
                appended.append(new)
                pinned[name], self.added[name] = whole, added
                _LOG.info("vocabulary %s: %s values, %s new", name, f"{whole.num_rows:,}", f"{added:,}")
        rows = pa.concat_tables(appended)
        if self._pool is None:
            self._append(rows)
        else:
            self._pending = self._pool.submit(self._append, rows)
        return pinned

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Within, `update` commits while its caller goes on (a commit takes Delta a second or two, whatever its size).

        Call `wait` before anything that holds the codes becomes visible; leaving waits too.
        """
        with ThreadPoolExecutor(1) as pool:
            self._pool = pool
            try:
                yield
                self.wait()
            finally:
                self._pool = None

    def wait(self) -> None:
        """Until what `update` added is committed and `version` is its version. Raises what went wrong there."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _read(self) -> pa.Table:
        self.version = self._latest()
        if self.version is None:
            return _ROWS.empty_table()
        files = DeltaLog(local(self._path)).files(self.version)
        if files is not None:
            # Without a Spark job: a day's fit is short.
            tables = [pq.ParquetFile(f.path).read(_ROWS.names).cast(_ROWS) for f in files]
            return pa.concat_tables(tables) if tables else _ROWS.empty_table()
        table = self._spark.read.format("delta").option("versionAsOf", self.version).load(self._path)
        return table.select(_ROWS.names).toArrow().cast(_ROWS)

    def _append(self, rows: pa.Table) -> None:
        """One commit; none where there is nothing to add to a table that is there."""
        if self.version is not None and not rows.num_rows:
            return
        frame = self._spark.createDataFrame(rows).coalesce(max(1, rows.num_rows // _ROWS_A_FILE))
        writer = frame.write.format("delta").mode("append")
        writer.option("userMetadata", f"headrace vocabulary of {self._ds}").save(self._path)
        self.version = self._latest()

    def _latest(self) -> int | None:
        return DeltaLog(local(self._path)).version


def _named(table: pa.Table, name: str) -> pa.Table:
    return table.filter(pc.equal(table.column("name"), name))


def _give_codes(name: str, counted: pa.Table, known: pa.Table, rule: VocabularyRule) -> pa.Table:
    """The counted values that are not known, with codes that go on after the highest: (value, code, count)."""
    first = rule.first_code
    if known.num_rows and (lowest := pc.min(known.column("code")).as_py()) != first:
        raise UserError(
            f"vocabulary '{name}' began with oov_buckets: {lowest - 1}, and its codes stay for ever; "
            f"set oov_buckets to {lowest - 1} again, or begin another (vocabulary: NEW_NAME)"
        )
    highest = pc.max(known.column("code")).as_py() if known.num_rows else first - 1
    new = counted.filter(pc.invert(pc.is_in(counted.column("value"), known.column("value"))))
    if rule.max_size is not None:
        # Codes have no gaps in the table, so the highest tells how many values there are.
        room = max(rule.max_size - (highest - first + 1), 0)
        new = new.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, room)
    # Arrow orders texts by their UTF-8 bytes.
    new = new.sort_by([("day", "ascending"), ("count", "descending"), ("value", "ascending")])
    codes = pa.array(np.arange(highest + 1, highest + 1 + new.num_rows), pa.int64())
    return new.select(["value", "count"]).append_column("code", codes)


def _rows(name: str, new: pa.Table, ds: str) -> pa.Table:
    """New values as rows of the Delta table."""
    n = new.num_rows
    columns = {
        "name": pa.repeat(name, n),
        "value": new.column("value"),
        "code": new.column("code"),
        "count": new.column("count"),
        "added_ds": pa.repeat(ds, n),
    }
    return pa.table(columns).cast(_ROWS)


def count_values(
    rows: DataFrame, columns: Sequence[ValueColumn], rules: Mapping[str, VocabularyRule], day: Column | None
) -> DataFrame:
    """How often each value is there and when first, for all vocabularies in one pass.

    Returns:
        (name string, value string, count bigint, day): values seen `min_count` times or more.
    """
    names = list(dict.fromkeys(c.vocabulary for c in columns))
    cells = [_cells(c, names.index(c.vocabulary)) for c in columns]
    scalars = [cell for cell, c in zip(cells, columns, strict=True) if not c.type.is_list]
    lists = [cell for cell, c in zip(cells, columns, strict=True) if c.type.is_list]
    together = [F.array(*scalars)] if scalars else []
    cell = F.explode(F.concat(*together, *lists) if len(together) + len(lists) > 1 else (together + lists)[0])
    counted = (
        rows.select(cell.alias("cell"), (day if day is not None else F.lit(0)).alias("day"))
        .where(F.col("cell.value").isNotNull())
        .groupBy("cell.v", "cell.value")
        .agg(F.count(F.lit(1)).alias("count"), F.min("day").alias("day"))
    )
    name = F.element_at(F.array(*[F.lit(n) for n in names]), F.col("v") + 1)
    least = F.element_at(F.array(*[F.lit(rules[n].min_count) for n in names]), F.col("v") + 1)
    return counted.where(F.col("count") >= least).select(name.alias("name"), "value", "count", "day")


def _cells(c: ValueColumn, index: int) -> Column:
    """A struct (vocabulary's index, value as text), or an array of them for a list."""

    def cell(x: Column) -> Column:
        return F.struct(F.lit(index).alias("v"), x.cast("string").alias("value"))

    return F.transform(c.column, cell) if c.type.is_list else cell(c.column)
