"""Vectors of users and items from a model in retrieval form: their computation by Spark tasks, and the stage `vectors`.

The stage writes what the model makes of each user and each item as Delta tables. user_vectors and item_vectors have the
key as the lake has it, `vector` (an array of floats) and the model's version. A pair's logit is the dot product of
both; an index of nearest neighbours by inner product finds a user's best items.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from headrace.compute.jagged import JaggedArray
from headrace.config import Entity, Score, Spec
from headrace.config.schema import Kind
from headrace.errors import UserError
from headrace.features.build.plan import pinned_table
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.delta.day_table import check_table_columns, rows_of_day, verify_day, write_day
from headrace.lake.spark.exchange import bounded_batches
from headrace.lake.spark.session import session
from headrace.lake.spark.tasks import report_peak_memory, worker_peak_memory
from headrace.models.predictor import NetworkPredictor, Predictor, read_meta
from headrace.score.columns import check_columns, context_scalars, key_types
from headrace.score.entities import ActiveEvents
from headrace.score.joined_tables import Partitioning, joined_tables, parts_of
from headrace.score.loaded_model import Columns, PairFeatures, loaded_model
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace

log = logging.getLogger("headrace.score")

Side = Literal["user", "item"]

#: Rows in memory at once.
_ROWS = 8_192


@dataclass(frozen=True)
class ModelVectors:
    """A model in retrieval form and a side; small and picklable, so that tasks are given it as it is."""

    #: The saved model's folder, visible on every executor.
    model: Location
    threads: int
    side: Side
    user_columns: tuple[str, ...]
    item_columns: tuple[str, ...]
    context: dict[str, pa.Scalar]
    #: Where workers of a host map the model's tables (Workspace.mapped); None: each has them in its memory.
    maps: HostPlace | None = None
    #: Tables that are not mapped: a task receives their rows first (headrace.score.joined_rows).
    joined: frozenset[str] = frozenset()

    def vectors(self, batch: pa.RecordBatch) -> NDArray[np.float32]:
        """Return the vectors of some rows.

        Args:
            batch: the side's columns, and perhaps others.

        Returns:
            float32 [rows, D], finite.

        Raises:
            UserError: the model is in no retrieval form, or gives vectors that are not finite.
        """
        predictor, _ = self._loaded()
        parts = [predictor.vectors(columns, self.side) for columns in self.features_of(batch)]
        vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not np.isfinite(vectors).all():
            raise UserError(f"the model in {self.model} gives vectors that are not finite; train it again")
        return vectors

    def known_vectors(self, batch: pa.RecordBatch) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the vectors, and which rows have a known value: (float32 [rows, D], bool [rows]).

        A row whose vector is that of a row without any value, or with no value that training has met, is like all other
        such rows: a user whom a model of ids alone never saw, an item that is newer than the model.
        """
        vectors, unknown_vectors = self.vectors(batch), self._vectors_of_nothing()
        known = np.ones(len(vectors), np.bool_)
        scale = (
            np.abs(unknown_vectors).max(axis=1) if unknown_vectors.size else np.zeros(len(unknown_vectors), np.float32)
        )
        for row, largest in zip(unknown_vectors, scale, strict=True):
            # A tower's products may round differently in another batch.
            known &= np.abs(vectors - row).max(axis=1, initial=0) > 1e-5 * largest
        return vectors, known

    def features_of(self, batch: pa.RecordBatch) -> Iterator[Columns]:
        """Yield the features of some rows, a block at a time; one block at least."""
        _, features = self._loaded()
        for start in range(0, max(batch.num_rows, 1), _ROWS):
            yield features.side_columns(batch.slice(start, _ROWS), self.side)

    def features_of_nothing(self) -> tuple[Columns, Columns]:
        """Return the features of a row of nulls, and of a row of values that no vocabulary has."""
        _, features = self._loaded()
        nulls = features.side_columns(pa.RecordBatch.from_arrays([pa.nulls(1)], [""]), self.side)
        codes = {f.name for f in features.fitted.features if f.kind == Kind.CATEGORICAL and not f.is_list}
        return nulls, {name: _as_unknown(x) if name in codes else x for name, x in nulls.items()}

    def _vectors_of_nothing(self) -> NDArray[np.float32]:
        """Return the vectors of `features_of_nothing`: float32 [2, D]."""
        predictor, _ = self._loaded()
        return np.concatenate([predictor.vectors(columns, self.side) for columns in self.features_of_nothing()])

    def load(self) -> tuple[Predictor, FittedWorkflow]:
        """Return the model, opened once in each process."""
        return loaded_model(self.model, self.threads, None, self.maps, joined=self.joined)

    def _loaded(self) -> tuple[NetworkPredictor, PairFeatures]:
        predictor, fitted = self.load()
        return _network(predictor, self.model), self._features(fitted)

    def _features(self, fitted: FittedWorkflow) -> PairFeatures:
        return PairFeatures(self.user_columns, self.item_columns, self.context, fitted)


def _network(predictor: Any, model: Location) -> NetworkPredictor:
    if not isinstance(predictor, NetworkPredictor):
        raise UserError(f"the model in {model} has no vectors")
    return predictor


def _as_unknown(codes: NDArray[Any] | JaggedArray) -> NDArray[Any]:
    """Replace null's code 0 by 1, the code of values out of the vocabulary."""
    assert isinstance(codes, np.ndarray)
    return np.where(codes == 0, np.ones_like(codes), codes)


def map_vectors(
    spark: SparkSession,
    vectors: ModelVectors,
    frame: DataFrame,
    names: Sequence[str],
    parts: Callable[[], Partitioning],
    work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
) -> DataFrame:
    """Return `frame.mapInArrow(work, schema)`; joined tables' rows reach each part's task first.

    Args:
        spark: the session.
        vectors: the model, of which `work` asks the vectors of its rows.
        frame: users or items, with columns c0, c1, ...
        names: what these are called, to `work`.
        parts: says how the frame is cut; asked where rows are joined in. Else it is left as it is.
        work: what a task does.
        schema: of what that makes.
    """
    column_names = tuple(names)
    if vectors.joined:
        # This imports torch, which no other driver needs.
        from headrace.score.joined_rows import CodesOfVectors, map_with_table_rows

        needed = partial(CodesOfVectors, vectors)
        return map_with_table_rows(spark, vectors, needed, frame, column_names, parts(), work, schema)

    def named(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from work(pa.RecordBatch.from_arrays(batch.columns, list(column_names)) for batch in batches)

    return frame.mapInArrow(named, schema)


_SIDES: tuple[Side, Side] = ("user", "item")


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
