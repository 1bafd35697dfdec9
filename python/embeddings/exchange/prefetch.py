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
from headrace.embeddings.exchange.remote_rows import Posted
from headrace.embeddings.exchange.row_exchange import Mail, Request
from headrace.embeddings.kernels.duplicates import gather


class Ahead:
    """The early part of one lookup, begun by one all-to-all. A arenas, W ranks."""

    def __init__(
        self,
        mail: Mail,
        collective: Collective,
        request: Request,
        weights: Sequence[Tensor],
        touched: Sequence[Sequence[Tensor]],
    ) -> None:
        """See the class.

        Args:
            mail: of the lookup.
            collective: the ranks.
            request: what is looked up.
            weights: this rank's matrices.
            touched: by arena, rows that the next step may change, each ascending.
        """
        self._mail, self._request = mail, request
        self._weights = weights
        #: Arenas whose rows travel; sums of bags, the arenas after them, come late.
        self._by_row = sum(asked is None for asked in request.asked)
        rows = request.rows[: self._by_row]
        #: By arena, of the rows that were asked for here: not sent early.
        self._late = [_among(r, of_arena) for r, of_arena in zip(rows, touched, strict=False)]
        early = [mail.on_wire(gather(w, r[~late])) for w, r, late in zip(weights, rows, self._late, strict=False)]
        marks = [torch.split(late, counts) for late, counts in zip(self._late, request.received, strict=False)]
        numbers = [
            torch.split(_bytes(r), [int((~m).sum()) for m in of_arena])
            for r, of_arena in zip(early, marks, strict=True)
        ]
        message, sizes = [torch.empty(0, dtype=torch.uint8)], []
        for rank in range(collective.world.size):
            parts = [torch.from_numpy(np.packbits(of_arena[rank].numpy())) for of_arena in marks]
            parts += [of_arena[rank].reshape(-1) for of_arena in numbers]
            message += parts
            sizes.append(sum(p.numel() for p in parts))
        self._wait = collective.start_all_to_all(torch.cat(message), sizes)

    def start_rest(self, answers: Sequence[Tensor] = ()) -> Callable[[], list[Tensor]]:
        """Begin to fetch the other rows; what waits for all of them gives them as `Mail.start_rows` does."""
        request, by_row = self._request, self._by_row
        late, early = self._read()
        sent = [_count(mask, counts) for mask, counts in zip(late, request.sent, strict=False)]
        rows = [r[mask] for r, mask in zip(request.rows, self._late, strict=False)]
        received = [_count(mask, counts) for mask, counts in zip(self._late, request.received, strict=False)]
        rest = Request(
            sent + request.sent[by_row:],
            rows + request.rows[by_row:],
            received + request.received[by_row:],
            request.asked,
        )
        wait = self._mail.start_rows(rest, self._weights, answers)
        if isinstance(wait, Posted):
            wait.bring_own()

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
        """By arena: which of the rows that this rank wants come late, bool [U]; the others [K, D]."""
        got, counts = self._wait()
        sent = self._request.sent[: self._by_row]
        kinds = [(self._mail.on_wire(w[:0]).dtype, w.shape[1]) for w in self._weights[: self._by_row]]
        masks: list[list[Tensor]] = [[] for _ in sent]
        rows: list[list[Tensor]] = [[] for _ in sent]
        for rank, part in enumerate(torch.split(got, counts)):
            at = 0
            for arena, of_arena in enumerate(sent):
                size = -(-of_arena[rank] // 8)
                bits = np.unpackbits(part[at : at + size].numpy(), count=of_arena[rank])
                masks[arena].append(torch.from_numpy(bits).bool())
                at += size
            for arena, (dtype, width) in enumerate(kinds):
                size = int((~masks[arena][rank]).sum()) * width * dtype.itemsize
                rows[arena].append(part[at : at + size])
                at += size
        early = [
            torch.cat(of_arena).view(dtype).view(-1, width)
            for of_arena, (dtype, width) in zip(rows, kinds, strict=True)
        ]
        return [torch.cat(m) for m in masks], early


def _among(rows: Tensor, sets: Sequence[Tensor]) -> Tensor:
    """Which rows are in one of the ascending sets: bool [len(rows)]."""
    found = torch.zeros(rows.numel(), dtype=torch.bool)
    for each in sets:
        if each.numel():
            place = torch.searchsorted(each, rows.to(each.dtype)).clamp_(max=each.numel() - 1)
            found |= each.index_select(0, place) == rows
    return found


def _bytes(rows: Tensor) -> Tensor:
    """A matrix [N, D] as bytes [N, D * size of a number]."""
    return rows.view(torch.uint8).view(rows.shape[0], rows.shape[1] * rows.element_size())


def _count(mask: Tensor, counts: Sequence[int]) -> list[int]:
    return [int(part.sum()) for part in torch.split(mask, list(counts))]
