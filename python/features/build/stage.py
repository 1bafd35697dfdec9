"""The stage `features`: the lake's events to the Parquet dataset of a day."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Spec
from headrace.dataset.parquet.layout import LISTING
from headrace.errors import UserError
from headrace.features.build import append
from headrace.features.build.lake_files import files_of_day, fit_files
from headrace.features.engines.arrow.lake_rows import LakeRows
from headrace.features.build.prepared_rows import day_rows, external_inputs, first_day
from headrace.features.layout.split import SPLIT, SplitRows, check_rows
from headrace.features.vocabulary.delta_table import VocabularyTable, again_if_overtaken
from headrace.features.workflow.workflow import FittedWorkflow, Workflow
from headrace.features.engines.arrow.write_lake import write_encoded
from headrace.features.layout.files import ColumnCounts, Engine, Written, WrittenDataset, plan_files, write_dataset
from headrace.lake.delta.log import DeltaLog
from headrace.lake.session import session
from headrace.manifest import Input, Manifest, Output
from headrace.schema import Kind
from headrace.stage import Context, Result, Stage
from headrace.storage import local

_LOG = logging.getLogger("headrace.features")


class CountStatistics(Protocol):
    """Counts the columns of a day, for the stage `drift`: headrace.drift.count_day."""

    def __call__(
        self,
        ctx: Context,
        fitted: FittedWorkflow,
        rows: SplitRows,
        files: LakeRows | None,
        counts: Mapping[str, int],
        folder: Path,
        engine: Engine,
        spark: SparkSession,
    ) -> tuple[Output, ...]:
        """Outputs of the stage.

        Args:
            fitted: what made the dataset.
            rows: the day's rows.
            files: the same as lake files, where they are.
            counts: rows of each split.
            folder: the dataset's.
            engine: who counts `rows` without `files`, and the dataset.
        """
        ...


class BuildFeatures(Stage):
    """Fit the workflow on the training range, transform every split, write the dataset.

    Reads the events at the version that ingest's manifest names: days up to `ds` of a daily source, the newest snapshot
    up to `ds` of another. Writes the vocabulary table (one commit) and the dataset's folder (one rename).
    """

    name = "features"
    version = 2
    needs = ("ingest",)

    def __init__(
        self, count_statistics: CountStatistics | None = None, after: Callable[[str], None] = lambda step: None
    ) -> None:
        """Make the stage.

        Args:
            count_statistics: needed where the spec has the section `drift`.
            after: called when a step of the work has ended: rows, fit, write. The GPU-plan gate listens.
        """
        self._count_statistics, self._after = count_statistics, after

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The section `features`, and what it needs of the table's declaration."""
        features = spec.features.model_dump(mode="json") | {"engine": engine_of(spec)}
        # What is counted, not its limits: those are for the stage `drift`.
        counted = spec.drift and spec.drift.model_dump(include={"quantiles", "top_values"})
        return {
            "features": features,
            "columns": [c.model_dump() for c in spec.table.columns],
            "event_time": spec.table.event_time,
            "daily": spec.source.daily,
            **({"statistics": counted} if counted else {}),
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The events' table at ingest's version, the tables that are joined to it, the dataset that is appended to."""
        events, base = _events_output(ctx), append.base_input(ctx, self.spec_part(ctx.spec), self.version)
        return (
            Input(kind="delta", name=events.name, version=events.version),
            *external_inputs(ctx.spec, ctx.ws),
            *([base] if base is not None else ()),
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The dataset's files are there with the sizes that they had."""
        folder = ctx.ws.home / manifest.output("dataset").name
        try:
            listed = json.loads((folder / LISTING).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return f"the dataset {folder} is gone or incomplete"
        for file in listed:
            path = folder / file["name"]
            if not path.is_file():
                return f"{path} is gone"
            if path.stat().st_size != file["size"]:
                return f"{path} has {path.stat().st_size} bytes, not {file['size']}"
        for output in manifest.outputs:
            if output.kind == "delta" and DeltaLog(ctx.ws.locate(output.name)).version is None:
                return f"the table {output.name} is gone"
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec or the data lack."""
        workflow = Workflow.from_spec(ctx.spec)
        if ctx.spec.features.append is not None:
            append.check(workflow)
            if engine_of(ctx.spec) != "arrow":
                raise UserError(
                    "features.append: only the Arrow engine appends; set features.engine: arrow, or append: false"
                )
        with (
            session(ctx.spec.spark, ctx.ws, f"features {ctx.spec.pipeline} {ctx.ds}") as spark,
            day_rows(ctx, _events(ctx, workflow, spark)) as rows,
        ):
            count = self._counting(ctx.spec)
            if ctx.spec.features.append is not None:
                return again_if_overtaken(lambda: _append(ctx, workflow, rows, spark, count, self.version))
            return again_if_overtaken(lambda: _build(ctx, workflow, rows, spark, count, self._after))

    def _counting(self, spec: Spec) -> CountStatistics:
        if spec.drift is None:
            return lambda *_, **__: ()
        if self._count_statistics is None:
            raise RuntimeError("the spec has a section `drift`: this stage needs headrace.drift.count_day to count for it")
        return self._count_statistics


def engine_of(spec: Spec) -> Engine:
    """The engine that `auto` stands for."""
    if spec.features.engine == "auto":
        return "spark" if spec.spark.profile == "gpu" else "arrow"
    return spec.features.engine


def _vocabularies(ctx: Context, spark: SparkSession) -> VocabularyTable:
    """The pipeline's vocabularies: for a run with the key of a finished one, as that one saw them."""
    done = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, BuildFeatures.name))
    version = done.facts["vocabulary_version"] if done is not None and done.key == ctx.key else None
    return VocabularyTable(spark, ctx.ws.table(ctx.spec.pipeline, "vocabulary").local_path(), ctx.ds, version)


