"""The rows of the scores: users are partitioned to tasks, which rank their items and report progress."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import pyarrow as pa
from pyspark import Accumulator
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Score
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import declared
from headrace.lake.spark.exchange import bounded_batches
from headrace.lake.spark.gpus import gpu_profile
from headrace.lake.spark.tasks import report_peak_memory
from headrace.logs import Progress, report_progress
from headrace.score.incremental import UsersToScore
from headrace.score.joined_tables import Partitioning, ReceivedRows
from headrace.score.ranking import TaskInputs, score_batches
from headrace.score.rerank.reranker import UnmetByTask
from headrace.stage import Context

log = logging.getLogger("headrace.score")

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
#: Column of the scores if there are candidates: the names of the sources that gave the item.
CANDIDATE_COLUMNS = {"source": "string"}
#: Columns of the scores if there are rules for lists.
RERANK_COLUMNS = {"propensity": "double", "reason": "string"}


def score_columns(score: Score) -> list[str]:
    """Return the columns of a spec's scores."""
    optional = [*(CANDIDATE_COLUMNS if score.candidates else ()), *(RERANK_COLUMNS if score.rerank else ())]
    return ["ds", score.user.key, score.item.key, "rank", "score", "model_version", *optional]


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
