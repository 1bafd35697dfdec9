"""Statistics by Spark: plain aggregates, which Catalyst and RAPIDS can optimize, and partial tables by Arrow.

The passes over the frame are:

- one for the ranges of doubles, which must be known before they are cut into digits (none for integers);
- one for all statistics of ungrouped rows;
- one for all that count values, or sum the label, by text;
- one for all that count numbers;
- one for each other statistic.

Small statistics are collected on the driver. Large ones stay a frame, from which tasks make tables by key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.features import transport
from headrace.features.functions.keys import spark_joint_key
from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import I64
from headrace.features.learn.statistics import LABEL, Number, Partial, Statistic, assemble, spark_fold
from headrace.features.transport import cut, packed
from headrace.features.types import ValueType
from headrace.features.vocabulary.frame_codes import PARTITION_BYTES, PARTITION_VALUES


@dataclass(frozen=True)
class ColumnStatistic:
    """A statistic of columns of a frame."""

    statistic: Statistic
    columns: Mapping[str, Column]
    types: Mapping[str, ValueType]


@dataclass(frozen=True)
class RowColumns:
    """Columns of a frame besides features; see `headrace.features.learn.statistics.BatchRows`."""

    label: Column | None = None
    label_type: ValueType | None = None
    day: Column | None = None
    #: Identity of the row: bigint.
    identity: Column | None = None


@dataclass(frozen=True)
class _TypedColumn:
    """A column of numbers to sum, and its type."""

    column: Column
    type: ValueType


@dataclass(frozen=True)
class Aggregated:
    """Statistics of all rows of a frame."""

    #: Partials by position among the requested statistics.
    partials: Mapping[int, Partial]
    #: Statistics that are too large for the driver; None: there are none.
    large: LargeStatistics | None
    #: Number of passes over the frame.
    passes: int


def aggregate(
    frame: DataFrame, requested: Sequence[ColumnStatistic], row_columns: RowColumns, by_key: Collection[int] = ()
) -> Aggregated:
    """Return statistics of all rows of a frame.

    Args:
        frame: the rows.
        requested: the statistics to collect.
        row_columns: label, day and identity of the rows, which statistics may need.
        by_key: positions among the requested statistics of those that may stay with Spark.

    Raises:
        UserError: folds are requested and the frame has no column of identities.
    """
    passes = 0
    places, ranged = _digit_places(frame, requested, row_columns)
    passes += ranged
    plain = [i for i, a in enumerate(requested) if not a.statistic.key and not a.statistic.folds]
    entries: dict[tuple[object, ...], list[int]] = {}
    separate = []
    for i, a in enumerate(requested):
        s = a.statistic
        if i in plain:
            continue
        if all(n.column == LABEL for n in s.numbers):
            entries.setdefault((s.kind, s.folds, s.day, s.numbers), []).append(i)
        else:
            separate.append(i)
    out: dict[int, Partial] = {}
    if plain:
        out |= _ungrouped(frame, {i: requested[i] for i in plain}, row_columns, places)
        passes += 1
    batches = [*entries.values(), *([i] for i in separate)]
    grouped = [_grouped(frame, {i: requested[i] for i in batch}, row_columns, places) for batch in batches]
    collected, large = collect_groups(grouped, by_key)
    return Aggregated(out | collected, large, passes + len(batches))


def _source(a: ColumnStatistic, number: Number, row_columns: RowColumns) -> _TypedColumn:
    if number.column == LABEL:
        assert row_columns.label is not None
        assert row_columns.label_type is not None
        return _TypedColumn(row_columns.label, row_columns.label_type)
    return _TypedColumn(a.columns[number.column], a.types[number.column])


#: Places of digits (`exact_sums.places`) by positions of the statistic and its number. All numbers that are the label
#: have the same places.
_DigitPlaces = Mapping[tuple[int, int], range]


def _digit_places(
    frame: DataFrame, requested: Sequence[ColumnStatistic], row_columns: RowColumns
) -> tuple[_DigitPlaces, int]:
    """Return the digits' places of each number that is summed, and the number of passes to find them (0 or 1)."""
    places: dict[tuple[int, int], range] = {}
    ranges: list[Column] = []
    pending: list[tuple[tuple[int, int], int, ValueType]] = []
    label_range: int | None = None
    for i, a in enumerate(requested):
        for j, number in enumerate(a.statistic.numbers):
            if not (number.sum or number.squares):
                continue
            source = _source(a, number, row_columns)
            if source.type.element in ("boolean", "int", "code"):
                largest = 1.0 if source.type.element == "boolean" else 2.0**31
                places[i, j] = exact_sums.places(1.0, largest, integral=True)
                continue
            range_number = len(ranges) // 2
            if number.column == LABEL and label_range is not None:
                range_number = label_range
            else:
                size = F.abs(exact_sums.spark_usable(source.column))
                ranges += [
                    F.min(F.when(size > 0, size)).alias(f"r{2 * range_number}"),
                    F.max(size).alias(f"r{2 * range_number + 1}"),
                ]
                label_range = range_number if number.column == LABEL else label_range
            pending.append(((i, j), range_number, source.type))
    if not ranges:
        return places, 0
    row = frame.agg(*ranges).collect()[0]
    for number_key, range_number, type_ in pending:
        low, high = row[2 * range_number], row[2 * range_number + 1]
        places[number_key] = exact_sums.places(low or 0.0, high or 0.0 if low else 0.0, integral=type_.is_integer)
    return places, 1


