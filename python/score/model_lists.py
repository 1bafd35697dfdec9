"""The models of a run, one for each arm of an experiment that has its own, and the rows of the lists that each makes.

Users are partitioned to tasks, which rank their items and report progress.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import Accumulator
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Score
from headrace.config.experiments import PARTS
from headrace.config.score import RERANK_COLUMNS
from headrace.features.functions.arrays import one_batch
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.preparation import ExternalReader, prepared_columns
from headrace.features.types import declared
from headrace.lake.spark.exchange import bounded_batches
from headrace.lake.spark.gpus import gpu_profile
from headrace.lake.spark.tasks import report_peak_memory
from headrace.logs import Progress, report_progress
from headrace.score.assignment import ARM, PART, Live, edges, parts_of
from headrace.score.candidates.candidates import UserCandidates, candidates_of_users
from headrace.score.candidates.shared_lists import tables_of_score
from headrace.score.candidates.source import CandidateContext, stored
from headrace.score.columns import context_scalars
from headrace.score.entities import ActiveEvents
from headrace.score.incremental import UsersToScore, users_to_score
from headrace.score.item_features import ItemFeatures
from headrace.score.items import ItemTable
from headrace.score.joined_tables import Partitioning, ReceivedRows, joined_tables
from headrace.score.loaded_model import PairFeatures, check_pair_features, loaded_workflow
from headrace.score.ranking import SEEN, TaskInputs, score_batches
from headrace.score.rerank.reranker import ModelItemVectors, RuleReranker, UnmetByTask
from headrace.score.scoring_model import ModelOfRun
from headrace.stage import Context
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace

_SECONDS = 2.0


@contextmanager
def progress(counter: Accumulator[int], pairs: int) -> Iterator[None]:
    """Log a line every few seconds about the tasks that have finished."""
    done, tick = threading.Event(), time.perf_counter()

    def report() -> None:
        first: tuple[int, float] | None = None
        last_scored = 0
        while not done.wait(_SECONDS):
            # Spark adds the counts of a retried task again.
            scored, now = min(counter.value, pairs), time.perf_counter()
            if scored == last_scored:
                continue
            last_scored = scored
            line = f"{scored:,}/{pairs:,} pairs ({100 * scored // pairs} %), {scored / (now - tick):,.0f} pairs/s"
            left = None
            # The first tasks start the workers and load the model, so the pace is measured after them.
            if first is None:
                first = (scored, now)
            else:
                left = (pairs - scored) * (now - first[1]) / (scored - first[0])
                line += f", {left:.0f} s left"
            log.info("score: %s", line)
            report_progress(Progress(scored, pairs, "pairs", scored / (now - tick), left))

    thread = threading.Thread(target=report, name="score-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


#: Tasks per core, so that cores finish together and progress shows; and the largest task, in pairs.
_TASKS_A_CORE = 4
_TASK_PAIRS = 4_000_000


@contextmanager
def scored_rows(
    ctx: Context,
    spark: SparkSession,
    task: TaskInputs,
    users: UsersToScore,
    model: str,
    measures: tuple[Accumulator[float], UnmetByTask],
    sources: Sequence[str] | None,
    received: ReceivedRows | None = None,
) -> Iterator[DataFrame]:
    """Give the table's rows of the users to be scored and of those kept, to be computed within the block.

    Users are partitioned to tasks by a hash of their key: the one exchange, of users; pairs never leave their task.
    Where rows of tables are joined in, they come to the tasks by two more (headrace.score.joined_rows).

    Args:
        ctx: the run.
        spark: the session.
        task: what all tasks are told.
        users: who is scored.
        model: its version.
        measures: of the workers' memory; of rules that lists of those who are scored now could not keep.
        sources: the names of the candidates' sources; None: all items are ranked.
        received: is told what rows of tables the tasks were brought; None: all are mapped.
    """
    spec, score = ctx.spec, ctx.spec.score
    assert score is not None
    pairs = users.pairs
    tasks = max(
        1, min(users.scored, max(_TASKS_A_CORE * spark.sparkContext.defaultParallelism, -(-pairs // _TASK_PAIRS)))
    )
    # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task puts the names back.
    names = list(users.changed.columns)
    numbered = users.changed.toDF(*[f"c{i}" for i in range(len(names))])
    key = F.col(numbered.columns[names.index(score.user.key)])
    shared, counter = spark.sparkContext.broadcast(task), spark.sparkContext.accumulator(0)
    peak, unmet = measures

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task_unmet: Counter[tuple[str, str]] = Counter()
        yield from score_batches(shared.value, batches, counter.add, task_unmet)
        if task_unmet:
            unmet.add(task_unmet)
        report_peak_memory(peak)

    def named(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from work(pa.RecordBatch.from_arrays(batch.columns, names) for batch in batches)

    types = {c.name: str(declared(c)) for c in prepared_columns(spec)}
    rerank_columns = [] if score.rerank is None else list(RERANK_COLUMNS.items())
    written = [("user", types[score.user.key]), ("item", types[score.item.key]), ("rank", "int"), ("score", "float")]
    written += [] if sources is None else [("sources", "int")]
    schema = ", ".join(f"{name} {type_}" for name, type_ in [*written, *rerank_columns])
    if task.joined:
        # This imports torch, which no other driver needs.
        from headrace.score.joined_rows import CodesOfUsers, map_with_table_rows

        needed, parts = partial(CodesOfUsers, task), Partitioning.by_hash(key, tasks)
        best = map_with_table_rows(spark, task, needed, numbered, names, parts, work, schema, received)
    else:
        partitioned = numbered.repartition(tasks, key).sortWithinPartitions(key)
        best = partitioned.mapInArrow(named, schema, profile=gpu_profile(spark) if task.gpu else None)
    frame = best.select(
        F.lit(ctx.ds).alias("ds"),
        F.col("user").alias(score.user.key),
        F.col("item").alias(score.item.key),
        "rank",
        "score",
        F.lit(model).alias("model_version"),
        *([] if sources is None else [names_of_sources(sources).alias("source")]),
        *[name for name, _ in rerank_columns],
    )
    if users.unchanged_scores is not None:
        unchanged = users.unchanged_scores.withColumn("ds", F.lit(ctx.ds))
        frame = frame.unionByName(unchanged.select(*[col(c) for c in frame.columns]))
    # Messages with table rows are large, so Spark's batches are bounded.
    bounded = bounded_batches(spark) if task.joined else nullcontext()
    with progress(counter, max(1, pairs)), bounded:
        yield frame
    shared.unpersist()


def names_of_sources(names: Sequence[str]) -> Column:
    """Return the names of the sources that gave an item, by the bits of the column `sources`: text, with commas
    between.
    """
    bits = F.col("sources")
    return F.concat_ws(",", *[F.when(bits.bitwiseAND(1 << i) != 0, F.lit(name)) for i, name in enumerate(names)])


#: Column of the scores if there are experiments: `experiment=arm`, separated by commas.
EXPERIMENT_COLUMNS = {"arms": "string"}


@dataclass(frozen=True)
class AssignmentColumns:
    """Columns of a user's assignment: `arms` (null: in no arm) and the place of the user's model (int)."""

    arms: Column
    model: Column

    @staticmethod
    def of_users(
        key: Column, is_integer: bool, experiments: Sequence[Live], models: Mapping[str | None, int]
    ) -> AssignmentColumns:
        """Return the assignment as headrace.score.assignment computes it from Arrow's columns.

        Of experiments whose arms have models, a user takes part in the first that takes him; an arm that was stopped
        is no longer named.

        Args:
            key: not null.
            is_integer: whether keys are whole numbers; else they are texts.
            experiments: of the day.
            models: the place of each model that is asked for.
        """
        key = key.cast("bigint" if is_integer else "string")
        taken, model = F.lit(False), F.lit(models[None])
        texts = []
        for live in experiments:
            takes_part = _place(key, f"{live.salt}/{PART}") < parts_of(live.experiment.percent)
            arm = _arm(key, live)
            if live.experiment.has_models:
                takes_part = takes_part & ~taken
                taken = taken | takes_part
                for name in live.experiment.arms:
                    model = F.when(takes_part & (arm == name), models[live.model_of(name)]).otherwise(model)
            named = takes_part & ~arm.isin(*live.stopped) if live.stopped else takes_part
            texts.append(F.when(named, F.concat(F.lit(f"{live.name}="), arm)))
        text = F.concat_ws(",", *texts)
        return AssignmentColumns(F.when(text != "", text), model)


def _arm(key: Column, live: Live) -> Column:
    """Return the user's arm, whether or not the user takes part."""
    place, shares = _place(key, f"{live.salt}/{ARM}"), live.experiment.shares
    *names, last = shares
    arm = F.lit(last)
    for name, edge in reversed(list(zip(names, edges(shares).tolist(), strict=False))):
        arm = F.when(place < edge, name).otherwise(arm)
    return arm


