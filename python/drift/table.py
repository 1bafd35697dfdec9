"""The Delta table of statistics: what came in, day by day, for people's queries and for the stage `drift`.

One row for each (day, split, side, column); a day is a partition, written by one commit that replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.lake.arrow_frame import arrow_frame
from headrace.lake.delta.fenced_write import save_delta
from headrace.lake.delta.log import DeltaLog, damaged_file
from headrace.storage import Fence, Location

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
        # input: a column of the events; feature: what was made of it.
        ("side", pa.string()),
        ("column", pa.string()),
        # number, category or time.
        ("kind", pa.string()),
        ("rows", pa.int64()),
        # Rows without a value.
        ("missing", pa.int64()),
        # Values, of a list its elements, and of these those that the vocabulary lacks.
        ("values", pa.int64()),
        ("oov", pa.int64()),
        # Exact up to 2,048, above it an estimate with a standard error of 2.2 %.
        ("distinct", pa.int64()),
        # Of the finite numbers.
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("mean", pa.float64()),
        ("std", pa.float64()),
        # Shares of the values; bins are fixed by the training split. A category's are its most frequent values there.
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
    """Replace a day's statistics in one commit; returns the table's version.

    Where the day's newest commit has the same `key` (a run that was killed after it, or one whose dataset was lost),
    and its files are whole, it stands: what was made from it is not stale because of a version that says the same.

    Args:
        spark: a session with Delta.
        path: the table's folder, made where it is missing.
        ds: the day.
        key: of the run: same key, same statistics.
        rows: from `SplitStatistics.rows`.
        ranges: first and last day by split.
        fence: of the holder of the lease under which the table is written.
    """
    said = {"stage": "statistics", "ds": ds, "key": key}
    for version, text in DeltaLog(path).user_metadata():
        found = _said(text)
        if found.get("stage") == "statistics" and found.get("ds") == ds:
            files = DeltaLog(path).files(version) or ()
            if found == said and damaged_file(f for f in files if f.partition.get("ds") == ds) is None:
                return version
            break
    full = [{**r, "ds": ds, **_range(ranges.get(str(r["split"])))} for r in rows]
    with arrow_frame(spark, pa.Table.from_pylist(full, SCHEMA)) as frame:
        writer = (
            frame.write.format("delta")
            .mode("overwrite")
            .partitionBy("ds")
            .option("replaceWhere", f"ds = '{ds}'")
            .option("userMetadata", json.dumps(said))
        )
        return save_delta(writer, path, fence)


def _range(days: tuple[str, str] | None) -> dict[str, str | None]:
    return {"from_day": days[0] if days else None, "to_day": days[1] if days else None}


def _said(text: str) -> Mapping[str, Any]:
    """A commit's metadata as JSON; empty where it is other text (somebody's VACUUM or OPTIMIZE)."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
