"""Evaluation of several models over the same rows: Spark's tasks predict, and are ranks of the evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headrace import config
from headrace.compute import pc
from headrace.config.schema import DatasetSchema
from headrace.dataset.layout import open_split
from headrace.features.functions.arrays import one_batch
from headrace.features.layout.split import SPLIT
from headrace.lake.spark.tasks import report_peak_memory, worker_peak_memory
from headrace.quality.gate.predictions import CollectedRows, OpenModel, RawActions, score_counts
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace
from headrace.train.evaluation.evaluate import Evaluation, Evaluator, Predictions
from headrace.train.evaluation.ranks import Bools, Ranks, as_they_are, ranks_of_tasks
from headrace.train.evaluation.request import Request

#: The split of candidate lists.
RANK = "rank"
#: Columns of the rows besides raw ones and the split.
LABEL, CARRIED = "__label", "__carried{}"
#: Timed batches, after one to warm up.
_TIMED = 7


@dataclass(frozen=True)
class GateTask:
    """Settings of each task; small.

    models: the folders of the saved models, the day's own first; maps: where tasks map them (models.maps);
    dataset, schema: the day's; train: what is measured; splits: of which rows; predicts: what the models give
    (config.Loss.predicts); columns: the rows' columns by their places; carried: by name in the dataset the column.
    label_column: the carried column that is the label; None: the dataset's own. optional: so many of the models, the
    last ones, decide nothing about the others: each is measured only where it gives a number for every row that is.
    actions: what each model as a policy chooses among, where `train` asks for that.
    """

    models: tuple[Location, ...]
    maps: HostPlace
    dataset: Location
    schema: DatasetSchema
    train: config.Train
    splits: tuple[str, ...]
    predicts: str
    columns: tuple[str, ...]
    carried: Mapping[str, str]
    label_column: str | None = None
    optional: int = 0
    actions: RawActions | None = None

    def request(self) -> Request:
        """Return what is measured, of which columns."""
        return Request(self.train, self.schema)

    def needed(self) -> tuple[list[str], list[str]]:
        """Carried columns by their names in the dataset, and features whose codes are needed."""
        request, lists = self.request(), RANK in self.splits
        carried = [*request.carried(), *(request.carried(lists=True) if lists else [])]
        if self.label_column is not None:
            carried.append(self.schema.carried_name(self.label_column))
        codes = [*request.codes(), *(request.codes(lists=True) if lists else [])]
        if request.action is not None:  # the raw columns identify a row's action
            codes = [name for name in codes if name != request.action.name or name in request.seen_features.values()]
        return list(dict.fromkeys(carried)), list(dict.fromkeys(codes))


@dataclass(frozen=True)
class ModelResult:
    """Evaluation of one model.

    evaluations: by split, where there is a row to measure it by; finite: rows of the first split of which it gives a
    number; known: by feature, values and those that its vocabulary has; scores: counts by bin of `score_counts`.
    """

    evaluations: Mapping[str, Evaluation]
    finite: int
    known: Mapping[str, tuple[int, int]]
    scores: Sequence[int]


def evaluate(spark: SparkSession, frame: DataFrame, task: GateTask, ranks: int) -> tuple[int, list[ModelResult], float]:
    """Predict and measure; no process has all rows.

    Args:
        frame: the columns of `task.columns`, in that order.
        ranks: tasks at once.

    Returns:
        Rows of the first split, with or without a number; for each model its result; the peak memory of the largest
        worker, MiB.

    Raises:
        UserError: a model is damaged, or a column is of another type than a model's.
    """
    peak = worker_peak_memory(spark.sparkContext)
    # Columns are numbered: Spark takes a dot in a column's name for the separator of a field.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(task.columns))]).repartition(ranks)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        result = _run_task(task, batches)
        if result is not None:
            yield pa.record_batch([pa.array([json.dumps(result)])], names=["found"])
        report_peak_memory(peak)

    (row,) = numbered.mapInArrow(run, "found string", barrier=True).collect()
    merged = json.loads(row[0])
    results = [
        ModelResult(
            {split: Evaluation(**fields) for split, fields in model["evaluations"].items()},
            model["finite"],
            {name: (values, known) for name, values, known in model["known"]},
            model["scores"],
        )
        for model in merged["models"]
    ]
    return merged["rows"], results, peak.value


def _run_task(task: GateTask, batches: Iterable[pa.RecordBatch]) -> dict[str, Any] | None:
    """Return a task's part; of the chief the whole result."""
    carried, codes = task.needed()
    models = [OpenModel.load(folder, task.maps) for folder in task.models]
    by_split = {split: CollectedRows(models, codes, carried, task.actions) for split in task.splits}
    for batch in batches:
        named = pa.RecordBatch.from_arrays(batch.columns, list(task.columns))
        split_of = named.column(SPLIT)
        for split, rows in by_split.items():
            split_rows = named.filter(pc.equal(split_of, split)) if len(by_split) > 1 else named
            if split_rows.num_rows:
                rows.add(
                    split_rows,
                    split_rows.column(LABEL),
                    {name: split_rows.column(task.carried[name]) for name in carried},
                )
    with ranks_of_tasks() as ranks:
        result = _measured(task, ranks, by_split, codes)
    return result if ranks.world.is_chief else None


