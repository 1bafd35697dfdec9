"""Spark windows over the events before a row.

All of it is made of row frames that begin at a key's first row (and one that holds a fixed number of rows), over rows
sorted by time. Such frames are computed as running values: Spark spills them, RAPIDS computes them in batches, and a
key with a million events costs what a thousand keys of a thousand do. A frame like `RANGE BETWEEN 28 DAYS PRECEDING` is
computed anew for each row by Spark, and held in memory whole by RAPIDS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F

from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import spark_micros
from headrace.features.table_ops.base import FILE, LINE, QUERY, SourceRead, SparkTableContext

#: Helper columns: the time of a row; by keys, a number where it has no past (one of them or the time is null), so that
#: such rows do not all meet in one partition. They stay for the operators that follow: rows that are together already
#: need not be brought together again.
EVENT_MICROS, _ALONE = "__t", "__alone"
#: The time of a row once it is shifted, and which copy it is then.
SHIFTED_MICROS, COPY = "__at", "__kind"


def _alone(keys: Collection[str]) -> str:
    return f"{_ALONE}({','.join(sorted(keys))})"


def _stays(column: str) -> bool:
    return column == EVENT_MICROS or column.startswith(_ALONE)


def with_time(frame: DataFrame, context: SparkTableContext, keys: Collection[str]) -> DataFrame:
    """Return the rows with EVENT_MICROS, and with what `has_key_and_time` and `partition_columns` look at."""
    time = context.schema.needs_time()
    if EVENT_MICROS not in frame.columns:
        frame = frame.withColumn(EVENT_MICROS, spark_micros(col(time), context.schema.types[time]))
    if _alone(keys) in frame.columns:
        return frame
    is_complete = F.col(EVENT_MICROS).isNotNull()
    for key in keys:
        is_complete = is_complete & col(key).isNotNull()
    return frame.withColumn(_alone(keys), F.when(~is_complete, F.xxhash64(FILE, LINE)))


def without_helpers(frame: DataFrame) -> DataFrame:
    """Return the rows without what `with_time` added: for operators that change keys, and for the end."""
    return frame.drop(*[c for c in frame.columns if _stays(c)])


def passthrough_columns(frame: DataFrame, columns: Sequence[str]) -> list[Column]:
    """Return the columns of an operator's input, and the helper columns that exist by now."""
    return [col(c) for c in dict.fromkeys([*columns, *(c for c in frame.columns if _stays(c))])]


def has_key_and_time(keys: Collection[str]) -> Column:
    """Return a boolean: the row has its keys and its time (after `with_time`)."""
    return col(_alone(keys)).isNull()


def is_event(keys: Collection[str]) -> Column:
    """Return a boolean: `has_key_and_time`, and no query row."""
    return F.col(QUERY).isNull() & has_key_and_time(keys)


def partition_columns(keys: Collection[str]) -> list[Column]:
    """Return the columns of partitions, the same for keys in another order."""
    return [*(col(k) for k in sorted(keys)), col(_alone(keys))]


def running(window: WindowSpec) -> WindowSpec:
    """Return the frame from the first row to this one."""
    return window.rowsBetween(Window.unboundedPreceding, Window.currentRow)


def first_of_instant(order: WindowSpec, time: str = EVENT_MICROS) -> Column:
    """Return a boolean: the first row, in `order`, of its key and instant."""
    return F.coalesce(F.lag(time, 1).over(order) < F.col(time), F.lit(True))


def sums_before(
    frame: DataFrame, keys: Collection[str], values: Mapping[str, Column], time: str = EVENT_MICROS
) -> DataFrame:
    """Return the rows with sums, by name, of a bigint column over the key's rows at strictly earlier instants; 0 if
    none.
    """
    order = Window.partitionBy(*partition_columns(keys)).orderBy(time)
    inputs = {f"__v_{name}": value for name, value in values.items()}
    frame = frame.withColumns({**inputs, "__first": first_of_instant(order, time)})
    # At the first row of an instant, what came before it was earlier, whatever the order within instants.
    frame = frame.withColumns(
        {
            f"__r_{n}": F.when(F.col("__first"), F.sum(f"__v_{n}").over(running(order)) - F.col(f"__v_{n}"))
            for n in values
        }
    )
    instant = Window.partitionBy(*partition_columns(keys), F.col(time))
    frame = frame.withColumns({name: F.max(f"__r_{name}").over(instant) for name in values})
    return frame.drop("__first", *inputs, *(f"__r_{n}" for n in values))


