"""Statistics of a day in their Delta table: the columns that the features stage read and the features that it wrote.

People query the table, and the stage `drift` reads it. One row for each (day, split, side, column); a day is a
partition, written by one commit that replaces it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.features.build.run import BuiltDay
from headrace.features.layout.split import SPLIT
from headrace.lake.delta.log import DeltaLog, damaged_file
from headrace.lake.delta.with_spark import save_delta
from headrace.lake.spark.exchange import arrow_frame
from headrace.quality.drift.columns import feature_columns, input_columns
from headrace.quality.drift.count_rows import measure_dataset, measure_frame, measure_lake
from headrace.stage import Context
from headrace.stage.manifest import Output
from headrace.storage import Fence, Location

_LOG = logging.getLogger("headrace.features")

_BIN = pa.struct(
    [
        # A number's bin holds low <= x < high (null: open); a category's the value (null: all others).
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("value", pa.string()),
        ("count", pa.int64()),
        ("share", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        # First and last day of the split's events, where the split is by time.
        ("from_day", pa.string()),
        ("to_day", pa.string()),
        # input: a column of the events; feature: a feature of the dataset.
        ("side", pa.string()),
        ("column", pa.string()),
        # number, category or time.
        ("kind", pa.string()),
        ("rows", pa.int64()),
        # Rows without a value.
        ("missing", pa.int64()),
        # Number of values (of lists: of elements), and of those outside the vocabulary.
        ("values", pa.int64()),
        ("oov", pa.int64()),
        # Exact up to 2,048, above it an estimate with a standard error of 2.2 %.
        ("distinct", pa.int64()),
        # Over the finite numbers.
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("mean", pa.float64()),
        ("std", pa.float64()),
        # Shares of the values. The training split fixes the bins: for a category, its most frequent values there.
        ("histogram", pa.list_(_BIN)),
        ("ds", pa.string()),
    ]
)


def write_statistics(
    spark: SparkSession,
    path: Location,
    ds: str,
    key: str,
    rows: Sequence[Mapping[str, Any]],
    ranges: Mapping[str, tuple[str, str] | None],
    fence: Fence | None = None,
) -> int:
    """Replace a day's statistics in one commit; return the table's version.

    The day's newest commit is kept where it has the same `key` (after a run that was killed, or whose dataset was lost)
    and its files are intact: another version with the same content would make later stages stale.

    Args:
        spark: a session with Delta.
        path: the table's folder, made where it is missing.
        ds: the day.
        key: of the run: same key, same statistics.
        rows: from `SplitStatistics.rows`.
        ranges: first and last day by split.
        fence: of the holder of the lease under which the table is written.
    """
    metadata = {"stage": "statistics", "ds": ds, "key": key}
    for version, text in DeltaLog(path).user_metadata():
        commit = _metadata(text)
        if commit.get("stage") == "statistics" and commit.get("ds") == ds:
            files = DeltaLog(path).files(version) or ()
            if commit == metadata and damaged_file(f for f in files if f.partition.get("ds") == ds) is None:
                return version
            break
    full = [{**r, "ds": ds, **_range(ranges.get(str(r["split"])))} for r in rows]
    with arrow_frame(spark, pa.Table.from_pylist(full, SCHEMA)) as frame:
        writer = (
            frame.write.format("delta")
            .mode("overwrite")
            .partitionBy("ds")
            .option("replaceWhere", f"ds = '{ds}'")
            .option("userMetadata", json.dumps(metadata))
        )
        return save_delta(writer, path, fence)


def _range(days: tuple[str, str] | None) -> dict[str, str | None]:
    return {"from_day": days[0] if days else None, "to_day": days[1] if days else None}


def _metadata(text: str) -> Mapping[str, Any]:
    """Parse a commit's metadata as JSON; empty for other text (of VACUUM or OPTIMIZE)."""
    try:
        metadata = json.loads(text)
    except ValueError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def count_day(ctx: Context, day: BuiltDay, spark: SparkSession) -> tuple[Output, ...]:
    """Count the day and replace it in the table; return the table at its new version. The spec has the section `drift`.

    Rows that are files are counted as such; those of the Spark engine, and the dataset, by the engine that made the
    dataset.
    """
    assert ctx.spec.drift is not None
    fitted, rows = day.fitted, day.rows
    started = time.perf_counter()
    splits, quantiles, top = tuple(day.counts), ctx.spec.drift.quantiles, ctx.spec.drift.top_values
    types = {c: fitted.workflow.input_type(c) for f in fitted.features for c in f.sources}
    inputs = input_columns(types, fitted.features)
    if day.files is not None:
        raw = measure_lake(spark, day.files, inputs, day.counts["train"], quantiles, top)
    else:
        raw = measure_frame(rows.frame, SPLIT, splits, inputs, day.counts["train"], quantiles, top)
    features = measure_dataset(spark, day.folder, splits, feature_columns(fitted.features), quantiles, top, day.engine)
    records = [r for part in (raw, features) for r in part.rows(fitted.vocabularies)]
    path = ctx.ws.table(ctx.spec.pipeline, "statistics")
    counted = time.perf_counter()
    version = write_statistics(spark, path, ctx.ds, ctx.key, records, rows.ranges, ctx.fence)
    _LOG.info(
        "counted %d columns and features in %.1f s, wrote their statistics in %.1f s",
        len(records) // len(splits),
        counted - started,
        time.perf_counter() - counted,
    )
    return (Output(kind="delta", name=ctx.ws.name_of(path), version=str(version), rows=len(records)),)
