"""The work of the stage `score`: users, items and models of a day to its lists, as one commit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegralType

from headrace.config import Score
from headrace.config.score import CANDIDATE_COLUMNS, RERANK_COLUMNS
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.lake.delta.day_table import check_table_columns, rows_of_day, write_day
from headrace.lake.delta.with_spark import read_version
from headrace.lake.scratch import task_folder
from headrace.lake.spark.tasks import worker_peak_memory
from headrace.models.predictor import maps_of_tasks
from headrace.score.assignment import Live
from headrace.score.columns import key_types
from headrace.score.entities import ActiveEvents, seen, with_activity
from headrace.score.incremental import write_hashes
from headrace.score.items import ItemTable
from headrace.score.model_lists import EXPERIMENT_COLUMNS, AssignmentColumns, RunInputs, lists_of_model
from headrace.score.ranking import SEEN
from headrace.score.rerank.reranker import UnmetByTask
from headrace.score.scoring_model import ModelOfRun
from headrace.stage import Context, Result
from headrace.stage.manifest import Output
from headrace.storage import Location

log = logging.getLogger("headrace.score")

_SAMPLE_ROWS = 10
#: Users whose lists are compared with what they have had.
_SAMPLED_USERS = 1_000


def check_table(ctx: Context) -> None:
    """See that a day's lists can be written to the table of scores. Raises UserError."""
    spec = ctx.spec
    assert spec.score is not None
    keys = key_types(spec, spec.score)
    columns = {"ds": "string", **keys, "rank": "integer", "score": "float", "model_version": "string"}
    optional = {**CANDIDATE_COLUMNS, **RERANK_COLUMNS, **EXPERIMENT_COLUMNS}
    check_table_columns(ctx.ws.table(spec.pipeline, "scores"), columns, "its keys were others", optional)


def score_day(ctx: Context, models: Sequence[ModelOfRun], experiments: Sequence[Live], spark: SparkSession) -> Result:
    """Score the day's users by their models and write all lists. Raises UserError for what the data lack."""
    spec, score = ctx.spec, ctx.spec.score
    assert score is not None
    maps = maps_of_tasks(ctx.ws, spec, [ctx.ws.locate(m.chosen.output.name) for m in models])
    active = ActiveEvents.read(ctx, spark)
    with _users_and_items(active, score) as (users, item_frame), task_folder(ctx, "score") as folder:
        # Workers keep files mapped, so each run uses other names.
        items = ItemTable.write(ctx, spark, item_frame, folder / ctx.key / "items")
        n_users = users.count()
        active.reader.check_unchanged()
        if not n_users or not items.rows:
            empty = score.user.key if not n_users else score.item.key
            raise UserError(f"no event in the training window of {ctx.ds} has a '{empty}': there is nothing to score")
        assigned = _users_by_model(users, n_users, score.user.key, experiments, models)
        peak, unmet = worker_peak_memory(spark.sparkContext), UnmetByTask.empty(spark.sparkContext)
        run = RunInputs(spark, active, items, folder, maps, peak, unmet)
        with ExitStack() as stack:
            lists = [
                stack.enter_context(lists_of_model(model, run, model_users, count))
                for model, (model_users, count) in zip(models, assigned.users, strict=True)
                if count
            ]
            tick = time.perf_counter()
            written = reduce(DataFrame.unionByName, [group.frame for group in lists])
            if assigned.arms is not None:
                position = written.columns.index("model_version") + 1
                columns = [col(c) for c in written.columns]
                written = written.select(*columns[:position], assigned.arms.alias("arms"), *columns[position:])
            table = ctx.ws.table(spec.pipeline, "scores")
            version = write_day(written, table, ctx, "score")
            hashed = [group.scored_users.hashed for group in lists if group.scored_users.hashed is not None]
            hashes = (write_hashes(ctx, reduce(DataFrame.unionByName, hashed)),) if hashed else ()
            seconds = time.perf_counter() - tick + sum(group.seconds for group in lists)
    pairs = sum(group.scored_users.pairs for group in lists)
    log.info("score: %s pairs in %.1f s (%s pairs/s)", f"{pairs:,}", seconds, f"{pairs / seconds:,.0f}")
    rows = rows_of_day(table, version, ctx.ds)
    output = Output(kind="delta", name=ctx.ws.name_of(table), version=str(version), rows=rows)
    scored, unchanged = (
        sum(getattr(group.scored_users, name) for group in lists) for name in ("scored", "unchanged_users")
    )
    return Result(
        outputs=(output, *hashes),
        rows={
            "users": sum(group.users for group in lists),
            "candidates": items.rows,
            "pairs": pairs,
            "scores": rows,
            **({"users_scored": scored, "users_kept": unchanged} if score.incremental else {}),
        },
        facts={
            "model": lists[0].facts,
            "pairs_per_second": round(pairs / seconds),
            **lists[0].candidates,
            **({} if score.rerank is None else {"unmet_rules": unmet.by_rule()}),
            **({"incremental": dict(lists[0].scored_users.facts)} if score.incremental else {}),
            **({"models": [group.facts | {"users": group.users} for group in lists]} if experiments else {}),
            **({"experiments": assigned.facts} if experiments else {}),
            **({} if score.exclude_seen else {"consumed": _consumed(active, spark, table, version)}),
            "sample": _sample(ctx, spark, table, version),
        },
        peak_memory_mib={"worker": peak.value},
    )


