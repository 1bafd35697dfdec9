"""The baseline stage: XGBoost on Spark over the dataset that the neural model is trained on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headrace import registry
from headrace.config import Spec
from headrace.embeddings.dynamic.spec import dynamic_features
from headrace.errors import UserError
from headrace.lake.session import session, with_slots
from headrace.manifest import Input, Manifest, Output
from headrace.models.predictor import read_meta
from headrace.registry.versions import preload
from headrace.stage import Context, Result, Stage
from headrace.train.evaluation.click import metrics_of

log = logging.getLogger("headrace.train")


class TrainBaseline(Stage):
    """XGBoost on Spark over the same dataset and split as the neural model: trained on train, measured on valid."""

    name = "baseline"
    version = 1
    needs: tuple[str, ...] = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The section, and the seed. `workers` is part of it: each sketches its own rows, so others cut elsewhere."""
        return {"baseline": spec.baseline.model_dump(mode="json") if spec.baseline else None, "seed": spec.train.seed}

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
        train = xgboost_spark.sample_row_groups(dataset, "train", schema, conf.max_rows)
        valid = xgboost_spark.sample_row_groups(dataset, "valid", schema)
        rows = {"train": sum(s.take for s in train), "valid": sum(s.take for s in valid)}
        for split, number in rows.items():
            if not number:
                raise UserError(f"{dataset / split} holds no rows; the baseline needs some in train and in valid")
        total = sum(s.rows for s in train)
        if rows["train"] < total:
            log.info("baseline: a sample of %s of %s rows (baseline.max_rows)", f"{rows['train']:,}", f"{total:,}")

        final = ctx.ws.model(spec.pipeline, ctx.ds, ctx.key) / "model"
        with session(with_slots(spec.spark, conf.workers), ctx.ws, f"baseline {spec.pipeline} {ctx.ds}") as spark:
            xgboost_spark.check_slots(spark, conf.workers)
            tick = time.perf_counter()
            booster, losses = xgboost_spark.fit(spark, train, schema, conf, seed)
            seconds = time.perf_counter() - tick
            log.info("baseline: %d trees over %s rows in %.1f s", conf.rounds, f"{rows['train']:,}", seconds)
            scores, labels, peak = xgboost_spark.predict(spark, booster, valid, schema, conf.workers)
        metrics, bins = metrics_of(labels, scores)
        with final.new_folder() as folder:
            card = {
                "pipeline": spec.pipeline,
                "ds": ctx.ds,
                "key": ctx.key,
                "metrics": metrics,
                "baseline": conf.model_dump(mode="json"),
                "seed": seed,
            }
            xgboost_model.save(folder, booster, schema, dataset / "workflow", card)
        preload()
        name, folder_name = f"{spec.pipeline}-baseline", ctx.ws.name_of(final)
        version = registry.register(
            ctx.ws,
            name,
            final,
            metrics,
            ctx.key,
            ds=ctx.ds,
            params={f"baseline.{k}": v for k, v in conf.model_dump(mode="json").items()},
        )
        shown = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if v is not None)
        log.info("baseline: %s on %s rows", shown, f"{rows['valid']:,}")
        last = {"epoch": 1, "step": conf.rounds, "auc": metrics["auc"], "log_loss": metrics["log_loss"]}
        return Result(
            outputs=(Output(kind="model", name=folder_name, version=ctx.key, rows=rows["train"]),),
            rows=rows,
            facts={
                "metrics": metrics,
                # A step is a tree: each looks at all rows once.
                "curve": [{"step": i, "epoch": i, "loss": loss} for i, loss in enumerate(losses, 1)],
                "evals": [last],
                "calibration_bins": [asdict(b) for b in bins],
                "left_out": left_out,
                "importance": xgboost_model.importance(booster, schema),
                "warm_start": None,
                "registered": {"name": name, "version": version},
                "ranks": conf.workers,
                "resumed_from_step": None,
                "fit_seconds": round(seconds, 3),
            },
            peak_memory_mib={"worker": peak},
        )