def _build(
    ctx: Context, workflow: Workflow, rows: SplitRows, spark: SparkSession, count: CountStatistics, after: Callable[[str], None]
) -> Result:
    spec, f = ctx.spec, ctx.spec.features
    vocabularies = _vocabularies(ctx, spark)
    with _files(ctx, workflow, rows) as files, vocabularies.in_background():
        tick = time.perf_counter()
        if files is None:
            counts = check_rows(rows, f.label, spec.pipeline)
            after("rows")
            fitted = workflow.fit(rows.frame.where(F.col(SPLIT) == "train"), vocabularies, rows.day)
        else:
            counts, fitted = fit_files(workflow, files, rows, vocabularies, spark, spec.pipeline)
        _LOG.info("rows: %s", ", ".join(f"{rows.describe(s)} {n:,}" for s, n in counts.items()))
        _LOG.info("fit took %.1f s", time.perf_counter() - tick)
        after("fit")

        tick = time.perf_counter()
        final = ctx.ws.dataset(spec.pipeline, ctx.ds, ctx.key).local_path()
        with local(final).new_folder() as new:
            folder = new.local_path()
            fitted.save(folder / "workflow")
            plans = plan_files(counts, f.row_group_rows, f.min_row_groups)
            if files is None:
                written = write_dataset(fitted, rows.frame, plans, folder, folder / "workflow", engine_of(spec))
            else:
                written = write_encoded(fitted, files, plans, folder, folder / "workflow", spark)
            vocabularies.wait()  # the dataset's codes are for ever before it is seen
            _complete(folder, written.files, counts)
        after("write")
        seconds = time.perf_counter() - tick
        total = sum(counts.values())
        _LOG.info("wrote %s rows in %.1f s (%s rows/s) to %s", f"{total:,}", seconds, f"{total / seconds:,.0f}", final)
        statistics = count(ctx, fitted, rows, files, counts, final, engine_of(spec), spark)

    return _result(ctx, fitted, vocabularies, rows, counts, written, final, statistics)


