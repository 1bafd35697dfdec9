"""ESMM: Ma et al., "Entire Space Multi-Task Model" (SIGIR 2018)."""

from __future__ import annotations

from torch import Tensor, nn

from headrace.config.model_args import ESMMArgs
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.multitask.layers import Towers


class ESMM(nn.Module):
    """An MLP for each task over the same embeddings; what follows a click is learned over all impressions.

    The conversion's output is its probability after a click. It has no loss of its own (weight 0): the product of both
    probabilities has one, over all rows, where the clicks alone would be a biased sample.

        tasks:
          click: {}
          purchase: {label: purchased, where: click, weight: 0}
          click_and_purchase: {product: [click, purchase]}

    Raises:
        UserError: no task is a product.
    """

    Args = ESMMArgs

    def __init__(self, features: InputFeatures, args: ESMMArgs) -> None:
        super().__init__()
        if not features.products:
            raise UserError(
                "model.class 'esmm' learns a conversion from a product of tasks, and train.tasks has none: write "
                "click_and_purchase: {product: [click, purchase]} beside both, and weight: 0 for the purchase"
            )
        self.towers = Towers(features, features.flat_columns, args.tower_mlp, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """The output of each task by its name, and the first one's as `logits`, float32 [B]."""
        return self.towers([inputs.flat] * len(inputs.features.tasks))  # type: ignore[no-any-return]
