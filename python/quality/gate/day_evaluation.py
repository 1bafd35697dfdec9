"""Saved models over the rows of a day's split, as the lake has them: what the stages that compare models share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.compute.psi import psi
from headrace.config import Gate, Spec, Train
from headrace.config.evaluation import CatalogueMetric, ClickMetric, RankingMetric, UserMetric
from headrace.config.section import Effect, keys_with
from headrace.dataset.layout import TEST
from headrace.errors import UserError
from headrace.features.build.plan import pinned_table
from headrace.features.build.rows import day_rows
from headrace.features.build.run import day_events
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.split import SPLIT
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import declared
from headrace.features.workflow.workflow import Workflow
from headrace.lake.spark.session import session
from headrace.models.predictor import maps_of_tasks, needed_models
from headrace.quality.gate.evaluate import CARRIED, LABEL, RANK, GateTask, ModelResult, batch_seconds, evaluate
from headrace.quality.gate.predictions import RawActions, coarse_counts, inputs_of
from headrace.quality.gate.rules import predicts
from headrace.stage import Context
from headrace.stage.manifest import Input
from headrace.storage import Location
from headrace.train.evaluation.bootstrap import difference
from headrace.train.evaluation.click import BASIC, OF_PROBABILITIES
from headrace.train.evaluation.evaluate import OF_LISTS

#: Metrics of predicted numbers (evaluation.regression).
_OF_NUMBERS = ("rmse", "mae", "r2")


def model_facts(
    folder: Location,
    result: ModelResult,
    splits: Sequence[str],
    batch_rows: int,
    seconds: float | None,
    requested: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a model's facts as JSON values.

    `bytes` counts all folders that are needed to open it: for a model of changed rows alone, also those of its bases.

    Args:
        folder: the saved model.
        result: its evaluation.
        splits: the measured splits, the first of single rows.
        batch_rows: rows of a timed batch.
        seconds: time of such a batch; None: none was timed.
        requested: metrics that are undefined where nothing could be measured.

    Raises:
        UserError: a base of the model is gone.
    """
    metrics: dict[str, Any] = dict.fromkeys(requested)
    intervals: dict[str, Any] = {}
    for split in splits:  # metrics of lists have names of their own
        if split in result.evaluations:
            metrics |= result.evaluations[split].metrics
            intervals |= result.evaluations[split].intervals
    first = result.evaluations.get(splits[0])
    return {
        "metrics": metrics,
        "intervals": intervals,
        "calibration_bins": first.calibration_bins if first else [],
        "finite": result.finite,
        "known": {name: list(counts) for name, counts in result.known.items()},
        "bytes": sum(f.size() for needed in needed_models(folder) for f in needed.files()),
        "batch_ms": None if seconds is None else round(1e3 * seconds, 4),
        "rows_per_second": None if not seconds else round(batch_rows / seconds, 1),
    }


def compare_models(
    splits: Sequence[str], model: ModelResult, reference: ModelResult, confidence: float
) -> dict[str, Any]:
    """Compare a model with a reference: differences of metrics, by slice too, and of predictions."""
    differences: dict[str, Any] = {}
    slices: list[dict[str, Any]] = []
    for split in splits:
        if split not in model.evaluations or split not in reference.evaluations:
            continue
        a, b = model.evaluations[split], reference.evaluations[split]
        for metric, value in a.metrics.items():
            differences[metric] = _difference(
                value, b.metrics.get(metric), a.replicates.get(metric), b.replicates.get(metric), confidence
            )
        for left, right in zip(a.slices, b.slices, strict=True):
            slices.append(
                {
                    "split": split,
                    "slice": left["slice"],
                    "value": left["value"],
                    "rows": left["rows"],
                    "metrics": left["metrics"],
                    "champion": right["metrics"],
                    "differences": {
                        metric: _difference(
                            value,
                            right["metrics"].get(metric),
                            left["replicates"].get(metric),
                            right["replicates"].get(metric),
                            confidence,
                        )
                        for metric, value in left["metrics"].items()
                    },
                }
            )
    expected, actual = coarse_counts(np.array(reference.scores, np.int64), np.array(model.scores, np.int64))
    return {
        "differences": differences,
        "slices": slices,
        "score_psi": psi(expected, actual),
        "score_bins": {"champion": expected, "model": actual},
    }


