"""Scores of a table of anybody's: pairs of a user and an item, or whole rows with the columns of the features."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import FloatType, StructField, StructType

from headrace.config import LandingSource, Table
from headrace.config.schema import quoted_names
from headrace.errors import UserError, nearest
from headrace.features.functions.spark_expressions import col
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.faults import BAD
from headrace.lake.landing.arrow_rows import arrow_plan, read_by_arrow
from headrace.lake.landing.compression import without_ending
from headrace.lake.landing.delimited import QuotedFields
from headrace.lake.landing.files import LandingDay, LandingFile
from headrace.lake.landing.formats import FileDamaged, LandingBatch, declared_names, header_of, separator_of
from headrace.lake.landing.write_rows import codec_of
from headrace.lake.scratch import task_folder
from headrace.lake.spark.exchange import bounded_batches
from headrace.models.predictor import Predictor
from headrace.score.columns import context_scalars
from headrace.score.entities import ActiveEvents
from headrace.score.joined_tables import Partitioning, ReceivedRows, joined_tables, parts_of
from headrace.score.loaded_model import loaded_model, loaded_workflow, predict_rows
from headrace.score.scoring_model import ScoringModel
from headrace.stage import Context
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace

log = logging.getLogger("headrace.score")

#: Columns that are added to a table.
ADDED = ("score", "model_version")


@dataclass(frozen=True)
class _Rows:
    """Spark task that gives rows with the model's predictions behind them."""

    model: Location
    threads: int
    output: str | None
    maps: HostPlace
    #: Tables that are not mapped: a task receives their rows before its own.
    joined: frozenset[str]
    names: tuple[str, ...]
    #: Number of leading columns to write; the others serve the features alone.
    kept_columns: int
    context: Mapping[str, pa.Scalar]

    def load(self) -> tuple[Predictor, FittedWorkflow]:
        """Return the model, opened once in each process."""
        return loaded_model(self.model, self.threads, self.output, self.maps, joined=self.joined)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches of the columns to keep and the scores, from batches with the columns `names`."""
        predictor, fitted = self.load()
        for batch in batches:
            scores = pa.array(predict_rows(predictor, fitted, batch, self.context), pa.float32())
            columns = [*batch.columns[: self.kept_columns], scores]
            yield pa.RecordBatch.from_arrays(columns, [f"c{i}" for i in range(len(columns))])


def score_table(ctx: Context, chosen: ScoringModel, spark: SparkSession, source: Location, target: Location) -> int:
    """Score every row of a table, and write it with the columns ADDED.

    Columns of the features that the table lacks are those of `score.user` and `score.item` by their keys, as of the end
    of ctx.ds, or the constants of `score.context`; of users and items without an event they are null. Rows pass through
    tasks as the input's files are cut, so that none depends on how many rows a user has; where rows of the model's
    tables are joined in (`score.embeddings`), by a hash of the columns that the features read.

    Args:
        ctx: the pipeline and the day; `upstream` has the manifests that are there.
        chosen: the model.
        spark: the session.
        source: a Delta table, a folder (or file) of Parquet, or a file of CSV with a header (`csv_rows`).
        target: a folder that is not there yet; of the same format as the input, of CSV Parquet. It appears when it is
            whole.

    Returns:
        rows written.

    Raises:
        UserError: there is no such table, or it has neither the columns nor the keys; the target is there already; or
            the model's tables do not fit, and their rows cannot be joined in.
    """
    score = ctx.spec.score
    assert score is not None
    if target.exists():
        raise UserError(f"{target} is there already: name another output, or remove it")
    if not source.exists():
        raise UserError(f"there is no table {source}")
    form = "delta" if (source / "_delta_log").is_dir() else "parquet"
    is_csv = without_ending(source.name).lower().endswith((".csv", ".tsv")) and not source.is_dir()
    with csv_rows(ctx, spark, source) if is_csv else nullcontext(spark.read.format(form).load(str(source))) as rows:
        return _score_rows(ctx, chosen, spark, rows, source, target, form)


def _score_rows(
    ctx: Context,
    chosen: ScoringModel,
    spark: SparkSession,
    rows: DataFrame,
    source: Location,
    target: Location,
    form: str,
) -> int:
    """Score the rows of a table; see `score_table`. `form`: Spark's name of the format to write."""
    score = ctx.spec.score
    assert score is not None
    clash = [c for c in rows.columns if c.lower() in ADDED]
    if clash:
        raise UserError(f"{source} has a column '{clash[0]}' of its own: rename it")
    folder, maps = ctx.ws.locate(chosen.output.name), ctx.ws.mapped(ctx.spec.pipeline)
    joined = joined_tables(score.embeddings, folder, maps, gpu=False)
    fitted = loaded_workflow(folder, maps)
    table_width, constants = len(rows.columns), context_scalars(ctx.spec, score)
    context = {c: constants[c] for c in constants if c not in rows.columns}
    missing = [c for c in fitted.input_columns if c not in rows.columns and c not in context]
    threads = int(spark.sparkContext.getConf().get("spark.task.cpus") or 1)
    # The folder is the outer block, so that it appears only after the inputs were checked to be unchanged.
    with target.new_folder() as building, _with_columns(ctx, spark, rows, missing, source) as complete_rows:
        mapped = ctx.ws.on_hosts(maps) if ctx.spec.spark.own_scratch else maps
        task = _Rows(folder, threads, score.output, mapped, joined, tuple(complete_rows.columns), table_width, context)
        fields = [StructField(f"c{i}", f.dataType) for i, f in enumerate(rows.schema.fields)]
        schema = StructType([*fields, StructField(f"c{table_width}", FloatType())])
        received = ReceivedRows.empty(spark.sparkContext, joined) if joined else None
        count = rows.count() if joined else 0
        scored = _scored(spark, task, complete_rows, fitted.input_columns, count, schema, received)
        named = scored.toDF(*rows.columns, ADDED[0]).withColumn(ADDED[1], F.lit(chosen.output.version))
        # Messages with table rows are large, so Spark's batches are bounded.
        with bounded_batches(spark) if joined else nullcontext():
            named.write.format(form).mode("append").save(str(building))
    if received is not None:
        totals = received.facts()
        log.info(
            "score: %s rows of %s were brought to the tasks (%s bytes), %s of them to one task",
            f"{totals['rows']:,}",
            ", ".join(totals["tables"]),
            f"{totals['bytes']:,}",
            f"{totals['most_rows_of_a_task']:,}",
        )
    return spark.read.format(form).load(str(target)).count()


