"""Batches on their way to the device: which is sent when, and that they arrive as they were."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.dataset.loader.batch import Batch
from headrace.train.loop.prefetch import prefetch_to_device


def batches(n: int, log: list[str]) -> Iterator[Batch]:
    for i in range(n):
        log.append(f"load {i}")
        yield Batch(np.full((5, 3), i, np.float32, "F"), np.full((5, 2), i, np.int64, "F"), np.full(5, i, np.float32))


class Slow:
    """A device that a tensor reaches only when it is received."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._waiting: dict[int, Tensor] = {}

    def send(self, x: Tensor) -> Tensor:
        there = torch.full_like(x, -1)
        self._waiting[id(there)] = x
        self._log.append(f"send {int(x.flatten()[0])}")
        return there

    def receive(self, x: Tensor) -> Tensor:
        return x.copy_(self._waiting.pop(id(x)))


def test_on_the_cpu_tensors_are_the_batches() -> None:
    given = list(batches(3, []))
    for b, part in zip(given, prefetch_to_device(given, torch.device("cpu")), strict=True):
        assert part.continuous.data_ptr() == b.continuous.ctypes.data
        assert part.codes.data_ptr() == b.codes.ctypes.data
        assert part.labels.data_ptr() == b.labels.ctypes.data
        assert part.rows(1, 3).codes.tolist() == b.codes[1:3].tolist()


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_batch_is_under_way_while_the_one_before_is_used(n: int) -> None:
    log: list[str] = []
    for i, part in enumerate(prefetch_to_device(batches(n, log), torch.device("cpu"), Slow(log))):
        log.append(f"use {i}")
        assert part.continuous.tolist() == [[i] * 3] * 5
        assert part.codes.tolist() == [[i] * 2] * 5
        assert part.labels.tolist() == [i] * 5
    assert [w for w in log if w.startswith("use")] == [f"use {i}" for i in range(n)]
    for i in range(n - 1):
        assert log.index(f"send {i + 1}") < log.index(f"use {i}") < log.index(f"use {i + 1}")
        if i + 2 < n:  # no more than one ahead
            assert log.index(f"use {i}") < log.index(f"load {i + 2}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_what_was_sent() -> None:
    given = list(batches(50, []))
    for b, part in zip(given, prefetch_to_device(given, torch.device("cuda")), strict=True):
        assert part.continuous.is_cuda
        assert not part.codes.is_cuda
        np.testing.assert_array_equal(part.continuous.cpu().numpy(), b.continuous)
        np.testing.assert_array_equal(part.labels.cpu().numpy(), b.labels)
