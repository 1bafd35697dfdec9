"""The work of the stage `features`: fit, write and count a day, whole or appended to yesterday's dataset."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import TableSource
from headrace.config.schema import Kind
from headrace.config.workspace import Workspace
from headrace.dataset.layout import LISTING
from headrace.errors import UserError
from headrace.features.arrow.decode import FILE, LINE
from headrace.features.arrow.scan import LakeRows
from headrace.features.arrow.write_lake import write_lake_rows
from headrace.features.build.lake_files import files_of_day, fit_files, staged_files, table_files
from headrace.features.build.plan import pinned_table
from headrace.features.build.rows import events_of_window, read_events, source_table, staged_frame
from headrace.features.functions.spark_expressions import col
from headrace.features.layout.files import (
    ColumnCounts,
    DatasetFile,
    Engine,
    TimeRule,
    WrittenDataset,
    columns_of,
    engine_of,
    plan_files,
)
from headrace.features.layout.split import SPLIT, SplitRows, check_rows
from headrace.features.types import declared
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.vocabulary.restoration import SavedCopies
from headrace.features.workflow.fitted import FittedWorkflow, whole_vocabularies
from headrace.features.workflow.workflow import Workflow
from headrace.lake.scratch import KEYED_TABLES, VOCABULARIES, task_folder
from headrace.stage import Context, Result
from headrace.stage.manifest import Manifest, Output
from headrace.storage import Location

_LOG = logging.getLogger("headrace.features")

#: Stages whose manifests name a folder with a saved workflow, and the kind of that output.
_HOLDERS = (("features", "dataset"), ("train", "model"))


@dataclass(frozen=True)
class BuiltDay:
    """A day's dataset and what it was made of."""

    #: The fitted workflow of the dataset.
    fitted: FittedWorkflow
    rows: SplitRows
    #: The rows as files; None: the Spark engine takes them as a frame.
    files: LakeRows | None
    #: Rows of each split.
    counts: Mapping[str, int]
    #: Folder of the dataset.
    folder: Location
    #: Engine that wrote the dataset.
    engine: Engine


#: Counts the columns of a day for the stage `drift`, and gives the outputs: headrace.quality.drift.count_day.
CountStatistics = Callable[[Context, BuiltDay, SparkSession], tuple[Output, ...]]


def vocabularies_of(ctx: Context, spark: SparkSession) -> VocabularyTable:
    """Return the pipeline's vocabularies: for a run with the key of a finished one, as that one saw them."""
    done = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, "features"))
    version = done.facts["vocabulary_version"] if done is not None and done.key == ctx.key else None
    scratch = ctx.ws.spark_local / VOCABULARIES / ctx.spec.pipeline
    table = ctx.ws.table(ctx.spec.pipeline, "vocabulary")
    return VocabularyTable(spark, table, ctx.ds, version, scratch, ctx.fence, _saved_copies(ctx.ws, ctx.spec.pipeline))


def _saved_copies(ws: Workspace, pipeline: str) -> SavedCopies:
    """Return the copies of a pipeline's vocabularies, and the version of the table that its last day names."""
    return SavedCopies(_named_version(ws, pipeline), lambda: _vocabularies(ws, pipeline))


def _named_version(ws: Workspace, pipeline: str) -> int | None:
    """Read one manifest: versions only grow from day to day, unless older days are made after newer ones."""
    for ds in reversed(ws.days_of_stages(pipeline).get("features", [])):
        manifest = Manifest.load(ws.manifest(pipeline, ds, "features"))
        if manifest is not None:
            version: int | None = manifest.facts.get("vocabulary_version")
            return version
    return None


def _vocabularies(ws: Workspace, pipeline: str) -> Iterator[tuple[str, str, pa.Table]]:
    for ds in sorted(ws.days(pipeline)):
        for stage, kind in _HOLDERS:
            manifest = Manifest.load(ws.manifest(pipeline, ds, stage))
            if manifest is None or manifest.removed:
                continue
            for output in manifest.outputs:
                if output.kind == kind:
                    for name, vocabulary in whole_vocabularies(ws.locate(output.name) / "workflow"):
                        yield ds, name, vocabulary


