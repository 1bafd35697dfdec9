"""The split and the part of each row as Spark columns.

A row's place depends on its identity (source file and line) alone: a hash of it says which part of its split it goes
to and its position there. So the rows are the same in the same order however Spark cut the work, and the order has
nothing to do with label, user or time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import Spec
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.files import (
    ColumnRule,
    DayRange,
    FilePlan,
    PositionRule,
    Rule,
    TimeRule,
    carried_columns,
    day_number,
    last_labelled_day,
    split_ranges,
)
from headrace.features.learn.statistics import IDENTITY
from headrace.features.workflow.workflow import Workflow
from headrace.lake.spark.exchange import partition_keys
from headrace.storage import Location

#: Name of the column with the split.
SPLIT = "__split"


@dataclass(frozen=True)
class FrameFiles:
    """Rows of a frame as Parquet files, of this run alone."""

    #: Folder of the files; the stage removes it at its end.
    folder: Location
    #: The columns' names in order. The files have numbers for them, as Spark's writer refuses some characters in names.
    columns: tuple[str, ...]


@dataclass(frozen=True)
class SplitRows:
    """Rows that belong to a split."""

    #: The events' columns and `__split`; a null there is a value of the split column that names no split.
    frame: DataFrame
    splits: tuple[str, ...]
    #: The same split as a rule, for readers that do not use the frame.
    rule: Rule
    #: First and last day (UTC) of a split by time.
    train_range: DayRange | None = None
    valid_range: DayRange | None = None
    test_range: DayRange | None = None
    #: Orders the days on which values are first seen: days since 1970 by event time; None where there is no time.
    day: Column | None = None
    #: The same rows as Parquet files that all tasks see; None: there are none.
    files: FrameFiles | None = None

    @property
    def ranges(self) -> dict[str, DayRange | None]:
        """First and last day of each split by time."""
        ranges = {"train": self.train_range, "valid": self.valid_range}
        return ranges | ({} if self.test_range is None else {"test": self.test_range})

    def describe(self, split: str) -> str:
        """Return a split for a message: its name and its range."""
        range_ = self.ranges.get(split)
        return f"'{split}'" + (f" ({range_[0]} to {range_[1]})" if range_ else "")


def split_rows(spec: Spec, events: DataFrame, ds: str, without_labels: bool = False) -> SplitRows:
    """Mark each row's split; rows outside all ranges are dropped (split by time only).

    Args:
        without_labels: whether events up to `ds` whose labels are not known yet are among those of `valid`.
    """
    split = spec.features.split
    if split.by == "time":
        return _by_time(spec, events, ds, without_labels)
    if split.by == "position":
        return _by_position(split.valid_fraction, events)
    assert split.column is not None
    known = ("train", "valid", "test", "rank")
    value = col(split.column).cast("string")
    frame = events.withColumn(SPLIT, F.when(value.isin(*known), value))
    present = {r[0] for r in frame.select(SPLIT).distinct().collect()}
    if None in present:
        bad = frame.where(F.col(SPLIT).isNull()).groupBy(value.alias("v")).count().orderBy(F.desc("count"), "v").head(5)
        values = ", ".join(f"{r['v']!r} ({r['count']} rows)" for r in bad)
        raise UserError(f"features.split.column: '{split.column}' must hold train, valid, test or rank, not {values}")
    splits = tuple(k for k in known if k in ("train", "valid") or k in present)
    return SplitRows(frame, splits, ColumnRule(split.column))


def _by_time(spec: Spec, events: DataFrame, ds: str, without_labels: bool) -> SplitRows:
    train, valid = split_ranges(spec, ds)
    test = (_following(valid[1]), last_labelled_day(spec, ds)) if spec.features.split.test_days else None
    if without_labels and test is not None:
        test = (test[0], ds)
    elif without_labels:
        valid = (valid[0], ds)
    last = valid[1] if test is None else test[1]
    assert spec.table.event_time is not None
    column = spec.table.event_time
    type_ = {c.name: c.type for c in spec.table.columns}[column]
    if type_ not in ("timestamp", "date"):
        raise UserError(f"table.event_time: column '{column}' is {type_}; a split by time needs timestamp or date")
    time = col(column)
    day = F.datediff(time, F.lit("1970-01-01").cast("date")) if type_ == "date" else _utc_day(time)
    rule = TimeRule(
        column,
        day_number(train[0]),
        day_number(valid[0]),
        day_number(last),
        None if test is None else day_number(test[0]),
    )
    if type_ == "timestamp":
        # A plain comparison, which Parquet's statistics can use.
        inside = (time >= _midnight(train[0])) & (time < _midnight(last, 1))
    else:
        inside = (time >= F.lit(train[0]).cast("date")) & (time <= F.lit(last).cast("date"))
    split = F.when(day >= F.lit(rule.valid), "valid").otherwise("train")
    if rule.test is not None:
        split = F.when(day >= F.lit(rule.test), "test").otherwise(split)
    return SplitRows(events.where(inside).withColumn(SPLIT, split), rule.splits, rule, train, valid, test, day)


def _following(day: str) -> str:
    return (date.fromisoformat(day) + timedelta(days=1)).isoformat()


def _utc_day(time: Column) -> Column:
    """Return days since 1970 in UTC, whatever the session's time zone.

    (GPUs have neither unix_micros nor unix_date.)
    """
    # The cast rounds down, also before 1970.
    seconds, length = time.cast("bigint"), F.lit(86_400).cast("bigint")
    return ((seconds - F.pmod(seconds, length)) / length).cast("int")


def _midnight(day: str, later: int = 0) -> Column:
    return F.lit(f"{date.fromisoformat(day) + timedelta(days=later)} 00:00:00+00:00").cast("timestamp")


def _by_position(fraction: float, events: DataFrame) -> SplitRows:
    """Mark the last rows in source order, by file name and line, as valid.

    Find the one file and line where valid begins.
    """
    files = events.groupBy("_source_file").count().collect()
    total = sum(r["count"] for r in files)
    rows_before = total - int(total * fraction)
    is_valid: Column = F.lit(False)
    rule = PositionRule(None, 0)
    passed = 0
    # Python orders texts by code point, Spark by UTF-8 bytes: the same order.
    for row in sorted(files, key=lambda r: str(r["_source_file"])):
        if passed + row["count"] <= rows_before:
            passed += row["count"]
            continue
        name = F.lit(row["_source_file"])
        lines = events.where(F.col("_source_file") == name).select("_source_line").orderBy("_source_line")
        first = lines.offset(rows_before - passed).limit(1).collect()[0][0]
        rule = PositionRule(row["_source_file"], int(first))
        is_valid = (F.col("_source_file") > name) | ((F.col("_source_file") == name) & (F.col("_source_line") >= first))
        break
    frame = events.withColumn(SPLIT, F.when(is_valid, "valid").otherwise("train"))
    return SplitRows(frame, ("train", "valid"), rule)


def check_rows(rows: SplitRows, label: str, pipeline: str, label_type: str = "binary") -> dict[str, int]:
    """Count the rows of each split and look at every label.

    Args:
        label_type: `features.label_type`.

    Raises:
        UserError: a label is null, or no such one, or train or valid has no row.
    """
    y = col(label).cast("double")
    counted = rows.frame.groupBy(SPLIT).agg(
        F.count(F.lit(1)).alias("rows"),
        F.count(F.when(y.isNull(), 1)).alias("null"),
        F.count(F.when(~y.isin(0.0, 1.0), 1)).alias("bad"),
    )
    by_split = {r[SPLIT]: r for r in counted.collect()}
    null, bad = (sum(r[key] for r in by_split.values()) for key in ("null", "bad"))
    counts = {split: int(by_split[split]["rows"]) if split in by_split else 0 for split in rows.splits}
    check_counts(rows, counts, null, bad if label_type == "binary" else 0, label, pipeline)
    return counts


def check_counts(rows: SplitRows, counts: Mapping[str, int], null: int, bad: int, label: str, pipeline: str) -> None:
    """Refuse what `check_rows` refuses: `null` and `bad` labels, an empty split."""
    for number, fault in ((null, "null"), (bad, "neither 0 nor 1")):
        if number:
            total = sum(counts.values())
            raise UserError(
                f"features.label: column '{label}' is {fault} in {number} of {total} rows. "
                f"Let ingest quarantine such rows: `required: true` on the column, and table.expectations.ranges: "
                f"{{{label}: [0, 1]}}" + (", or set features.label_type: number" if bad and not null else "")
            )
    for split in rows.splits:
        if not counts[split]:
            raise UserError(
                f"pipeline '{pipeline}': split {rows.describe(split)} has no row"
                + ("; run earlier days' ingest first, or change ds or features.split" if rows.train_range else "")
            )


def identity(w: Workflow) -> list[Column]:
    """Return what travels with a row besides its features: label, carried columns, split, and what places it."""
    return [
        col(w.label_column).cast("float").alias("__label"),
        *[_carried(w, source).alias(name) for name, source in carried_columns(w).items()],
        F.col(SPLIT),
        F.xxhash64("_source_file", "_source_line").alias("__hash"),
        *([_of_training().alias(IDENTITY)] if w.out_of_fold else []),
        F.col("_source_file").alias("__source_file"),
        F.col("_source_line").alias("__source_line"),
    ]


def _carried(w: Workflow, column: str) -> Column:
    """Return a timestamp as microseconds, null where it is; others as they are."""
    type_ = w.input_type(column)
    return spark_micros(col(column), type_) if type_.element == "timestamp" else col(column)


def _of_training() -> Column:
    """Return the hash of the identity of rows of the training range."""
    return F.when(F.col(SPLIT) == "train", F.xxhash64("_source_file", "_source_line"))


def part_of(plans: list[FilePlan]) -> Column:
    """Return the part of a row with `identity`: its index in `plans`."""
    out: Column | None = None
    for split in dict.fromkeys(p.split for p in plans):
        part_numbers = [i for i, p in enumerate(plans) if p.split == split]
        index = (F.lit(part_numbers[0]) + F.pmod(F.col("__hash"), F.lit(len(part_numbers)).cast("bigint"))).cast("int")
        out = F.when(F.col(SPLIT) == split, index) if out is None else out.when(F.col(SPLIT) == split, index)
    assert out is not None
    return out


def part_key(plans: list[FilePlan]) -> Column:
    """Return the key to repartition rows with `__part` by, so that each part has a partition of its own."""
    return of_part([F.lit(k) for k in partition_keys(len(plans))])


def of_part(values: list[Column]) -> Column:
    """Return the element of a list that belongs to the part of a row with `__part`."""
    return F.element_at(F.array(*values), F.col("__part") + 1)