@contextmanager
def csv_rows(ctx: Context, spark: SparkSession, file: Location) -> Iterator[DataFrame]:
    """Give the rows of a CSV file whose first line names its columns, in the types that `table.columns` declares.

    Separator and texts for null are those of the pipeline's source, where that is CSV, too. The rows are there within
    the block.

    Raises:
        UserError: a column is not declared, a row cannot be read, or the file is damaged.
    """
    pipeline_source, info = ctx.spec.source, file.info()
    landing_file = LandingFile(str(file), file, info.size, info.modified_ns, info.tag)
    separator = "\t" if without_ending(file.name).lower().endswith(".tsv") else ","
    source = LandingSource(format="csv", path=str(file), separator=separator)
    if isinstance(pipeline_source, LandingSource) and pipeline_source.format == "csv":
        source = pipeline_source.model_copy(
            update={"path": str(file), "header": True, "complete": None, "catch_up_days": 0}
        )
    declared = {c.name: c for c in ctx.spec.table.columns if c.path is None}
    form = QuotedFields(separator_of(source), source.trim, source.escape)
    names = declared_names(landing_file, header_of(landing_file, form, source.multiline), declared)
    if unknown := [name for name in names if name not in declared]:
        raise UserError(
            f"{file} has a column '{unknown[0]}', which table.columns does not declare"
            f"{nearest(unknown[0], declared)} (declared: {', '.join(declared)})"
        )
    if not names:
        raise UserError(f"{file} is empty: its first line must name its columns")
    columns = tuple(declared[name].model_copy(update={"required": False}) for name in names)
    table = Table(columns=columns, text_nul=ctx.spec.table.text_nul)
    epochs = {name: unit for name, unit in pipeline_source.timestamps.items() if name in names}
    source = source.model_copy(update={"timestamps": epochs})
    batch = LandingBatch(spark, source, table, (LandingDay(ctx.ds, (landing_file,)),))
    with task_folder(ctx, "score", "csv") as staging:
        try:
            read = read_by_arrow(batch, arrow_plan(batch, []), staging / "rows", staging / "judged", codec_of(spark))
        except FileDamaged as e:
            raise UserError(f"{file} cannot be read: {e.cause}") from None
        if read.bad:
            judged = read.judged_rows(spark)
            assert judged is not None, "bad rows are judged one by one"
            line, reason = judged.where(F.col("_state") == BAD).orderBy("_line").select("_line", "_reason").take(1)[0]
            raise UserError(f"{file}: {read.bad:,} rows cannot be read; the first is line {line}: {reason}")
        rows = read.good_rows(batch, quoted_names(names))
        yield spark.createDataFrame([], table.spark_schema) if rows is None else rows.select(*map(col, names))


