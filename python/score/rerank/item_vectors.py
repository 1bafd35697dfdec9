"""Vectors of items by the model that ranks, asked for in its task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.jagged import JaggedArray
from headrace.models.predictor import Predictor
from headrace.score.rank.item_features import ItemFeatures
from headrace.score.rank.loaded import loaded_model
from headrace.score.rank.pair_features import Columns, gather
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace


@dataclass(frozen=True)
class ModelItemVectors:
    """Picklable; the model is the one that the worker has loaded to rank, and items' features are mapped."""

    model: Location
    threads: int
    output: str | None
    maps: HostPlace | None
    item_features: ItemFeatures
    #: See TaskInputs.
    gpu: bool = False
    joined: frozenset[str] = frozenset()

    def __call__(self, item_rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [n, D] of rows [n].

        Raises:
            UserError: the model is in no retrieval form.
        """
        predictor, _ = loaded_model(self.model, self.threads, self.output, self.maps, self.gpu, self.joined)
        columns = gather({}, self.item_features.open(), item_rows, item_rows)
        return _vectors(predictor, columns, len(item_rows))


def _vectors(predictor: Predictor, columns: Columns, n: int) -> NDArray[np.float32]:
    of = getattr(predictor, "vectors", None)
    if of is None:
        raise UserError(
            f"score.rerank.diversity.by is 'vectors', and a model of kind '{predictor.kind}' has none: name columns of "
            f"score.item"
        )
    for f in predictor.schema.features:
        if f.name not in columns:  # the user's: an item's vector does not look at them
            nothing = np.zeros(n, f.dtype)
            columns[f.name] = JaggedArray(np.zeros(n + 1, np.int64), nothing[:0]) if f.is_list else nothing
    found: NDArray[np.float32] = of(columns, "item")
    return found