def newest_before(
    frame: DataFrame, keys: Collection[str], name: str, value: Column, empty: Column, time: str = EVENT_MICROS
) -> DataFrame:
    """Return the rows with a column `name`: `value` of the newest row at a strictly earlier instant where it is not
    null.

    Rows at one instant follow each other by file and line. `empty` (not null) is the value where there is none.
    `__first` says which row of its instant is the first: see `first_of_instant`.
    """
    order = Window.partitionBy(*partition_columns(keys)).orderBy(time, FILE, LINE)
    frame = frame.withColumn("__x", value)
    frame = frame.withColumn("__y", F.last("__x", ignorenulls=True).over(running(order)))
    frame = frame.withColumn("__z", F.when(F.col("__first"), F.coalesce(F.lag("__y", 1).over(order), empty)))
    frame = frame.withColumn(name, F.last("__z", ignorenulls=True).over(running(order)))
    return frame.drop("__x", "__y", "__z")


def shifted(frame: DataFrame, columns: Sequence[str], keys: Collection[str], offsets: Sequence[int]) -> DataFrame:
    """Return each row at its time (COPY 0), and each event again at its time + offsets[i] (COPY i + 1), at
    SHIFTED_MICROS.

    The copies keep the keys, identity and helper columns; of `columns` all others are null there.
    """
    if not offsets:
        return frame.withColumns({COPY: F.lit(0), SHIFTED_MICROS: F.col(EVENT_MICROS)})
    kinds = F.array(*[F.lit(i) for i in range(len(offsets) + 1)])
    frame = frame.withColumn(COPY, F.explode(F.when(is_event(keys), kinds).otherwise(F.array(F.lit(0)))))
    micros = F.when(F.col(COPY) == 0, F.col(EVENT_MICROS))
    for i, offset in enumerate(offsets, 1):
        micros = micros.when(F.col(COPY) == i, F.col(EVENT_MICROS) + F.lit(offset).cast("bigint"))
    frame = frame.withColumn(SHIFTED_MICROS, micros)
    kept_columns = {*keys, FILE, LINE, QUERY}
    rest = [c for c in columns if c not in kept_columns and not _stays(c)]
    return frame.withColumns({c: F.when(F.col(COPY) == 0, col(c)) for c in rest})


@dataclass(frozen=True)
class Sums:
    """Sums of `window_sums`: bigint columns of events by name, null counting as 0."""

    values: Mapping[str, Column]
    #: Lengths in microseconds; None: since the beginning.
    windows: Sequence[int | None]
    #: An event counts only this many microseconds after it happened.
    delay: int = 0

    def column(self, name: str, window: int) -> str:
        """Return the column of the sum of `name` over windows[window]."""
        return f"__s_{name}_{window}"


def window_sums(frame: DataFrame, context: SparkTableContext, keys: Collection[str], sums: Sums) -> DataFrame:
    """Return the rows with the sums over events at u of the key with t - delay - window <= u < t - delay, t the row's
    time.

    A sum over a window is one running sum over a sequence in which each event enters (+) and, a window later, leaves
    (-): rows times (1 + the number of windows), each looked at once.
    """
    columns = frame.columns
    frame = with_time(frame, context, keys)
    none = F.lit(0).cast("bigint")
    values = {f"__w_{n}": F.when(is_event(keys), F.coalesce(v, none)).otherwise(none) for n, v in sums.values.items()}
    frame = frame.withColumns(values)
    offsets = [sums.delay] if sums.delay else []
    enters = len(offsets)
    leaves: dict[int, int] = {}
    for i, window in enumerate(sums.windows):
        if window is not None:
            offsets.append(sums.delay + window)
            leaves[i] = len(offsets)
    frame = shifted(frame, columns, keys, offsets)
    changes = {}
    for name in sums.values:
        x = F.col(f"__w_{name}")
        for i in range(len(sums.windows)):
            change = F.when(F.col(COPY) == enters, x)
            if i in leaves:
                change = change.when(F.col(COPY) == leaves[i], -x)
            changes[sums.column(name, i)] = change.otherwise(none)
    frame = sums_before(frame, keys, changes, SHIFTED_MICROS).where(F.col(COPY) == 0)
    results = {c: F.when(has_key_and_time(keys), F.col(c)).otherwise(none) for c in changes}
    return frame.select(*passthrough_columns(frame, columns), *[x.alias(c) for c, x in results.items()])


