"""Retrieval form of a model: vectors of users and items, over all ranks.

Such a network names the categorical feature of its items (`item`), and has

    queries(inputs) -> float32 [B, D]      of each row's user
    items(inputs) -> float32 [B, D]        of each row's item; its dot product with the query is the row's logit

If an item's vector depends only on its code, it also has `all_items(inputs) -> float32 [cardinality, D]`, by code. If
items have further features, it names them in `item_features`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headrace.comm.base import Collective
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.embeddings.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.inputs import Inputs
from headrace.models.sharded_model import ShardedModel


class RetrievalNetwork(Protocol):
    """Network in retrieval form; see the module."""

    item: str

    def queries(self, inputs: Inputs) -> Tensor: ...

    def items(self, inputs: Inputs) -> Tensor: ...


def query_vectors(model: ShardedModel, continuous: Tensor, categorical: CategoricalBatch) -> Tensor:
    """Return the vectors of the users of a batch's rows: float32 [B, D], without gradients. Collective.

    Args:
        continuous: float32 [B, C].
        categorical: the batch's categorical features.
    """
    with torch.no_grad():  # not inference_mode: its tensors cannot be sent by Horovod's thread
        return _network(model).queries(model.inputs_of(continuous, categorical)).float()


def row_item_vectors(model: ShardedModel, continuous: Tensor, categorical: CategoricalBatch) -> Tensor:
    """Return the vectors of the items of a batch's rows: float32 [B, D], without gradients. Collective."""
    with torch.no_grad():
        return _network(model).items(model.inputs_of(continuous, categorical)).float()


def item_feature(network: nn.Module, schema: DatasetSchema, purpose: str) -> Feature:
    """Return the categorical feature of a network's items.

    Args:
        purpose: what the vectors are for, for the message.

    Raises:
        UserError: the network has no retrieval form, or its item is not a feature of codes.
    """
    name = getattr(network, "item", None)
    if not isinstance(name, str) or not hasattr(network, "queries"):
        raise UserError(
            f"{purpose} is for models in retrieval form, and {type(network).__name__} is none: it has no `item`, "
            f"`queries` and `items` (docs/retrieval.md)"
        )
    feature = next((f for f in schema.of(Kind.CATEGORICAL) if f.name == name), None)
    if feature is None or feature.cardinality is None or feature.is_list:
        raise UserError(f"{purpose}: the model's item '{name}' is no categorical feature with one code a row")
    return feature


def further_item_features(network: nn.Module) -> Sequence[str]:
    """Return the features, besides the item's code, from which a network computes an item's vector."""
    names: Sequence[str] = getattr(network, "item_features", ())
    return [] if hasattr(network, "all_items") else [f for f in names if f != getattr(network, "item", None)]


def item_vectors(
    model: ShardedModel, collective: Collective, features: ItemFeaturesByCode, *, rows: int = 4_096
) -> Tensor:
    """Return the vectors of all codes of the item's vocabulary: float32 [cardinality, D], on each rank. Collective.

    Each rank computes its share, with the network in evaluation mode and without gradients.

    Args:
        features: known features of the items, by code.
        rows: number of items in a batch.
    """
    cardinality = item_feature(model.network, model.schema, "a ranking of all items").cardinality
    assert cardinality is not None
    with torch.no_grad():
        all_items: Callable[[Inputs], Tensor] | None = getattr(model.network, "all_items", None)
        if all_items is not None:
            return all_items(model.inputs_of(*features.rows(model.schema, np.zeros(0, np.int64)))).float()
        rank, size = collective.world.rank, collective.world.size
        share = -(-cardinality // size)
        first, last = min(rank * share, cardinality), min((rank + 1) * share, cardinality)
        parts = []
        for begin in range(0, share, rows):
            codes = np.arange(min(first + begin, last), min(first + min(begin + rows, share), last))
            parts.append(row_item_vectors(model, *features.rows(model.schema, codes)))
        # Gather on the host, as all messages outside a step do.
        return collective.all_gather(torch.cat(parts).cpu()).to(model.device)


def _network(model: ShardedModel) -> RetrievalNetwork:
    return cast(RetrievalNetwork, model.network)


@dataclass(frozen=True)
class ItemFeaturesByCode:
    """Features of items, by code: [cardinality, length] each, continuous ones float32, categorical ones int64.

    Lists are padded with 0 at their end. Zeros stand for unknown features of an item.
    """

    item: str
    columns: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    def rows(self, schema: DatasetSchema, codes: npt.NDArray[np.int64]) -> tuple[torch.Tensor, CategoricalBatch]:
        """Return the items of codes [n] as rows of a batch, whose other features are 0: continuous [n, C],
        categorical.
        """
        n = len(codes)

        def column_values(name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
            if name == self.item:
                return codes[:, None]
            if name in self.columns:
                return self.columns[name][codes]
            return np.zeros((n, length), dtype)

        continuous = [column_values(f.name, f.length, np.float32) for f in schema.of(Kind.CONTINUOUS)]
        scalars, lists = [], []
        for f in schema.of(Kind.CATEGORICAL):
            values = torch.from_numpy(column_values(f.name, f.length, np.int64))
            if f.is_list:
                lists.append(JaggedTensor.of_padded(values, 0))
            else:
                scalars.append(values)
        return (
            torch.from_numpy(np.concatenate(continuous, axis=1)) if continuous else torch.zeros(n, 0),
            CategoricalBatch(torch.cat(scalars, dim=1) if scalars else torch.zeros(n, 0, dtype=torch.int64), lists),
        )
