"""The features stage's statistics: of the columns that it read and of the features that it wrote, into their table."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from headrace.drift.columns import feature_columns, input_columns
from headrace.drift.count_arrow import measure_dataset, measure_frame, measure_lake
from headrace.drift.table import write_statistics
from headrace.features.engines.arrow.lake_rows import LakeRows
from headrace.features.layout.files import Engine
from headrace.features.layout.split import SPLIT, SplitRows
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.manifest import Output
from headrace.stage import Context

_LOG = logging.getLogger("headrace.features")


def count_day(
    ctx: Context,
    fitted: FittedWorkflow,
    rows: SplitRows,
    files: LakeRows | None,
    counts: Mapping[str, int],
    folder: Path,
    engine: Engine,
    spark: SparkSession,
) -> tuple[Output, ...]:
    """Count the day and replace it in the table. The spec has the section `drift`.

    Args:
        fitted: what made the dataset.
        rows: the day's rows.
        files: the same as lake files, where they are.
        counts: rows of each split.
        folder: the dataset's.
        engine: who counts `rows` without `files`, and the dataset.
    """
    assert ctx.spec.drift is not None
    tick = time.perf_counter()
    splits, quantiles, top = tuple(counts), ctx.spec.drift.quantiles, ctx.spec.drift.top_values
    types = {c: fitted.workflow.input_type(c) for f in fitted.features for c in f.sources}
    inputs = input_columns(types, fitted.features)
    if files is not None:
        raw = measure_lake(spark, files, inputs, counts["train"], quantiles, top)
    else:
        raw = measure_frame(rows.frame, SPLIT, splits, inputs, counts["train"], quantiles, top, engine)
    made = measure_dataset(spark, folder, splits, feature_columns(fitted.features), quantiles, top, engine)
    records = [r for part in (raw, made) for r in part.rows(fitted.vocabularies)]
    path = ctx.ws.table(ctx.spec.pipeline, "statistics")
    ranges = {"train": rows.train_range, "valid": rows.valid_range}
    counted = time.perf_counter()
    version = write_statistics(spark, path.local_path(), ctx.ds, ctx.key, records, ranges)
    _LOG.info(
        "counted %d columns and features in %.1f s, wrote their statistics in %.1f s",
        len(records) // len(splits),
        counted - tick,
        time.perf_counter() - counted,
    )
    return (Output(kind="delta", name=ctx.ws.name_of(path), version=str(version), rows=len(records)),)