def build(
    ctx: Context,
    workflow: Workflow,
    rows: SplitRows,
    spark: SparkSession,
    count: CountStatistics,
    after: Callable[[str], None],
) -> Result:
    """Fit the workflow, write the dataset whole and count its statistics. `after` is told each step that has ended."""
    spec, f = ctx.spec, ctx.spec.features
    vocabularies = vocabularies_of(ctx, spark)
    with (
        task_folder(ctx, "features") as shared_folder,
        day_files(ctx, workflow, rows, spark, shared_folder) as files,
        vocabularies.in_background(),
    ):
        tick = time.perf_counter()
        if files is None:
            from headrace.features.spark.fit import fit

            counts = check_rows(rows, f.label, spec.pipeline, f.label_type)
            after("rows")
            tables = ctx.ws.spark_local / KEYED_TABLES / spec.pipeline
            train = rows.frame.where(F.col(SPLIT) == "train")
            fitted = fit(workflow, train, vocabularies, rows.day, tables, shared_folder)
        else:
            counts, fitted = fit_files(
                workflow,
                files,
                rows,
                vocabularies,
                spark,
                spec.pipeline,
                label_type=f.label_type,
                shared_folder=shared_folder,
            )
        _LOG.info("rows: %s", ", ".join(f"{rows.describe(s)} {n:,}" for s, n in counts.items()))
        _LOG.info("fit took %.1f s", time.perf_counter() - tick)
        after("fit")

        tick = time.perf_counter()
        final = ctx.ws.dataset(spec.pipeline, ctx.ds, ctx.key)
        with final.new_folder() as folder:
            fitted.save(folder / "workflow")
            plans = plan_files(counts, f.row_group_rows, f.min_row_groups)
            if files is None:
                from headrace.features.spark.write import write

                written = write(fitted, rows.frame, plans, folder, folder / "workflow")
            else:
                written = write_lake_rows(fitted, files, plans, folder, folder / "workflow", spark)
            vocabularies.wait()  # the dataset's codes are for ever before it is seen
            complete(folder, written.files, counts)
        after("write")
        seconds = time.perf_counter() - tick
        total = sum(counts.values())
        _LOG.info("wrote %s rows in %.1f s (%s rows/s) to %s", f"{total:,}", seconds, f"{total / seconds:,.0f}", final)
        day = BuiltDay(fitted, rows, files, counts, final, engine_of(spec))
        statistics = count(ctx, day, spark)

    return _result(ctx, day, vocabularies, written, statistics)


def append_day(
    ctx: Context, workflow: Workflow, rows: SplitRows, spark: SparkSession, count: CountStatistics, version: int
) -> Result:
    """Build as `build` does, with files by day, those of unchanged days taken over from yesterday's dataset."""
    from headrace.features.build import append

    spec, f = ctx.spec, ctx.spec.features
    base = append.open_base(ctx, next((i for i in ctx.inputs if i.kind == "dataset"), None))
    vocabularies = vocabularies_of(ctx, spark)
    with (
        task_folder(ctx, "features") as shared_folder,
        pinned_files(ctx, workflow, rows, spark) if engine_of(spec) == "arrow" else nullcontext() as files,
        vocabularies.in_background(),
    ):
        if files is None:
            raise UserError(_why_not_appended(ctx))
        tick = time.perf_counter()
        learned = base.fitted if base is not None else None
        counts, fitted = fit_files(
            workflow, files, rows, vocabularies, spark, spec.pipeline, learned, spec.features.label_type, shared_folder
        )
        _LOG.info("rows: %s", ", ".join(f"{rows.describe(s)} {n:,}" for s, n in counts.items()))
        _LOG.info("fit took %.1f s", time.perf_counter() - tick)

        tick = time.perf_counter()
        assert isinstance(rows.rule, TimeRule)
        window = [n for n in (f.window_days, f.split.valid_days, f.split.test_days) if n]
        plan = append.plan_days(base, files, ctx.ws, f.row_group_rows, f.min_row_groups, window)
        final = ctx.ws.dataset(spec.pipeline, ctx.ds, ctx.key)
        with final.new_folder() as folder:
            fitted.save(folder / "workflow")
            retained = append.link_kept(plan, folder, rows.rule)
            newly_written = WrittenDataset([], {})
            if plan.plans:
                newly_written = write_lake_rows(fitted, plan.sources, plan.plans, folder, folder / "workflow", spark)
            written = append.merge(retained, newly_written)
            vocabularies.wait()  # the dataset's codes are for ever before it is seen
            append.save_days(folder, plan, written, base.learned if base is not None else ctx.ds)
            complete(folder, written.files, counts)
        _LOG.info(
            "kept %s rows of %d days, wrote %s rows of %d days in %.1f s to %s",
            f"{sum(d.rows for d in plan.retained.values()):,}",
            len(plan.retained),
            f"{sum(x.rows for x in newly_written.files):,}",
            len(newly_written.days),
            time.perf_counter() - tick,
            final,
        )
        day = BuiltDay(fitted, rows, files, counts, final, "arrow")
        statistics = count(ctx, day, spark)
    facts = {
        "version": version,
        "learned": base.learned if base is not None else ctx.ds,
        "kept": sorted(plan.retained),
        "written": sorted(newly_written.days),
    }
    return _result(ctx, day, vocabularies, written, statistics, {"append": facts})