#: Of `newest_version`: the struct that it adds, null where there is none.
VERSION = "__version"
_ORDER, _VALUE = "__order", "__value"


def newest_version(
    frame: DataFrame,
    context: SparkTableContext,
    keys: Collection[str],
    versions: DataFrame,
    value: Sequence[str],
    inclusive: bool,
) -> DataFrame:
    """Return the rows with VERSION: the columns `value` (as fields 0, 1, ...) of the newest version before the row.

    Args:
        versions: columns `keys` of the rows' types, EVENT_MICROS (bigint) and `value`, no null in keys and time; where
            several are of one key and time, FILE and LINE to order them.
        inclusive: whether a version from exactly the row's time counts.

    Rows and versions are sorted together, once; a join on `key and valid_from <= time` would meet every pair.
    """
    columns = frame.columns
    fields = F.struct(*[col(v).alias(str(i)) for i, v in enumerate(value)])
    place_in_file = [F.col(c) for c in (FILE, LINE) if c in versions.columns]
    right = versions.select(
        *[col(k) for k in keys],
        F.col(EVENT_MICROS),
        *place_in_file,
        fields.alias(_VALUE),
        F.lit(0 if inclusive else 2).alias(_ORDER),
    )
    both = with_time(frame, context, keys).withColumn(_ORDER, F.lit(1)).unionByName(right, allowMissingColumns=True)
    order = Window.partitionBy(*partition_columns(keys)).orderBy(EVENT_MICROS, _ORDER, FILE, LINE)
    both = both.withColumn(VERSION, F.last(_VALUE, ignorenulls=True).over(running(order)))
    rows = both.where(F.col(_ORDER) == 1)
    return rows.select(
        *passthrough_columns(rows, columns), F.when(has_key_and_time(keys), F.col(VERSION)).alias(VERSION)
    )


#: True of the rows, null of the events; what the rows' QUERY was.
_ASKS, _ROW_QUERY = "__asks", "__own_query"


def with_source_events(
    frame: DataFrame,
    context: SparkTableContext,
    keys: Mapping[str, str],
    read: SourceRead,
    values: Mapping[str, Column],
) -> tuple[DataFrame, dict[str, Column]]:
    """Return the rows, and the source's events that have their keys and a time; and where `values` of these are found.

    Args:
        keys: column of the rows -> column of the source, of one type.
        values: expressions over the source's columns; null in the rows.
    """
    rows = with_time(frame, context, keys).withColumnRenamed(QUERY, _ROW_QUERY)
    rows = rows.withColumns({QUERY: F.lit("asks"), _ASKS: F.lit(True)})
    events = context.source(read)
    is_complete = F.col(EVENT_MICROS).isNotNull()
    for source_key in keys.values():
        is_complete = is_complete & col(source_key).isNotNull()
    value_columns = {name: f"__x_{name}" for name in values}
    events = events.where(is_complete).select(
        *[col(source_key).alias(key) for key, source_key in keys.items()],
        EVENT_MICROS,
        FILE,
        LINE,
        F.lit(None).cast("string").alias(QUERY),
        *[value.alias(value_columns[name]) for name, value in values.items()],
    )
    return rows.unionByName(events, allowMissingColumns=True), {name: F.col(c) for name, c in value_columns.items()}


def rows_without_source(both: DataFrame) -> DataFrame:
    """Return the rows of `with_source_events` without the events."""
    return both.where(F.col(_ASKS)).drop(QUERY, _ASKS).withColumnRenamed(_ROW_QUERY, QUERY)