@dataclass(frozen=True)
class _UsersByModel:
    """A run's users by model."""

    #: Users of each model, with their number.
    users: list[tuple[DataFrame, int]]
    #: The column `arms`; None without experiments.
    arms: Column | None = None
    #: Users by experiment and arm.
    facts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def _users_by_model(
    users: DataFrame, count: int, key: str, experiments: Sequence[Live], models: Sequence[ModelOfRun]
) -> _UsersByModel:
    if not experiments:
        return _UsersByModel([(users, count)])
    model_places = {requested: i for i, model in enumerate(models) for requested in model.requested_by}
    is_integer = isinstance(users.schema[key].dataType, IntegralType)
    assigned = AssignmentColumns.of_users(col(key), is_integer, experiments, model_places)
    counts = users.groupBy(assigned.model.alias("model"), assigned.arms.alias("arms")).count().collect()
    model_counts = [sum(row["count"] for row in counts if row["model"] == i) for i in range(len(models))]
    facts: dict[str, Counter[str]] = {live.name: Counter() for live in experiments}
    for row in counts:
        for part in (row["arms"] or "").split(","):
            name, _, arm = part.partition("=")
            if arm:
                facts[name][arm] += row["count"]
    parts = [(users.where(assigned.model == i), n) for i, n in enumerate(model_counts)]
    return _UsersByModel(parts, assigned.arms, {name: dict(sorted(arms.items())) for name, arms in facts.items()})


@contextmanager
def _users_and_items(active: ActiveEvents, score: Score) -> Iterator[tuple[DataFrame, DataFrame]]:
    """Give (users, items). Users, perhaps with seen items, are computed once and kept until the context ends."""
    with active.entities(score.user, score.item) as (users, items):
        # Candidates exclude seen items already.
        if score.exclude_seen and score.candidates is None:
            any_label = score.exclude_seen == "any_label"
            clicked = seen(active.ctx.spec, active.events, score.user.key, score.item.key, any_label)
            clicked = clicked.select(F.col("key").alias("__key"), F.col("seen").alias(SEEN))
            users = users.join(clicked, col(score.user.key) == F.col("__key"), "left").drop("__key")
        if score.rerank is not None:
            items = with_activity(active.ctx.spec, active.events, items, score.item.key)
        users = users.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield users, items
        finally:
            users.unpersist()


def _consumed(active: ActiveEvents, spark: SparkSession, table: Location, version: int) -> dict[str, int]:
    """Count, in the lists of some users, the items that their user has had (a label of 1), as `exclude_seen` would.

    Returns:
        `users` that were looked at, the same ones in every run; items `listed` for them; `consumed` among these.
    """
    ctx, score = active.ctx, active.ctx.spec.score
    assert score is not None
    user, item = score.user.key, score.item.key
    lists = _lists_of_day(ctx, spark, table, version).select(col(user).alias("user"), col(item).alias("item"), "rank")
    first_items = lists.where(F.col("rank") == 1).orderBy(F.xxhash64("user"), "user").limit(_SAMPLED_USERS)
    users = F.broadcast(first_items.select(F.col("user").alias("sampled")))
    events = active.events.join(users, col(user) == F.col("sampled"), "left_semi")
    had = seen(ctx.spec, events, user, item)
    counts = (
        lists.join(users, F.col("user") == F.col("sampled"), "left_semi")
        .join(F.broadcast(had), F.col("user") == F.col("key"), "left")
        .agg(
            F.count_distinct("user").alias("users"),
            F.count("item").alias("listed"),
            F.count_if(F.array_contains("seen", F.col("item"))).alias("consumed"),
        )
    )
    return {name: int(count) for name, count in counts.collect()[0].asDict().items()}


def _lists_of_day(ctx: Context, spark: SparkSession, table: Location, version: int) -> DataFrame:
    return read_version(spark, table, version, lambda partition: partition["ds"] == ctx.ds).where(F.col("ds") == ctx.ds)


def _sample(ctx: Context, spark: SparkSession, table: Location, version: int) -> list[dict[str, Any]]:
    """Return the first rows, as JSON values."""
    score: Score | None = ctx.spec.score
    assert score is not None
    frame = _lists_of_day(ctx, spark, table, version)
    rows = frame.orderBy(col(score.user.key), "rank").limit(_SAMPLE_ROWS).collect()
    return [
        {
            name: value if isinstance(value, (str, int, float, bool)) else str(value)
            for name, value in r.asDict().items()
        }
        for r in rows
    ]
