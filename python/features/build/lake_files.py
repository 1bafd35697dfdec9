"""The Arrow engine's day where the rows are lake files: which files, their counts, the fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.features.arrow.decode import LakeFile
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.scan import LakeRows, Splitter, lake_rows
from headrace.features.build.rows import days_of_window
from headrace.features.layout.files import columns_of, time_ranges
from headrace.features.layout.split import FrameFiles, SplitRows, check_counts
from headrace.features.table_ops.preparation import RowPreparation, prepared_columns, row_preparation
from headrace.features.types import ValueType, declared
from headrace.features.vocabulary.codes import Vocabularies
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import DataFile, DeltaLog, check_files
from headrace.stage import Context
from headrace.storage import Location

if TYPE_CHECKING:
    from headrace.lake.tables.declared import PinnedTable


@contextmanager
def files_of_day(
    spec: Spec, ws: Workspace, ds: str, events: Location, version: int, workflow: Workflow, rows: SplitRows
) -> Iterator[LakeRows | None]:
    """Yield the pinned lake files that hold the events of a dataset of `ds`; None where they do not hold its rows.

    That is where table operators make them that need more than Arrow and a row, where the table's log no longer names
    the version's files, or where deletion vectors mark rows of them as deleted.
    """
    files = None if _by_spark(spec) else DeltaLog(events).plain_files(version)
    files = None if files is None else of_day(spec, ds, files)
    check_files(events, files or ())
    lake_files = None if files is None else [LakeFile(f.path, f.size) for f in files]
    with rows_of_files(spec, ws, lake_files, workflow, rows) as lake_rows_of_day:
        yield lake_rows_of_day


@contextmanager
def table_files(
    ctx: Context, taken: PinnedTable, workflow: Workflow, rows: SplitRows, spark: SparkSession
) -> Iterator[LakeRows | None]:
    """Yield `files_of_day` of a source that is a table; None also where its files may not be read as they are."""
    spec = ctx.spec
    # Operators may look at any column.
    columns = {c.name for c in spec.table.columns}
    if not spec.features.prepare:
        columns = {*workflow.input_columns, workflow.label_column, *workflow.carried_columns, *columns_of(rows.rule)}
    files = None if _by_spark(spec) else taken.plain_files(spark, days_of_window(ctx, taken.days), columns)
    lake_files = None if files is None else [LakeFile(f.path, f.size, f.name, f.identity) for f in files]
    with rows_of_files(spec, ctx.ws, lake_files, workflow, rows) as lake_rows_of_day:
        yield lake_rows_of_day


@contextmanager
def staged_files(
    spec: Spec, ws: Workspace, workflow: Workflow, rows: SplitRows, staged: FrameFiles
) -> Iterator[LakeRows]:
    """Yield `files_of_day` of rows that Spark has written to files of this run.

    In a folder that all hosts see their row groups lie beside them: no other run reads them.
    """
    sizes = {name: size for name, size in staged.folder.sizes().items() if name.endswith(".parquet")}
    files = [LakeFile(staged.folder / name, size, columns=staged.columns) for name, size in sizes.items()]
    decoded = staged.folder.parent / f"{staged.folder.name}-decoded"
    home = ws.encoded(spec.pipeline) if spec.spark.own_scratch else decoded
    with _lake_rows(spec, ws, files, workflow, rows, home, None) as lake_rows_of_day:
        yield lake_rows_of_day


@contextmanager
def rows_of_files(
    spec: Spec, ws: Workspace, files: list[LakeFile] | None, workflow: Workflow, rows: SplitRows
) -> Iterator[LakeRows | None]:
    """Yield the rows of lake files; None where there are no files to read."""
    if files is None:
        yield None
        return
    home = ws.encoded(spec.pipeline)
    with _lake_rows(spec, ws, files, workflow, rows, home, row_preparation(spec)) as lake_rows_of_day:
        yield lake_rows_of_day


def _lake_rows(
    spec: Spec,
    ws: Workspace,
    files: list[LakeFile],
    workflow: Workflow,
    rows: SplitRows,
    home: Location,
    preparation: RowPreparation | None,
) -> AbstractContextManager[LakeRows]:
    """Return the rows of files for as long as the context.

    Args:
        home: where their row groups are kept.
        preparation: what makes the rows of the files'.
    """
    types = {c.name: declared(c) for c in prepared_columns(spec)}
    extra: dict[str, ValueType] = {name: types[name] for name in columns_of(rows.rule)}
    splitter = Splitter(rows.rule, rows.splits, workflow.label_column, by_day=spec.features.append is not None)
    host_scratch = ws.on_hosts(home) if spec.spark.own_scratch else None
    return lake_rows(workflow, files, splitter, home, extra, preparation, host_scratch)


def _by_spark(spec: Spec) -> bool:
    """Return whether table operators make the rows that need more than Arrow and a row."""
    return bool(spec.features.prepare) and row_preparation(spec) is None


def of_day(spec: Spec, ds: str, files: list[DataFile]) -> list[DataFile]:
    """Return the files that a dataset of `ds` may see: days up to it of a daily source, else the newest snapshot up to
    it.
    """
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
    label_type: str = "binary",
    shared_folder: Location | None = None,
) -> tuple[dict[str, int], FittedWorkflow]:
    """Return rows of each split and the fitted workflow: one pass over the files gives both, most often.

    Args:
        base: what is taken over, all but vocabularies; None: all is learned.
        label_type: `features.label_type`.
        shared_folder: see `LakeFit`.

    Raises:
        UserError: as `headrace.features.layout.split.check_rows`.
    """
    fit = LakeFit(workflow, files, base, shared_folder)
    task = fit.next_task()
    results = fit.scan(spark, task)
    counts = files.counts
    bad = counts.bad_labels if label_type == "binary" else 0
    check_counts(rows, counts.rows, counts.null_labels, bad, workflow.label_column, pipeline)
    while task is not None:
        fit.merge(results)
        task = fit.next_task()
        if task is not None:
            results = fit.scan(spark, task)
    return counts.rows, fit.finish(vocabularies)