def _ungrouped(
    frame: DataFrame, requested: Mapping[int, ColumnStatistic], row_columns: RowColumns, places: _DigitPlaces
) -> dict[int, Partial]:
    """Return all statistics without groups, from one pass that gives one row."""
    plan = _AggregatePlan()
    measures: dict[int, dict[str, str]] = {}
    for i, a in requested.items():
        measures[i] = plan.add_rows(a.statistic, row_columns)
        for j, number in enumerate(a.statistic.numbers):
            measures[i] |= plan.add_number(j, number, _source(a, number, row_columns), places.get((i, j)))
    answer = plan.select(frame).agg(*[plan.aggregate(alias) for alias in plan.aggregates]).toArrow()
    return {i: partial_of(answer, aliases, {}) for i, aliases in measures.items()}


def _grouped(
    frame: DataFrame, requested: Mapping[int, ColumnStatistic], row_columns: RowColumns, places: _DigitPlaces
) -> Groups:
    """Return statistics of one form over several columns in one aggregate: groups by (column, value, fold)."""
    order = list(requested)
    first = requested[order[0]]
    s = first.statistic
    plan = _AggregatePlan()
    plan.values["__entries"] = _entries([requested[i] for i in order])
    groups = [F.col("__entry.v").alias("v"), F.col("__entry.key").alias("key")]
    if s.folds:
        if row_columns.identity is None:
            raise UserError("folds are of rows with an identity: the columns _source_file and _source_line are missing")
        plan.values["__fold"] = spark_fold(row_columns.identity, s.folds)
        groups.append(F.col("__fold").alias("fold"))
    measures = plan.add_rows(s, row_columns)
    for j, number in enumerate(s.numbers):
        measures |= plan.add_number(j, number, _source(first, number, row_columns), places.get((order[0], j)))
    exploded = plan.select(frame).withColumn("__entry", F.explode("__entries")).where(F.col("__entry.key").isNotNull())
    grouped = exploded.groupBy(*groups).agg(*[plan.aggregate(alias) for alias in plan.aggregates])
    keys = tuple((("key",) if requested[i].statistic.key else ()) + (("fold",) if s.folds else ()) for i in order)
    return Groups(grouped, GroupsForm(tuple(order), keys, measures))


def _entries(requested: Sequence[ColumnStatistic]) -> Column:
    """Return an array of structs (v: number of the statistic, key: the row's text or double; null without a value)."""

    def entry(v: int, key: Column) -> Column:
        return F.struct(F.lit(v).alias("v"), key.alias("key"))

    def text_entry(v: int) -> Callable[[Column], Column]:
        return lambda x: entry(v, x.cast("string"))

    scalars, lists = [], []
    for v, a in enumerate(requested):
        s = a.statistic
        if not s.key:
            scalars.append(entry(v, F.lit("")))
        elif s.kind == "number":
            scalars.append(entry(v, exact_sums.spark_rounded(exact_sums.spark_usable(a.columns[s.key[0]]), s.bits)))
        elif a.types[s.key[0]].is_list:
            lists.append(F.transform(a.columns[s.key[0]], text_entry(v)))
        else:
            scalars.append(entry(v, spark_joint_key([a.columns[name] for name in s.key])))
    parts = ([F.array(*scalars)] if scalars else []) + lists
    return F.concat(*parts) if len(parts) > 1 else parts[0]