def _difference(
    value: float | None, reference: float | None, draws: Any, reference_draws: Any, confidence: float
) -> dict[str, float | None] | None:
    """Return a difference with its paired interval; None where a value is undefined.

    Without replicates there is no interval.
    """
    if value is None or reference is None:
        return None
    paired = difference(value, reference, draws or (), reference_draws or (), confidence)
    if paired is not None:
        return asdict(paired)
    return {"value": value - reference, "low": None, "high": None, "p": None}


@dataclass(frozen=True)
class DayEvaluation:
    """Evaluation of several models over the same rows.

    splits: the one that is measured, and `rank` where there are lists; rows: of the first; results: by model;
    facts: of each model (`model_facts`); peak_mib: memory of the largest worker.
    """

    splits: tuple[str, ...]
    rows: int
    results: Sequence[ModelResult]
    facts: Sequence[dict[str, Any]]
    peak_mib: float


def tables_of_day(ctx: Context) -> list[Input]:
    """List the inputs of a day's rows: the events at ingest's version, and the tables of the dataset."""
    events = pinned_table(ctx)
    read = ctx.upstream["features"].inputs
    other_tables = [i for i in read if i.kind not in ("stage", "dataset") and i.name != events.name]
    return [Input(kind=events.kind, name=events.name, version=events.version), *other_tables]


def evaluation_settings(spec: Spec, gate: Gate, for_policies: bool = False) -> Mapping[str, Any]:
    """Return the keys of a spec that the result depends on."""
    return {
        "model": gate.model,
        "split": gate.split,
        "batch_rows": gate.latency.batch_rows,
        **keys_with(measures(spec, gate, for_policies), {Effect.METRICS}),
    }


@contextmanager
def rows_of_day(ctx: Context, name: str) -> Iterator[tuple[SparkSession, DataFrame]]:
    """Yield the rows that the day's dataset was made of, with their split. `ctx.inputs` has `tables_of_day`.

    Raises:
        UserError: as the features stage does.
    """
    with (
        session(ctx.spec.spark, ctx.ws, f"{name} {ctx.spec.pipeline} {ctx.ds}") as spark,
        day_rows(ctx, day_events(ctx, Workflow.from_spec(ctx.spec), spark)) as rows,
    ):
        yield spark, rows.frame


def evaluate_day(
    ctx: Context,
    spark: SparkSession,
    rows: DataFrame,
    folders: Sequence[Location],
    gate: Gate,
    optional: int = 0,
    actions: RawActions | None = None,
) -> DayEvaluation:
    """Have saved models predict the rows of a split, each by its own workflow, and measure them.

    Args:
        rows: see `rows_of_day`.
        folders: the saved models; the first is one of the day's dataset.
        gate: which split, and what is measured.
        optional: see EvaluationTask.
        actions: measure the models as policies over these, too; then they are not timed.

    Raises:
        UserError: the dataset or a model lacks something that the spec requests.
    """
    task = _task(ctx, gate, folders, optional, actions)
    frame, batch = _columns(ctx, rows, task), gate.latency.batch_rows
    total, results, peak = evaluate(spark, frame, task, max(1, spark.sparkContext.defaultParallelism))
    seconds = batch_seconds(frame, task.columns, folders, task.maps, batch) if actions is None else []
    facts = [
        model_facts(folder, result, task.splits, batch, seconds[i] if seconds else None, requested_metrics(task))
        for i, (folder, result) in enumerate(zip(folders, results, strict=True))
    ]
    return DayEvaluation(task.splits, total, results, facts, peak)