def _measured(
    task: GateTask, ranks: Ranks, by_split: Mapping[str, CollectedRows], codes: Sequence[str]
) -> dict[str, Any]:
    """Metrics of every model and split. Collective."""
    probability = as_they_are if task.predicts == "probability" else None
    evaluator = Evaluator(task.request(), probability, of_slices=True)
    evaluator.count_training_rows(ranks, open_split(task.dataset, "train", task.schema))
    first, models = task.splits[0], range(len(task.models))
    required, optional = models[: len(models) - task.optional], models[len(models) - task.optional :]
    evaluations: list[dict[str, Any]] = [{} for _ in models]
    finite = np.zeros(len(task.models), np.int64)
    for split, rows in by_split.items():
        labels = rows.labels
        if task.label_column is not None:
            labels = rows.carried_column(task.schema.carried_name(task.label_column)).astype(np.float32)
        scores = [rows.scores(i) for i in models]
        # A model's missing predictions must not count against the others: all are measured on the remaining rows.
        usable: Bools = ~np.isnan(labels)
        if split == first:
            finite[:] = [int(np.isfinite(s).sum()) for s in scores]
        for i in required:
            usable &= np.isfinite(scores[i])
        measured_models: Sequence[int] = required
        if not int(ranks.add_up(np.array(usable.sum()))):
            # No row has a number from all models: the day's own model is measured alone, on the rows that it predicts.
            measured_models, usable = models[:1], ~np.isnan(labels) & np.isfinite(scores[0])
            if not int(ranks.add_up(np.array(usable.sum()))):
                continue
        missing_counts = ranks.add_up(
            np.array([int((usable & ~np.isfinite(scores[i])).sum()) for i in optional], np.int64)
        )
        measured_models = [*measured_models, *(i for i, n in zip(optional, missing_counts, strict=True) if not n)]
        of_rows = {name: rows.carried_column(name)[usable] for name in rows.carried}
        of_codes = {name: rows.code_column(name)[usable] for name in codes}
        for i in measured_models:
            choices = rows.choices(i, usable)
            predictions = Predictions(scores[i][usable], labels[usable], of_rows, of_codes, choices=choices)
            if split == RANK:
                measured = evaluator.evaluate_lists(ranks, predictions)
            elif task.predicts == "number":
                measured = evaluator.evaluate_regression(ranks, predictions)
            else:
                measured = evaluator.evaluate(ranks, predictions)
            evaluations[i][split] = asdict(measured)
    total = int(ranks.add_up(np.array(len(by_split[first].labels))))
    finite = ranks.add_up(finite)
    model_records = []
    for i in models:
        known = by_split[first].known[i]
        counts = ranks.add_up(known.counts)
        model_records.append(
            {
                "evaluations": evaluations[i],
                "finite": int(finite[i]),
                "known": [[name, *c] for name, c in zip(known.names, counts.tolist(), strict=True)],
                "scores": ranks.add_up(score_counts(by_split[first].scores(i))).tolist(),
            }
        )
    return {"rows": total, "models": model_records}


def batch_seconds(
    frame: DataFrame, columns: Sequence[str], models: Sequence[Location], maps: HostPlace, rows: int
) -> list[float]:
    """Yield seconds that each model takes for a batch on one core, from raw rows to predictions: the median of some.

    Args:
        frame: raw rows, of which the first are taken.
        columns: its columns' names.
        models: saved models.
        maps: where tasks map them.
        rows: of a batch; where there are fewer, they are repeated.

    Returns:
        By model; empty where there is no row.
    """
    names = list(columns)
    numbered = frame.limit(rows).toDF(*[f"c{i}" for i in range(len(names))]).coalesce(1)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        batches_ = [batch for batch in batches if batch.num_rows]
        if not batches_:
            return
        table = pa.Table.from_batches(batches_)
        repeated = one_batch(table.take(pa.array(np.arange(rows) % table.num_rows)))
        batch = pa.RecordBatch.from_arrays(repeated.columns, names)
        seconds = [_median_seconds(batch, OpenModel.load(folder, maps)) for folder in models]
        yield pa.record_batch([pa.array(seconds, pa.float64())], names=["seconds"])

    return [float(r[0]) for r in numbered.mapInArrow(run, "seconds double").collect()]


def _median_seconds(batch: pa.RecordBatch, model: OpenModel, clock: Callable[[], float] = time.perf_counter) -> float:
    taken = []
    for _ in range(1 + _TIMED):
        tick = clock()
        model.predict(model.features(batch))
        taken.append(clock() - tick)
    return float(np.median(taken[1:]))
