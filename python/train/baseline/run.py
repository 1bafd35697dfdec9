"""Training, evaluation and registration of trees: the common work of the stages `baseline` and `second_stage`.

In the evaluation Spark's tasks are the ranks, and each holds the predictions of its row groups.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xgboost as xgb
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from headrace import config
from headrace.config import Trees
from headrace.config.operations import with_slots
from headrace.config.schema import DatasetSchema
from headrace.dataset.layout import TEST, open_split
from headrace.embeddings.dynamic.spec import dynamic_features
from headrace.errors import UserError
from headrace.lake.spark.session import session
from headrace.lake.spark.tasks import report_peak_memory, worker_peak_memory
from headrace.models import registry, xgboost_model
from headrace.models.predictor import Predictor
from headrace.models.registry.versions import lineage_of, preload, registered_name
from headrace.stage import Context, Result
from headrace.stage.manifest import Output
from headrace.storage import Location
from headrace.train.baseline import xgboost_spark
from headrace.train.baseline.xgboost_spark import (
    Fitted,
    Rows,
    TrainingRows,
    TreeInputs,
    check_lists,
    read_rows,
    sample_row_groups,
)
from headrace.train.carried_columns import carried_weight, is_weighted
from headrace.train.evaluation.bootstrap import write_replicates
from headrace.train.evaluation.evaluate import Evaluation, Evaluator, Predictions
from headrace.train.evaluation.policy import Choices, Policy, ScoreAction
from headrace.train.evaluation.ranks import F64, Ranks, as_they_are, ranks_of_tasks
from headrace.train.evaluation.request import Request
from headrace.train.job import REPLICATES

#: The split of candidate lists.
RANK = "rank"
#: Logit of probabilities that are 0 or 1 in float32.
_LARGEST_LOGIT = 100.0


@dataclass(frozen=True)
class EvaluationTask:
    """Input of a task of the evaluation.

    Attributes:
        label: column that the trees predict.
        group: carried column of the lists that they were trained on; None: no lists.
        splits: splits to evaluate.
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
        """Schema of the dataset."""
        return self.inputs.schema

    def request(self, lists: bool = False) -> Request:
        """Return the spec's request; with `lists` the request for the lists that the trees were trained on."""
        train = self.train.model_copy(update={"rank_group": self.group}) if lists else self.train
        return Request(train, self.schema)

    def columns(self, split: str) -> tuple[list[str], list[str]]:
        """Return the carried columns of a split besides the label, and the features whose codes are needed."""
        request, lists = self.request(), self.request(lists=True)
        carried, codes = request.carried(split == RANK), request.codes(split == RANK)
        if self.group is not None and split != RANK:
            carried, codes = [*carried, *lists.carried(lists=True)], [*codes, *lists.codes(lists=True)]
        return list(dict.fromkeys(carried)), list(dict.fromkeys(codes))

    def evaluate(self, ranks: Ranks, predictor: Predictor) -> dict[str, Evaluation]:
        """Return the evaluation of each split. Collective."""
        probability = as_they_are if self.objective == "classification" else None
        evaluator, of_lists = (Evaluator(self.request(lists), probability) for lists in (False, True))
        train = open_split(self.dataset, "train", self.schema)
        evaluator.count_training_rows(ranks, train)
        if self.group is not None:
            of_lists.count_training_rows(ranks, train)
        policy = evaluator.policy(ranks, train) if self.objective == "classification" else None
        evaluations: dict[str, Evaluation] = {}
        for split in self.splits:
            predictions = self._predict(split, ranks, predictor, None if split == RANK else policy)
            if split == RANK:
                evaluations[split] = evaluator.evaluate_lists(ranks, predictions)
            elif self.objective == "regression":
                evaluations[split] = evaluator.evaluate_regression(ranks, predictions)
            else:
                evaluations[split] = evaluator.evaluate(ranks, predictions)
                if self.group is not None:
                    evaluations[f"{split}_lists"] = of_lists.evaluate_lists(ranks, predictions)
        return evaluations

    def _predict(self, split: str, ranks: Ranks, predictor: Predictor, policy: Policy | None = None) -> Predictions:
        """Predict this rank's share of a split: row groups r, r + ranks, ..."""
        carried, codes = self.columns(split)
        groups = sample_row_groups(self.dataset, split, self.schema, carried=carried)
        groups_of_rank = groups[ranks.world.rank :: ranks.world.size]
        scores: list[NDArray[np.float32]] = []
        labels: list[NDArray[np.float32]] = []
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in (*carried, *codes)}
        choices: list[Choices] = []
        for rows in read_rows(groups_of_rank, self.inputs.features, self.label, list(columns)):
            scores.append(predictor.predict(rows.features))
            if policy is not None:
                logged = rows.columns[policy.actions.feature].astype(np.int64)
                choices.append(policy.choose(logged, _scorer(predictor, rows)))
            labels.append(rows.labels)
            for name, column in rows.columns.items():
                columns[name].append(column)
        return Predictions(
            _joined(scores, np.float32),
            _joined(labels, np.float32),
            {name: _joined(columns[name], object) for name in carried},
            {name: _joined(columns[name], np.int64).astype(np.int64) for name in codes},
            choices=None if policy is None else Choices.concat(choices),
        )