def _append(
    ctx: Context, workflow: Workflow, rows: SplitRows, spark: SparkSession, count: CountStatistics, version: int
) -> Result:
    """`_build` with files by day, those of unchanged days taken over from yesterday's dataset."""
    spec, f = ctx.spec, ctx.spec.features
    base = append.open_base(ctx, next((i for i in ctx.inputs if i.kind == "dataset"), None))
    vocabularies = _vocabularies(ctx, spark)
    with _files(ctx, workflow, rows) as files, vocabularies.in_background():
        if files is None:
            raise UserError(
                f"features.append works on the lake's files, and the log of {_events_output(ctx).name} no longer names "
                f"those of version {_events_output(ctx).version}; run ingest again, or set append: false"
            )
        tick = time.perf_counter()
        learned = base.fitted if base is not None else None
        counts, fitted = fit_files(workflow, files, rows, vocabularies, spark, spec.pipeline, learned)
        _LOG.info("rows: %s", ", ".join(f"{rows.describe(s)} {n:,}" for s, n in counts.items()))
        _LOG.info("fit took %.1f s", time.perf_counter() - tick)

        tick = time.perf_counter()
        assert rows.valid_range is not None
        window = (f.window_days, f.split.valid_days)
        plan = append.plan_days(base, files, ctx.ws.home, f.row_group_rows, f.min_row_groups, window)
        final = ctx.ws.dataset(spec.pipeline, ctx.ds, ctx.key).local_path()
        with local(final).new_folder() as new:
            folder = new.local_path()
            fitted.save(folder / "workflow")
            kept = append.take_over(plan, folder, rows.valid_range[0])
            made = WrittenDataset([], {})
            if plan.plans:
                made = write_encoded(fitted, plan.sources, plan.plans, folder, folder / "workflow", spark)
            written = append.together(kept, made)
            vocabularies.wait()  # the dataset's codes are for ever before it is seen
            append.save_days(folder, plan, written, base.learned if base is not None else ctx.ds)
            _complete(folder, written.files, counts)
        _LOG.info(
            "took over %s rows of %d days, wrote %s rows of %d days in %.1f s to %s",
            f"{sum(d.rows for d in plan.kept.values()):,}",
            len(plan.kept),
            f"{sum(x.rows for x in made.files):,}",
            len(made.days),
            time.perf_counter() - tick,
            final,
        )
        statistics = count(ctx, fitted, rows, files, counts, final, "arrow", spark)
    facts = {
        "version": version,
        "learned": base.learned if base is not None else ctx.ds,
        "kept": sorted(plan.kept),
        "written": sorted(made.days),
    }
    return _result(ctx, fitted, vocabularies, rows, counts, written, final, statistics, {"append": facts})


def _result(
    ctx: Context,
    fitted: FittedWorkflow,
    vocabularies: VocabularyTable,
    rows: SplitRows,
    counts: Mapping[str, int],
    written: WrittenDataset,
    final: Path,
    statistics: tuple[Output, ...],
    more: Mapping[str, Any] | None = None,
) -> Result:
    name, total = str(final.relative_to(ctx.ws.home)), sum(counts.values())
    return Result(
        outputs=(Output(kind="dataset", name=name, version=ctx.key, rows=total), *statistics),
        rows=counts,
        facts=_facts(fitted, vocabularies, rows, counts, written) | dict(more or {}),
        dataset_schema=fitted.schema,
    )


def _events_output(ctx: Context) -> Output:
    try:
        return next(o for o in ctx.upstream["ingest"].outputs if o.kind == "delta" and o.name.endswith("/events"))
    except StopIteration:
        raise UserError(f"ingest's manifest of {ctx.ds} names no events table; run ingest again") from None