def _result(
    ctx: Context,
    day: BuiltDay,
    vocabularies: VocabularyTable,
    written: WrittenDataset,
    statistics: tuple[Output, ...],
    more: Mapping[str, Any] | None = None,
) -> Result:
    name, total = ctx.ws.name_of(day.folder), sum(day.counts.values())
    return Result(
        outputs=(Output(kind="dataset", name=name, version=ctx.key, rows=total), *statistics),
        rows=day.counts,
        facts=facts_of(day.fitted, vocabularies, day.rows, day.counts, written) | dict(more or {}),
        dataset_schema=day.fitted.schema,
    )


def day_events(ctx: Context, workflow: Workflow, spark: SparkSession) -> DataFrame:
    """Return the pinned events that a dataset of `ds` may see."""
    spec, pinned = ctx.spec, pinned_table(ctx)
    events = read_events(ctx, spark)
    stored_types = dict(events.dtypes)
    needed_columns = {*workflow.input_columns, *workflow.carried_columns, f"{workflow.label_column}"}
    for c in spec.table.columns:
        column, stored_type = c.name, stored_types.get(c.name, "no column at all")
        # Table operators may read any column.
        if (column in needed_columns or spec.features.prepare) and stored_type != str(declared(c)):
            raise UserError(
                f"column '{column}' is declared {c.type}, but {pinned.name} (version {pinned.version}) has it "
                f"as {stored_type}; run ingest again"
            )
    return events_of_window(ctx, events)


@contextmanager
def day_files(
    ctx: Context, workflow: Workflow, rows: SplitRows, spark: SparkSession, folder: Location
) -> Iterator[LakeRows | None]:
    """Yield the rows as files; None for the Spark engine.

    They are the pinned files, those of prepared rows, or files that Spark writes here: of a table's version that no
    data files hold as it is, as where deletion vectors mark rows as deleted.

    Args:
        folder: of this run, for the latter; all hosts see it.
    """
    if engine_of(ctx.spec) != "arrow":
        yield None
        return
    staged = rows.files
    if staged is None:
        with pinned_files(ctx, workflow, rows, spark) as files:
            if files is not None:
                yield files
                return
        w = workflow
        names = (*w.input_columns, w.label_column, *w.carried_columns, *columns_of(rows.rule), FILE, LINE)
        _, staged = staged_frame(rows.frame.select(*map(col, dict.fromkeys(names))), folder / "rows")
    with staged_files(ctx.spec, ctx.ws, workflow, rows, staged) as files:
        yield files


