"""What a dataset says of each item beside its code: one row for each code, of the features that are the item's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from headrace.embeddings.input.jagged import JaggedTensor
from headrace.models.categorical import CategoricalBatch
from headrace.schema import DatasetSchema, Kind


@dataclass(frozen=True)
class ItemFeatures:
    """Features of items, by code: continuous ones float32 [cardinality, length], categorical ones int64 likewise.

    A list has its padded length, 0 behind its end. Zeros stand for what is not known of an item.
    """

    item: str
    columns: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    def rows(self, schema: DatasetSchema, codes: npt.NDArray[np.int64]) -> tuple[torch.Tensor, CategoricalBatch]:
        """The items of codes [n] as rows of a batch, whose other features are 0: continuous [n, C], categorical."""
        n = len(codes)

        def of(name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
            if name == self.item:
                return codes[:, None]
            if name in self.columns:
                return self.columns[name][codes]
            return np.zeros((n, length), dtype)

        continuous = [of(f.name, f.length, np.float32) for f in schema.of(Kind.CONTINUOUS)]
        scalars, lists = [], []
        for f in schema.of(Kind.CATEGORICAL):
            values = torch.from_numpy(of(f.name, f.length, np.int64))
            if f.is_list:
                lists.append(JaggedTensor.of_padded(values, 0))
            else:
                scalars.append(values)
        return (
            torch.from_numpy(np.concatenate(continuous, axis=1)) if continuous else torch.zeros(n, 0),
            CategoricalBatch(torch.cat(scalars, dim=1) if scalars else torch.zeros(n, 0, dtype=torch.int64), lists),
        )