def measures(spec: Spec, gate: Gate, for_policies: bool = False) -> Train:
    """`train` with what the gate's rules name besides what the spec asks to be measured; `off_policy` on request."""
    train = spec.train
    available = [*get_args(ClickMetric)]
    available += get_args(UserMetric) if train.evaluation.user is not None else ()
    if train.rank_group is not None:
        available += [
            *get_args(RankingMetric),
            *(get_args(CatalogueMetric) if train.evaluation.item is not None else ()),
        ]
    requested = dict.fromkeys([*train.evaluation.metrics, "calibration_error", *gate.metric_names()])
    evaluation = train.evaluation.model_copy(
        update={
            "metrics": tuple(m for m in requested if m in available),
            "bootstrap": gate.bootstrap if train.evaluation.user is not None else None,
            "full_ranking": None,
            "off_policy": None,
        }
    )
    if for_policies:  # policies alone: no other metrics, no slices
        less: dict[str, Any] = {"off_policy": train.evaluation.off_policy, "metrics": (), "slices": {}}
        evaluation = evaluation.model_copy(update=less)
    return train.model_copy(update={"evaluation": evaluation, "tasks": {}})


def requested_metrics(task: GateTask) -> list[str]:
    """Return the metrics that evaluations of the task's splits have, each where there is a row to measure it by."""
    metrics = list(_OF_NUMBERS) if task.predicts == "number" else [*BASIC, *_requested(task, (ClickMetric, UserMetric))]
    if task.predicts == "order":
        metrics = [m for m in metrics if m not in OF_PROBABILITIES]
    lists = [*OF_LISTS, *_requested(task, (RankingMetric, CatalogueMetric))] if RANK in task.splits else []
    return list(dict.fromkeys([*metrics, *lists]))


def _requested(task: GateTask, kinds: Sequence[Any]) -> list[str]:
    return [m for kind in kinds for m in task.train.evaluation.metrics_of(kind)]


def _task(
    ctx: Context, gate: Gate, compared: Sequence[Location], optional: int, actions: RawActions | None
) -> GateTask:
    """Return the settings of the tasks."""
    spec = ctx.spec
    features = ctx.upstream["features"]
    schema, dataset = features.dataset_schema, ctx.ws.locate(features.output("dataset").name)
    if schema is None:
        raise UserError("the manifest of stage 'features' describes no dataset; run that stage again")
    split = gate.split or (TEST if (dataset / TEST).is_dir() else "valid")
    if not (dataset / split).is_dir():
        raise UserError(f"gate.split: {dataset} has no split '{split}'")
    trees = {"baseline": spec.baseline, "second_stage": spec.second_stage}.get(gate.model)
    # Lists of the split `rank` have the label of clicks alone.
    label_column = None if trees is None else trees.column
    has_lists = spec.train.rank_group is not None and (dataset / RANK).is_dir()
    lists = [RANK] if has_lists and label_column is None and actions is None else []
    carried = {f.name: CARRIED.format(i) for i, f in enumerate(schema.carried_columns.values())}
    needed = dict.fromkeys(c for folder in compared for c in inputs_of(folder))
    needed |= dict.fromkeys(() if actions is None else actions.columns)
    task = GateTask(
        tuple(compared),
        maps_of_tasks(ctx.ws, spec, compared),
        dataset,
        schema,
        measures(spec, gate, actions is not None),
        (split, *lists),
        predicts(spec, gate),
        (*needed, LABEL, SPLIT, *carried.values()),
        carried,
        label_column,
        optional,
        actions,
    )
    task.request()
    return task


def _columns(ctx: Context, frame: DataFrame, task: GateTask) -> DataFrame:
    """Return the rows of the splits, with the columns that tasks read, as the dataset carries them."""
    types = {c.name: declared(c) for c in prepared_columns(ctx.spec)}
    sources = {f.name: column for column, f in task.schema.carried_columns.items()}

    def carried(name: str) -> Any:
        source = sources[name]
        is_time = types[source].element == "timestamp" and not types[source].is_list
        return spark_micros(col(source), types[source]) if is_time else col(source)

    raw = [c for c in task.columns if c not in (LABEL, SPLIT, *task.carried.values())]
    return frame.where(F.col(SPLIT).isin(*task.splits)).select(
        *[col(c) for c in raw],
        col(ctx.spec.features.label).cast("float").alias(LABEL),
        F.col(SPLIT),
        *[carried(name).alias(alias) for name, alias in task.carried.items()],
    )
