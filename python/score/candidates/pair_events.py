"""Which users had which items: events of the pipeline or of a named source, one row for each pair."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import PairEvents
from headrace.errors import UserError, nearest
from headrace.features.build.rows import end_of_day
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.layout.split import SPLIT
from headrace.features.table_ops.base import SourceRead
from headrace.features.table_ops.preparation import midnight
from headrace.features.table_ops.spark_windows import EVENT_MICROS
from headrace.features.types import declared
from headrace.lake.calendar import following
from headrace.score.candidates.expressions import condition
from headrace.score.candidates.source import SourceContext
from headrace.score.items import ITEM_ROW

#: The columns of pairs besides ITEM_ROW: the user's key, and the time of the pair's newest event in microseconds
#: (bigint; 0 where the events have no time).
USER, AT = "__user", "__at"


def pairs_of(context: SourceContext, events: PairEvents, where: str) -> DataFrame:
    """(USER, ITEM_ROW, AT): one row for each user and each item of `context.items` that have such an event.

    Args:
        context: of the run.
        events: which events count.
        where: the section's place in the spec, for messages.

    Returns:
        A frame that is computed once for all who ask for the same.

    Raises:
        UserError: the expression is none of the events' columns, or they lack a key's column.
    """
    asked = (events.from_, events.where, events.days, events.user, events.item)
    return context.keep(("pairs", *asked), lambda: _pairs(context, events, where))


def _pairs(context: SourceContext, events: PairEvents, where: str) -> DataFrame:
    rows, at = _own(context, events, where) if events.from_ is None else _named(context, events, where)
    score = context.score
    if events.days is not None:
        rows = rows.where(at >= F.lit(_end(context, events, following(context.ctx.ds, -events.days))))
    types = dict(context.users.dtypes) | dict(context.items.dtypes)
    names = {"user": events.user or score.user.key, "item": events.item or score.item.key}
    for key, name in names.items():
        if name not in rows.columns:
            known = [c for c in rows.columns if not c.startswith("_")]
            raise UserError(
                f"{where}.{key}: the events have no column '{name}'{nearest(name, known)} (there are: "
                f"{', '.join(known)})"
            )
    # A text that is no number is no user's key, and no item's.
    user = col(names["user"]).try_cast(types[score.user.key])
    item = col(names["item"]).try_cast(types[score.item.key])
    # Each pair once before it meets the items: one that a user had a thousand times is one row from here on.
    found = rows.select(user.alias(USER), item.alias("__item"), at.alias(AT)).where(
        F.col(USER).isNotNull() & F.col("__item").isNotNull()
    )
    found = found.groupBy(USER, "__item").agg(F.max(AT).alias(AT))
    keys = context.items.select(col(score.item.key).alias("__item"), F.col(ITEM_ROW))
    return found.join(keys, "__item").select(USER, ITEM_ROW, AT)


def _own(context: SourceContext, events: PairEvents, where: str) -> tuple[DataFrame, Column]:
    """Events of the training window: up to ds with a split by time, else those of train."""
    spec, rows = context.ctx.spec, context.active.events
    if spec.features.split.by != "time":
        rows = rows.where(F.col(SPLIT) == "train")
    if events.where is None:
        rows = rows.where(col(spec.features.label).cast("double") == 1.0)
    else:
        rows = rows.where(condition(rows, events.where, f"{where}.where"))
    time = spec.table.event_time
    if time is None:
        return rows, F.lit(0).cast("bigint")
    type_ = next(declared(c) for c in spec.table.columns if c.name == time)
    return rows, F.coalesce(spark_micros(col(time), type_), F.lit(0).cast("bigint"))


def _named(context: SourceContext, events: PairEvents, where: str) -> tuple[DataFrame, Column]:
    assert events.from_ is not None
    # What a user bought is bought: `features.history_days` is a bound of features, not of this.
    lookback = None if events.days is None else events.days * DAY_MICROS
    rows = context.active.sources(SourceRead(events.from_, "all_events", lookback))
    # What happened up to the end of ds.
    rows = rows.where(F.col(EVENT_MICROS) < F.lit(_end(context, events, context.ctx.ds)))
    if events.where is not None:
        rows = rows.where(condition(rows, events.where, f"{where}.where"))
    return rows, F.col(EVENT_MICROS)


def _end(context: SourceContext, events: PairEvents, ds: str) -> int:
    """The first microsecond after a day, in terms of the events' times."""
    return midnight(ds, 1) if events.from_ is None else end_of_day(context.ctx.spec.sources[events.from_], ds)
