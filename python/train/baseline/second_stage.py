"""The stage second_stage: XGBoost on Spark over the features and the neural model's predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.dataset.parquet.layout import TEST
from headrace.errors import UserError
from headrace.manifest import Input, Manifest
from headrace.models.predictor import ONLY_TASK, file_digest, read_meta
from headrace.stage import Context, Result, Stage, identity
from headrace.train.baseline.stage_parts import refuse_drawn_negatives, trees_part, verify_trees


class TrainSecondStage(Stage):
    """Trees behind the neural model (stacking: Wolpert, 1992): a model's predictions of rows that it was trained on
    are better than those of others, so the trees learn from the split `valid`, and the split `test` measures them.
    """

    name = "second_stage"
    version = 1
    needs: tuple[str, ...] = ("features", "train")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """See `trees_part`."""
        return trees_part(spec, self.name, spec.second_stage)

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """None besides the dataset and the neural model.

        Raises:
            UserError: the model may have been trained on rows that the trees would learn from, or there are no
                negatives.
        """
        refuse_drawn_negatives(ctx.spec, self.name)
        _check_unseen(ctx)
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The saved model, the first one, and the registry are there."""
        return verify_trees(ctx, manifest)

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the dataset, the first model or the master lack."""
        # Imports XGBoost and scikit-learn (2 s): not for those who only ask whether there is something to do.
        from headrace.train.baseline.run import FirstModel, train_trees

        conf, train = ctx.spec.second_stage, ctx.upstream["train"]
        assert conf is not None
        output = train.output("model")
        folder = ctx.ws.locate(output.name)
        outputs = tuple(read_meta(folder).get("tasks", {})) or (ONLY_TASK,)
        card = {"key": output.version, "sha256": file_digest(folder / "model.json"), "outputs": list(outputs)}
        result = train_trees(ctx, conf, self.name, FirstModel(folder, card, outputs))
        # Of the same rows, by the same evaluation.
        alone = train.facts.get("evaluation", {}).get(TEST, {}).get("metrics", {})
        first = {"stage": "train", "name": output.name, "version": output.version, "metrics": alone}
        return Result(
            outputs=result.outputs,
            rows=result.rows,
            facts={**result.facts, "first_model": first},
            peak_memory_mib=result.peak_memory_mib,
        )


def _check_unseen(ctx: Context) -> None:
    """See that the neural model learned nothing of the split valid.

    Raises:
        UserError: it was trained on an earlier dataset, whose splits may be others, or it started from another day's
            model, whose train may have had rows of this day's valid: by time it has not, as days move on.
    """
    train = ctx.upstream["train"]
    made_of = {i.name: i.version for i in train.inputs if i.kind == "stage"}
    again = f"headrace run {ctx.spec.argument} --ds {ctx.ds} --from train --to second_stage"
    if made_of.get("features") != identity(ctx.upstream["features"]):
        raise UserError(
            f"second_stage: the neural model was trained on another dataset than that of {ctx.ds} now, perhaps on rows "
            f"that the trees would learn from; run: {again}"
        )
    if train.facts.get("pretrained") or (train.facts.get("warm_start") and ctx.spec.features.split.by != "time"):
        raise UserError(
            f"second_stage: the neural model started from another one, which may have been trained on rows of the "
            f"split valid, that the trees learn from: set train.warm_start=false, leave train.pretrained out, or split "
            f"by time; then run: {again}"
        )
