"""Batches on their way to the device: which is sent when, and that they arrive as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.compute.jagged import JaggedArray
from headrace.dataset.batches import Batch
from headrace.train.micro_batch import MicroBatch, prefetch_to_device


def batches(n: int, log: list[str]) -> Iterator[Batch]:
    for i in range(n):
        log.append(f"load {i}")
        lists = {"h": JaggedArray(np.array([0, 2, 2, 3, 3, 4]), np.full(4, i, np.int32))}
        numbers, codes = np.full((5, 3), i, np.float32, "F"), np.full((5, 2), i, np.int64, "F")
        yield Batch(numbers, codes, np.full(5, i, np.float32), {}, lists)


class Slow:
    """A device that a batch reaches only when it is received."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def send(self, batch: MicroBatch) -> MicroBatch:
        self._log.append(f"send {int(batch.labels[0])}")
        return batch

    def receive(self, sent: MicroBatch) -> MicroBatch:
        return sent


def test_on_the_cpu_tensors_are_the_batches() -> None:
    sent = list(batches(3, []))
    for b, part in zip(sent, prefetch_to_device(sent, torch.device("cpu")), strict=True):
        assert part.continuous.data_ptr() == b.continuous.ctypes.data
        assert part.categorical.codes.data_ptr() == b.codes.ctypes.data
        assert part.categorical.lists[0].values.data_ptr() == b.lists["h"].values.ctypes.data
        assert part.labels.data_ptr() == b.labels.ctypes.data
        middle = part.rows(1, 3).categorical
        assert middle.codes.tolist() == b.codes[1:3].tolist()
        assert (middle.samples, middle.lists[0].flat().values.tolist()) == (2, b.lists["h"].values[2:3].tolist())


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_batch_is_under_way_while_the_one_before_is_used(n: int) -> None:
    log: list[str] = []
    for i, part in enumerate(prefetch_to_device(batches(n, log), torch.device("cpu"), Slow(log))):
        log.append(f"use {i}")
        assert part.continuous.tolist() == [[i] * 3] * 5
        assert part.categorical.codes.tolist() == [[i] * 2] * 5
        assert part.labels.tolist() == [i] * 5
    assert [w for w in log if w.startswith("use")] == [f"use {i}" for i in range(n)]
    for i in range(n - 1):
        assert log.index(f"send {i + 1}") < log.index(f"use {i}") < log.index(f"use {i + 1}")
        if i + 2 < n:  # no more than one ahead
            assert log.index(f"use {i}") < log.index(f"load {i + 2}")


class Stream:
    """A stand-in for a CUDA stream: what is queued on it, in order."""

    current: Stream

    def __init__(self, device: object = None) -> None:
        self.queue: list[str] = []

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self.queue)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        self.queue.append("wait for " + ", ".join(event[0].queue[: event[1]]))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


def test_only_the_batch_that_is_used_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch behind it, which is sent before, is not waited for; and all of it comes from pinned memory."""
    computing, pinned = Stream(), set()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        previous, Stream.current = Stream.current, stream
        yield
        Stream.current = previous

    def pin(x: Tensor) -> Tensor:
        copy = x.clone()
        pinned.add(copy.data_ptr())
        return copy

    def to(x: Tensor, device: object, non_blocking: bool = False) -> Tensor:
        assert x.data_ptr() in pinned
        assert non_blocking
        Stream.current.queue.append(f"copy {int(x.flatten()[0])}")
        return x

    Stream.current = computing
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: computing)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: None)
    for i, batch in enumerate(prefetch_to_device(batches(3, []), torch.device("cuda"))):
        assert batch.categorical.codes.data_ptr() in pinned
        assert batch.categorical.lists[0].values.data_ptr() in pinned
        assert batch.labels.tolist() == [i] * 5
        computing.queue.append(f"use {i}")
    waits = [w for w in computing.queue if w.startswith("wait")]
    copies = ["copy 0, copy 0", "copy 0, copy 0, copy 1, copy 1", "copy 0, copy 0, copy 1, copy 1, copy 2, copy 2"]
    assert waits == [f"wait for {c}" for c in copies]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_what_was_sent() -> None:
    sent = list(batches(50, []))
    for b, part in zip(sent, prefetch_to_device(sent, torch.device("cuda")), strict=True):
        assert part.continuous.is_cuda
        assert not part.categorical.codes.is_cuda
        np.testing.assert_array_equal(part.continuous.cpu().numpy(), b.continuous)
        np.testing.assert_array_equal(part.labels.cpu().numpy(), b.labels)
