"""The score stage: users x candidate items, the best of each user, one Delta commit."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
from pyspark import Accumulator, StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Score, Spec
from headrace.errors import UserError
from headrace.features.build.events import pinned_table
from headrace.features.functions.arrays import one_batch
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.external import ExternalReader, pin
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import declared
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.arrow_batches import bounded_batches
from headrace.lake.delta.frame import read_version
from headrace.lake.session import session
from headrace.lake.worker_errors import worker_errors
from headrace.lake.worker_memory import report_peak_memory, worker_peak_memory
from headrace.manifest import Input, Manifest, Output
from headrace.models.predictor import maps_of, read_meta
from headrace.score.candidates.candidates import UserCandidates, candidates_of_users
from headrace.score.candidates.source import SourceContext, stored
from headrace.score.candidates.table import tables_of_score
from headrace.score.day_table import check_columns as check_table_columns
from headrace.score.day_table import key_types, rows_of_day, verify_day, write_day
from headrace.score.entities import Active, seen, with_activity
from headrace.score.items import ItemTable
from headrace.score.rank.blocks import SEEN, TaskInputs, score_batches
from headrace.score.rank.item_features import ItemFeatures
from headrace.score.rank.pair_features import PairFeatures, check_columns, check_pair_features, context_scalars
from headrace.score.rerank.columns import check_rule_columns
from headrace.score.rerank.item_vectors import ModelItemVectors
from headrace.score.rerank.reranker import RuleReranker
from headrace.score.rerank.unmet_by_task import UnmetByTask
from headrace.score.scoring_model import ScoringModel, pinned_model, scoring_model
from headrace.stage import Context, Result, Stage
from headrace.storage import Location

log = logging.getLogger("headrace.score")

#: Tasks for each core, so that cores finish together and progress is seen; and the most pairs of a task.
_TASKS_A_CORE = 4
_TASK_PAIRS = 4_000_000
_PROGRESS_SECONDS = 2.0
_SAMPLE_ROWS = 10
#: The column of the scores where there are candidates: the names of the sources that gave the item.
_OF_CANDIDATES = {"source": "string"}
#: Users, and items, whose pairs' features are compared.
_CHECKED = 8
#: Columns of the scores where there are rules for lists.
_OF_RERANK = {"propensity": "double", "reason": "string"}


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
    more = {**_OF_CANDIDATES, **_OF_RERANK}
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
        task = TaskInputs(
            model=folder,
            threads=threads,
            output=score.output,
            top_k=score.top_k if score.rerank is None else score.ranked,
            rank_depth=score.ranked,
            rerank=_reranker(ctx, folder, threads, of_items),
            user_key=score.user.key,
            items=items,
            item_features=of_items,
            user_columns=features.user,
            item_names=features.item,
            context=dict(features.context),
            maps=ctx.ws.mapped(spec.pipeline),
        )
        peak = worker_peak_memory(spark.sparkContext)
        with _candidates(ctx, chosen, spark, active, users, items) as found_candidates:
            pairs = n_users * n_items
            if found_candidates is not None:
                users, n_users = found_candidates.frame, found_candidates.facts["users"]
                pairs = found_candidates.facts["candidates"]
            tick = time.perf_counter()
            counts, table = (n_users, pairs), ctx.ws.table(spec.pipeline, "scores")
            unmet = UnmetByTask.of(spark.sparkContext)
            measures = peak, unmet
            with _scored(ctx, spark, task, users, counts, chosen.output.version, measures, found_candidates) as scored:
                # Rows of items that filters leave out must never be in the table: counted before the commit.
                written = scored if found_candidates is None else stored(spark, scored, scratch / "scores")
                of_candidates = _check_filters(ctx, found_candidates, written)
                version = write_day(written, table, stage="score", ds=ctx.ds, key=ctx.key)
            seconds = time.perf_counter() - tick
    log.info("score: %s pairs in %.1f s (%s pairs/s)", f"{pairs:,}", seconds, f"{pairs / seconds:,.0f}")
    rows = rows_of_day(table, version, ctx.ds)
    output = Output(kind="delta", name=ctx.ws.name_of(table), version=str(version), rows=rows)
    return Result(
        outputs=(output,),
        rows={"users": n_users, "candidates": n_items, "pairs": pairs, "scores": rows},
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
            "sample": _sample(ctx, spark, table, version),
        },
        peak_memory_mib={"worker": peak.value},
    )


def _reranker(ctx: Context, folder: Location, threads: int, of_items: ItemFeatures) -> RuleReranker | None:
    score = ctx.spec.score
    if score is None or score.rerank is None:
        return None
    sources = () if score.candidates is None else tuple(score.candidates.sources)
    maps = ctx.ws.mapped(ctx.spec.pipeline)
    vectors = ModelItemVectors(folder, threads, score.output, maps, of_items)
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


def names_of_sources(names: Sequence[str]) -> Column:
    """The names of the sources that gave an item, by the bits of the column `sources`: text, with commas between."""
    bits = F.col("sources")
    return F.concat_ws(",", *[F.when(bits.bitwiseAND(1 << i) != 0, F.lit(name)) for i, name in enumerate(names)])


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


@contextmanager
def _scored(
    ctx: Context,
    spark: SparkSession,
    task: TaskInputs,
    users: DataFrame,
    counts: tuple[int, int],
    model: str,
    measures: tuple[Accumulator[float], UnmetByTask],
    candidates: UserCandidates | None,
) -> Iterator[DataFrame]:
    """The rows of the table, to be computed within the block. `counts`: of users and of pairs.

    Users are partitioned to tasks by a hash of their key: the one exchange, of users; pairs never leave their task.
    """
    spec, score = ctx.spec, ctx.spec.score
    assert score is not None
    n_users, pairs = counts
    tasks = min(n_users, max(_TASKS_A_CORE * spark.sparkContext.defaultParallelism, -(-pairs // _TASK_PAIRS)))
    partitioned = users.repartition(tasks, col(score.user.key)).sortWithinPartitions(col(score.user.key))
    # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task puts the names back.
    names = list(partitioned.columns)
    numbered = partitioned.toDF(*[f"c{i}" for i in range(len(names))])
    shared, counter = spark.sparkContext.broadcast(task), spark.sparkContext.accumulator(0)
    peak, unmet = measures

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        named = (pa.RecordBatch.from_arrays(batch.columns, names) for batch in batches)
        of_task: Counter[tuple[str, str]] = Counter()
        yield from score_batches(shared.value, named, counter.add, of_task)
        if of_task:
            unmet.add(of_task)
        report_peak_memory(peak)

    types = {c.name: str(declared(c)) for c in prepared_columns(spec)}
    of_lists = [] if score.rerank is None else list(_OF_RERANK.items())
    written = [("user", types[score.user.key]), ("item", types[score.item.key]), ("rank", "int"), ("score", "float")]
    written += [] if candidates is None else [("sources", "int")]
    best = numbered.mapInArrow(work, ", ".join(f"{name} {type_}" for name, type_ in [*written, *of_lists]))
    frame = best.select(
        F.lit(ctx.ds).alias("ds"),
        F.col("user").alias(score.user.key),
        F.col("item").alias(score.item.key),
        "rank",
        "score",
        F.lit(model).alias("model_version"),
        *([] if candidates is None else [names_of_sources(candidates.names).alias("source")]),
        *[name for name, _ in of_lists],
    )
    with _progress(counter, pairs), worker_errors():
        yield frame
    shared.unpersist()


@contextmanager
def _progress(counter: Accumulator[int], pairs: int) -> Iterator[None]:
    """A line every few seconds about the tasks that have finished."""
    done, tick = threading.Event(), time.perf_counter()

    def tell() -> None:
        first: tuple[int, float] | None = None
        shown = 0
        while not done.wait(_PROGRESS_SECONDS):
            # A task that is run twice counts twice.
            scored, now = min(counter.value, pairs), time.perf_counter()
            if scored == shown:
                continue
            shown = scored
            line = f"{scored:,}/{pairs:,} pairs ({100 * scored // pairs} %), {scored / (now - tick):,.0f} pairs/s"
            # The first tasks pay for the start of the workers and the load of the model; the pace is that of the rest.
            if first is None:
                first = (scored, now)
            else:
                line += f", {(pairs - scored) * (now - first[1]) / (scored - first[0]):.0f} s left"
            log.info("score: %s", line)

    thread = threading.Thread(target=tell, name="score-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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
