"""A rank's rows of a step as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.dataset.loader.batch import Batch
from headrace.embeddings.jagged import JaggedTensor
from headrace.models.categorical import CategoricalBatch
from headrace.train.setup.list_column import ListColumn
from headrace.train.setup.sample_weight import SampleWeights
from headrace.train.setup.task_labels import TaskLabels


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some of this rank's rows of a step: continuous float32 [B, C], categorical features, labels float32 [B].

    weights: float32 [B], what each row's loss is multiplied by; None: 1. targets: by task but the first, float32 [B],
    NaN where a row is none of the task's. lists: which list each row is of, int64 [B]; None: nothing asks for it.
    """

    continuous: Tensor
    categorical: CategoricalBatch
    labels: Tensor
    weights: Tensor | None = None
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    lists: Tensor | None = None

    @staticmethod
    def of(
        batch: Batch,
        weights: SampleWeights | None = None,
        labels: TaskLabels | None = None,
        lists: ListColumn | None = None,
    ) -> MicroBatch:
        """All rows of a batch, in its memory, with their weights, the tasks' labels, lists.

        Raises:
            UserError: a weight is no number of at least 0; a label is none.
        """
        weighted = None if weights is None else weights.of(batch.carried)
        jagged = [JaggedTensor(*map(torch.from_numpy, (x.values, x.offsets))) for x in batch.lists.values()]
        return MicroBatch(
            torch.from_numpy(batch.continuous),
            CategoricalBatch(
                torch.from_numpy(batch.codes),
                jagged,
                None if batch.negatives is None else torch.from_numpy(batch.negatives),
            ),
            torch.from_numpy(batch.labels),
            None if weighted is None else torch.from_numpy(weighted),
            {
                task: torch.from_numpy(target)
                for task, target in (labels.of(batch.labels, batch.carried) if labels is not None else {}).items()
            },
            None if lists is None else torch.from_numpy(lists.of(batch.carried)),
        )

    def rows(self, start: int, end: int) -> MicroBatch:
        """Consecutive rows: views."""
        weights = None if self.weights is None else self.weights[start:end]
        return MicroBatch(
            self.continuous[start:end],
            self.categorical.rows(start, end),
            self.labels[start:end],
            weights,
            {task: x[start:end] for task, x in self.targets.items()},
            None if self.lists is None else self.lists[start:end],
        )

    def pin_memory(self) -> MicroBatch:
        """In pinned memory."""
        return MicroBatch(
            self.continuous.pin_memory(),
            self.categorical.pin_memory(),
            self.labels.pin_memory(),
            None if self.weights is None else self.weights.pin_memory(),
            {task: x.pin_memory() for task, x in self.targets.items()},
            None if self.lists is None else self.lists.pin_memory(),
        )
