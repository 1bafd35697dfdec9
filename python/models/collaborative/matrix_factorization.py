"""Matrix factorisation: Koren, Bell, Volinsky, "Matrix Factorization Techniques for Recommender Systems" (2009)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import pad

from headrace.config.model_args import MatrixFactorizationArgs
from headrace.models.collaborative.scores import dots, dots_with_negatives, loss_of, unit
from headrace.models.feature_checks import check_feature
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup


class MatrixFactorization(nn.Module):
    """A vector for each user and each item; the logit is their dot product plus a bias of the item.

    With `similarity: cosine` it is their cosine over the temperature, without a bias; with a sampled softmax that is
    the model of Wu et al., "On the Effectiveness of Sampled Softmax Loss for Item Recommendation" (2024).

    Losses: `bce`, of each row's label; `bpr` (Rendle et al., "BPR: Bayesian Personalized Ranking from Implicit
    Feedback", 2009) and `softmax`, of positive rows beside the batch's negatives; rows of label 0 add nothing there.
    """

    Args = MatrixFactorizationArgs

    def __init__(self, features: InputFeatures, args: MatrixFactorizationArgs) -> None:
        super().__init__()
        check_feature(features, "model.args.item", args.item, is_list=False)
        self.args, self.item, self._cosine = args, args.item, args.similarity == "cosine"
        self._bias = int(args.item_bias and not self._cosine)
        width = features.embedding_dim
        self.lookups = [
            EmbeddingLookup("user", args.user, width),
            EmbeddingLookup("item", args.item, width + self._bias),
        ]
        if args.loss != "bce":
            self.lookups.append(EmbeddingLookup("negatives", args.item, width + self._bias, ids="negatives"))

    def queries(self, inputs: Inputs) -> Tensor:
        """Vectors of the rows' users, float32 [B, D]; the last is 1 where items have a bias."""
        users = self._scaled(inputs.embedding("user")) / self.args.temperature
        return pad(users, (0, 1), value=1.0) if self._bias else users

    def items(self, inputs: Inputs) -> Tensor:
        """Vectors of the rows' items, float32 [B, D]."""
        return self._scaled(inputs.embedding("item"))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]; in training `negatives` [B, n] besides, where the loss looks at them."""
        queries = self.queries(inputs)
        outputs = {"logits": dots(queries, self.items(inputs))}
        if self.training and self.args.loss != "bce":
            outputs["negatives"] = dots_with_negatives(queries, self._scaled(inputs.embedding("negatives")))
        return outputs

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The sum over the rows, []."""
        return loss_of(self.args.loss, outputs, inputs, self.item)

    def _scaled(self, x: Tensor) -> Tensor:
        return unit(x) if self._cosine else x
