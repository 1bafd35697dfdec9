"""Users and items to score: the active ones and those of a named source, with their columns at the end of the day."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Entity, Spec
from headrace.features.build.rows import SourceRows, events_of_window, events_within_days, read_events
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.layout.split import SPLIT, split_rows
from headrace.features.table_ops.base import FILE, LABEL_KNOWN, LINE, QUERY, SourceRead
from headrace.features.table_ops.preparation import ExternalReader, Preparation, midnight
from headrace.features.table_ops.spark_windows import EVENT_MICROS
from headrace.features.types import ValueType
from headrace.stage import Context


def with_listed(side: DataFrame, entity: Entity, events: DataFrame, rows: DataFrame) -> DataFrame:
    """Return one side with the further keys that a source lists, each with the columns of its newest row.

    Args:
        side: the key and the columns, of those that are active (`entity.limit` of them at most).
        entity: the side's section.
        events: with the column `__split`: who has some in the training rows is not new.
        rows: of the source, with EVENT_MICROS. Columns that it lacks are null, and values that are none of the
            column's type; a row whose key is none is left out.
    """
    types, source_columns = dict(side.dtypes), set(rows.columns)
    columns = [c for c in side.columns if c != entity.key]
    values = F.struct(
        F.lit(0).alias("0"),
        *(
            (col(c) if c in source_columns else F.lit(None)).try_cast(types[c]).alias(str(i))
            for i, c in enumerate(columns, 1)
        ),
    )
    # Among rows of equal time the greatest one, so that every run takes the same.
    key = col(entity.key).try_cast(types[entity.key])
    listed = rows.where(key.isNotNull()).groupBy(key.alias("key"))
    newest_rows = listed.agg(F.max(F.struct(F.col(EVENT_MICROS).alias("at"), values.alias("values"))).alias("newest"))
    active = events.where(F.col(SPLIT) == "train").select(col(entity.key).alias("active")).distinct()
    new = newest_rows.join(active, F.col("key") == F.col("active"), "left_anti")
    return side.unionByName(
        new.select(
            F.col("key").alias(entity.key),
            *(F.col("newest.values").getField(str(i)).alias(c) for i, c in enumerate(columns, 1)),
        )
    )


@dataclass(frozen=True)
class ActiveEvents:
    """The pinned events that the dataset of a day was made of."""

    ctx: Context
    #: Events of the splits, with the column `__split`, after the leading operators that treat each row alone.
    events: DataFrame
    #: The same with earlier events that only table operators read, and without `__split`.
    past: DataFrame
    #: The remaining table operators.
    other_operators: Preparation
    reader: ExternalReader
    sources: SourceRows

    @staticmethod
    def read(ctx: Context, spark: SparkSession) -> ActiveEvents:
        """Return the active users and items of `events_of_window`."""
        spec, events = ctx.spec, events_of_window(ctx, read_events(ctx, spark))
        leading, other_operators = Preparation.from_spec(spec).split(serving=True)
        # The tables that the dataset was made with, not those of today.
        tables = (*leading.externals, *other_operators.externals)
        reader = ExternalReader.pinned_by(ctx.ws, tables, ctx.upstream["features"].inputs)
        sources = SourceRows.for_day(ctx, spark)
        if leading.steps:
            # Labels as known by the end of the day; only the dataset asks which of them are final.
            end_of_day = midnight(ctx.ds, 1)
            events = leading.spark(
                events_within_days(spec, events, ctx.ds), reader, sources=sources, seen_until=end_of_day
            )
            events = events.drop(QUERY, LABEL_KNOWN)
        past = events_within_days(spec, events, ctx.ds) if other_operators.steps else events
        if spec.features.split.column is None or spec.features.split.column in events.columns:
            marked = split_rows(spec, events, ctx.ds, without_labels=True).frame
        else:  # The split is made for training alone (`last_events`): users have had what is held out, too.
            marked = events.withColumn(SPLIT, F.lit("train"))
        return ActiveEvents(ctx, marked, past, other_operators, reader, sources)

    @contextmanager
    def entities(self, user: Entity, item: Entity) -> Iterator[tuple[DataFrame, DataFrame]]:
        """Give (users, items) as `newest`; columns of table operators that read the past are as of the end of the day.

        With those besides that a side's named source lists (`with_listed`).

        What those operators say is computed once and kept until the end of the context.
        """
        spec = self.ctx.spec
        if not self.other_operators.steps:
            yield (
                self._with_listed(newest(spec, self.events, user), user),
                self._with_listed(newest(spec, self.events, item), item),
            )
            return
        types = dict(self.other_operators.steps[0].schema.types)
        kinds = {"user": user, "item": item}
        lookups = [self._lookup_rows(kind, entity, types) for kind, entity in kinds.items()]
        columns = [*types, FILE, LINE]
        rows = self.past.select(*[col(c) for c in columns], F.lit(None).cast("string").alias(QUERY))
        for added in lookups:
            rows = rows.unionByName(added)
        columns_by_side = {kind: list(dict.fromkeys((entity.key, *entity.columns))) for kind, entity in kinds.items()}
        values = self.other_operators.spark(rows, self.reader, sources=self.sources).where(F.col(QUERY).isNotNull())
        values = values.select(
            QUERY, *[col(c) for c in dict.fromkeys([*columns_by_side["user"], *columns_by_side["item"]])]
        )
        values = values.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            users, items = (
                values.where(F.col(QUERY) == kind).select(*[col(c) for c in columns])
                for kind, columns in columns_by_side.items()
            )
            yield self._with_listed(users, user), self._with_listed(items, item)
        finally:
            values.unpersist()

    def _with_listed(self, side: DataFrame, entity: Entity) -> DataFrame:
        if entity.from_ is None:
            return side
        return with_listed(side, entity, self.events, self.sources(SourceRead(entity.from_, "table")))

    def _lookup_rows(self, kind: str, entity: Entity, types: Mapping[str, ValueType]) -> DataFrame:
        """Return a row for each key: its newest event, moved to the end of the day and without a label."""
        spec = self.ctx.spec
        time = spec.table.event_time
        assert time is not None
        newest_rows = newest(spec, self.events, replace_columns(entity, tuple(types)))
        micros = self._end(types[time])
        end_time = F.timestamp_micros(F.lit(micros)) if types[time].element == "timestamp" else _date(micros)
        changed: dict[str, Column] = {
            time: end_time,
            spec.features.label: F.lit(None).cast(str(types[spec.features.label])),
        }
        return newest_rows.select(
            *[changed.get(c, col(c)).alias(c) for c in types],
            F.lit(f"#{kind}").alias(FILE),
            F.xxhash64(col(entity.key)).alias(LINE),
            F.lit(kind).alias(QUERY),
        )

    def _end(self, time: ValueType) -> int:
        """Return the instant to score for, in microseconds: the end of ds; with no split by time, after all events."""
        spec = self.ctx.spec
        if spec.features.split.by == "time":
            return midnight(self.ctx.ds, 1)
        assert spec.table.event_time is not None
        newest = self.past.agg(F.max(spark_micros(col(spec.table.event_time), time))).collect()[0][0]
        return int(newest or 0) + (DAY_MICROS if time.element == "date" else 1)


def _date(micros: int) -> Column:
    day = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    return F.lit(day.date().isoformat()).cast("date")


def replace_columns(entity: Entity, columns: tuple[str, ...]) -> Entity:
    """Return the same entity with other columns."""
    return entity.model_copy(update={"columns": columns})


def newest(spec: Spec, events: DataFrame, entity: Entity) -> DataFrame:
    """Return the key and the entity's columns, a row for each key with an event in the training rows.

    The columns are those of the key's newest event up to ds (validation days included: it is what is known on that
    day), by event time, then by place in the source. With a limit: the keys with the most events in the training rows,
    of equally many the lower key.
    """
    columns = [c for c in dict.fromkeys(entity.columns) if c != entity.key]
    # Without a time, events are ordered by their place in the source.
    age: list[Column] = [col(spec.table.event_time)] if spec.table.event_time else []
    order = F.struct(*age, F.col("_source_file"), F.col("_source_line"))
    values = F.struct(F.lit(0).alias("0"), *(col(c).alias(str(i)) for i, c in enumerate(columns, 1)))
    newest_rows = (
        events.where(col(entity.key).isNotNull())
        .groupBy(col(entity.key).alias("key"))
        .agg(F.count(F.when(F.col(SPLIT) == "train", 1)).alias("events"), F.max_by(values, order).alias("newest"))
        .where(F.col("events") > 0)
    )
    if entity.limit is not None:
        newest_rows = newest_rows.orderBy(F.desc("events"), F.asc("key")).limit(entity.limit)
    return newest_rows.select(
        F.col("key").alias(entity.key), *(F.col(f"newest.{i}").alias(c) for i, c in enumerate(columns, 1))
    )


def with_activity(spec: Spec, events: DataFrame, items: DataFrame, key: str) -> DataFrame:
    """Return items with `events`, their number in the training rows, and `first_event`, the time of the first up to ds.

    Both are null of items without any.
    """
    time = spec.table.event_time
    event_time = F.lit(None).cast("timestamp") if time is None else col(time)
    counts = F.count(F.when(F.col(SPLIT) == "train", 1)).alias("events")
    item_events = events.where(col(key).isNotNull()).groupBy(col(key).alias("__of_item"))
    return items.join(
        item_events.agg(counts, F.min(event_time).alias("first_event")), col(key) == F.col("__of_item"), "left"
    ).drop("__of_item")


def seen(spec: Spec, events: DataFrame, user_key: str, item_key: str, any_label: bool = False) -> DataFrame:
    """Return (key, seen): for each user, the items of their events up to ds; of a split by column those in train.

    Args:
        spec: with the label and the split.
        events: with the column `__split`.
        user_key: the column of users.
        item_key: the column of items.
        any_label: whether events count whose label is not 1.
    """
    rows = events.where(col(user_key).isNotNull() & col(item_key).isNotNull())
    if not any_label:
        rows = rows.where(col(spec.features.label).cast("double") == 1.0)
    if spec.features.split.by == "column":
        rows = rows.where(F.col(SPLIT) == "train")
    return rows.groupBy(col(user_key).alias("key")).agg(F.collect_set(col(item_key)).alias("seen"))