def _events(ctx: Context, workflow: Workflow, spark: SparkSession) -> DataFrame:
    """The pinned events that a dataset of `ds` may see."""
    spec, pinned = ctx.spec, _events_output(ctx)
    path = ctx.ws.home / pinned.name
    events = spark.read.format("delta").option("versionAsOf", int(pinned.version)).load(str(path))
    there = dict(events.dtypes)
    wanted = {*workflow.input_columns, *workflow.carried_columns, f"{workflow.label_column}"}
    for declared in spec.table.columns:
        column, found = declared.name, there.get(declared.name, "no column at all")
        # Table operators may look at any of them.
        if (column in wanted or spec.features.prepare) and found != declared.type:
            raise UserError(
                f"column '{column}' is declared {declared.type}, but {pinned.name} (version {pinned.version}) has it "
                f"as {found}; run ingest again"
            )
    if spec.source.daily:
        events = events.where(F.col("ds") <= ctx.ds)
        if spec.features.split.by == "time":
            # An event lands on its day or later, never before.
            events = events.where(F.col("ds") >= first_day(spec, ctx.ds))
        return events
    # Each run's day of a snapshot source holds all of it.
    newest = events.where(F.col("ds") <= ctx.ds).agg(F.max("ds")).collect()[0][0]
    return events.where(F.col("ds") == F.lit(newest))


def _files(ctx: Context, workflow: Workflow, rows: SplitRows) -> AbstractContextManager[LakeRows | None]:
    """The pinned events as files, for the Arrow engine."""
    if engine_of(ctx.spec) != "arrow":
        return nullcontext()
    pinned = _events_output(ctx)
    return files_of_day(ctx.spec, ctx.ws, ctx.ds, ctx.ws.home / pinned.name, int(pinned.version), workflow, rows)


def _complete(folder: Path, files: list[Written], counts: Mapping[str, int]) -> None:
    """Check that every row was written once, clear away what killed tasks left, list the files."""
    for split, rows in counts.items():
        found = sum(f.rows for f in files if f.name.startswith(f"{split}/"))
        if found != rows:
            raise RuntimeError(f"split '{split}' has {rows} rows, but {found} were written")
    wanted = {folder / f.name for f in files}
    for split in counts:
        for path in (folder / split).iterdir():
            if path not in wanted:
                path.unlink()
    listed = [{"name": f.name, "size": f.size, "rows": f.rows, "row_groups": f.row_groups} for f in files]
    for path in sorted((folder / "workflow").rglob("*")):
        if path.is_file():
            listed.append({"name": str(path.relative_to(folder)), "size": path.stat().st_size})
    local(folder / LISTING).put_text(json.dumps(listed, indent=1) + "\n")


def _facts(
    fitted: FittedWorkflow,
    vocabularies: VocabularyTable,
    rows: SplitRows,
    counts: Mapping[str, int],
    written: WrittenDataset,
) -> dict[str, Any]:
    by_split = {s: [f for f in written.files if f.name.startswith(f"{s}/")] for s in rows.splits}
    columns = []
    for feature in fitted.features:
        entry: dict[str, Any] = {"name": feature.name, "kind": feature.kind.value, "sources": list(feature.sources)}
        has_oov = feature.kind is Kind.CATEGORICAL and feature.vocabulary is not None
        found = {s: columns_of[feature.name] for s, columns_of in written.counts.items()}
        entry |= _rates(sum(found.values(), ColumnCounts()), sum(counts.values()), has_oov)
        entry["splits"] = {s: _rates(mine, counts[s], has_oov) for s, mine in found.items()}
        columns.append(entry)
    return {
        "splits": {
            s: {"rows": sum(f.rows for f in mine), "row_groups": sum(f.row_groups for f in mine), "files": len(mine)}
            for s, mine in by_split.items()
        },
        "vocabulary_version": vocabularies.version,
        "vocabularies": {
            name: {"size": len(v), "new": vocabularies.added.get(name, 0)} for name, v in fitted.vocabularies.items()
        },
        "columns": columns,
        "train_range": list(rows.train_range) if rows.train_range else None,
        "valid_range": list(rows.valid_range) if rows.valid_range else None,
    }


def _rates(found: ColumnCounts, rows: int, has_oov: bool) -> dict[str, float | None]:
    """missing_rate: of the rows, those that lack a value of the feature's columns; oov_rate: of the values, those that
    the vocabulary lacks."""
    return {
        "missing_rate": found.missing / rows if rows else 0.0,
        "oov_rate": (found.oov / found.coded if found.coded else 0.0) if has_oov else None,
    }
