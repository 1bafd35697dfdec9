"""The rows of a day: the lake's events, through the spec's table operators where there are any, split."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.features.build.events import pinned_table
from headrace.features.build.source_rows import SourceRows
from headrace.features.build.window import within
from headrace.features.layout.day_ranges import split_ranges
from headrace.features.layout.label_horizon import seen_until
from headrace.features.layout.split import SplitRows, split_rows
from headrace.features.table_ops.base import LABEL_KNOWN, QUERY
from headrace.features.table_ops.external import ExternalReader, pin
from headrace.features.table_ops.preparation import Preparation, row_preparation, train_range
from headrace.manifest import Input
from headrace.stage import Context
from headrace.storage import Location

_LOG = logging.getLogger("headrace.features")


def other_inputs(ctx: Context) -> tuple[Input, ...]:
    """The tables that are joined, as they are now, and the named sources that are read, as ingest's manifest pins them.

    Raises:
        UserError: one is missing.
    """
    if not ctx.spec.features.prepare:
        return ()
    preparation = Preparation.from_spec(ctx.spec)
    pinned = (pinned_table(ctx, name) for name in preparation.sources)
    sources = (Input(kind="delta", name=p.name, version=p.version) for p in pinned)
    return (*pin(ctx.ws, preparation.externals), *sources)


@contextmanager
def day_rows(ctx: Context, events: DataFrame, *, from_files: bool = False) -> Iterator[SplitRows]:
    """The rows that the dataset of a day is made of.

    With table operators they are computed once and kept while the stage goes over them several times, to count, to fit,
    to write: as Parquet files, or by Spark on the executors' disks where they share none. But not where the engine
    makes them of the lake's files itself.

    Args:
        ctx: its inputs pin the tables that are joined, see `other_inputs`.
        events: the pinned events from `first_day` on.
        from_files: whether the engine works on the lake's files where it can (`row_preparation`).

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
    numbers, kept = count(), list[DataFrame]()
    in_place = from_files and row_preparation(spec) is not None

    def materialize(frame: DataFrame) -> DataFrame:
        if in_place:
            return frame
        if spec.spark.own_scratch:
            # What is lost with an executor is made again of the pinned versions.
            kept.append(frame.persist(StorageLevel.DISK_ONLY))
            return kept[-1]
        path = folder / str(next(numbers))
        path.parent.make_dir()
        return _kept(frame, path)

    try:
        train, valid = split_ranges(spec, ctx.ds)
        preparation = Preparation.from_spec(spec)
        reader = ExternalReader.of(ctx.ws, preparation.externals, ctx.inputs)
        frame = preparation.spark(
            within(spec, events, ctx.ds),
            reader,
            train_range(spec, train[0], valid[0]),
            materialize,
            SourceRows.of(ctx, events.sparkSession),
            seen_until(spec, ctx.ds),
        )
        if LABEL_KNOWN in frame.columns:
            frame = frame.where(F.col(LABEL_KNOWN)).drop(LABEL_KNOWN)
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
        for frame in kept:
            frame.unpersist()
        folder.remove_quietly()


def _kept(frame: DataFrame, path: Location) -> DataFrame:
    """The same rows, from files."""
    names = frame.columns
    # Parquet's writer refuses some characters in names: numbers travel.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(names))])
    numbered.write.mode("overwrite").parquet(str(path))
    return frame.sparkSession.read.schema(numbered.schema).parquet(str(path)).toDF(*names)
