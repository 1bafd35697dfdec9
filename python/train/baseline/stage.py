"""The baseline stage: XGBoost on Spark over the dataset that the neural model is trained on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace import registry
from headrace.config import Baseline, Evaluation, Spec
from headrace.dataset.parquet.layout import open_split
from headrace.embeddings.dynamic.spec import dynamic_features
from headrace.errors import UserError
from headrace.lake.session import session, with_slots
from headrace.manifest import Input, Manifest, Output
from headrace.models.predictor import read_meta
from headrace.registry.versions import preload
from headrace.stage import Context, Result, Stage
from headrace.storage import Location
from headrace.train.evaluation.paired import write_replicates
from headrace.train.job import REPLICATES
from headrace.train.setup.sample_weight import carried_weight

if TYPE_CHECKING:  # imports XGBoost
    from headrace.train.baseline.xgboost_spark import Fitted

log = logging.getLogger("headrace.train")


class TrainBaseline(Stage):
    """XGBoost on Spark over the same dataset and split as the neural model: trained on train, measured on valid."""

    name = "baseline"
    version = 1
    needs: tuple[str, ...] = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The section, the seed and what is measured. `workers` is part of it: each sketches its own rows, so others
        cut elsewhere. The device is not, as which trees grow on it differs no more than by rounding."""
        train = spec.train
        part: dict[str, Any] = {
            "baseline": spec.baseline.model_dump(mode="json") if spec.baseline else None,
            "seed": train.seed,
        }
        if train.evaluation != Evaluation():  # keys of runs from before these were looked at stay as they are
            part["evaluation"] = train.evaluation.model_dump(mode="json")
        if _is_weighted(spec):
            part["sample_weight"] = train.sample_weight
        if train.rank_group is not None or (spec.baseline is not None and spec.baseline.objective == "ranking"):
            part |= {"rank_group": train.rank_group, "rank_k": train.rank_k}
        return part

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """None besides the dataset.

        Raises:
            UserError: the dataset has no negatives of its own.
        """
        if ctx.spec.train.negatives is not None:
            raise UserError(
                f"baseline: pipeline '{ctx.spec.pipeline}' draws its negatives batch by batch while the neural model "
                f"trains (train.negatives), so its dataset has nothing for XGBoost to tell clicks from; remove the "
                f"section `baseline`"
            )
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The saved model and the registry are there."""
        try:
            read_meta(ctx.ws.locate(manifest.output("model").name))
        except UserError as e:
            return str(e)
        if not (ctx.ws.home / "mlflow.db").is_file():
            return "the model registry is gone"
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the dataset or the master lack."""
        # Import XGBoost and scikit-learn (2 s): not for those who only ask whether there is something to do.
        from headrace.models import xgboost_model
        from headrace.train.baseline import xgboost_spark
        from headrace.train.baseline.evaluate import EvaluationTask, evaluate, task_splits
        from headrace.train.baseline.rows import sample_row_groups
        from headrace.train.baseline.xgboost_spark import TrainingRows

        spec, conf, seed = ctx.spec, ctx.spec.baseline, ctx.spec.train.seed
        assert conf is not None
        schema = ctx.upstream["features"].dataset_schema
        if schema is None:
            raise UserError("the manifest of stage 'features' describes no dataset; run that stage again")
        left_out = [f.name for f in dynamic_features(schema)]
        if left_out:
            if not xgboost_model.matrix_columns(schema):
                raise UserError(
                    "every feature has raw ids, on which trees cannot split; leave out the section baseline"
                )
            log.info("baseline: without %s: trees do not see raw ids", ", ".join(left_out))
        dataset = ctx.ws.locate(ctx.upstream["features"].output("dataset").name)
        label = schema.label.name if conf.label is None else schema.carried_name(conf.label)
        column = None if conf.objective != "ranking" else conf.group or spec.train.rank_group
        group = None if column is None else schema.carried_name(column)
        weight = next(iter(carried_weight(spec.train, schema)), None) if _is_weighted(spec) else None
        carried = [name for name in (None if conf.label is None else label, group, weight) if name is not None]
        train = sample_row_groups(dataset, "train", schema, conf.max_rows, carried)
        valid = sample_row_groups(dataset, "valid", schema, carried=carried)
        rows = {"train": sum(s.take for s in train), "valid": sum(s.take for s in valid)}
        for split, number in rows.items():
            if not number:
                raise UserError(f"{dataset / split} holds no rows; the baseline needs some in train and in valid")
        total = sum(s.rows for s in train)
        if rows["train"] < total:
            log.info("baseline: a sample of %s of %s rows (baseline.max_rows)", f"{rows['train']:,}", f"{total:,}")
        splits = task_splits(dataset, spec.train, conf.label is not None)
        task = EvaluationTask(dataset, schema, spec.train, conf.objective, label, group, splits)
        for split in splits:
            open_split(dataset, split, schema, task.columns(split)[0])
        stops_early = conf.early_stopping_rounds is not None
        learned = TrainingRows(train, valid if stops_early else (), schema, label, group, weight)

        final = ctx.ws.model(spec.pipeline, ctx.ds, ctx.key) / "model"
        with session(with_slots(spec.spark, conf.workers), ctx.ws, f"baseline {spec.pipeline} {ctx.ds}") as spark:
            xgboost_spark.check_slots(spark, conf.workers)
            tick = time.perf_counter()
            device = "cuda" if spec.spark.profile == "gpu" else "cpu"
            fitted = xgboost_spark.fit(spark, learned, conf, seed=seed, k=spec.train.rank_k, device=device)
            booster, seconds = fitted.booster, time.perf_counter() - tick
            trees = booster.num_boosted_rounds()
            log.info("baseline: %d trees over %s rows in %.1f s", trees, f"{rows['train']:,}", seconds)
            if trees < len(fitted.training):
                log.info("baseline: of %d trees those up to the best on the split valid", len(fitted.training))
            found, peak = evaluate(spark, booster, task, conf.workers)
        rows |= {split: of.rows for split, of in found.items() if split in splits}
        metrics = dict(found["valid"].metrics)
        for lists in ("valid_lists", "rank"):  # those of `rank` are what the neural model has
            metrics |= found[lists].metrics if lists in found else {}
        importance = xgboost_model.importance(booster, schema)
        with final.new_folder() as folder:
            card = {
                "pipeline": spec.pipeline,
                "ds": ctx.ds,
                "key": ctx.key,
                "metrics": metrics,
                "baseline": conf.model_dump(mode="json"),
                "seed": seed,
                "importance": importance,
            }
            xgboost_model.save(folder, booster, schema, dataset / "workflow", card)
        write_replicates(final.parent / REPLICATES, {split: of.replicates for split, of in found.items()})
        registered = _register(ctx, conf, final, metrics, fitted) if ctx.registers else None
        shown = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if v is not None)
        log.info("baseline: %s on %s rows", shown, f"{rows['valid']:,}")
        last = {"epoch": 1, "step": trees} | {n: metrics[n] for n in ("auc", "log_loss") if n in metrics}
        is_basic = task.request().is_basic and found.keys() == {"valid"}
        return Result(
            outputs=(Output(kind="model", name=ctx.ws.name_of(final), version=ctx.key, rows=rows["train"]),),
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
                "calibration_bins": found["valid"].calibration_bins,
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


def _is_weighted(spec: Spec) -> bool:
    """Whether rows have weights. For ranking XGBoost takes one for a list, not for a row."""
    is_ranking = spec.baseline is not None and spec.baseline.objective == "ranking"
    return spec.train.sample_weight is not None and not is_ranking


def _register(
    ctx: Context, conf: Baseline, model: Location, metrics: Mapping[str, float | None], fitted: Fitted
) -> dict[str, str]:
    preload()
    name = f"{ctx.spec.pipeline}-baseline"
    params = {f"baseline.{k}": v for k, v in conf.model_dump(mode="json").items()}
    version = registry.register(
        ctx.ws, name, model, metrics, ctx.key, ds=ctx.ds, params=params, history=_history(fitted)
    )
    return {"name": name, "version": version}


def _history(fitted: Fitted) -> list[dict[str, float | None]]:
    """The training and validation metric of each tree, as the registry takes them."""
    found: list[dict[str, float | None]] = []
    for i, loss in enumerate(fitted.training):
        point: dict[str, float | None] = {"step": i + 1, "training": loss}
        if fitted.validation:
            point["validation"] = fitted.validation[i]
        found.append(point)
    return found
