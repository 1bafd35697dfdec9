"""Which events a dataset of a day is made of: the days of the split, and those before that table operators look at."""

from __future__ import annotations

from datetime import date, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Spec
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.day_ranges import split_ranges
from headrace.features.table_ops.preparation import Preparation, midnight
from headrace.features.types import declared


def first_day(spec: Spec, ds: str) -> str:
    """The first day whose events are read: that of the training range, or earlier ones that table operators look at."""
    if not spec.features.prepare:
        return split_ranges(spec, ds)[0][0]
    back = spec.features.history_days
    if back is None:
        back = Preparation.from_spec(spec).lookback_days
    return days_before_training(spec, ds, back)


def days_before_training(spec: Spec, ds: str, days: int) -> str:
    """The day so many days before the training range's first."""
    return (date.fromisoformat(split_ranges(spec, ds)[0][0]) - timedelta(days=days)).isoformat()


def by_days(spec: Spec) -> bool:
    """Whether a dataset is made of some days of the events; else of all, or of a snapshot."""
    return spec.source.daily and spec.features.split.by == "time"


def within(spec: Spec, events: DataFrame, ds: str) -> DataFrame:
    """Events that happened from `first_day` to the end of ds, whenever they landed (split by time of daily sources)."""
    if not by_days(spec):
        return events
    assert spec.table.event_time is not None
    type_ = next(declared(c) for c in spec.table.columns if c.name == spec.table.event_time)
    t = spark_micros(col(spec.table.event_time), type_)
    return events.where((t >= F.lit(midnight(first_day(spec, ds)))) & (t < F.lit(midnight(ds, 1))))
