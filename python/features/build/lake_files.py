"""The Arrow engine's day where the rows are lake files: which files, their counts, the fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from headrace.config import Spec
from headrace.features.engines.arrow.fit import LakeFit
from headrace.features.engines.arrow.lake_rows import LakeRows, Splitter, lake_rows
from headrace.features.layout.split import SplitRows, check_counts, time_ranges
from headrace.features.layout.split_rule import columns_of
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.table_ops.row_preparation import row_preparation
from headrace.features.types import ValueType, declared
from headrace.features.vocabulary.delta_table import Vocabularies
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import DataFile, DeltaLog
from headrace.storage import Location
from headrace.workspace import Workspace


@contextmanager
def files_of_day(
    spec: Spec, ws: Workspace, ds: str, events: Location, version: int, workflow: Workflow, rows: SplitRows
) -> Iterator[LakeRows | None]:
    """The lake's files that hold the events of a dataset of `ds`, pinned; None where the rows must come from a frame.

    That is where table operators make them that need more than Arrow and a row, where the table's log no longer names
    the version's files, or where deletion vectors mark rows of them as deleted.
    """
    preparation = row_preparation(spec)
    by_spark = bool(spec.features.prepare) and preparation is None
    files = None if by_spark else DeltaLog(events).plain_files(version)
    if files is None:
        yield None
        return
    types = {c.name: declared(c) for c in prepared_columns(spec)}
    extra: dict[str, ValueType] = {name: types[name] for name in columns_of(rows.rule)}
    splitter = Splitter(rows.rule, rows.splits, workflow.label_column, by_day=spec.features.append is not None)
    home = ws.encoded(spec.pipeline)
    with lake_rows(workflow, of_day(spec, ds, files), splitter, home, extra, preparation) as found:
        yield found


def of_day(spec: Spec, ds: str, files: list[DataFile]) -> list[DataFile]:
    """The files that a dataset of `ds` may see: days up to it of a daily source, else the newest snapshot up to it."""
    days = {f.partition["ds"] or "" for f in files}
    seen = {d for d in days if d <= ds}
    if not spec.source.daily:
        seen = {max(seen, default="")}
    elif spec.features.split.by == "time":
        first = spec.first_landing_day(time_ranges(spec.features, ds)[0][0])
        seen = {d for d in seen if d >= first}
    return [f for f in files if f.partition["ds"] in seen]


def fit_files(
    workflow: Workflow,
    files: LakeRows,
    rows: SplitRows,
    vocabularies: Vocabularies,
    spark: SparkSession | None,
    pipeline: str,
    base: FittedWorkflow | None = None,
) -> tuple[dict[str, int], FittedWorkflow]:
    """Rows of each split, and what the training rows teach: one pass over the files does both, most often.

    Args:
        base: what is taken over, all but vocabularies; None: all is learned.

    Raises:
        UserError: as `headrace.features.layout.split.check_rows`.
    """
    fit = LakeFit(workflow, files, base)
    task = fit.next_task()
    results = files.scan(spark, task)
    counts = files.counts
    check_counts(rows, counts.rows, counts.null_labels, counts.bad_labels, workflow.label_column, pipeline)
    while task is not None:
        fit.merge(results)
        task = fit.next_task()
        if task is not None:
            results = files.scan(spark, task)
    return counts.rows, fit.finish(vocabularies)
