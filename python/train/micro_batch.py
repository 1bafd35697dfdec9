"""A rank's rows of a step as tensors, and their copy to the device of the dense part.

On a GPU a batch is copied from pinned memory on a separate stream while the previous step computes, and only this copy
is waited for. Codes are pinned too; the lookup copies them to the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.dataset.batches import Batch
from headrace.embeddings.jagged import JaggedTensor
from headrace.models.categorical import CategoricalBatch
from headrace.train.carried_columns import ListColumn, SampleWeights, TaskLabels


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some of this rank's rows of a step: continuous float32 [B, C], categorical features, labels float32 [B].

    Attributes:
        weights: weights of the rows' losses, float32 [B]; None: 1.
        targets: labels of each task but the first, float32 [B], NaN for rows that are not in the task.
        lists: number of each row's list, int64 [B]; None: lists are not needed.
    """

    continuous: Tensor
    categorical: CategoricalBatch
    labels: Tensor
    weights: Tensor | None = None
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    lists: Tensor | None = None

    @staticmethod
    def from_batch(
        batch: Batch,
        weights: SampleWeights | None = None,
        labels: TaskLabels | None = None,
        lists: ListColumn | None = None,
    ) -> MicroBatch:
        """Create tensors of all rows of a batch, in its memory, with weights, labels of tasks, and lists.

        Raises:
            UserError: a weight is not a number of at least 0, or a label is not valid.
        """
        weighted = None if weights is None else weights.weights(batch.carried)
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
                for task, target in (labels.targets(batch.labels, batch.carried) if labels is not None else {}).items()
            },
            None if lists is None else torch.from_numpy(lists.list_ids(batch.carried)),
        )

    def rows(self, start: int, end: int) -> MicroBatch:
        """Return consecutive rows, as views."""
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
        """Return a copy in pinned memory."""
        return MicroBatch(
            self.continuous.pin_memory(),
            self.categorical.pin_memory(),
            self.labels.pin_memory(),
            None if self.weights is None else self.weights.pin_memory(),
            {task: x.pin_memory() for task, x in self.targets.items()},
            None if self.lists is None else self.lists.pin_memory(),
        )


class DeviceCopy(Protocol):
    """Copy of batches to a device."""

    def send(self, batch: MicroBatch) -> Any:
        """Begin to copy a batch."""

    def receive(self, sent: Any) -> MicroBatch:
        """Return the batch of `send`; kernels that are queued from now on may use it."""


class CudaCopy:
    """Copy on a second CUDA stream; codes stay on the host, pinned, and the lookup copies them.

    torch's allocators know from the copies and from `record_stream` when a block can be reused, so the host does not
    wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: MicroBatch) -> tuple[MicroBatch, torch.cuda.Event]:
        pinned = batch.pin_memory()
        with torch.cuda.stream(self._stream):
            continuous = pinned.continuous.to(self._device, non_blocking=True)
            labels = pinned.labels.to(self._device, non_blocking=True)
            weights = None if pinned.weights is None else pinned.weights.to(self._device, non_blocking=True)
            targets = {task: x.to(self._device, non_blocking=True) for task, x in pinned.targets.items()}
            lists = None if pinned.lists is None else pinned.lists.to(self._device, non_blocking=True)
            sent = MicroBatch(continuous, pinned.categorical, labels, weights, targets, lists)
            return sent, self._stream.record_event()

    def receive(self, sent: tuple[MicroBatch, torch.cuda.Event]) -> MicroBatch:
        batch, copied = sent
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)  # for the event and not for the stream, which has the next batch already
        for x in (batch.continuous, batch.labels, batch.weights, batch.lists, *batch.targets.values()):
            if x is not None:
                x.record_stream(computing)
        return batch


def prefetch_to_device(
    batches: Iterable[Batch],
    device: torch.device,
    copy: DeviceCopy | None = None,
    *,
    weights: SampleWeights | None = None,
    labels: TaskLabels | None = None,
    lists: ListColumn | None = None,
) -> Iterator[MicroBatch]:
    """Yield the batches, in order.

    Args:
        batches: batches of the loader. On a GPU they are read one batch ahead.
        device: device of the dense part. On the CPU, tensors share the batches' memory.
        copy: copy to the device; None: the device's default.
        weights: weights of the rows; None: no weights.
        labels: labels of the tasks; None: only the dataset's label.
        lists: column of the lists; None: lists are not needed.

    Raises:
        UserError: a weight is not a number of at least 0, or a label is not valid.
    """
    if copy is None and device.type == "cuda":
        copy = CudaCopy(device)
    tensors = (MicroBatch.from_batch(batch, weights, labels, lists) for batch in batches)
    if copy is None:
        yield from tensors
        return
    sent = None
    for batch in tensors:
        previous, sent = sent, copy.send(batch)
        if previous is not None:
            yield copy.receive(previous)
    if sent is not None:
        yield copy.receive(sent)