def pinned_files(
    ctx: Context, workflow: Workflow, rows: SplitRows, spark: SparkSession
) -> AbstractContextManager[LakeRows | None]:
    """Return the pinned data files, for the Arrow engine; None where they do not hold the rows as they are."""
    taken = source_table(ctx)
    if taken is not None:
        return table_files(ctx, taken, workflow, rows, spark)
    pinned = pinned_table(ctx)
    return files_of_day(ctx.spec, ctx.ws, ctx.ds, ctx.ws.locate(pinned.name), int(pinned.version), workflow, rows)


def _why_not_appended(ctx: Context) -> str:
    table = pinned_table(ctx)
    if isinstance(ctx.spec.source, TableSource):
        return (
            f"features.append reads data files themselves, and those of {table.name} at version {table.version} cannot "
            f"be read so: rows of them are deleted or were left out by ingest, their columns have other names or types "
            f"than are declared, or they have rows of other days; write the table anew (of Delta's: REORG TABLE ... "
            f"APPLY (PURGE)) and run ingest again, or set append: false"
        )
    return (
        f"features.append works on the lake's files, and the log of {table.name} no longer names those of version "
        f"{table.version}, or deletion vectors mark rows of them as deleted; run ingest again, or write the files anew "
        f"(REORG TABLE delta.`...` APPLY (PURGE)) and run ingest again, or set append: false"
    )


def complete(folder: Location, files: list[DatasetFile], counts: Mapping[str, int]) -> None:
    """Check that every row was written once, clear away what killed tasks left, list the files."""
    for split, rows in counts.items():
        written_rows = sum(f.rows for f in files if f.name.startswith(f"{split}/"))
        if written_rows != rows:
            raise RuntimeError(f"split '{split}' has {rows} rows, but {written_rows} were written")
    expected_files = {folder / f.name for f in files}
    for split in counts:
        (folder / split).discard_unfinished()
        for path in (folder / split).entries():
            if path not in expected_files:
                path.remove()
    listed = [{"name": f.name, "size": f.size, "rows": f.rows, "row_groups": f.row_groups} for f in files]
    listed += [{"name": path.below(folder), "size": path.size()} for path in (folder / "workflow").files()]
    (folder / LISTING).put_text(json.dumps(listed, indent=1) + "\n")


def facts_of(
    fitted: FittedWorkflow,
    vocabularies: VocabularyTable,
    rows: SplitRows,
    counts: Mapping[str, int],
    written: WrittenDataset,
) -> dict[str, Any]:
    """Return a dataset's facts for the manifest: splits, vocabularies, rates of missing and unknown values."""
    by_split = {s: [f for f in written.files if f.name.startswith(f"{s}/")] for s in rows.splits}
    columns = []
    for feature in fitted.features:
        entry: dict[str, Any] = {"name": feature.name, "kind": feature.kind.value, "sources": list(feature.sources)}
        has_oov = feature.kind is Kind.CATEGORICAL and feature.vocabulary is not None
        counts_of_split = {s: columns_of[feature.name] for s, columns_of in written.counts.items()}
        entry |= _rates(sum(counts_of_split.values(), ColumnCounts()), sum(counts.values()), has_oov)
        entry["splits"] = {s: _rates(split_counts, counts[s], has_oov) for s, split_counts in counts_of_split.items()}
        columns.append(entry)
    return {
        "splits": {
            s: {
                "rows": sum(f.rows for f in split_files),
                "row_groups": sum(f.row_groups for f in split_files),
                "files": len(split_files),
            }
            for s, split_files in by_split.items()
        },
        "vocabulary_version": vocabularies.version,
        "vocabularies": {
            name: {"size": len(v), "new": vocabularies.added.get(name, 0)} for name, v in fitted.vocabularies.items()
        },
        "columns": columns,
        **{f"{split}_range": list(days) if days else None for split, days in rows.ranges.items()},
    }


def _rates(value_counts: ColumnCounts, rows: int, has_oov: bool) -> dict[str, float | None]:
    """Return missing_rate, the share of rows that lack a value of the feature's columns, and oov_rate, the share of
    values that the vocabulary lacks.
    """
    return {
        "missing_rate": value_counts.missing / rows if rows else 0.0,
        "oov_rate": (value_counts.oov / value_counts.coded if value_counts.coded else 0.0) if has_oov else None,
    }
