"""Forward and backward pass of a part of a step: as torch runs them, or with the dense part as one CUDA graph.

A graph launches all kernels of the dense part at once, with the memory and the shapes that it was recorded with. So
what goes in is copied into that memory, and a part of other shapes (the last of an uneven cut) is run as torch does.
Lookups, whose shapes differ each time, stay outside: their gradient comes out of the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from headrace.models.dlrm import DLRM, Begun
from headrace.train.loop.prefetch import Part

log = logging.getLogger("headrace.train")

#: Records what a function does, which runs some times meanwhile; gives what does it again.
Record = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True)
class Pass:
    """A forward pass that was made: the part's share of the step's mean loss, [], and what makes the backward pass."""

    loss: Tensor
    backward: Callable[[], None]


class Passes(Protocol):
    """What makes passes."""

    def __call__(self, part: Part, begun: Begun) -> Pass:
        """Collective: lookups."""


class Eager:
    """As torch runs it. `batch_size`: rows of a step over all ranks."""

    def __init__(self, model: DLRM, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size

    def __call__(self, part: Part, begun: Begun) -> Pass:
        loss = self.loss(self._model(part.continuous, begun), part.labels)
        return Pass(loss.detach(), lambda: torch.autograd.backward(loss))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of rows of a step."""
        return binary_cross_entropy_with_logits(logits, labels, reduction="sum") / self._batch_size


class Graphed:
    """The dense part as a graph, recorded with the shapes of the first part, before any gradient is there.

    Where it cannot be, or a part has other shapes, the log says why, once for each reason, and `Eager` makes the pass.

    Args:
        model: on a GPU.
        batch_size: rows of a step over all ranks.
        record: the recorder.
    """

    def __init__(self, model: DLRM, batch_size: int, record: Record | None = None) -> None:
        self._model, self._eager = model, Eager(model, batch_size)
        self._record = record or record_cuda
        self._replay: Callable[[], None] | None = None
        self._said: set[str] = set()
        self._never = ""
        if model.config.dropout:
            self._never = "model.dropout draws anew in each step"
        elif not model.features:
            self._never = "the model has no categorical features"

    def __call__(self, part: Part, begun: Begun) -> Pass:
        if self._replay is None and not self._never:
            self._begin(part)
        reason = self._never or self._misfit(part)
        if reason or self._replay is None:
            if reason not in self._said:
                self._said.add(reason)
                log.warning("train.cuda_graphs: the dense part runs without a graph: %s", reason)
            return self._eager(part, begun)
        begun.planned.in_place = False  # the graph reads them in memory of its own
        begun.start()
        vectors = self._model.vectors(begun)
        assert isinstance(vectors, Tensor)
        with torch.no_grad():
            self._continuous.copy_(part.continuous)
            self._labels.copy_(part.labels)
            self._vectors.copy_(vectors)
        self._replay()
        return Pass(self._loss, lambda: torch.autograd.backward(vectors, self._vectors.grad))

    def _misfit(self, part: Part) -> str:
        rows, recorded = len(part.labels), len(self._labels)
        return "" if rows == recorded else f"a part of {rows} rows, recorded were {recorded}"

    def _begin(self, part: Part) -> None:
        device = self._model.device
        self._continuous = torch.zeros(part.continuous.shape, device=device)
        self._labels = torch.zeros(part.labels.shape, device=device)
        shape = len(part.labels), self._model.features, self._model.config.embedding_dim
        self._vectors = torch.zeros(shape, device=device, requires_grad=True)
        parameters = self._model.dense_parameters()
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        try:
            self._replay = self._record(self._dense_part)
        except RuntimeError as e:
            self._never = str(e).splitlines()[0]
        for p in parameters:  # of what ran while it was recorded
            assert p.grad is not None
            p.grad.zero_()

    def _dense_part(self) -> None:
        # Not in the recorded memory at first, so that each run writes it anew; the parameters' are, and are added to.
        self._vectors.grad = None
        loss = self._eager.loss(self._model.dense(self._continuous, self._vectors), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss = loss.detach()


def record_cuda(work: Callable[[], None]) -> Callable[[], None]:
    """Record a CUDA graph: three runs on a stream of their own first, in which libraries choose and allocate.

    Other threads may use the device meanwhile: batches are on their way (headrace.train.loop.prefetch).
    """
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
