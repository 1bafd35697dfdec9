"""Rows of the next lookup that travel before the step of this one: those that the step does not touch.

An owner knows which of its rows open lookups touch, for it was asked for them, so the answer is exact: what it sends
early no gradient can change, the rest follows after the step. With each row goes one bit: sent now, or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.embeddings.exchange.remote_rows import RemoteRows
from headrace.embeddings.exchange.row_exchange import RowExchange, RowRequest
from headrace.embeddings.kernels.duplicates import gather


class RowPrefetch:
    """The early part of one lookup, begun by one all-to-all. A fused tables, W ranks."""

    def __init__(
        self,
        exchange: RowExchange,
        collective: Collective,
        request: RowRequest,
        weights: Sequence[Tensor],
        touched: Sequence[Sequence[Tensor]],
    ) -> None:
        """See the class.

        Args:
            exchange: of the lookup.
            collective: the ranks.
            request: what is looked up.
            weights: this rank's matrices.
            touched: by fused table, rows that the next step may change, each ascending.
        """
        self._exchange, self._request = exchange, request
        self._weights = weights
        #: Fused tables whose rows travel; sums of bags, the fused tables after them, come late.
        self._by_row = sum(requested is None for requested in request.requested)
        rows = request.rows[: self._by_row]
        #: By fused table, of the rows that were asked for here: not sent early.
        self._late = [_among(r, of_fused) for r, of_fused in zip(rows, touched, strict=False)]
        early = [
            exchange.to_comm_dtype(gather(w, r[~late])) for w, r, late in zip(weights, rows, self._late, strict=False)
        ]
        marks = [torch.split(late, counts) for late, counts in zip(self._late, request.received, strict=False)]
        numbers = [
            torch.split(_bytes(r), [int((~m).sum()) for m in of_fused])
            for r, of_fused in zip(early, marks, strict=True)
        ]
        message, sizes = [torch.empty(0, dtype=torch.uint8)], []
        for rank in range(collective.world.size):
            parts = [torch.from_numpy(np.packbits(of_fused[rank].numpy())) for of_fused in marks]
            parts += [of_fused[rank].reshape(-1) for of_fused in numbers]
            message += parts
            sizes.append(sum(p.numel() for p in parts))
        self._wait = collective.start_all_to_all(torch.cat(message), sizes)

    def start_rest(self, answers: Sequence[Tensor] = ()) -> Callable[[], list[Tensor]]:
        """Begin to fetch the other rows; what waits for all of them gives them as `RowExchange.start_rows` does."""
        request, by_row = self._request, self._by_row
        late, early = self._read()
        sent = [_count(mask, counts) for mask, counts in zip(late, request.sent, strict=False)]
        rows = [r[mask] for r, mask in zip(request.rows, self._late, strict=False)]
        received = [_count(mask, counts) for mask, counts in zip(self._late, request.received, strict=False)]
        rest = RowRequest(
            sent + request.sent[by_row:],
            rows + request.rows[by_row:],
            received + request.received[by_row:],
            request.requested,
        )
        wait = self._exchange.start_rows(rest, self._weights, answers)
        if isinstance(wait, RemoteRows):
            wait.copy_local()

        def whole() -> list[Tensor]:
            found = wait()
            for i, (mask, now) in enumerate(zip(late, early, strict=True)):
                out = now.new_empty(mask.numel(), now.shape[1])
                out[~mask], out[mask] = now, found[i]
                found[i] = out
            return found

        return whole

    def drop(self) -> None:
        """Receive what is on its way, for nothing."""
        self._wait()

    def _read(self) -> tuple[list[Tensor], list[Tensor]]:
        """By fused table: which of the rows that this rank wants come late, bool [U]; the others [K, D]."""
        got, counts = self._wait()
        sent = self._request.sent[: self._by_row]
        kinds = [(self._exchange.to_comm_dtype(w[:0]).dtype, w.shape[1]) for w in self._weights[: self._by_row]]
        masks: list[list[Tensor]] = [[] for _ in sent]
        rows: list[list[Tensor]] = [[] for _ in sent]
        for rank, part in enumerate(torch.split(got, counts)):
            at = 0
            for fused, of_fused in enumerate(sent):
                size = -(-of_fused[rank] // 8)
                bits = np.unpackbits(part[at : at + size].numpy(), count=of_fused[rank])
                masks[fused].append(torch.from_numpy(bits).bool())
                at += size
            for fused, (dtype, width) in enumerate(kinds):
                size = int((~masks[fused][rank]).sum()) * width * dtype.itemsize
                rows[fused].append(part[at : at + size])
                at += size
        early = [
            torch.cat(of_fused).view(dtype).view(-1, width)
            for of_fused, (dtype, width) in zip(rows, kinds, strict=True)
        ]
        return [torch.cat(m) for m in masks], early


def _among(rows: Tensor, sets: Sequence[Tensor]) -> Tensor:
    """Which rows are in one of the ascending sets: bool [len(rows)]."""
    found = torch.zeros(rows.numel(), dtype=torch.bool)
    for each in sets:
        if each.numel():
            position = torch.searchsorted(each, rows.to(each.dtype)).clamp_(max=each.numel() - 1)
            found |= each.index_select(0, position) == rows
    return found


def _bytes(rows: Tensor) -> Tensor:
    """A matrix [N, D] as bytes [N, D * size of a number]."""
    return rows.view(torch.uint8).view(rows.shape[0], rows.shape[1] * rows.element_size())


def _count(mask: Tensor, counts: Sequence[int]) -> list[int]:
    return [int(part.sum()) for part in torch.split(mask, list(counts))]
