"""Scoring those alone whose inputs have changed: what each user's list was made of, as two hashes, from run to run.

A user's list is a function of the user's columns, of its candidates with their columns, of the model and of the
settings. Where all of these are as they were, so is the list, and its rows are copied. That holds to the bit where a
pair's score does not depend on the pairs beside it, which each run looks at (`rank.blocks.scores_stand_alone`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from headrace import __version__
from headrace.config import Score
from headrace.features.functions.spark_expressions import col
from headrace.lake.delta.day_table import rows_of_day, verify_day, write_day
from headrace.lake.delta.with_spark import read_version
from headrace.lake.spark.gpus import gpu_profile
from headrace.models.predictor import model_digest
from headrace.score.items import HASHES, ItemTable, row_hashes
from headrace.score.ranking import CHECKED_ITEMS, ITEMS, SEEN, SOURCES, TaskInputs, scores_stand_alone
from headrace.stage import Context
from headrace.stage.manifest import Manifest, Output, fingerprint

log = logging.getLogger("headrace.score")

#: Kind of the manifest's output, and name of the lake's table, for the users' hashes.
KIND = TABLE = "score_inputs"
#: Two hashes of a user's inputs: bigint each.
INPUT_HASHES = ("inputs_0", "inputs_1")
#: Libraries that compute the scores: another version may round differently.
_LIBRARIES = ("torch", "xgboost", "numpy", "pyarrow")
#: Users whose pairs are scored alone and together.
_CHECKED_USERS = 8
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


@dataclass(frozen=True)
class UsersToScore:
    """The users of a run: those to be scored, and what stays of the others."""

    #: The users to be scored; `scored` of them, with `pairs` candidates.
    changed: DataFrame
    scored: int
    pairs: int
    #: Earlier scores of the unchanged users; None if all users are scored.
    unchanged_scores: DataFrame | None = None
    #: Number of unchanged users.
    unchanged_users: int = 0
    #: All users with INPUT_HASHES; None without `score.incremental`.
    hashed: DataFrame | None = None
    #: For the manifest.
    facts: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def users_to_score(
    ctx: Context, spark: SparkSession, task: TaskInputs, users: DataFrame, counts: tuple[int, int], columns: list[str]
) -> Iterator[UsersToScore]:
    """Compare the users with those of the run before: of this day, or else of the newest day before it.

    The hashes are computed once and kept to the end of the context.

    Args:
        ctx: the run; without `score.incremental` everybody is scored.
        spark: the session.
        task: the items and the model.
        users: the key, the user's columns and perhaps `__seen`, or `__items` and `__sources`.
        counts: of users, and of their candidates.
        columns: of the scores.
    """
    score = ctx.spec.score
    assert score is not None
    if not score.incremental:
        yield UsersToScore(users, *counts)
        return
    reason = _reason_to_score_all(spark, task, users)
    hashed = with_hashes(users, task.items, _other_inputs(score, task, ctx.ds)).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        previous_run = None if reason else _previous_run(ctx)
        split = None if previous_run is None else _split_by_change(ctx, spark, hashed, previous_run, columns)
        if previous_run is None or split is None:
            reason = reason or "there is no run before to compare with"
            log.info("score: everybody is scored: %s", reason)
            yield UsersToScore(users, *counts, hashed=hashed, facts={"all": reason})
            return
        changed, unchanged_scores = split
        pairs = F.sum(F.size(ITEMS)) if ITEMS in users.columns else F.count("*") * F.lit(task.items.rows)
        scored, changed_pairs = changed.agg(F.count("*"), F.coalesce(pairs, F.lit(0))).collect()[0]
        log.info("score: %s of %s users have changed", f"{scored:,}", f"{counts[0]:,}")
        facts = {"before": {"ds": previous_run.ds, "key": previous_run.key}}
        changed = changed.drop(*INPUT_HASHES)
        yield UsersToScore(changed, scored, changed_pairs, unchanged_scores, counts[0] - scored, hashed, facts)
    finally:
        hashed.unpersist()


def _reason_to_score_all(spark: SparkSession, task: TaskInputs, users: DataFrame) -> str | None:
    """Return why everybody must be scored, whatever has changed, or None where unchanged lists can be copied."""
    names = list(users.columns)
    sample = users.limit(_CHECKED_USERS).toDF(*[f"c{i}" for i in range(len(names))])

    def check(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            named = pa.RecordBatch.from_arrays(batch.columns, names)
            if task.joined:
                from headrace.score.joined_rows import take_few_rows  # imports torch, in the worker alone

                take_few_rows(task, named, CHECKED_ITEMS)
            yield pa.RecordBatch.from_pydict({"alone": [scores_stand_alone(task, named)]})

    profile = gpu_profile(spark) if task.gpu else None
    if all(row[0] for row in sample.mapInArrow(check, "alone boolean", profile=profile).collect()):
        return None
    return "the model's score of a pair depends on the pairs beside it"


def _other_inputs(score: Score, task: TaskInputs, ds: str) -> dict[str, Any]:
    """Return what lists depend on besides users and items."""
    settings = score.model_dump(mode="json", exclude={"model", "metric", "incremental", "embeddings"})
    inputs = {"settings": settings, "model": model_digest(task.model), "code": __version__, "threads": task.threads}
    inputs["gpu"] = task.gpu
    inputs["libraries"] = {name: _version(name) for name in _LIBRARIES}
    rules = score.rerank
    if rules is not None and (rules.freshness is not None or rules.explore is not None):
        inputs["ds"] = ds  # fresh items and draws differ by day
    return inputs


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def with_hashes(users: DataFrame, items: ItemTable, other_inputs: Mapping[str, Any]) -> DataFrame:
    """Return users with INPUT_HASHES.

    Args:
        users: the key, the user's columns and perhaps `__seen`, or `__items` and `__sources`.
        items: all items; where users have no lists of their own, all of them are everybody's.
        other_inputs: whatever else a list depends on. JSON values.
    """
    listed = ITEMS in users.columns
    user_columns = [c for c in users.columns if c not in (ITEMS, SOURCES)]
    if SEEN in user_columns:  # collected in no particular order
        users = users.withColumn(SEEN, F.sort_array(SEEN))
    text = F.lit(fingerprint({"said": dict(other_inputs), "items": None if listed else items.fingerprint}))
    if not listed:
        return users.select("*", *row_hashes(users, user_columns, INPUT_HASHES, text))
    # mapInArrow reads a dot in a column's name as a field's: numbers travel.
    fields = [StructField(f"c{i}", f.dataType) for i, f in enumerate(users.schema.fields)]
    schema = StructType([*fields, *(StructField(n, LongType()) for n in INPUT_HASHES)])
    numbered = users.toDF(*[f.name for f in fields]).mapInArrow(_Lists(items, tuple(users.columns)), schema)
    with_sums = numbered.toDF(*users.columns, *INPUT_HASHES)
    mixed = row_hashes(with_sums, user_columns, INPUT_HASHES, text, *[F.col(n) for n in INPUT_HASHES])
    return with_sums.select(*[col(c) for c in users.columns], *mixed)


@dataclass(frozen=True)
class _Lists:
    """Spark task that gives users with sums of the hashes of their items behind them."""

    items: ItemTable
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            sources = batch.column(self.names.index(SOURCES)) if SOURCES in self.names else None
            sums = self.sums(batch.column(self.names.index(ITEMS)), sources)
            columns = [*batch.columns, *(pa.array(s.view(np.int64)) for s in sums)]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names, *INPUT_HASHES])

    def sums(self, items: pa.ListArray, sources: pa.ListArray | None) -> list[NDArray[np.uint64]]:
        """Return two sums over each list's items, whatever their order: uint64 [lists]."""
        rows = items.flatten()
        lengths = pc.fill_null(pc.list_value_length(items), 0).to_numpy(zero_copy_only=False)
        ends = np.append(0, np.cumsum(lengths))
        masks = np.zeros(len(rows), np.uint64)
        if sources is not None:
            masks = sources.flatten().to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
        sums = []
        for name, odd in zip(HASHES, _ODD, strict=True):
            hashes = self.items.take(name, rows).to_numpy(zero_copy_only=False).view(np.uint64)
            mixed = _mix(hashes + (masks + np.uint64(1)) * odd)
            total = np.append(np.uint64(0), np.cumsum(mixed, dtype=np.uint64))
            sums.append(total[ends[1:]] - total[ends[:-1]])
        return sums


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits so that each changes all others: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _split_by_change(
    ctx: Context, spark: SparkSession, users: DataFrame, previous_run: Manifest, columns: list[str]
) -> tuple[DataFrame, DataFrame] | None:
    """Split users with INPUT_HASHES into those with changed rows, and the earlier scores of the others.

    None: the earlier ones lack a column.
    """
    assert ctx.spec.score is not None
    key = ctx.spec.score.user.key

    def rows_of_day_before(output: Output) -> DataFrame:
        table = read_version(
            spark, ctx.ws.locate(output.name), int(output.version), lambda partition: partition["ds"] == previous_run.ds
        )
        return table.where(F.col("ds") == previous_run.ds).drop("ds")

    previous_hashes = rows_of_day_before(previous_run.output(KIND)).select(
        *[col(c).alias(f"__{i}") for i, c in enumerate((key, *INPUT_HASHES))]
    )
    same = (
        (col(key) == F.col("__0")) & (F.col(INPUT_HASHES[0]) == F.col("__1")) & (F.col(INPUT_HASHES[1]) == F.col("__2"))
    )
    unchanged = users.join(previous_hashes, same, "left_semi").select(col(key).alias("__key"))
    scores = rows_of_day_before(previous_run.output("delta"))
    if not set(columns) <= {"ds", *scores.columns}:
        return None
    unchanged_scores = scores.join(unchanged, col(key) == F.col("__key"), "left_semi")
    return users.join(previous_hashes, same, "left_anti"), unchanged_scores


def write_hashes(ctx: Context, users: DataFrame) -> Output:
    """Keep the hashes of a day's users for the next run: one commit that replaces the day."""
    assert ctx.spec.score is not None
    table = ctx.ws.table(ctx.spec.pipeline, TABLE)
    frame = users.select(F.lit(ctx.ds).alias("ds"), col(ctx.spec.score.user.key), *INPUT_HASHES)
    number = write_day(frame, table, ctx, TABLE)
    return Output(kind=KIND, name=ctx.ws.name_of(table), version=str(number), rows=rows_of_day(table, number, ctx.ds))


def _previous_run(ctx: Context) -> Manifest | None:
    """Return the manifest of the previous run whose outputs are still valid."""
    for ds in sorted((d for d in ctx.ws.days(ctx.spec.pipeline) if d <= ctx.ds), reverse=True):
        manifest = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ds, "score"))
        if manifest is None or not any(o.kind == KIND for o in manifest.outputs):
            continue
        if not any(verify_day(ctx.ws, manifest.output(kind), ds) for kind in ("delta", KIND)):
            return manifest
    return None
