"""The stages of trees: `baseline` on the neural model's dataset, `second_stage` on its predictions too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Spec, Trees
from headrace.config.section import Effect, keys_with
from headrace.dataset.layout import TEST
from headrace.errors import UserError
from headrace.models.predictor import ONLY_TASK, damaged_model, file_digest, read_meta
from headrace.models.registry.client import missing_version
from headrace.stage import Context, Result, Stage, identity
from headrace.stage.manifest import Input, Manifest
from headrace.train.carried_columns import is_weighted
from headrace.train.requirements import refuse_drawn_negatives


def trees_part(spec: Spec, name: str, conf: Trees | None) -> dict[str, Any]:
    """Return the part of the spec that changes a stage of trees: its section, the seed, row weights and the metrics.

    `workers` belongs to it: each worker sketches its own rows, so another number gives other cuts. The device does not:
    trees grown on it differ by rounding only.
    """
    return {
        name: conf.model_dump(mode="json") if conf else None,
        "seed": spec.train.seed,
        "sample_weight": spec.train.sample_weight if is_weighted(spec, conf) else None,
        **keys_with(spec.train, {Effect.METRICS}),
    }


def verify_trees(ctx: Context, manifest: Manifest) -> str | None:
    """Return the damage of the saved model or the registry, or None."""
    damaged = damaged_model(ctx.ws.locate(manifest.output("model").name))
    return damaged or missing_version(ctx.ws, manifest.facts.get("registered"))


class TrainBaseline(Stage):
    """XGBoost on Spark: trained on the split `train` of the neural model's dataset, measured on its split `valid`."""

    name = "baseline"
    version = 1
    needs: tuple[str, ...] = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """See `trees_part`."""
        return trees_part(spec, self.name, spec.baseline)

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return no input besides the dataset. Raises UserError where the dataset has no negatives of its own."""
        refuse_drawn_negatives(ctx.spec, self.name)
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the saved model and its version in the registry exist."""
        return verify_trees(ctx, manifest)

    def run(self, ctx: Context) -> Result:
        """Train the trees, evaluate and register them.

        Raises:
            UserError: the dataset or the Spark master lacks something that XGBoost needs.
        """
        # Imported here, since XGBoost and scikit-learn take 2 s and a dry run needs neither.
        from headrace.train.baseline.run import train_trees

        assert ctx.spec.baseline is not None
        return train_trees(ctx, ctx.spec.baseline, self.name)


class TrainSecondStage(Stage):
    """Trees over the neural model's predictions (stacking: Wolpert, 1992).

    A model predicts the rows that it was trained on better than others. So the trees learn from the split `valid`, and
    the split `test` measures them.
    """

    name = "second_stage"
    version = 1
    needs: tuple[str, ...] = ("features", "train")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """See `trees_part`."""
        return trees_part(spec, self.name, spec.second_stage)

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return no input besides the dataset and the neural model.

        Raises:
            UserError: the model may have been trained on rows that the trees would learn from, or the dataset has no
                negatives of its own.
        """
        refuse_drawn_negatives(ctx.spec, self.name)
        _check_unseen(ctx)
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the saved model, with the first one, and its version in the registry exist."""
        return verify_trees(ctx, manifest)

    def run(self, ctx: Context) -> Result:
        """Train the trees, evaluate and register them with the neural model as their first model.

        Raises:
            UserError: the dataset, the first model or the Spark master lacks something that the trees need.
        """
        # Imported here, since XGBoost and scikit-learn take 2 s and a dry run needs neither.
        from headrace.train.baseline.run import FirstModelSource, train_trees

        conf, train = ctx.spec.second_stage, ctx.upstream["train"]
        assert conf is not None
        output = train.output("model")
        folder = ctx.ws.locate(output.name)
        outputs = tuple(read_meta(folder).get("tasks", {})) or (ONLY_TASK,)
        first_model = {"key": output.version, "sha256": file_digest(folder / "model.json"), "outputs": list(outputs)}
        result = train_trees(ctx, conf, self.name, FirstModelSource(folder, first_model, outputs))
        # The neural model's metrics of the same rows, by the same evaluation.
        neural_metrics = train.facts.get("evaluation", {}).get(TEST, {}).get("metrics", {})
        first = {"stage": "train", "name": output.name, "version": output.version, "metrics": neural_metrics}
        return Result(
            outputs=result.outputs,
            rows=result.rows,
            facts={**result.facts, "first_model": first},
            peak_memory_mib=result.peak_memory_mib,
        )


def _check_unseen(ctx: Context) -> None:
    """Check that the neural model was not trained on rows of the split `valid`.

    Raises:
        UserError: it was trained on another dataset, whose splits may differ; or it started from another model, whose
            training rows may be in this split. With a split by time, an earlier day's model has not seen them.
    """
    train = ctx.upstream["train"]
    input_versions = {i.name: i.version for i in train.inputs if i.kind == "stage"}
    command = f"headrace run {ctx.spec.argument} --ds {ctx.ds} --from train --to second_stage"
    if input_versions.get("features") != identity(ctx.upstream["features"]):
        raise UserError(
            f"second_stage: the neural model was trained on another dataset than that of {ctx.ds} now, perhaps on rows "
            f"that the trees would learn from; run: {command}"
        )
    if train.facts.get("pretrained") or (train.facts.get("warm_start") and ctx.spec.features.split.by != "time"):
        raise UserError(
            f"second_stage: the neural model started from another one, which may have been trained on rows of the "
            f"split valid, that the trees learn from: set train.warm_start=false, leave train.pretrained out, or split "
            f"by time; then run: {command}"
        )
