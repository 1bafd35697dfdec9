"""The least that looking up and learning rows costs a step: each row is read once, then read and written once.

In place of the embeddings of bench.train_ranks' floor: ids are known beforehand and sorted, nothing is exchanged, no
vector reaches the dense part and no gradient comes from it. What is left is memory: forward, a rank reads the rows that
the ranks ask it for (each rank's distinct ones) and writes them side by side; in the step it reads a gradient for each
row that was touched, and reads and writes the row and its state of row-wise Adagrad. Tables are dealt by rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.peers.torchrec_step import TrainingStep, draw_ids
from headrace.dataset.batches import Batch
from headrace.embeddings.addressing import CodeBatch
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.kernels import cpu
from headrace.embeddings.storage import empty_table
from headrace.embeddings.update_rules import fused_step


class NoMessages:
    """Prepared lookup of a constant, which sends no messages."""

    zero_copy = False

    def __init__(self, samples: int, batch: int) -> None:
        self.samples, self.batch = samples, batch

    def start(self) -> None: ...

    def prefetch(self) -> None: ...

    def drop(self) -> None: ...


class Constant(nn.Module):
    """Embeddings of nothing: the same vectors for every batch."""

    dynamic = None

    def __init__(self, like: Any, samples: int, batches: list[Batch]) -> None:
        super().__init__()
        self.plan = like.plan
        width = len(like.plan.lookups)
        self._vectors = torch.randn(samples, width, like.plan.tables[0].dim) * 0.01
        self._numbers = {b.codes.ctypes.data: number for number, b in enumerate(batches)}

    def prepare(
        self, codes: CodeBatch, weights: None = None, raw: object = (), *, zero_copy: bool = False
    ) -> NoMessages:
        if isinstance(codes, Tensor):
            return NoMessages(codes.shape[0], self._numbers[codes.data_ptr()])
        first = codes[0]
        samples = first.offsets.numel() - 1 if isinstance(first, JaggedTensor) else len(first)
        return NoMessages(samples, 0)  # which batch it is only `Touched` wants to know, whose features have one id

    def forward(self, prepared: NoMessages) -> Tensor:
        return self._vectors[: prepared.samples]

    def step_all(self, lr: float | None = None) -> None: ...


class Touched(Constant):
    """The same vectors, beside which the rows of the batch are read and changed."""

    def __init__(self, like: Any, step: TrainingStep, rank: int, batches: list[Batch]) -> None:
        super().__init__(like, step.batch, batches)
        #: By batch: the rows that ranks ask for here, and distinct ones.
        self._requested: list[tuple[Tensor, Tensor]] = []
        share = -(-max(step.rows) // step.world)
        for number in range(step.batches):
            requested = [_own_rows(draw_ids(step, r, number), share, step.world, rank) for r in range(step.world)]
            self._requested.append((torch.cat(requested), torch.cat(requested).unique()))
        self._table = empty_table(share * len(step.rows), step.dim).uniform_(-0.1, 0.1)
        self._state = empty_table(share * len(step.rows), 1).zero_()
        self._gradient = torch.randn(max(d.numel() for _, d in self._requested), step.dim) * 1e-6
        self._now = 0

    def forward(self, prepared: NoMessages) -> Tensor:
        self._now = prepared.batch
        rows, _ = self._requested[self._now]
        cpu.pool_sum(self._table, rows, rows.numel())
        return super().forward(prepared)

    def step_all(self, lr: float | None = None) -> None:
        _, rows = self._requested[self._now]
        each = torch.arange(rows.numel())
        rowwise = fused_step("rowwise_adagrad", self._table)
        assert rowwise is not None
        rowwise(self._table, [self._state], rows, each, each, rows.numel(), self._gradient, lr=1e-6, decay=0.0, step=1)


def _own_rows(ids: Any, share: int, world: int, rank: int) -> Tensor:
    """Return distinct rows of a rank's matrix that ids [B, tables, ids] ask for: int64, ascending."""
    codes = np.asarray(ids).reshape(len(ids), ids.shape[1], -1)
    rows = codes // world + (np.arange(codes.shape[1]) * share)[None, :, None]
    return torch.from_numpy(np.unique(rows[codes % world == rank]))
