"""The score stage: users x candidate items, the best of each user, one Delta commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Score, Spec
from headrace.errors import UserError
from headrace.features.build.events import pinned_table
from headrace.features.functions.arrays import one_batch
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.external import ExternalReader, pin
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.arrow_batches import bounded_batches
from headrace.lake.assigned_gpu import gpu_profile
from headrace.lake.delta.frame import read_version
from headrace.lake.session import session
from headrace.lake.worker_errors import worker_errors
from headrace.lake.worker_memory import worker_peak_memory
from headrace.manifest import Input, Manifest, Output
from headrace.models.predictor import maps_of, read_meta
from headrace.score.candidates.candidates import UserCandidates, candidates_of_users
from headrace.score.candidates.source import SourceContext, stored
from headrace.score.candidates.table import tables_of_score
from headrace.score.day_table import check_columns as check_table_columns
from headrace.score.day_table import key_types, rows_of_day, verify_day, write_day
from headrace.score.entities import Active, seen, with_activity
from headrace.score.incremental import users_to_score, write_hashes
from headrace.score.items import ItemTable
from headrace.score.rank.blocks import SEEN, TaskInputs
from headrace.score.rank.item_features import ItemFeatures
from headrace.score.rank.pair_features import PairFeatures, check_columns, check_pair_features, context_scalars
from headrace.score.rerank.columns import check_rule_columns
from headrace.score.rerank.item_vectors import ModelItemVectors
from headrace.score.rerank.reranker import RuleReranker
from headrace.score.rerank.unmet_by_task import UnmetByTask
from headrace.score.revisions import revisions
from headrace.score.scored import OF_CANDIDATES, OF_RERANK, score_columns, scored_rows
from headrace.score.scoring_model import ScoringModel, pinned_model, scoring_model
from headrace.stage import Context, Result, Stage
from headrace.storage import Location

log = logging.getLogger("headrace.score")

_SAMPLE_ROWS = 10
#: Users, and items, whose pairs' features are compared.
_CHECKED = 8


class ScoreCandidates(Stage):
    """Score active users x candidate items on Spark with the registered model; keep the top K of each user."""

    name = "score"
    version = 1
    needs: tuple[str, ...] = ("train?", "features", "ingest", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The section; columns, window and label are part of the upstream stages' keys."""
        return {
            "score": spec.score.model_dump(mode="json") if spec.score else None,
            "event_time": spec.table.event_time,
            **revisions(spec),
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The events at ingest's version, and the model. Raises UserError where columns or the model are missing."""
        assert ctx.spec.score is not None
        check_columns(ctx.spec, ctx.spec.score)
        check_rule_columns(ctx.spec)
        events = pinned_table(ctx)
        return (
            Input(kind=events.kind, name=events.name, version=events.version),
            scoring_model(ctx).input,
            *pin(ctx.ws, tables_of_score(ctx.spec.score)),
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The table's version still has this day's rows, and their files are there."""
        return verify_day(ctx.ws, manifest.output("delta"), ctx.ds)

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or the model lack."""
        chosen = pinned_model(ctx)
        read_meta(ctx.ws.locate(chosen.output.name))
        _check_table(ctx)
        with session(ctx.spec.spark, ctx.ws, f"score {ctx.spec.pipeline} {ctx.ds}") as spark:
            return _run(ctx, chosen, spark)


def _check_table(ctx: Context) -> None:
    spec = ctx.spec
    assert spec.score is not None
    keys = key_types(spec, spec.score)
    wanted = {"ds": "string", **keys, "rank": "integer", "score": "float", "model_version": "string"}
    more = {**OF_CANDIDATES, **OF_RERANK}
    check_table_columns(ctx.ws.table(spec.pipeline, "scores"), wanted, "its keys were others", more)


def _run(ctx: Context, chosen: ScoringModel, spark: SparkSession) -> Result:
    spec, score = ctx.spec, ctx.spec.score
    assert score is not None
    folder = ctx.ws.locate(chosen.output.name)
    maps = maps_of(folder, ctx.ws.mapped(spec.pipeline))
    for other in maps.parent.entries():
        if other != maps:  # of models that have scored before; who maps them now keeps what is open
            other.remove_quietly()
    features = PairFeatures(
        (score.user.key, *score.user.columns),
        (score.item.key, *score.item.columns),
        context_scalars(spec, score),
        FittedWorkflow.load(folder / "workflow", maps=maps / "vocabularies"),
    )
    active = Active.of(ctx, spark)
    # Workers keep what they have mapped: the files of another run have other names.
    scratch = ctx.ws.spark_local / "score" / spec.pipeline / ctx.key
    with _users_and_items(active, score) as (users, found), _scratch(scratch.parent):
        items = ItemTable.write(ctx, spark, found, scratch / "items")
        n_users, n_items = users.count(), items.rows
        active.reader.check_unchanged()
        if not n_users or not n_items:
            empty = score.user.key if not n_users else score.item.key
            raise UserError(f"no event in the training window of {ctx.ds} has a '{empty}': there is nothing to score")
        of_items = ItemFeatures.write(items, folder / "workflow", features, scratch / "item_features", spark)
        _check_pair_features(features, users, items, of_items)
        log.info(
            "score: %s users x %s items = %s pairs with the %s model",
            f"{n_users:,}",
            f"{n_items:,}",
            f"{n_users * n_items:,}",
            _kind(chosen),
        )
        threads = int(spark.sparkContext.getConf().get("spark.task.cpus") or 1)
        gpu = chosen.stage != "baseline" and gpu_profile(spark) is not None
        task = TaskInputs(
            model=folder,
            threads=threads,
            output=score.output,
            top_k=score.top_k if score.rerank is None else score.ranked,
            rank_depth=score.ranked,
            rerank=_reranker(ctx, folder, threads, of_items, gpu),
            user_key=score.user.key,
            items=items,
            item_features=of_items,
            user_columns=features.user,
            item_names=features.item,
            context=dict(features.context),
            maps=ctx.ws.mapped(spec.pipeline),
            gpu=gpu,
        )
        peak = worker_peak_memory(spark.sparkContext)
        with _candidates(ctx, chosen, spark, active, users, items) as found_candidates:
            pairs, sources = n_users * n_items, None
            if found_candidates is not None:
                users, n_users = found_candidates.frame, found_candidates.facts["users"]
                pairs, sources = found_candidates.facts["candidates"], found_candidates.names
            tick = time.perf_counter()
            table = ctx.ws.table(spec.pipeline, "scores")
            unmet = UnmetByTask.of(spark.sparkContext)
            measures = peak, unmet
            with users_to_score(ctx, spark, task, users, (n_users, pairs), score_columns(score)) as part:
                pairs = part.pairs
                with scored_rows(ctx, spark, task, part, chosen.output.version, measures, sources) as scored:
                    # Rows of items that filters leave out must never be in the table: counted before the commit.
                    written = scored if found_candidates is None else stored(spark, scored, scratch / "scores")
                    of_candidates = _check_filters(ctx, found_candidates, written)
                    version = write_day(written, table, stage="score", ds=ctx.ds, key=ctx.key)
                hashes = () if part.hashed is None else (write_hashes(ctx, part.hashed),)
            seconds = time.perf_counter() - tick
    log.info("score: %s pairs in %.1f s (%s pairs/s)", f"{pairs:,}", seconds, f"{pairs / seconds:,.0f}")
    rows = rows_of_day(table, version, ctx.ds)
    output = Output(kind="delta", name=ctx.ws.name_of(table), version=str(version), rows=rows)
    return Result(
        outputs=(output, *hashes),
        rows={
            "users": n_users,
            "candidates": n_items,
            "pairs": pairs,
            "scores": rows,
            **({"users_scored": part.scored, "users_kept": part.kept_users} if score.incremental else {}),
        },
        facts={
            "model": {
                "stage": chosen.stage,
                "kind": _kind(chosen),
                "name": chosen.output.name,
                "version": chosen.output.version,
                "registered": chosen.facts.get("registered"),
                "auc": chosen.facts["metrics"].get("auc"),
                "asked": score.model,
                **({} if score.output is None else {"output": score.output}),
            },
            "pairs_per_second": round(pairs / seconds),
            **of_candidates,
            **({} if score.rerank is None else {"unmet_rules": unmet.by_rule()}),
            **({"incremental": dict(part.facts)} if score.incremental else {}),
            "sample": _sample(ctx, spark, table, version),
        },
        peak_memory_mib={"worker": peak.value},
    )


def _reranker(ctx: Context, folder: Location, threads: int, of_items: ItemFeatures, gpu: bool) -> RuleReranker | None:
    score = ctx.spec.score
    if score is None or score.rerank is None:
        return None
    sources = () if score.candidates is None else tuple(score.candidates.sources)
    maps = ctx.ws.mapped(ctx.spec.pipeline)
    vectors = ModelItemVectors(folder, threads, score.output, maps, of_items, gpu)
    return RuleReranker(score.rerank, score.top_k, ctx.ds, sources, vectors)


@contextmanager
def _users_and_items(active: Active, score: Score) -> Iterator[tuple[DataFrame, DataFrame]]:
    """(users, items): the users, perhaps with what they have seen, are computed once and kept to the context's end."""
    with active.entities(score.user, score.item) as (users, items):
        # Where there are candidates, none of them is one that was seen.
        if score.exclude_seen and score.candidates is None:
            clicked = seen(active.ctx.spec, active.events, score.user.key, score.item.key)
            clicked = clicked.select(F.col("key").alias("__key"), F.col("seen").alias(SEEN))
            users = users.join(clicked, col(score.user.key) == F.col("__key"), "left").drop("__key")
        if score.rerank is not None:
            items = with_activity(active.ctx.spec, active.events, items, score.item.key)
        users = users.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield users, items
        finally:
            users.unpersist()


@contextmanager
def _candidates(
    ctx: Context, chosen: ScoringModel, spark: SparkSession, active: Active, users: DataFrame, items: ItemTable
) -> Iterator[UserCandidates | None]:
    """What `score.candidates` gives each user; None where all items are ranked."""
    score = ctx.spec.score
    assert score is not None
    if score.candidates is None:
        yield None
        return
    reader = ExternalReader.of(ctx.ws, tables_of_score(score), ctx.inputs)
    context = SourceContext(ctx, spark, active, users, items.frame(spark), reader, chosen)
    # Users come with lists of their items.
    with bounded_batches(spark), ExitStack() as made:
        with worker_errors():  # of the making alone
            found = made.enter_context(candidates_of_users(context))
        reader.check_unchanged()
        yield found


def _check_filters(ctx: Context, candidates: UserCandidates | None, rows: DataFrame) -> dict[str, Any]:
    """The facts of candidates, when the rows to be written have been counted against all filters."""
    if candidates is None:
        return {}
    violations = candidates.violations(rows)
    if violations:
        raise RuntimeError(f"{violations} of the scores of {ctx.ds} are of items that score.filters leave out")
    return {"candidates": {**candidates.facts, "violations": violations}}


@contextmanager
def _scratch(folder: Location) -> Iterator[None]:
    """What runs of the pipeline write there goes at the end; what a killed one left there, before."""
    folder.remove()
    try:
        yield
    finally:
        folder.remove_quietly()


def _kind(chosen: ScoringModel) -> str:
    return {"train": "neural"}.get(chosen.stage, chosen.stage)


def _check_pair_features(features: PairFeatures, users: DataFrame, items: ItemTable, of_items: ItemFeatures) -> None:
    """The shortcut's proof, on a few pairs of this very run."""
    few = one_batch(users.drop(SEEN).limit(_CHECKED).toArrow())
    first = one_batch(items.open().select(list(dict.fromkeys(features.item))).slice(0, _CHECKED))
    check_pair_features(features, few, first, of_items.open())


def _sample(ctx: Context, spark: SparkSession, table: Location, version: int) -> list[dict[str, Any]]:
    """The first rows, as JSON values."""
    score: Score | None = ctx.spec.score
    assert score is not None
    frame = read_version(spark, table, version, lambda of: of["ds"] == ctx.ds).where(F.col("ds") == ctx.ds)
    rows = frame.orderBy(col(score.user.key), "rank").limit(_SAMPLE_ROWS).collect()
    return [
        {
            name: value if isinstance(value, (str, int, float, bool)) else str(value)
            for name, value in r.asDict().items()
        }
        for r in rows
    ]
