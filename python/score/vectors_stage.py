"""The vectors stage: what a model in retrieval form makes of each user and each item, as Delta tables.

user_vectors and item_vectors have the key as the lake has it, `vector` (an array of floats) and the model's version. A
pair's logit is the dot product of both; an index of nearest neighbours by inner product finds a user's best items.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Entity, Score, Spec
from headrace.errors import UserError
from headrace.features.build.plan import pinned_table
from headrace.lake.spark.exchange import bounded_batches
from headrace.lake.spark.session import session
from headrace.lake.spark.tasks import report_peak_memory, worker_peak_memory
from headrace.models.predictor import read_meta
from headrace.score.columns import check_columns, context_scalars
from headrace.score.day_table import check_columns as check_table_columns
from headrace.score.day_table import key_types, rows_of_day, verify_day, write_day
from headrace.score.entities import ActiveEvents
from headrace.score.joined_tables import Partitioning, joined_tables, parts_of
from headrace.score.model_vectors import ModelVectors, Side, map_vectors
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import Location

log = logging.getLogger("headrace.score")

_SIDES: tuple[Side, Side] = ("user", "item")
#: Rows in memory at once.
_ROWS = 8_192


class ExportVectors(Stage):
    """Write vectors of the users and items that were active in the training window, all of them."""

    name = "vectors"
    version = 1
    needs = ("train", "features", "ingest")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return who is scored, and what for, whatever the limits; the rest is part of the upstream stages' keys."""
        if spec.score is None:
            return {}
        sides: dict[str, Any] = {side: _entity(spec.score, side).model_dump(mode="json") for side in _SIDES}
        return {**sides, "context": dict(spec.score.context), "event_time": spec.table.event_time}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the events at ingest's version, and the model. Raises UserError where columns are missing."""
        assert ctx.spec.score is not None
        check_columns(ctx.spec, ctx.spec.score)
        events, model = pinned_table(ctx), ctx.upstream["train"].output("model")
        return (
            Input(kind=events.kind, name=events.name, version=events.version),
            Input(kind="model", name=model.name, version=model.version),
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the versions of both tables still have this day's rows."""
        return next((fault for o in manifest.outputs if (fault := verify_day(ctx.ws, o, ctx.ds)) is not None), None)

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or the model lack."""
        score, model = ctx.spec.score, ctx.upstream["train"].output("model")
        assert score is not None
        read_meta(ctx.ws.locate(model.name))
        for side in _SIDES:
            _check_table(ctx, score, side)
        with session(ctx.spec.spark, ctx.ws, f"vectors {ctx.spec.pipeline} {ctx.ds}") as spark:
            return _run(ctx, score, model, spark)


def _entity(score: Score, side: Side) -> Entity:
    entity = score.user if side == "user" else score.item
    return entity.model_copy(update={"limit": None})


def _table(ctx: Context, side: Side) -> Location:
    return ctx.ws.table(ctx.spec.pipeline, f"{side}_vectors")


def _check_table(ctx: Context, score: Score, side: Side) -> None:
    key = _entity(score, side).key
    if key.lower() in ("vector", "model_version", "ds"):
        raise UserError(f"score.{side}.key: '{key}' is the name of another column of the table of vectors")
    types = key_types(ctx.spec, score)
    columns = {"ds": "string", key: types[key], "vector": "array<float>", "model_version": "string"}
    check_table_columns(_table(ctx, side), columns, "its key was another")


def _run(ctx: Context, score: Score, model: Output, spark: SparkSession) -> Result:
    active = ActiveEvents.read(ctx, spark)
    peak = worker_peak_memory(spark.sparkContext)
    threads = int(spark.sparkContext.getConf().get("spark.task.cpus") or 1)
    outputs, rows = [], {}
    folder, maps = ctx.ws.locate(model.name), ctx.ws.mapped(ctx.spec.pipeline)
    joined = joined_tables(score.embeddings, folder, maps, gpu=False)
    with active.entities(_entity(score, "user"), _entity(score, "item")) as (users, items):
        frames: dict[Side, DataFrame] = {"user": users, "item": items}
        active.reader.check_unchanged()
        for side, frame in frames.items():
            key = _entity(score, side).key
            task = ModelVectors(
                model=folder,
                threads=threads,
                side=side,
                user_columns=(score.user.key, *score.user.columns),
                item_columns=(score.item.key, *score.item.columns),
                context=context_scalars(ctx.spec, score),
                maps=ctx.ws.on_hosts(maps) if ctx.spec.spark.own_scratch else maps,
                joined=joined,
            )
            shared, names = spark.sparkContext.broadcast(task), list(frame.columns)

            def work(
                batches: Iterable[pa.RecordBatch], shared: Any = shared, key: str = key
            ) -> Iterator[pa.RecordBatch]:
                yield from vector_batches(shared.value, key, batches)
                report_peak_memory(peak)

            # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task puts the names back.
            numbered = frame.toDF(*[f"c{i}" for i in range(len(names))])
            schema = f"key {key_types(ctx.spec, score)[key]}, vector array<float>"
            of_key = F.col(numbered.columns[names.index(key)])

            def parts(frame: DataFrame = frame, of_key: Column = of_key) -> Partitioning:
                return Partitioning.by_hash(of_key, parts_of(spark, frame.count()))

            vectors = map_vectors(spark, task, numbered, names, parts, work, schema)
            table_rows = vectors.select(
                F.lit(ctx.ds).alias("ds"),
                F.col("key").alias(key),
                "vector",
                F.lit(model.version).alias("model_version"),
            )
            table = _table(ctx, side)
            # Messages with table rows are large, so Spark's batches are bounded.
            with bounded_batches(spark) if joined else nullcontext():
                version = write_day(table_rows, table, ctx, f"{side}_vectors")
            shared.unpersist()
            rows[f"{side}s"] = rows_of_day(table, version, ctx.ds)
            if not rows[f"{side}s"]:
                raise UserError(f"no event in the training window of {ctx.ds} has a '{key}': there are no vectors")
            outputs.append(
                Output(kind="delta", name=ctx.ws.name_of(table), version=str(version), rows=rows[f"{side}s"])
            )
    log.info("vectors: %s users, %s items", f"{rows['users']:,}", f"{rows['items']:,}")
    return Result(
        outputs=tuple(outputs),
        rows=rows,
        facts={"model": {"name": model.name, "version": model.version}},
        peak_memory_mib={"worker": peak.value},
    )


def vector_batches(vectors: ModelVectors, key: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compute the vectors of users or items.

    Args:
        vectors: the model, and whose batches these are.
        key: the name of the key.
        batches: the key and the side's columns.

    Yields:
        Batches of (key, vector list<float32>).

    Raises:
        UserError: the model is in no retrieval form, or gives vectors that are not finite.
    """
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            part = batch.slice(start, _ROWS)
            values = vectors.vectors(part)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            yield pa.RecordBatch.from_arrays([part.column(key), lists.cast(pa.list_(pa.float32()))], ["key", "vector"])
