"""SimpleX: Mao et al., "SimpleX: A Simple and Strong Baseline for Collaborative Filtering" (CIKM 2021)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from headrace.config.model_args import SimpleXArgs
from headrace.models.collaborative.scores import dots, dots_with_negatives, unit, weights_of_positives
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses.contrastive import cosine_contrastive


class SimpleX(nn.Module):
    """The cosine of an item and a user, who is a vector of the user's own beside the mean of a history of items.

    user = user_share * u + (1 - user_share) * V mean(items of the history); the history's items have the item's table
    where both features have one vocabulary. A user without a history is that vector alone, and with `history: null` all
    are: matrix factorisation under the cosine contrastive loss.
    """

    Args = SimpleXArgs

    def __init__(self, features: InputFeatures, args: SimpleXArgs) -> None:
        super().__init__()
        width = features.embedding_dim
        self.args, self.item = args, args.item
        self.lookups = [
            EmbeddingLookup("user", args.user, width),
            EmbeddingLookup("item", args.item, width),
            EmbeddingLookup("negatives", args.item, width, ids="negatives"),
        ]
        if args.history is not None:
            self.lookups.append(EmbeddingLookup("history", args.history, width, pooling="mean"))
            #: V of the paper.
            self.of_history = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def queries(self, inputs: Inputs) -> Tensor:
        """Vectors of the rows' users, of length 1: float32 [B, D]."""
        users = inputs.embedding("user")
        if self.args.history is not None:
            share = self.args.user_share
            users = share * users + (1 - share) * self.of_history(inputs.embedding("history"))
        return unit(self.dropout(users))

    def items(self, inputs: Inputs) -> Tensor:
        """Vectors of the rows' items, of length 1: float32 [B, D]."""
        return unit(inputs.embedding("item"))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B], cosines; `negatives` [B, n] besides, in training."""
        queries = self.queries(inputs)
        outputs = {"logits": dots(queries, self.items(inputs))}
        if self.training:
            outputs["negatives"] = dots_with_negatives(queries, unit(inputs.embedding("negatives")))
        return outputs

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The sum over the rows, []; a row of label 0 adds nothing."""
        return cosine_contrastive(
            outputs["logits"],
            outputs["negatives"],
            weights_of_positives(inputs),
            margin=self.args.margin,
            negative_weight=self.args.negative_weight,
        )
