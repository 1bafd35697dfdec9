"""The features stage's statistics: of the columns that it read and of the features that it wrote, into their table."""

from __future__ import annotations

import logging
import time

from pyspark.sql import SparkSession

from headrace.drift.columns import feature_columns, input_columns
from headrace.drift.count_arrow import measure_dataset, measure_frame, measure_lake
from headrace.drift.table import write_statistics
from headrace.features.build.run import BuiltDay
from headrace.features.layout.split import SPLIT
from headrace.manifest import Output
from headrace.stage import Context

_LOG = logging.getLogger("headrace.features")


def count_day(ctx: Context, day: BuiltDay, spark: SparkSession) -> tuple[Output, ...]:
    """Count the day and replace it in the table; gives the table at its new version. The spec has the section `drift`.

    Rows that are lake files are counted as such; other rows, and the dataset, by the engine that made the dataset.
    """
    assert ctx.spec.drift is not None
    fitted, rows = day.fitted, day.rows
    tick = time.perf_counter()
    splits, quantiles, top = tuple(day.counts), ctx.spec.drift.quantiles, ctx.spec.drift.top_values
    types = {c: fitted.workflow.input_type(c) for f in fitted.features for c in f.sources}
    inputs = input_columns(types, fitted.features)
    if day.files is not None:
        raw = measure_lake(spark, day.files, inputs, day.counts["train"], quantiles, top)
    else:
        raw = measure_frame(rows.frame, SPLIT, splits, inputs, day.counts["train"], quantiles, top, day.engine)
    made = measure_dataset(spark, day.folder, splits, feature_columns(fitted.features), quantiles, top, day.engine)
    records = [r for part in (raw, made) for r in part.rows(fitted.vocabularies)]
    path = ctx.ws.table(ctx.spec.pipeline, "statistics")
    counted = time.perf_counter()
    version = write_statistics(spark, path, ctx.ds, ctx.key, records, rows.ranges, ctx.fence)
    _LOG.info(
        "counted %d columns and features in %.1f s, wrote their statistics in %.1f s",
        len(records) // len(splits),
        counted - tick,
        time.perf_counter() - counted,
    )
    return (Output(kind="delta", name=ctx.ws.name_of(path), version=str(version), rows=len(records)),)