def evaluate(
    spark: SparkSession, booster: xgb.Booster, task: EvaluationTask, workers: int
) -> tuple[dict[str, Evaluation], float]:
    """Evaluate splits on `workers` Spark tasks, which are the ranks of the evaluation: no process has all predictions.

    Returns:
        the evaluations by split, with lists of `valid` and `test` as `valid_lists` and `test_lists`; and the peak
        memory of the largest Python worker in MiB, which includes the training, since Spark reuses workers.

    Raises:
        UserError: a split lacks something, or a slice's expression cannot be evaluated.
    """
    raw, peak = bytes(booster.save_raw("ubj")), worker_peak_memory(spark.sparkContext)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        loaded_booster = xgb.Booster({"nthread": 1})
        loaded_booster.load_model(bytearray(raw))
        with ranks_of_tasks() as ranks:
            evaluations = task.evaluate(ranks, task.inputs.predictor(loaded_booster))
        if ranks.world.is_chief:
            record = json.dumps({split: asdict(evaluation) for split, evaluation in evaluations.items()})
            yield pa.record_batch([pa.array([record])], names=["evaluation"])
        report_peak_memory(peak)

    frame = spark.range(0, workers, 1, workers).mapInArrow(run, "evaluation string", barrier=True)
    (row,) = frame.collect()
    return {split: Evaluation(**record) for split, record in json.loads(row[0]).items()}, peak.value


def _scorer(predictor: Predictor, rows: Rows) -> ScoreAction:
    """Return a function that predicts the logits of the same rows with other values of some features."""

    def score(values: Mapping[str, Any]) -> F64:
        changed = {name: np.full_like(rows.features[name], value) for name, value in values.items()}
        p = predictor.predict({**rows.features, **changed}).astype(np.float64)
        with np.errstate(divide="ignore"):
            logits: F64 = np.clip(np.log(p) - np.log1p(-p), -_LARGEST_LOGIT, _LARGEST_LOGIT)
        return logits

    return score


def _joined(parts: Sequence[NDArray[Any]], empty: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, empty)


def task_splits(dataset: Location, train: config.Train, label_is_carried: bool) -> tuple[str, ...]:
    """Return the splits to evaluate. Lists of the split `rank` have only the label of clicks."""
    splits = ["valid", *(["test"] if (dataset / "test").is_dir() else [])]
    if train.rank_group is not None and not label_is_carried:
        splits.append(RANK)
    return tuple(splits)


log = logging.getLogger("headrace.train")


