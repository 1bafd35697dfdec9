"""The rows of a day: the lake's events, through the spec's table operators where there are any, split."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, timedelta
from itertools import count

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Spec
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.split import SplitRows, split_rows, time_ranges
from headrace.features.table_ops.base import QUERY
from headrace.features.table_ops.external import ExternalReader, pin
from headrace.features.table_ops.preparation import Preparation, midnight, train_range
from headrace.features.types import declared
from headrace.manifest import Input
from headrace.stage import Context
from headrace.storage import Location
from headrace.workspace import Workspace

_LOG = logging.getLogger("headrace.features")


def first_day(spec: Spec, ds: str) -> str:
    """The first day whose events are read: that of the training range, or earlier ones that table operators look at."""
    first = time_ranges(spec.features, ds)[0][0]
    if not spec.features.prepare:
        return first
    back = spec.features.history_days
    if back is None:
        back = Preparation.from_spec(spec).lookback_days
    return (date.fromisoformat(first) - timedelta(days=back)).isoformat()


def external_inputs(spec: Spec, ws: Workspace) -> tuple[Input, ...]:
    """The tables that are joined, as they are now. Raises UserError where one is missing."""
    return pin(ws, Preparation.from_spec(spec).externals) if spec.features.prepare else ()


def within(spec: Spec, events: DataFrame, ds: str) -> DataFrame:
    """Events that happened from `first_day` to the end of ds, whenever they landed (split by time of daily sources)."""
    if not (spec.source.daily and spec.features.split.by == "time"):
        return events
    assert spec.table.event_time is not None
    type_ = next(declared(c) for c in spec.table.columns if c.name == spec.table.event_time)
    t = spark_micros(col(spec.table.event_time), type_)
    return events.where((t >= F.lit(midnight(first_day(spec, ds)))) & (t < F.lit(midnight(ds, 1))))


@contextmanager
def day_rows(ctx: Context, events: DataFrame) -> Iterator[SplitRows]:
    """The rows that the dataset of a day is made of.

    With table operators they are computed once and kept as Parquet files while the stage goes over them several times:
    to count, to fit, to write.

    Args:
        ctx: its inputs pin the tables that are joined, see `external_inputs`.
        events: the pinned events from `first_day` on.

    Raises:
        UserError: as the operators and the split do; a table that was joined has changed.
    """
    spec = ctx.spec
    if not spec.features.prepare:
        yield split_rows(spec, events, ctx.ds)
        return
    folder = ctx.ws.spark_local / "prepared" / f"{spec.pipeline}-{ctx.ds}"
    # What a killed run left.
    folder.remove_quietly()
    numbers = count()

    def materialize(frame: DataFrame) -> DataFrame:
        path = folder / str(next(numbers))
        path.parent.make_dir()
        return _kept(frame, path)

    try:
        train, valid = time_ranges(spec.features, ctx.ds)
        preparation = Preparation.from_spec(spec)
        reader = ExternalReader.of(ctx.ws, preparation.externals, ctx.inputs)
        frame = preparation.spark(
            within(spec, events, ctx.ds), reader, train_range(spec, train[0], valid[0]), materialize
        )
        frame = frame.drop(QUERY)
        if spec.features.split.by == "time":
            # Without a look at the rows, and what was read for the past alone is not kept.
            rows = split_rows(spec, frame, ctx.ds)
            rows = replace(rows, frame=materialize(rows.frame))
        else:
            rows = split_rows(spec, materialize(frame), ctx.ds)
        reader.check_unchanged()
        _LOG.info("prepared the rows by %s", ", ".join(s.op.name for s in preparation.steps))
        yield rows
    finally:
        folder.remove_quietly()


def _kept(frame: DataFrame, path: Location) -> DataFrame:
    """The same rows, from files."""
    names = frame.columns
    # Parquet's writer refuses some characters in names: numbers travel.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(names))])
    numbered.write.mode("overwrite").parquet(str(path))
    return frame.sparkSession.read.schema(numbered.schema).parquet(str(path)).toDF(*names)
