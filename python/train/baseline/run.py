"""Train trees, evaluate them, save and register them: what the stages baseline and second_stage have in common."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace import registry
from headrace.config import Trees
from headrace.dataset.parquet.layout import TEST, open_split
from headrace.embeddings.dynamic.spec import dynamic_features
from headrace.errors import UserError
from headrace.lake.spark.session import session, with_slots
from headrace.manifest import Output
from headrace.models import xgboost_model
from headrace.registry.versions import preload, registered_name
from headrace.stage import Context, Result
from headrace.storage import Location
from headrace.train.baseline import xgboost_spark
from headrace.train.baseline.evaluate import EvaluationTask, evaluate, task_splits
from headrace.train.baseline.inputs import TreeInputs
from headrace.train.baseline.rows import check_lists, sample_row_groups
from headrace.train.baseline.stage_parts import is_weighted
from headrace.train.baseline.xgboost_spark import Fitted, TrainingRows
from headrace.train.carried_columns import carried_weight
from headrace.train.evaluation.paired import write_replicates
from headrace.train.job import REPLICATES
from headrace.train.lineage import lineage_of

log = logging.getLogger("headrace.train")


@dataclass(frozen=True)
class FirstModel:
    """The model whose predictions the trees look at: its saved model, what model.json names it by, its outputs."""

    folder: Location
    card: Mapping[str, Any]
    outputs: tuple[str, ...]


def train_trees(ctx: Context, conf: Trees, name: str, first: FirstModel | None = None) -> Result:
    """What a stage of trees does.

    Args:
        ctx: the stage's.
        conf: the section.
        name: of the stage and of the section.
        first: None: the trees learn from the split `train`, and `valid` measures them. Else they learn from `valid`,
            and `test` measures them.

    Raises:
        UserError: what the dataset or the master lack.
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
        found, peak = evaluate(spark, booster, task, conf.workers)
    rows |= {split: of.rows for split, of in found.items() if split in splits}
    metrics = dict(found[measured_by].metrics)
    for lists in (f"{measured_by}_lists", "rank"):  # those of `rank` are what the neural model has
        metrics |= found[lists].metrics if lists in found else {}
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
    write_replicates(final.parent / REPLICATES, {split: of.replicates for split, of in found.items()})
    registered = _register(ctx, conf, name, final, metrics, fitted) if ctx.registers else None
    shown = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if v is not None)
    log.info("%s: %s on %s rows", name, shown, f"{rows[measured_by]:,}")
    last = {"epoch": 1, "step": trees} | {n: metrics[n] for n in ("auc", "log_loss") if n in metrics}
    is_basic = task.request().is_basic and found.keys() == {"valid"}
    return Result(
        outputs=(Output(kind="model", name=ctx.ws.name_of(final), version=ctx.key, rows=rows[learned_from]),),
        rows=rows,
        facts={
            "metrics": metrics,
            # A step is a tree: each looks at all rows once.
            "curve": [{"step": i, "epoch": i, "loss": loss} for i, loss in enumerate(fitted.training, 1)],
            "validation_curve": [{"step": i, "loss": loss} for i, loss in enumerate(fitted.validation, 1)],
            "curve_metric": fitted.metric,
            "steps": len(fitted.training),
            "best_step": trees,
            "objective": conf.objective,
            "evals": [last],
            "calibration_bins": found[measured_by].calibration_bins,
            "evaluation": {} if is_basic else {split: of.record() for split, of in found.items()},
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
    """The training and validation metric of each tree, as the registry takes them."""
    found: list[dict[str, float | None]] = []
    for i, loss in enumerate(fitted.training):
        point: dict[str, float | None] = {"step": i + 1, "training": loss}
        if fitted.validation:
            point["validation"] = fitted.validation[i]
        found.append(point)
    return found
