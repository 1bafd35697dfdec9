"""A rank's rows of a step as tensors, and their way to the device of the dense part.

On a GPU a batch goes through pinned memory, which the device reads by itself, on a stream of its own: it is sent while
the step before computes, and it alone is waited for. Codes are pinned too; the lookup brings them to the device.
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
    def from_batch(
        batch: Batch,
        weights: SampleWeights | None = None,
        labels: TaskLabels | None = None,
        lists: ListColumn | None = None,
    ) -> MicroBatch:
        """Make tensors of all rows of a batch, in its memory, with their weights, the tasks' labels, lists.

        Raises:
            UserError: a weight is no number of at least 0; a label is none.
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
        """Begin to copy."""

    def receive(self, sent: Any) -> MicroBatch:
        """Return the batch of `send`, for use by what is queued on the device from now on."""


class CudaCopy:
    """A CUDA stream beside the one that computes; codes stay on the host, pinned, for the lookup to bring.

    torch's allocators of pinned and of device memory know from their copies and from `record_stream` when a block is no
    longer in use, and give it out again; so nothing here waits on the host.
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
        computing.wait_event(copied)  # not for the stream: the next batch is on it already
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
        batches: what the loader gives. On a GPU it is asked one batch ahead.
        device: where the dense part is. On the CPU tensors share the batches' memory.
        copy: how they come there; None: as the device needs.
        weights: of the rows; None: they have none.
        labels: of the tasks; None: there is the dataset's label alone.
        lists: which rows are a list; None: nothing asks for it.

    Raises:
        UserError: a weight is no number of at least 0; a label is none.
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
