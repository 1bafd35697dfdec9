"""The evaluation of the trees: Spark's tasks are its ranks, and each keeps what it predicted of its row groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xgboost as xgb
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from headrace import config
from headrace.dataset.parquet.layout import open_split
from headrace.lake.spark.tasks import report_peak_memory, worker_peak_memory
from headrace.models.predictor import Predictor
from headrace.schema import DatasetSchema
from headrace.storage import Location
from headrace.train.baseline.inputs import TreeInputs
from headrace.train.baseline.rows import Rows, read_rows, sample_row_groups
from headrace.train.evaluation.bootstrap import F64
from headrace.train.evaluation.evaluate import Evaluation, Evaluator
from headrace.train.evaluation.policy import Choices, Policy, ScoreAction
from headrace.train.evaluation.predictions import Predictions
from headrace.train.evaluation.ranks import Ranks
from headrace.train.evaluation.request import Request
from headrace.train.evaluation.rows import as_they_are
from headrace.train.evaluation.spark_tasks import ranks_of_tasks

#: The split of candidate lists.
RANK = "rank"
#: Of probabilities that float32 has as 0 or 1.
_LARGEST_LOGIT = 100.0


@dataclass(frozen=True)
class EvaluationTask:
    """What each task is given.

    label: the column that was learned; group: the carried column of the lists that were learned from, if there are;
    splits: those to evaluate.
    """

    dataset: Location
    inputs: TreeInputs
    train: config.Train
    objective: str
    label: str
    group: str | None
    splits: tuple[str, ...]

    @property
    def schema(self) -> DatasetSchema:
        """The dataset's."""
        return self.inputs.schema

    def request(self, lists: bool = False) -> Request:
        """What the spec asks for; `lists`: of the lists that were learned from."""
        train = self.train.model_copy(update={"rank_group": self.group}) if lists else self.train
        return Request(train, self.schema)

    def columns(self, split: str) -> tuple[list[str], list[str]]:
        """Carried columns besides the label, and features whose codes are needed, of a split."""
        request, lists = self.request(), self.request(lists=True)
        carried, codes = request.carried(split == RANK), request.codes(split == RANK)
        if self.group is not None and split != RANK:
            carried, codes = [*carried, *lists.carried(lists=True)], [*codes, *lists.codes(lists=True)]
        return list(dict.fromkeys(carried)), list(dict.fromkeys(codes))

    def evaluate(self, ranks: Ranks, predictor: Predictor) -> dict[str, Evaluation]:
        """By split. Collective."""
        probability = as_they_are if self.objective == "classification" else None
        evaluator, of_lists = (Evaluator(self.request(lists), probability) for lists in (False, True))
        train = open_split(self.dataset, "train", self.schema)
        evaluator.count_training_rows(ranks, train)
        if self.group is not None:
            of_lists.count_training_rows(ranks, train)
        policy = evaluator.policy(ranks, train) if self.objective == "classification" else None
        found: dict[str, Evaluation] = {}
        for split in self.splits:
            mine = self._predict(split, ranks, predictor, None if split == RANK else policy)
            if split == RANK:
                found[split] = evaluator.evaluate_lists(ranks, mine)
            elif self.objective == "regression":
                found[split] = evaluator.evaluate_regression(ranks, mine)
            else:
                found[split] = evaluator.evaluate(ranks, mine)
                if self.group is not None:
                    found[f"{split}_lists"] = of_lists.evaluate_lists(ranks, mine)
        return found

    def _predict(self, split: str, ranks: Ranks, predictor: Predictor, policy: Policy | None = None) -> Predictions:
        """Every rank's share of a split: row groups r, r + ranks, ..."""
        carried, codes = self.columns(split)
        groups = sample_row_groups(self.dataset, split, self.schema, carried=carried)
        mine = groups[ranks.world.rank :: ranks.world.size]
        scores: list[NDArray[np.float32]] = []
        labels: list[NDArray[np.float32]] = []
        others: dict[str, list[NDArray[Any]]] = {name: [] for name in (*carried, *codes)}
        choices: list[Choices] = []
        for rows in read_rows(mine, self.inputs.features, self.label, list(others)):
            scores.append(predictor.predict(rows.features))
            if policy is not None:
                logged = rows.others[policy.actions.feature].astype(np.int64)
                choices.append(policy.choose(logged, _scorer(predictor, rows)))
            labels.append(rows.labels)
            for name, column in rows.others.items():
                others[name].append(column)
        return Predictions(
            _joined(scores, np.float32),
            _joined(labels, np.float32),
            {name: _joined(others[name], object) for name in carried},
            {name: _joined(others[name], np.int64).astype(np.int64) for name in codes},
            choices=None if policy is None else Choices.concat(choices),
        )


def evaluate(
    spark: SparkSession, booster: xgb.Booster, task: EvaluationTask, workers: int
) -> tuple[dict[str, Evaluation], float]:
    """Evaluate splits on `workers` Spark tasks, which are the ranks of the evaluation: no process has all predictions.

    Returns:
        By split; lists of `valid` and `test` as `valid_lists` and `test_lists`. And the peak memory of the largest
        Python worker, MiB: Spark keeps workers, so that is the training's, too.

    Raises:
        UserError: what a split lacks, or an expression of a slice that cannot be evaluated.
    """
    raw, peak = bytes(booster.save_raw("ubj")), worker_peak_memory(spark.sparkContext)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        own = xgb.Booster({"nthread": 1})
        own.load_model(bytearray(raw))
        with ranks_of_tasks() as ranks:
            found = task.evaluate(ranks, task.inputs.predictor(own))
        if ranks.world.is_chief:
            told = json.dumps({split: asdict(of) for split, of in found.items()})
            yield pa.record_batch([pa.array([told])], names=["evaluation"])
        report_peak_memory(peak)

    frame = spark.range(0, workers, 1, workers).mapInArrow(run, "evaluation string", barrier=True)
    (row,) = frame.collect()
    return {split: Evaluation(**of) for split, of in json.loads(row[0]).items()}, peak.value


def _scorer(predictor: Predictor, rows: Rows) -> ScoreAction:
    """The logits of rows with other values of some features."""

    def score(values: Mapping[str, Any]) -> F64:
        changed = {name: np.full_like(rows.features[name], value) for name, value in values.items()}
        p = predictor.predict({**rows.features, **changed}).astype(np.float64)
        with np.errstate(divide="ignore"):
            found: F64 = np.clip(np.log(p) - np.log1p(-p), -_LARGEST_LOGIT, _LARGEST_LOGIT)
        return found

    return score


def _joined(parts: Sequence[NDArray[Any]], empty: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, empty)


def task_splits(dataset: Location, train: config.Train, label_is_carried: bool) -> tuple[str, ...]:
    """The splits that there are to evaluate. Lists of the split `rank` have the label of clicks alone."""
    found = ["valid", *(["test"] if (dataset / "test").is_dir() else [])]
    if train.rank_group is not None and not label_is_carried:
        found.append(RANK)
    return tuple(found)
