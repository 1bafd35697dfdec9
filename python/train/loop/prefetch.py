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
class Part:
    """Some of this rank's rows of a step: continuous float32 [B, C], codes int64 [B, S], labels float32 [B]."""

    continuous: Tensor
    codes: Tensor
    labels: Tensor

    def rows(self, start: int, end: int) -> Part:
        """Consecutive rows: views."""
        return Part(self.continuous[start:end], self.codes[start:end], self.labels[start:end])


class Lane(Protocol):
    """How tensors come to a device."""

    def send(self, x: Tensor) -> Tensor:
        """Begin to copy: the tensor on the device, which may not be there yet."""

    def receive(self, x: Tensor) -> Tensor:
        """What was sent, for use by what is queued on the device from now on."""


class CudaLane:
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


def feed(batches: Iterable[Batch], device: torch.device, lane: Lane | None = None) -> Iterator[Part]:
    """The batches, in order.

    Args:
        batches: what the loader gives. On a GPU it is asked one batch ahead.
        device: where the dense part is. On the CPU tensors share the batches' memory.
        lane: how they come there; None: as the device needs.
    """
    if lane is None and device.type == "cuda":
        lane = CudaLane(device)
    parts = (Part(*(torch.from_numpy(x) for x in (b.continuous, b.codes, b.labels))) for b in batches)
    if lane is None:
        yield from parts
        return
    sent: Part | None = None
    for part in parts:
        under_way = Part(lane.send(part.continuous), part.codes, lane.send(part.labels))
        if sent is not None:
            yield _received(sent, lane)
        sent = under_way
    if sent is not None:
        yield _received(sent, lane)


def _received(part: Part, lane: Lane) -> Part:
    return Part(lane.receive(part.continuous), part.codes, lane.receive(part.labels))
