"""Batches as tensors where the dense part computes.

On a GPU a batch goes through pinned memory, which the device reads by itself, on a stream of its own: it is sent while
the step before computes, and only what is not there yet is waited for. Codes are brought there by the lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.dataset.loader.batch import Batch


@dataclass(frozen=True)
class MicroBatch:
    """Some of this rank's rows of a step: continuous float32 [B, C], codes int64 [B, S], labels float32 [B]."""

    continuous: Tensor
    codes: Tensor
    labels: Tensor

    def rows(self, start: int, end: int) -> MicroBatch:
        """Consecutive rows: views."""
        return MicroBatch(self.continuous[start:end], self.codes[start:end], self.labels[start:end])


class DeviceCopy(Protocol):
    """How tensors come to a device."""

    def send(self, x: Tensor) -> Tensor:
        """Begin to copy: the tensor on the device, which may not be there yet."""

    def receive(self, x: Tensor) -> Tensor:
        """What was sent, for use by what is queued on the device from now on."""


class CudaCopy:
    """A CUDA stream beside the one that computes.

    torch's allocators of pinned and of device memory know from `pin_memory`'s copy and from `record_stream` when a
    block is no longer in use, and give it out again; so nothing here waits on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, x: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            return x.pin_memory().to(self._device, non_blocking=True)

    def receive(self, x: Tensor) -> Tensor:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        x.record_stream(computing)
        return x


def prefetch_to_device(
    batches: Iterable[Batch], device: torch.device, copy: DeviceCopy | None = None
) -> Iterator[MicroBatch]:
    """The batches, in order.

    Args:
        batches: what the loader gives. On a GPU it is asked one batch ahead.
        device: where the dense part is. On the CPU tensors share the batches' memory.
        copy: how they come there; None: as the device needs.
    """
    if copy is None and device.type == "cuda":
        copy = CudaCopy(device)
    tensors = (MicroBatch(*(torch.from_numpy(x) for x in (b.continuous, b.codes, b.labels))) for b in batches)
    if copy is None:
        yield from tensors
        return
    sent: MicroBatch | None = None
    for batch in tensors:
        copying = MicroBatch(copy.send(batch.continuous), batch.codes, copy.send(batch.labels))
        if sent is not None:
            yield _received(sent, copy)
        sent = copying
    if sent is not None:
        yield _received(sent, copy)


def _received(batch: MicroBatch, copy: DeviceCopy) -> MicroBatch:
    return MicroBatch(copy.receive(batch.continuous), batch.codes, copy.receive(batch.labels))
