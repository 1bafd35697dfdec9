"""A rank's rows of a step as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.dataset.loader.batch import Batch
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.models.categorical import CategoricalBatch


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some of this rank's rows of a step: continuous float32 [B, C], categorical features, labels float32 [B]."""

    continuous: Tensor
    categorical: CategoricalBatch
    labels: Tensor

    @staticmethod
    def of(batch: Batch) -> MicroBatch:
        """All rows of a batch, in its memory."""
        lists = [JaggedTensor(*map(torch.from_numpy, (x.values, x.offsets))) for x in batch.lists.values()]
        return MicroBatch(
            torch.from_numpy(batch.continuous),
            CategoricalBatch(torch.from_numpy(batch.codes), lists),
            torch.from_numpy(batch.labels),
        )

    def rows(self, start: int, end: int) -> MicroBatch:
        """Consecutive rows: views."""
        return MicroBatch(self.continuous[start:end], self.categorical.rows(start, end), self.labels[start:end])

    def pin_memory(self) -> MicroBatch:
        """In pinned memory."""
        return MicroBatch(self.continuous.pin_memory(), self.categorical.pin_memory(), self.labels.pin_memory())