class _AggregatePlan:
    """Expressions of one pass, in layers of plain columns, so that an expression used often is computed once."""

    def __init__(self) -> None:
        #: First layer, by alias: values of rows.
        self.values: dict[str, Column] = {}
        #: Second layer, by alias: digits of these values.
        self._digits: dict[str, Column] = {}
        #: Aggregates over columns of both layers, by alias.
        self.aggregates: dict[str, Column] = {}
        self._next = itertools.count()

    def add_rows(self, statistic: Statistic, row_columns: RowColumns) -> dict[str, str]:
        """Add the number of rows and the first day. Return the partial's column names with the aggregates' aliases."""
        measures = {"rows": self._add(F.count(F.lit(1)))}
        if statistic.day:
            self.values["__day"] = (row_columns.day if row_columns.day is not None else F.lit(0)).cast("bigint")
            measures["day"] = self._add(F.min("__day"))
        return measures

    def add_number(self, j: int, number: Number, source: _TypedColumn, places: range | None) -> dict[str, str]:
        """Add all measures of number `j`. Return the partial's column names with the aggregates' aliases."""
        x = f"__x{next(self._next)}"
        self.values[x] = exact_sums.spark_usable(source.column)
        measures = {f"{j}.count": self._add(F.count(x))}
        if number.minmax:
            measures |= {f"{j}.min": self._add(F.min(x)), f"{j}.max": self._add(F.max(x))}
        if places is not None:
            names = {place: f"{x}d{i}" for i, place in enumerate(places)}
            for place, digit in exact_sums.sql_digits(x, places).items():
                self._digits[names[place]] = F.expr(digit)
                measures[f"{j}.sum.{place}"] = self._add(F.sum(names[place]))
            if number.squares:
                for place, digit in exact_sums.sql_square_digits(names, places).items():
                    measures[f"{j}.squares.{place}"] = self._add(F.expr(f"sum({digit})"))
        return measures

    def aggregate(self, alias: str) -> Column:
        """Return an aggregate of the pass."""
        return self.aggregates[alias].alias(alias)

    def select(self, frame: DataFrame) -> DataFrame:
        """Return the frame with the values, in layers."""
        values = [column.alias(name) for name, column in self.values.items()] or [F.lit(1).alias("__one")]
        frame = frame.select(*values)
        if self._digits:
            frame = frame.select("*", *[column.alias(name) for name, column in self._digits.items()])
        return frame

    def _add(self, aggregate: Column) -> str:
        alias = f"m{next(self._next)}"
        self.aggregates[alias] = aggregate
        return alias


#: Bytes of each number of a group.
_NUMBER = 8
#: Column that numbers the forms of groups, in a frame of several forms.
_FORM = "form"


@dataclass(frozen=True)
class GroupsForm:
    """Layout of a frame of groups: the statistics and measures that its columns are."""

    #: Position among the requested statistics, by the value of `v`.
    order: tuple[int, ...]
    #: Which of the columns `key` and `fold` the groups have, by the value of `v`.
    keys: tuple[tuple[str, ...], ...]
    #: Column of the frame, by the column name in partials.
    measures: Mapping[str, str]

    def partials(self, answer: pa.Table) -> dict[int, Partial]:
        """Return the statistics by their positions; one without groups is an empty table."""
        answer = answer.combine_chunks()
        form_values = answer.column("v").to_numpy()
        out = {}
        for v, (i, keys) in enumerate(zip(self.order, self.keys, strict=True)):
            groups = answer.filter(pa.array(form_values == v))
            out[i] = partial_of(groups, self.measures, {name: groups.column(name) for name in keys})
        return out


@dataclass(frozen=True)
class Groups:
    """Statistics of one form: distinct groups (v, key, fold if there are folds) and their numbers."""

    frame: DataFrame
    form: GroupsForm


@dataclass(frozen=True)
class LargeStatistics:
    """Statistics that are too large for the driver."""

    #: (name int, statistic binary): the position among the requested statistics, and groups of it. All groups of a key
    #: are in one partition.
    statistics: DataFrame
    #: Positions among the requested statistics.
    names: frozenset[int]
    persisted: tuple[DataFrame, ...]

    def release(self) -> None:
        """Free the persisted frames on the executors' disks."""
        for frame in self.persisted:
            frame.unpersist()


