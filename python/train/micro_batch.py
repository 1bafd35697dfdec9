"""A rank's rows of a step as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.dataset.loader.batch import Batch
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.models.categorical import CategoricalBatch
from headrace.train.setup.sample_weight import checked_weights


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some of this rank's rows of a step: continuous float32 [B, C], categorical features, labels float32 [B].

    weights: float32 [B], what each row's loss is multiplied by; None: 1.
    """

    continuous: Tensor
    categorical: CategoricalBatch
    labels: Tensor
    weights: Tensor | None = None

    @staticmethod
    def of(batch: Batch, weight: str | None = None) -> MicroBatch:
        """All rows of a batch, in its memory, with the weights that a carried column holds.

        Raises:
            UserError: a weight is no number of at least 0.
        """
        lists = [JaggedTensor(*map(torch.from_numpy, (x.values, x.offsets))) for x in batch.lists.values()]
        return MicroBatch(
            torch.from_numpy(batch.continuous),
            CategoricalBatch(torch.from_numpy(batch.codes), lists),
            torch.from_numpy(batch.labels),
            None if weight is None else torch.from_numpy(checked_weights(batch.carried[weight], weight)),
        )

    def rows(self, start: int, end: int) -> MicroBatch:
        """Consecutive rows: views."""
        weights = None if self.weights is None else self.weights[start:end]
        return MicroBatch(
            self.continuous[start:end], self.categorical.rows(start, end), self.labels[start:end], weights
        )

    def pin_memory(self) -> MicroBatch:
        """In pinned memory."""
        return MicroBatch(
            self.continuous.pin_memory(),
            self.categorical.pin_memory(),
            self.labels.pin_memory(),
            None if self.weights is None else self.weights.pin_memory(),
        )