def _place(key: Column, salt: str) -> Column:
    return F.pmod(F.xxhash64(F.lit(salt), key), F.lit(PARTS))


log = logging.getLogger("headrace.score")

#: Users, and items, whose pairs' features are compared.
_CHECKED = 8


@dataclass(frozen=True)
class RunInputs:
    """Inputs that all models of a run share."""

    spark: SparkSession
    active: ActiveEvents
    items: ItemTable
    #: Files that tasks exchange, by the key of each model's context.
    folder: Location
    #: Where tasks map models.
    maps: HostPlace
    #: Peak memory of the workers.
    peak: Accumulator[float]
    #: Rules that the lists of the users scored in this run could not keep.
    unmet: UnmetByTask


@dataclass(frozen=True)
class ModelLists:
    """The lists of one model's users."""

    model: ModelOfRun
    #: Rows of the scores, computed when they are read.
    frame: DataFrame
    #: Users with candidates.
    users: int
    scored_users: UsersToScore
    #: Seconds spent so far; ranking itself runs when the rows are read.
    seconds: float
    #: Table rows that tasks received; None if all tables are mapped.
    received: ReceivedRows | None = None
    #: For the manifest.
    candidates: dict[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """The model, as the manifest tells it when the rows have been read."""
        chosen, (first, *_) = self.model.chosen, self.model.requested_by
        score = self.model.ctx.spec.score
        assert score is not None
        return {
            "stage": chosen.stage,
            "kind": kind(chosen.stage),
            "name": chosen.output.name,
            "version": chosen.output.version,
            "registered": chosen.facts.get("registered"),
            "auc": chosen.facts["metrics"].get("auc"),
            "asked": first or score.model,
            **({} if score.output is None else {"output": score.output}),
            **({} if self.received is None else {"joined": self.received.facts()}),
        }


@contextmanager
def lists_of_model(model: ModelOfRun, run: RunInputs, users: DataFrame, n_users: int) -> Iterator[ModelLists]:
    """Give a model's lists for some users, to be computed within the block.

    Args:
        model: the model.
        run: what it shares with the others of the run.
        users: its users; how many is `n_users`.
        n_users: at least one.
    """
    ctx, chosen, spark, items = model.ctx, model.chosen, run.spark, run.items
    spec, score = ctx.spec, ctx.spec.score
    assert score is not None
    folder, scratch = ctx.ws.locate(chosen.output.name), run.folder / ctx.key
    features = PairFeatures(
        (score.user.key, *score.user.columns),
        (score.item.key, *score.item.columns),
        context_scalars(spec, score),
        loaded_workflow(folder, ctx.ws.mapped(spec.pipeline)),
    )
    item_features = ItemFeatures.write(items, folder, features, scratch / "item_features", spark, run.maps)
    _check_pair_features(features, users, items, item_features)
    log.info(
        "score: %s users x %s items = %s pairs with the %s model",
        f"{n_users:,}",
        f"{items.rows:,}",
        f"{n_users * items.rows:,}",
        kind(chosen.stage),
    )
    threads = int(spark.sparkContext.getConf().get("spark.task.cpus") or 1)
    gpu = chosen.stage != "baseline" and gpu_profile(spark) is not None
    joined = joined_tables(score.embeddings, folder, ctx.ws.mapped(spec.pipeline), gpu)
    received = ReceivedRows.empty(spark.sparkContext, joined) if joined else None
    task = TaskInputs(
        model=folder,
        threads=threads,
        output=score.output,
        top_k=score.top_k if score.rerank is None else score.ranked,
        rank_depth=score.ranked,
        rerank=_reranker(ctx, folder, threads, item_features, gpu, joined, run.maps),
        user_key=score.user.key,
        items=items,
        item_features=item_features,
        user_columns=features.user,
        item_names=features.item,
        context=dict(features.context),
        maps=run.maps,
        joined=joined,
        gpu=gpu,
    )
    with _candidates(model, run, users) as candidates:
        pairs, sources = n_users * items.rows, None
        if candidates is not None:
            users, n_users = candidates.frame, candidates.facts["users"]
            pairs, sources = candidates.facts["candidates"], candidates.names
        tick = time.perf_counter()
        with users_to_score(ctx, spark, task, users, (n_users, pairs), score.row_columns) as scored_users:
            measures = run.peak, run.unmet
            with scored_rows(
                ctx, spark, task, scored_users, chosen.output.version, measures, sources, received
            ) as scored:
                # Rows that filters exclude must never be in the table, so they are counted before the commit.
                written = scored if candidates is None else stored(spark, scored, scratch / "scores")
                candidate_facts = _check_filters(ctx, candidates, written)
                yield ModelLists(
                    model, written, n_users, scored_users, time.perf_counter() - tick, received, candidate_facts
                )


def kind(stage: str) -> str:
    """Return the name that people use for the models of a stage."""
    return {"train": "neural"}.get(stage, stage)


def _reranker(
    ctx: Context,
    folder: Location,
    threads: int,
    item_features: ItemFeatures,
    gpu: bool,
    joined: frozenset[str],
    maps: HostPlace,
) -> RuleReranker | None:
    score = ctx.spec.score
    if score is None or score.rerank is None:
        return None
    sources = () if score.candidates is None else tuple(score.candidates.sources)
    vectors = ModelItemVectors(folder, threads, score.output, maps, item_features, gpu, joined)
    return RuleReranker(score.rerank, score.top_k, ctx.ds, sources, vectors)


@contextmanager
def _candidates(model: ModelOfRun, run: RunInputs, users: DataFrame) -> Iterator[UserCandidates | None]:
    """Give the candidates of each user; None where all items are ranked."""
    ctx, spark = model.ctx, run.spark
    score: Score | None = ctx.spec.score
    assert score is not None
    if score.candidates is None:
        yield None
        return
    reader = ExternalReader.pinned_by(ctx.ws, tables_of_score(score), ctx.inputs)
    items, folder = run.items.frame(spark), run.folder / ctx.key
    context = CandidateContext(ctx, spark, run.active, users, items, reader, model.chosen, folder, run.maps)
    # Users' lists make rows large, so Spark's batches are bounded.
    with bounded_batches(spark), ExitStack() as stack:
        candidates = stack.enter_context(candidates_of_users(context))
        reader.check_unchanged()
        yield candidates


def _check_filters(ctx: Context, candidates: UserCandidates | None, rows: DataFrame) -> dict[str, Any]:
    """Return the facts of candidates, after a count of the rows to be written against all filters."""
    if candidates is None:
        return {}
    violations = candidates.violations(rows)
    if violations:
        raise RuntimeError(f"{violations} of the scores of {ctx.ds} are of items that score.filters leave out")
    return {"candidates": {**candidates.facts, "violations": violations}}


def _check_pair_features(
    features: PairFeatures, users: DataFrame, items: ItemTable, item_features: ItemFeatures
) -> None:
    """Check the shortcut on a few pairs of this very run."""
    sample = one_batch(users.drop(SEEN).limit(_CHECKED).toArrow())
    first = one_batch(items.first(_CHECKED).select(list(dict.fromkeys(features.item))))
    check_pair_features(features, sample, first, item_features.first(_CHECKED))