@dataclass(frozen=True)
class FirstModelSource:
    """The model whose predictions the trees read: its saved model, its entry in model.json, and its outputs."""

    folder: Location
    card: Mapping[str, Any]
    outputs: tuple[str, ...]


def train_trees(ctx: Context, conf: Trees, name: str, first: FirstModelSource | None = None) -> Result:
    """Train, evaluate, save and register the trees of a stage.

    Args:
        ctx: context of the stage.
        conf: section of the spec.
        name: name of the stage and of the section.
        first: model whose predictions the trees read. Without one they learn from the split `train` and are measured on
            `valid`; with one they learn from `valid` and are measured on `test`.

    Raises:
        UserError: the dataset or the Spark master lacks something that XGBoost needs.
    """
    spec, seed = ctx.spec, ctx.spec.train.seed
    schema = ctx.upstream["features"].dataset_schema
    if schema is None:
        raise UserError("the manifest of stage 'features' describes no dataset; run that stage again")
    left_out = [f.name for f in dynamic_features(schema)]
    if left_out:
        if not xgboost_model.matrix_columns(schema):
            raise UserError(f"every feature has raw ids, on which trees cannot split; leave out the section {name}")
        log.info("%s: without %s: trees do not see raw ids", name, ", ".join(left_out))
    inputs = TreeInputs(schema) if first is None else TreeInputs(schema, first.folder, first.outputs)
    learned_from, measured_by = ("train", "valid") if first is None else ("valid", TEST)
    dataset = ctx.ws.locate(ctx.upstream["features"].output("dataset").name)
    label = schema.label.name if conf.column is None else schema.carried_name(conf.column)
    column = None if conf.objective != "ranking" else conf.group or spec.train.rank_group
    group = None if column is None else schema.carried_name(column)
    weight = next(iter(carried_weight(spec.train, schema)), None) if is_weighted(spec, conf) else None
    carried = [c for c in (None if conf.column is None else label, group, weight) if c is not None]
    if not (dataset / measured_by).is_dir():
        raise UserError(f"{dataset} has no split {measured_by}, by which {name} is evaluated: see features.split")
    train = sample_row_groups(dataset, learned_from, schema, conf.max_rows, carried)
    valid = sample_row_groups(dataset, measured_by, schema, carried=carried)
    rows = {learned_from: sum(s.take for s in train), measured_by: sum(s.take for s in valid)}
    for split, number in rows.items():
        if not number:
            raise UserError(
                f"{dataset / split} holds no rows; the {name} needs some in {learned_from} and in {measured_by}"
            )
    if group is not None:
        assert column is not None
        for samples in (train, valid):
            check_lists(samples, label, group, column, f"{name}.group" if conf.group else "train.rank_group")
    total = sum(s.rows for s in train)
    if rows[learned_from] < total:
        log.info("%s: a sample of %s of %s rows (%s.max_rows)", name, f"{rows[learned_from]:,}", f"{total:,}", name)
    # Lists of the split `rank` may have rows of `valid`.
    splits = (measured_by,) if first is not None else task_splits(dataset, spec.train, conf.column is not None)
    task = EvaluationTask(dataset, inputs, spec.train, conf.objective, label, group, splits)
    for split in splits:
        open_split(dataset, split, schema, task.columns(split)[0])
    stops_early = conf.stops_after is not None
    learned = TrainingRows(train, valid if stops_early else (), inputs, label, group, weight)

    final = ctx.ws.model(spec.pipeline, ctx.ds, ctx.key) / "model"
    with session(with_slots(spec.spark, conf.workers), ctx.ws, f"{name} {spec.pipeline} {ctx.ds}") as spark:
        xgboost_spark.check_slots(spark, conf.workers, name)
        tick = time.perf_counter()
        device = "cuda" if spec.spark.profile == "gpu" else "cpu"
        fitted = xgboost_spark.fit(spark, learned, conf, seed=seed, k=spec.train.rank_k, device=device, name=name)
        booster, seconds = fitted.booster, time.perf_counter() - tick
        trees = booster.num_boosted_rounds()
        log.info("%s: %d trees over %s rows in %.1f s", name, trees, f"{rows[learned_from]:,}", seconds)
        if trees < len(fitted.training):
            log.info("%s: of %d trees those up to the best on the split valid", name, len(fitted.training))
        evaluations, peak = evaluate(spark, booster, task, conf.workers)
    rows |= {split: evaluation.rows for split, evaluation in evaluations.items() if split in splits}
    metrics = dict(evaluations[measured_by].metrics)
    for lists in (f"{measured_by}_lists", "rank"):  # the neural model is measured on the lists of `rank` too
        metrics |= evaluations[lists].metrics if lists in evaluations else {}
    importance = xgboost_model.importance(booster, schema, [f"{ctx.spec.model.kind}: {o}" for o in inputs.outputs])
    with final.new_folder() as folder:
        card = {
            **({} if first is None else {"kind": "second_stage", "first": first.card}),
            "pipeline": spec.pipeline,
            "ds": ctx.ds,
            "key": ctx.key,
            "metrics": metrics,
            name: conf.model_dump(mode="json"),
            "seed": seed,
            "importance": importance,
        }
        xgboost_model.save(folder, booster, schema, dataset / "workflow", card)
    write_replicates(
        final.parent / REPLICATES, {split: evaluation.replicates for split, evaluation in evaluations.items()}
    )
    registered = _register(ctx, conf, name, final, metrics, fitted) if ctx.registers else None
    summary = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if v is not None)
    log.info("%s: %s on %s rows", name, summary, f"{rows[measured_by]:,}")
    last = {"epoch": 1, "step": trees} | {n: metrics[n] for n in ("auc", "log_loss") if n in metrics}
    is_basic = task.request().is_basic and evaluations.keys() == {"valid"}
    return Result(
        outputs=(Output(kind="model", name=ctx.ws.name_of(final), version=ctx.key, rows=rows[learned_from]),),
        rows=rows,
        facts={
            "metrics": metrics,
            # A step is a tree, which reads all rows once.
            "curve": [{"step": i, "epoch": i, "loss": loss} for i, loss in enumerate(fitted.training, 1)],
            "validation_curve": [{"step": i, "loss": loss} for i, loss in enumerate(fitted.validation, 1)],
            "curve_metric": fitted.metric,
            "steps": len(fitted.training),
            "best_step": trees,
            "objective": conf.objective,
            "evals": [last],
            "calibration_bins": evaluations[measured_by].calibration_bins,
            "evaluation": {} if is_basic else {split: evaluation.record() for split, evaluation in evaluations.items()},
            "left_out": left_out,
            "importance": importance,
            "warm_start": None,
            "registered": registered,
            "ranks": conf.workers,
            "resumed_from_step": None,
            "fit_seconds": round(seconds, 3),
        },
        peak_memory_mib={"worker": peak},
    )


def _register(
    ctx: Context, conf: Trees, name: str, model: Location, metrics: Mapping[str, float | None], fitted: Fitted
) -> dict[str, str]:
    preload()
    registered = registered_name(ctx.spec.pipeline, name)
    params = {f"{name}.{k}": v for k, v in conf.model_dump(mode="json").items()}
    version = registry.register(
        ctx.ws,
        registered,
        model,
        metrics,
        ctx.key,
        ds=ctx.ds,
        params=params,
        lineage=lineage_of(ctx),
        history=_history(fitted),
    )
    return {"name": registered, "version": version}


def _history(fitted: Fitted) -> list[dict[str, float | None]]:
    """Return the training and validation metric of each tree, in the registry's format."""
    points: list[dict[str, float | None]] = []
    for i, loss in enumerate(fitted.training):
        point: dict[str, float | None] = {"step": i + 1, "training": loss}
        if fitted.validation:
            point["validation"] = fitted.validation[i]
        points.append(point)
    return points
