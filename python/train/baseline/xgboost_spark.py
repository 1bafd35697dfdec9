"""XGBoost on Spark over a dataset's Parquet row groups: what runs on the executors, and how it is launched.

Task i of W reads row groups i, i+W, i+2W, ... of the split: no shuffle, the same rows in the same order each time, and
so the same trees. The dataset's folder must be visible on every executor, as it must be for Petastorm.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xgboost as xgb
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession

from headrace.config import Baseline
from headrace.dataset.parquet.layout import open_split
from headrace.dataset.parquet.lists import by_column
from headrace.errors import UserError
from headrace.lake.worker_memory import report_peak_memory, worker_peak_memory
from headrace.models.xgboost_model import XGBoostPredictor, matrix, matrix_columns, matrix_features
from headrace.schema import DatasetSchema
from headrace.storage import Location

log = logging.getLogger("headrace.train")

#: Rows of one Arrow batch between the tasks' processes and the JVM.
_BATCH_ROWS = 65_536
_PROGRESS_SECONDS = 2.0
#: The name of the label among the matrix's columns, which are f0, f1, ...: names of the spec may be anything.
_LABEL = "label"


@dataclass(frozen=True)
class RowGroupSample:
    """What is wanted of one row group: all of it, or a sample."""

    path: str
    #: The row group's place in its file, and in the split.
    index: int
    piece: int
    rows: int
    take: int


def sample_row_groups(
    dataset: Location, split: str, schema: DatasetSchema, max_rows: int | None = None
) -> list[RowGroupSample]:
    """The row groups of a split, in order; with `max_rows`, exactly that many rows spread evenly over them.

    Raises:
        UserError: no such split, or a damaged file; see `headrace.dataset.parquet.layout.open_split`.
    """
    groups = open_split(dataset, split, schema).row_groups
    total = sum(g.rows for g in groups)
    wanted = total if max_rows is None else min(total, max_rows)
    found, seen = [], 0
    for g in groups:
        # Differences of rounded-down cumulative shares: each within one row of its part, the sum exact.
        take = (seen + g.rows) * wanted // total - seen * wanted // total
        seen += g.rows
        if take:
            found.append(RowGroupSample(str(g.path), g.index, g.piece, g.rows, take))
    return found


def check_slots(spark: SparkSession, workers: int) -> None:
    """A barrier stage needs all its tasks at once: on a local master, see now whether they fit.

    Raises:
        UserError: fewer cores than workers. (On a cluster executors may still be on their way: Spark waits for them.)
    """
    sc = spark.sparkContext
    if not (sc.master or "").startswith("local"):
        return
    java = sc._jsc.sc()
    slots = int(java.maxNumConcurrentTasks(java.resourceProfileManager().resourceProfileFromId(0)))
    if slots < workers:
        raise UserError(
            f"baseline.workers is {workers}, but Spark's master {sc.master} runs {slots} task(s) at a time; "
            f"set baseline.workers={slots}, or a master with more cores (spark.master)"
        )


def fit(
    spark: SparkSession, groups: Sequence[RowGroupSample], schema: DatasetSchema, conf: Baseline, seed: int
) -> tuple[xgb.Booster, list[float]]:
    """Train `conf.rounds` trees on `conf.workers` Spark tasks.

    Args:
        spark: an active session with room for all workers at once.
        groups: of the train split; at least one row.
        schema: the dataset's.
        conf: rounds, depth, learning rate, workers.
        seed: of the row sample.

    Returns:
        The booster (its columns are `matrix_columns(schema)`), and the training log loss after each round.
    """
    from xgboost.spark import SparkXGBClassifier

    workers = min(conf.workers, len(groups))
    if workers < conf.workers:
        log.info(
            "baseline: %d worker(s) for %d row group(s) (baseline.workers is %d)", workers, len(groups), conf.workers
        )
    # Its INFO lines are dumps of parameters.
    logging.getLogger("XGBoost-PySpark").setLevel(logging.WARNING)
    names = [f"f{i}" for i in range(len(matrix_columns(schema)))]
    classifier = SparkXGBClassifier(
        features_col=names,
        label_col=_LABEL,
        num_workers=workers,
        n_estimators=conf.rounds,
        max_depth=conf.max_depth,
        learning_rate=conf.learning_rate,
        tree_method="hist",
        missing=float("nan"),
        random_state=seed,
        eval_metric="logloss",
        verbose=False,
        callbacks=[Progress(conf.rounds)],
    )
    model = classifier.fit(_frame(spark, groups, schema, workers, seed))
    losses = model.training_summary.train_objective_history["logloss"]
    return model.get_booster(), [float(v) for v in losses]


def predict(
    spark: SparkSession, booster: xgb.Booster, groups: Sequence[RowGroupSample], schema: DatasetSchema, workers: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Probabilities and labels of the rows of a split, in order of the tasks: float32 [n] each.

    And the peak memory of the largest Python worker, MiB: Spark keeps workers, so that is `fit`'s, too.
    """
    raw, peak = bytes(booster.save_raw("ubj")), worker_peak_memory(spark.sparkContext)

    def score(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        own = xgb.Booster({"nthread": 1})
        own.load_model(bytearray(raw))
        predictor = XGBoostPredictor(schema, own)
        for columns, labels in _read(batches, groups, schema, workers, seed=0):
            yield pa.record_batch([pa.array(predictor.predict(columns)), pa.array(labels)], names=["score", _LABEL])
        report_peak_memory(peak)

    frame = spark.range(0, workers, 1, workers).mapInArrow(score, "score float, label float")
    table = frame.toArrow()
    return table["score"].to_numpy(), table[_LABEL].to_numpy(), peak.value


def _frame(
    spark: SparkSession, groups: Sequence[RowGroupSample], schema: DatasetSchema, workers: int, seed: int
) -> DataFrame:
    """The matrix of `groups` as a DataFrame of exactly `workers` partitions: f0, f1, ..., label, all float."""
    names = [f"f{i}" for i in range(len(matrix_columns(schema)))]

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for columns, labels in _read(batches, groups, schema, workers, seed):
            data = matrix(schema, columns)
            arrays = [pa.array(np.ascontiguousarray(data[:, i])) for i in range(data.shape[1])]
            yield pa.record_batch([*arrays, pa.array(labels)], names=[*names, _LABEL])

    ddl = ", ".join(f"{name} float" for name in [*names, _LABEL])
    return spark.range(0, workers, 1, workers).mapInArrow(rows, ddl)


def _read(
    batches: Iterable[pa.RecordBatch], groups: Sequence[RowGroupSample], schema: DatasetSchema, workers: int, seed: int
) -> Iterator[tuple[Mapping[str, NDArray[Any]], NDArray[np.float32]]]:
    """The physical columns and labels of this task's row groups, a batch at a time. `batches` says which task it is."""
    features, label = matrix_features(schema), schema.label.name
    columns = [f.name for f in features]
    for batch in batches:
        for task in batch.column(0).to_pylist():
            for group in groups[task::workers]:
                table = pq.ParquetFile(group.path).read_row_group(group.index, columns=[*columns, label])
                if group.take < group.rows:
                    rng = np.random.default_rng([seed, group.piece])
                    table = table.take(np.sort(rng.choice(group.rows, group.take, replace=False)))
                for start in range(0, table.num_rows, _BATCH_ROWS):
                    part = table.slice(start, _BATCH_ROWS)
                    yield (
                        by_column(part, features, str(group.path)),
                        part[label].to_numpy().astype(np.float32, copy=False),
                    )


class Progress(xgb.callback.TrainingCallback):  # type: ignore[misc]  # xgboost is untyped
    """A line every few seconds from the first worker, on its standard error (on one machine: the user's terminal)."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds
        self._started = self._shown = 0.0

    def before_training(self, model: Any) -> Any:
        self._started = self._shown = time.monotonic()
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        now, done = time.monotonic(), epoch + 1
        if xgb.collective.get_rank() == 0 and (now - self._shown >= _PROGRESS_SECONDS or done == self._rounds):
            self._shown = now
            seconds = max(now - self._started, 1e-9)
            loss = evals_log["training"]["logloss"][-1]
            left = (self._rounds - done) * seconds / done
            line = f"round {done}/{self._rounds}, training log loss {loss:.4f}, {done / seconds:.1f} rounds/s"
            print(f"baseline: {line}, {left:.0f} s left", file=sys.stderr, flush=True)
        return False
