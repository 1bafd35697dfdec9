"""Forward and backward pass of a micro-batch, as torch runs them or as one CUDA graph.

A graph launches all kernels of the dense part at once, with the memory and the shapes that it was captured with. So
what goes in is copied into that memory, and a micro-batch of other shapes (the last of an uneven cut) is run as torch
does. Lookups, whose shapes differ each time, stay outside: their gradient comes out of the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.models.inputs import Inputs
from headrace.models.sharded_model import PendingLookups, ShardedModel
from headrace.train.micro_batch import MicroBatch


@dataclass(frozen=True)
class Forward:
    """A forward pass that was made: the micro-batch's share of the step's mean loss, [], and what goes backward."""

    loss: Tensor
    backward: Callable[[], None]


class ForwardBackward(Protocol):
    """A function that makes forward passes."""

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        """Make a forward pass. Collective: the lookups end."""


class EagerForward:
    """Forward passes as torch runs them. `batch_size`: rows of a step over all ranks."""

    def __init__(self, model: ShardedModel, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        row_values = batch.labels, batch.weights, batch.targets, batch.lists
        inputs = self._model.inputs_of(batch.continuous, lookups, *row_values)
        loss = self.loss(inputs)
        return Forward(loss.detach(), lambda: torch.autograd.backward(loss))

    def loss(self, inputs: Inputs) -> Tensor:
        """Sum over the micro-batch's rows / rows of the step, []."""
        return self._model.loss(self._model.outputs(inputs), inputs) / self._batch_size


log = logging.getLogger("headrace.train")

#: Captures what a function does, which runs some times meanwhile; returns what replays it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class GraphedForward:
    """The dense part as a graph, captured with the shapes of the first micro-batch, before any gradient is there.

    Where it cannot be, or a micro-batch has other shapes, the log says why, once for each reason, and `EagerForward`
    makes the pass.

    Args:
        model: on a GPU.
        batch_size: rows of a step over all ranks.
        capture: captures and returns the replay; default `capture_cuda`.
        accumulate: micro-batches of a step.
    """

    def __init__(
        self, model: ShardedModel, batch_size: int, capture: Capture | None = None, *, accumulate: int = 1
    ) -> None:
        self._model, self._eager = model, EagerForward(model, batch_size)
        self._capture, self._accumulates = capture or capture_cuda, accumulate > 1
        self._replay: Callable[[], None] | None = None
        self._reported: set[str] = set()
        self._unsupported = ""
        if any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
            self._unsupported = "dropout draws anew in each step"
        elif getattr(model.network, "lookups", None) is not None:
            self._unsupported = "the model has lookups of its own, whose shapes differ from step to step"
        elif not model.features:
            self._unsupported = "the model has no categorical features"

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        if batch.weights is not None:
            self._unsupported = self._unsupported or "train.sample_weight is no part of it"
        if batch.lists is not None:
            self._unsupported = self._unsupported or "model.loss.group is no part of it"
        if batch.targets:
            self._unsupported = self._unsupported or "train.tasks is no part of it"
        if self._replay is None and not self._unsupported:
            self._start(batch)
        reason = self._unsupported or self._shape_mismatch(batch)
        if reason or self._replay is None:
            if reason not in self._reported:
                self._reported.add(reason)
                log.warning("train.cuda_graphs: the dense part runs without a graph: %s", reason)
            return self._eager(batch, lookups)
        lookups.planned.zero_copy = False  # the graph reads them in memory of its own
        lookups.start()
        vectors = self._model.vectors(lookups)
        assert isinstance(vectors, Tensor)
        with torch.no_grad():
            self._continuous.copy_(batch.continuous)
            self._labels.copy_(batch.labels)
            self._vectors.copy_(vectors)
        self._replay()

        def backward() -> None:
            grad = self._vectors.grad
            assert grad is not None
            self._model.add_gradient_sum(grad)
            # Tables keep it as it is until the step, which may come after further replays.
            torch.autograd.backward(vectors, grad.clone() if self._accumulates else grad)

        return Forward(self._loss, backward)

    def _shape_mismatch(self, batch: MicroBatch) -> str:
        rows, captured = len(batch.labels), len(self._labels)
        return "" if rows == captured else f"a micro-batch of {rows} rows, captured were {captured}"

    def _start(self, batch: MicroBatch) -> None:
        device = self._model.device
        self._continuous = torch.zeros(batch.continuous.shape, device=device)
        self._labels = torch.zeros(batch.labels.shape, device=device)
        shape = len(batch.labels), self._model.features, self._model.config.embedding_dim
        self._vectors = torch.zeros(shape, device=device, requires_grad=True)
        parameters = self._model.dense_parameters()
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        try:
            self._replay = self._capture(self._dense_part)
        except RuntimeError as e:
            self._unsupported = str(e).splitlines()[0]
        for p in parameters:  # of what ran while it was captured
            assert p.grad is not None
            p.grad.zero_()

    def _dense_part(self) -> None:
        # Not in the captured memory at first, so that each run writes it anew; the parameters' are, and are added to.
        self._vectors.grad = None
        inputs = Inputs(
            self._model.inputs,
            self._continuous,
            self._vectors,
            self._labels,
            ids=_NotCaptured(),
            all_gather=_not_captured,
        )
        loss = self._eager.loss(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss = loss.detach()


class _NotCaptured(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"train.cuda_graphs: the model asks for the ids of '{name}', which no graph has: set it to false"
        )

    def __contains__(self, name: object) -> bool:
        return True


def _not_captured(x: Tensor) -> Tensor:
    raise UserError("train.cuda_graphs: the model gathers over the ranks, which no graph does: set it to false")


def capture_cuda(work: Callable[[], None]) -> Callable[[], None]:
    """Capture a CUDA graph: three warm-up runs on a stream of their own first, in which libraries choose and allocate.

    Other threads may use the device meanwhile: batches are on their way (headrace.train.micro_batch).
    """
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
