"""Scores of a query beside its item and beside drawn negatives, and losses of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from headrace.errors import UserError
from headrace.models.feature_checks import check_feature
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.losses.pairwise import bpr
from headrace.models.losses.pointwise import binary_cross_entropy
from headrace.models.losses.softmax import sampled_softmax


def dots(queries: Tensor, items: Tensor) -> Tensor:
    """Each row's dot product: float32 [B, D], [B, D] -> [B]."""
    return (queries * items).sum(dim=1)


def dots_with_negatives(queries: Tensor, negatives: Tensor) -> Tensor:
    """Of queries [B, D] and their negatives, [B, n, D], or [n, D] where all rows share them: float32 [B, n]."""
    if negatives.ndim == 2:
        return queries @ negatives.T
    return torch.bmm(negatives, queries.unsqueeze(2)).squeeze(2)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1; zeros stay."""
    return normalize(x, dim=-1)


def weights_of_positives(inputs: Inputs) -> Tensor:
    """What the rows weigh in a loss of positives alone: a row of label 0 nothing. float32 [B]."""
    return inputs.labels if inputs.weights is None else inputs.labels * inputs.weights


def loss_of(kind: Literal["bce", "bpr", "softmax"], outputs: Mapping[str, Tensor], inputs: Inputs, item: str) -> Tensor:
    """The sum over the rows, [].

    Args:
        kind: bce: of each row's label; the others: of positive rows beside their negatives.
        outputs: `logits` [B]; `negatives` [B, n], the scores of the batch's negatives.
        item: the feature that negatives are drawn of; those that are the row's own are left out of a softmax.
    """
    logits = outputs["logits"]
    if kind == "bce":
        return binary_cross_entropy(logits, inputs.labels, inputs.weights)
    weights = weights_of_positives(inputs)
    if kind == "bpr":
        return bpr(logits, outputs["negatives"], weights)
    own = inputs.ids(item)
    assert isinstance(own, Tensor)
    return sampled_softmax(logits, outputs["negatives"], weights, hits=inputs.negatives == own.unsqueeze(1))


def cardinality_of(features: InputFeatures, name: str) -> int:
    """Codes of a feature whose whole table a model looks at.

    Raises:
        UserError: there is no such feature of one code a row.
    """
    found = features.cardinality.get(name)
    if found is None:
        raise UserError(
            f"the model looks at every value of feature '{name}': the dataset has no such feature with a vocabulary "
            f"(categorify)"
        )
    check_feature(features, "model.args", name, is_list=False)
    return found
