"""Rows of the next lookup that travel before the step of this one: those that the step does not touch.

An owner knows which of its rows open lookups touch, for it was asked for them, so the answer is exact: what it sends
early no gradient can change, the rest follows after the step. With each row goes one bit: sent now, or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.embeddings.collective import Collective
from headrace.embeddings.exchange import Mail, Request, gather


class Ahead:
    """The early part of one lookup, begun by one all-to-all. A arenas, W ranks."""

    def __init__(
        self, collective: Collective, request: Request, weights: Sequence[Tensor], touched: Sequence[Sequence[Tensor]]
    ) -> None:
        """See the class.

        Args:
            collective: the ranks.
            request: what is looked up.
            weights: this rank's matrices.
            touched: by arena, rows that the next step may change, each ascending.
        """
        self._request = request
        self._weights = weights
        #: By arena, of the rows that were asked for here: not sent early.
        self._late = [_among(rows, of_arena) for rows, of_arena in zip(request.rows, touched, strict=True)]
        early = [gather(w, r[~late]) for w, r, late in zip(weights, request.rows, self._late, strict=True)]
        marks = [torch.split(late, counts) for late, counts in zip(self._late, request.received, strict=True)]
        numbers = [
            torch.split(_bytes(rows), [int((~m).sum()) for m in of_arena])
            for rows, of_arena in zip(early, marks, strict=True)
        ]
        message, sizes = [torch.empty(0, dtype=torch.uint8)], []
        for rank in range(collective.world.size):
            parts = [torch.from_numpy(np.packbits(of_arena[rank].numpy())) for of_arena in marks]
            parts += [of_arena[rank].reshape(-1) for of_arena in numbers]
            message += parts
            sizes.append(sum(p.numel() for p in parts))
        self._wait = collective.start_all_to_all(torch.cat(message), sizes)

    def start_rest(self, mail: Mail) -> Callable[[], list[Tensor]]:
        """Begin to fetch the other rows; what waits for all of them gives them as `Mail.start_rows` does."""
        request = self._request
        late, early = self._read()
        rest = Request(
            sent=[_count(mask, counts) for mask, counts in zip(late, request.sent, strict=True)],
            rows=[rows[mask] for rows, mask in zip(request.rows, self._late, strict=True)],
            received=[_count(mask, counts) for mask, counts in zip(self._late, request.received, strict=True)],
        )
        wait = mail.start_rows(rest, self._weights)

        def whole() -> list[Tensor]:
            found = []
            for mask, now, later in zip(late, early, wait(), strict=True):
                out = now.new_empty(mask.numel(), now.shape[1])
                out[~mask], out[mask] = now, later
                found.append(out)
            return found

        return whole

    def drop(self) -> None:
        """Receive what is on its way, for nothing."""
        self._wait()

    def _read(self) -> tuple[list[Tensor], list[Tensor]]:
        """By arena: which of the rows that this rank wants come late, bool [U]; the others [K, D]."""
        got, counts = self._wait()
        sent, weights = self._request.sent, self._weights
        masks: list[list[Tensor]] = [[] for _ in sent]
        rows: list[list[Tensor]] = [[] for _ in sent]
        for rank, part in enumerate(torch.split(got, counts)):
            at = 0
            for arena, of_arena in enumerate(sent):
                size = -(-of_arena[rank] // 8)
                bits = np.unpackbits(part[at : at + size].numpy(), count=of_arena[rank])
                masks[arena].append(torch.from_numpy(bits).bool())
                at += size
            for arena, weight in enumerate(weights):
                size = int((~masks[arena][rank]).sum()) * weight.shape[1] * weight.element_size()
                rows[arena].append(part[at : at + size])
                at += size
        early = [
            torch.cat(of_arena).view(w.dtype).view(-1, w.shape[1]) for of_arena, w in zip(rows, weights, strict=True)
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
