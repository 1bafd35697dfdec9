"""The Spark engine's write: the operators' Spark bodies, then the Arrow engine's tasks write the files."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame

from headrace.features.spark_plan import col, is_missing
from headrace.features.split import SPLIT
from headrace.features.workflow import FittedWorkflow
from headrace.features.writer import FilePlan, Written, carried_columns, identity, placed
from headrace.features.writer_arrow import write_in_tasks


def write(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan], folder: Path, workflow: Path
) -> list[Written]:
    """See `headrace.features.writer.write_dataset`."""
    w = fitted.workflow
    carried = carried_columns(w)
    frame = rows.select(*[col(c) for c in w.input_columns], *identity(w))
    flags = {c: f"__missing{i}" for i, c in enumerate(w.input_columns)}
    frame = frame.select("*", *[is_missing(c, w.input_type(c)).alias(flag) for c, flag in flags.items()])
    keep = ["__label", *carried, SPLIT, "__hash", "__source_file", "__source_line", *flags.values()]
    frame = fitted.transform(frame, keep=keep)
    return write_in_tasks(placed(frame, plans), plans, folder, workflow, "spark", tuple(carried))