def collect_groups(
    groups: Sequence[Groups], by_key: Collection[int]
) -> tuple[dict[int, Partial], LargeStatistics | None]:
    """Return the statistics of groups in memory, or apart those at positions `by_key` if these are large together."""
    out: dict[int, Partial] = {}
    mixed = []
    for group in groups:
        if by_key and not set(by_key).isdisjoint(group.form.order):
            mixed.append(group)
        else:
            out |= group.form.partials(group.frame.toArrow())
    if not mixed:
        return out, None
    # The frames are read more than once; Spark recomputes a lost partition.
    frames = tuple(group.frame.persist(StorageLevel.DISK_ONLY) for group in mixed)
    with ExitStack() as stack:
        for frame in frames:
            stack.callback(frame.unpersist)
        key_groups = [_groups_of(frame, group.form, by_key) for group, frame in zip(mixed, frames, strict=True)]
        rows, text, size = _size(key_groups)
        if size <= transport.most_in_driver(frames[0].sparkSession):
            for group, frame in zip(mixed, frames, strict=True):
                out |= group.form.partials(frame.toArrow())
            return out, None
        for group, frame in zip(mixed, frames, strict=True):
            if other_positions := set(group.form.order) - set(by_key):
                answer = group.form.partials(_groups_of(frame, group.form, other_positions).toArrow())
                out |= {i: partial for i, partial in answer.items() if i in other_positions}
        pack = _Pack(tuple(group.form for group in mixed))
        # Each form has its own names of columns, so that the union keeps them apart.
        parts = reduce(
            lambda a, b: a.unionByName(b, allowMissingColumns=True),
            (pack.renamed(number, frame) for number, frame in enumerate(key_groups)),
        )
        partitions = max(1, -(-rows // PARTITION_VALUES), -(-text // PARTITION_BYTES))
        statistics = parts.repartition(partitions, "key").mapInArrow(pack.run, "name int, statistic binary")
        stack.pop_all()
        return out, LargeStatistics(statistics, frozenset(by_key), frames)


def _groups_of(frame: DataFrame, form: GroupsForm, positions: Collection[int]) -> DataFrame:
    """Return the groups of some statistics."""
    return frame.where(F.col("v").isin([v for v, i in enumerate(form.order) if i in positions]))


def _size(frames: Sequence[DataFrame]) -> tuple[int, int, int]:
    """Return (groups, bytes of their keys, bytes)."""
    rows = text = size = 0
    for frame in frames:
        n, keys = frame.agg(F.count("key"), F.sum(F.octet_length("key"))).collect()[0]
        rows, text = rows + n, text + (keys or 0)
        size += (keys or 0) + n * _NUMBER * (len(frame.columns) - 1)
    return rows, text, size


@dataclass(frozen=True)
class _Pack:
    """Encoder of the statistics of a partition's keys; runs in a task."""

    forms: tuple[GroupsForm, ...]

    def renamed(self, number: int, frame: DataFrame) -> DataFrame:
        """Return the groups of form `number`, with column names that no other form has."""
        columns = [F.col(name).alias(_numbered_name(number, name)) for name in self.forms[number].measures.values()]
        shared = [name for name in frame.columns if name in ("v", "key", "fold")]
        return frame.select(F.lit(number).alias(_FORM), *shared, *columns)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches (name int, statistic binary) of the partition's groups."""
        received = list(batches)
        if not received:
            return
        all_groups = pa.Table.from_batches(received)
        for number, form in enumerate(self.forms):
            form_groups = all_groups.filter(pc.equal(all_groups.column(_FORM), number))
            measures = {name: _numbered_name(number, alias) for name, alias in form.measures.items()}
            for i, partial in GroupsForm(form.order, form.keys, measures).partials(form_groups).items():
                for piece in cut(partial) if partial.num_rows else ():
                    yield pa.RecordBatch.from_arrays(
                        [pa.array([i], pa.int32()), pa.array([packed(piece, i)], pa.binary())], ["name", "statistic"]
                    )


def _numbered_name(number: int, name: str) -> str:
    return f"{name}_{number}"


def partial_of(answer: pa.Table, measures: Mapping[str, str], keys: Mapping[str, pa.ChunkedArray]) -> Partial:
    """Return a statistic's partial table from the columns of an aggregate's result."""
    columns: dict[str, pa.Array] = {name: key.combine_chunks() for name, key in keys.items()}
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    for name, alias in measures.items():
        column = answer.column(alias)
        number, _, rest = name.partition(".")
        measure, _, place = rest.partition(".")
        if place:
            # Spark's sum of no rows is null.
            sums.setdefault((number, measure), {})[int(place)] = np.asarray(column.fill_null(0).to_numpy(), np.int64)
        elif name == "day":
            columns[name] = column.fill_null(np.iinfo(np.int64).max).combine_chunks()
        else:
            columns[name] = column.combine_chunks()
    return assemble(columns, sums)
