"""Staging of a frame as Parquet files: the Arrow engine reads files whose rows have a source file and line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.features.arrow.decode import FILE, LINE, LakeFile
from headrace.features.arrow.scan import LakeRows, Splitter, lake_rows
from headrace.features.layout.files import ColumnRule
from headrace.features.types import ValueType
from headrace.features.workflow.workflow import Workflow
from headrace.library.frames import library_of, to_arrow
from headrace.storage import Location, local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Column with the name of the row's split.
SPLIT = "__split"
_ROW_GROUP_ROWS = 131_072


@contextmanager
def staged_rows(
    workflow: Workflow, frames: Mapping[str, Any], staging: str | os.PathLike[str] | None = None
) -> Iterator[tuple[LakeRows, SparkSession | None]]:
    """Yield frames as lake rows, one frame a split, and the Spark session that reads them (None without Spark).

    Args:
        workflow: the workflow, which names the columns.
        frames: frames by split.
        staging: a folder for the files, which Spark's executors see too; the files are removed at the end. None: the
            system's temporary folder.

    Raises:
        UserError: some frames are Spark's and some are not; a column is missing or has another type.
    """
    are_spark = {library_of(frame) == "spark" for frame in frames.values()}
    if len(are_spark) > 1:
        raise UserError("some of the frames are Spark's and some are not; give all of one kind")
    if staging is not None and not Path(staging).is_dir():
        raise UserError(f"staging folder {staging} is not there")
    spark = next(iter(frames.values())).sparkSession if are_spark == {True} else None
    with tempfile.TemporaryDirectory(prefix="headrace-", dir=staging) as name:
        folder_root, files = local(name).transient(), list[LakeFile]()
        for split, frame in frames.items():
            folder = folder_root / "rows" / split
            if spark is not None:
                _write_spark(workflow, frame, split, folder)
            else:
                _write_table(to_arrow(frame, _needed_columns(workflow)), split, folder / "part-0.parquet")
            files += [LakeFile(file, file.size()) for file in folder.entries() if file.suffix == ".parquet"]
        splits = tuple(dict.fromkeys(("train", *frames)))
        splitter = Splitter(ColumnRule(SPLIT), splits, workflow.label_column)
        with lake_rows(workflow, files, splitter, folder_root / "encoded", {SPLIT: ValueType("string")}) as rows:
            yield rows, spark


def _needed_columns(workflow: Workflow) -> Sequence[Any]:
    required = {*workflow.input_columns, workflow.label_column, *workflow.carried_columns}
    return [c for c in workflow.declared if c.name in required]


def _write_table(table: pa.Table, split: str, file: Location) -> None:
    n = table.num_rows
    table = table.append_column(FILE, pa.repeat(split, n)).append_column(LINE, pa.array(range(n), pa.int64()))
    table = table.append_column(SPLIT, pa.repeat(split, n))
    with file.new_file() as path:
        pq.write_table(table, path, row_group_size=_ROW_GROUP_ROWS, compression="none")


def _write_spark(workflow: Workflow, frame: DataFrame, split: str, folder: Location) -> None:
    """Write a Spark frame.

    A row's line is its partition and its number in it, so it depends on how Spark computes the frame.
    """
    from pyspark.sql import functions as F

    from headrace.features.functions.spark_expressions import col

    selected = frame.select(
        *(col(c.name).cast(c.type).alias(c.name) for c in _needed_columns(workflow)),
        F.lit(split).alias(FILE),
        F.monotonically_increasing_id().alias(LINE),
        F.lit(split).alias(SPLIT),
    )
    selected.write.parquet(str(folder))


def split_frame(frame: Any, valid: float) -> dict[str, Any]:
    """Split a frame: the last rows, a share `valid` of all, are the split `valid` (0: there is no such split).

    Raises:
        UserError: the share is not in [0, 1), or the frame is Spark's, whose rows have no order.
    """
    if not 0 <= valid < 1:
        raise UserError(
            f"valid={valid}: give the share of the rows that validate, from 0 to below 1, or a frame of them"
        )
    if not valid:
        return {"train": frame}
    if library_of(frame) == "spark":
        raise UserError(
            "the rows of a Spark frame have no order, so none are its last; give the rows to validate on as a frame of "
            "their own (valid=...), for example frame.where(...)"
        )
    rows = len(frame) if not isinstance(frame, pa.RecordBatch) else frame.num_rows
    train = rows - int(rows * valid)
    if library_of(frame) == "pandas":
        return {"train": frame.iloc[:train], "valid": frame.iloc[train:]}
    return {"train": frame.slice(0, train), "valid": frame.slice(train)}
