"""Batches as tensors where the dense part computes.

On a GPU a batch goes through pinned memory, which the device reads by itself, on a stream of its own: it is sent while
the step before computes, and it alone is waited for. Codes are pinned too; the lookup brings them to the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from headrace.dataset.loader.batch import Batch
from headrace.train.micro_batch import MicroBatch
from headrace.train.setup.list_column import ListColumn
from headrace.train.setup.sample_weight import SampleWeights
from headrace.train.setup.task_labels import TaskLabels


class DeviceCopy(Protocol):
    """How batches come to a device."""

    def send(self, batch: MicroBatch) -> Any:
        """Begin to copy."""

    def receive(self, sent: Any) -> MicroBatch:
        """What `send` began, for use by what is queued on the device from now on."""


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
    """The batches, in order.

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
    tensors = (MicroBatch.of(batch, weights, labels, lists) for batch in batches)
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
