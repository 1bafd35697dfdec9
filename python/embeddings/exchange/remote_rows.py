"""Rows of other ranks on their way through memory that the ranks share, read where their owners wrote them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.comm.base import ReceivedMessage
from headrace.embeddings.kernels import cpu
from headrace.embeddings.kernels.duplicates import gather


class RemoteRows:
    """The vectors that a rank asked for, on their way through shared memory. Its own are read where they are."""

    def __init__(
        self,
        receive: Callable[[], ReceivedMessage],
        matrix: Tensor,
        local_rows: Tensor | None,
        counts: Sequence[int],
        rank: int,
    ) -> None:
        """See the class.

        Args:
            receive: waits for the other ranks' vectors.
            matrix: where this rank's own are, float32 [rows, D].
            local_rows: which of its rows they are; None: all.
            counts: vectors from each rank, [W].
            rank: this one.
        """
        self._receive_message, self.counts, self._rank = receive, list(counts), rank
        self._matrix, self._local_rows = matrix, local_rows

    def copy_local(self) -> None:
        """Copy this rank's rows, as they are now."""
        if self._local_rows is not None:
            self._matrix, self._local_rows = gather(self._matrix, self._local_rows), None

    def __call__(self) -> list[Tensor]:
        """All vectors in order of their owners: one matrix [U, D]."""
        received = self._receive_message()
        self.copy_local()
        out = torch.cat([self._matrix if p is None else p for p in received.parts])
        received.release()
        return [out]

    def pointers(self) -> tuple[Tensor, ReceivedMessage]:
        """The vectors' addresses in order of their owners, int64 [U]; what those of other ranks belong to."""
        received = self._receive_message()
        return row_pointers(
            [(self._matrix, self._local_rows) if p is None else (p, None) for p in received.parts]
        ), received


def row_pointers(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The addresses of matrices' rows, of all where none are named: int64, one matrix after the other."""
    counts = [matrix.shape[0] if rows is None else rows.numel() for matrix, rows in parts]
    out = torch.empty(sum(counts), dtype=torch.int64)
    for (matrix, rows), out_part in zip(parts, torch.split(out, counts), strict=True):
        cpu.row_pointers(matrix, rows, out_part)
    return out
