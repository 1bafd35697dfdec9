"""The baseline stage: XGBoost on Spark over the dataset that the neural model is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.manifest import Input, Manifest
from headrace.stage import Context, Result, Stage
from headrace.train.baseline.stage_parts import refuse_drawn_negatives, trees_part, verify_trees


class TrainBaseline(Stage):
    """XGBoost on Spark over the same dataset and split as the neural model: trained on train, measured on valid."""

    name = "baseline"
    version = 1
    needs: tuple[str, ...] = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """See `trees_part`."""
        return trees_part(spec, self.name, spec.baseline)

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """None besides the dataset. Raises UserError where the dataset has no negatives of its own."""
        refuse_drawn_negatives(ctx.spec, self.name)
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The saved model and the registry are there."""
        return verify_trees(ctx, manifest)

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the dataset or the master lack."""
        # Imports XGBoost and scikit-learn (2 s): not for those who only ask whether there is something to do.
        from headrace.train.baseline.run import train_trees

        assert ctx.spec.baseline is not None
        return train_trees(ctx, ctx.spec.baseline, self.name)