def _scored(
    spark: SparkSession,
    task: _Rows,
    complete_rows: DataFrame,
    read: Sequence[str],
    rows: int,
    schema: StructType,
    received: ReceivedRows | None,
) -> DataFrame:
    """Return the frame that tasks make of rows that have all columns.

    Args:
        spark: the session.
        task: what each does.
        complete_rows: the rows.
        read: the columns that the features read; constants of the context are not among the rows'.
        rows: how many they are, where rows of tables are joined in.
        schema: of what tasks make.
        received: is told what rows of tables the tasks were brought; None: all are mapped.
    """
    # mapInArrow reads a dot in a column's name as a field's: numbers travel.
    frame = complete_rows.toDF(*[f"c{i}" for i in range(len(complete_rows.columns))])
    if task.joined:
        # This imports torch, which no other driver needs.
        from headrace.score.joined_rows import CodesOfRows, map_with_table_rows

        key = F.xxhash64(*[F.col(f"c{task.names.index(c)}") for c in read if c in task.names])
        parts, needed = Partitioning.by_hash(key, parts_of(spark, rows)), partial(CodesOfRows, task, task.context)
        return map_with_table_rows(spark, task, needed, frame, task.names, parts, task, schema, received)

    def named(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from task(pa.RecordBatch.from_arrays(batch.columns, list(task.names)) for batch in batches)

    return frame.mapInArrow(named, schema)


@contextmanager
def _with_columns(
    ctx: Context, spark: SparkSession, rows: DataFrame, missing: list[str], source: Location
) -> Iterator[DataFrame]:
    """Give the rows with missing columns of users and items behind theirs, to be computed within the block."""
    if not missing:
        yield rows
        return
    score = ctx.spec.score
    assert score is not None
    sides = {"user": score.user, "item": score.item}
    columns_by_side = {side: [c for c in missing if c in entity.columns] for side, entity in sides.items()}
    without_origin = [c for c in missing if not any(c in side_columns for side_columns in columns_by_side.values())]
    if without_origin:
        raise UserError(
            f"the features of the model read {', '.join(repr(c) for c in without_origin)}, which {source} lacks "
            f"(it has: {', '.join(rows.columns)}) and score.user, score.item and score.context do not give"
        )
    for side, columns in columns_by_side.items():
        if columns and sides[side].key not in rows.columns:
            raise UserError(f"{source} has neither '{columns[0]}' nor the {side}'s key '{sides[side].key}'")
    missing_stages = [stage for stage in ("ingest", "features") if stage not in ctx.upstream]
    if missing_stages:
        raise UserError(
            f"{source} lacks {', '.join(repr(c) for c in missing)}, and what users and items have of them is not known "
            f"for {ctx.ds}. Run: headrace run {ctx.spec.argument} --ds {ctx.ds} --to features"
        )
    active = ActiveEvents.read(ctx, spark)
    user, item = (e.model_copy(update={"limit": None}) for e in sides.values())
    with active.entities(user, item) as frames:
        for (side, columns), frame in zip(columns_by_side.items(), frames, strict=True):
            if columns:
                key = sides[side].key
                values = frame.select(col(key).alias("__key"), *[col(c) for c in columns])
                rows = rows.join(values, col(key) == F.col("__key"), "left").drop("__key")
        yield rows
        active.reader.check_unchanged()
