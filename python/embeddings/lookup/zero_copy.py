"""Vectors that are read where they lie, and gradients that are summed where they are needed.

A model that takes the vectors sample by sample (headrace.models) does not need them side by side. Those of this
rank's rows it reads in the tables, those of other ranks' rows in the memory that the ranks share, or else in the
message that came. Backward, the gradient of each distinct row is summed, sample by sample, in what travels to its
owner, who reads it there in the step. So vectors and gradients are written once where they were copied three times.
All bits are those of `ShardedEmbeddings.forward`: each sum runs in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headrace import native
from headrace.comm.base import Delivered, Letter
from headrace.embeddings.exchange.remote_rows import row_pointers
from headrace.embeddings.exchange.row_exchange import Request
from headrace.embeddings.input.addressing import Occurrences
from headrace.embeddings.kernels import cpu
from headrace.embeddings.lookup.handle import Prepared
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.optim.gradients import Gradient
from headrace.embeddings.sharding.layout import Arena, Layout
from headrace.embeddings.storage.dtypes import decode


def can_place(layout: Layout) -> bool:
    """Whether lookups by a layout can be read in place: vectors of one width, each from one row or from one owner."""
    widths = {a.width for a in layout.arenas}
    return (
        native.library() is not None
        and len(widths) == 1
        and {layout.plan.by_name[x.table].dim for x in layout.plan.lookups} == widths
        and all(a.dtype is torch.float32 or not a.local for a in layout.arenas)
        and not any(a.cached for a in layout.arenas)
        and all(not a.pooled or a.one_rank_each for a in layout.arenas)
        and sum(not a.local for a in layout.arenas) <= 1
        and all(g.mode == "sum" for g in layout.groups)
    )


def is_placed(arena: Arena, occurrences: Occurrences) -> bool:
    """Whether the vectors of a batch lie somewhere: each is one row, or a bag's sum as its owner gives it."""
    is_plain = occurrences.weights is None and occurrences.divisor is None
    return is_plain and (arena.pooled or occurrences.starts is None)


class Placed:
    """The vectors of a lookup: float32 [B, F, D], somewhere in memory.

    They stay as they are until the backward pass, or until nothing refers to this any more. Its user computes the
    vectors' gradients at one go between `open` and `close`, or gives them to `take`.
    """

    def __init__(self, embeddings: LocalTables, prepared: Prepared) -> None:
        """Of a lookup that has started. Waits for its rows."""
        self._embeddings, self._prepared = embeddings, prepared
        #: Of a vector, D.
        self.width = embeddings.layout.arenas[0].width
        self._came: Delivered | None = None
        self._kept: list[Tensor] = []
        self._letter: Letter | None = None
        #: By arena, the sums of gradients that stay here: of distinct rows, or of those of them that are this rank's.
        self._sums: list[Tensor] = []
        #: Around what is computed for the gradients; see headrace.train.callbacks.tracing.
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        #: A tensor that asks for a gradient, for autograd.
        self.anchor: Tensor = embeddings.anchor
        #: Addresses of the vectors: int64 [B, F].
        self.at: Tensor | None = self._spread([self._addresses(n) for n in range(len(prepared.parts))], False)
        self.check()

    def release(self) -> None:
        """Nobody reads the vectors any more."""
        self.at = None
        self._kept = []
        if self._came is not None:
            self._came.release()

    def open(self) -> Tensor:
        """Addresses of the vectors' gradients, int64 [B, F]: an odd one, less 1, is stored to, others are added to.

        Front to back, so by one thread.
        """
        self.check()
        return self._spread([row_pointers([(p, None) for p in places]) for places in self._reserve()], True)

    def take(self, gradient: Tensor) -> None:
        """Take the gradients of all vectors, float32 [B, F, D], in place of `open`. Collective, as `close`."""
        self.check()
        by_group = self._embeddings.layout.cut(gradient.flatten(1))
        for part, places in zip(self._prepared.parts, self._reserve(), strict=True):
            if not part.groups:
                continue
            of_group = by_group[part.groups[0][0]]
            counts = [p.shape[0] for p in places]
            if part.bags is not None:
                for place, bags in zip(places, torch.split(part.bags.bag, counts), strict=True):
                    cpu.pool_sum(of_group, bags, bags.numel(), out=place)
                continue
            found = part.sorted()
            ends = torch.cat([found.starts, torch.tensor([found.order.numel()])])
            cuts = ends[torch.tensor([0, *counts]).cumsum(0)].tolist()
            starts = torch.split(found.starts, counts)
            for place, of_place, first, last in zip(places, starts, cuts, cuts[1:], strict=False):
                cpu.pool_sum(of_group, found.order[first:last], place.shape[0], of_place - first, out=place)
        self.close()

    def _reserve(self) -> list[list[Tensor]]:
        """By arena, where the gradients of its distinct rows (or parts of bags) go: matrices, one after the other."""
        embeddings, prepared = self._embeddings, self._prepared
        found = []
        for arena, part in zip(embeddings.layout.arenas, prepared.parts, strict=True):
            if arena.local:
                part.ends = embeddings.runs(arena)
            counts = [part.sorted().unique.numel() if part.bags is None else part.bags.bag.numel()]
            places: list[Tensor | None] = [None]
            posted = None if arena.local else prepared.posted
            if posted is not None and embeddings.post is not None:
                self._letter = embeddings.post.reserve(posted.counts, (self.width,), torch.float32)
                counts, places = posted.counts, list(self._letter.parts)
            own = torch.empty(sum(n for n, p in zip(counts, places, strict=True) if p is None), self.width)
            self._sums.append(own)
            found.append([own if p is None else p for p in places])
        return found

    def close(self) -> None:
        """The gradients are there: send them to the owners of their rows. Collective.

        Those that come are waited for when the embeddings need them, while the rest of the backward pass runs.
        """
        embeddings, prepared = self._embeddings, self._prepared
        for arena, part, own in zip(embeddings.layout.arenas, prepared.parts, self._sums, strict=True):
            if arena.local:
                embeddings.add_gradient(arena, Gradient.of_sums(part.sorted().unique, own))
            elif self._letter is None:
                assert prepared.request is not None
                embeddings.send_gradients(prepared.request, [own])
            else:
                assert prepared.request is not None
                embeddings.expect(_arrival(embeddings, arena, prepared.request, own, self._letter.send()))
        self._sums, self._letter = [], None
        self.release()

    def check(self) -> None:
        """Raise RuntimeError unless the vectors are there, as they were."""
        if self.at is None:
            raise RuntimeError("a second backward pass of one lookup: its vectors are gone")
        if self._prepared.started_at != self._embeddings.steps:
            raise RuntimeError("a step between start and backward of a lookup in place: its vectors have changed")

    def _addresses(self, number: int) -> Tensor:
        """Where the vectors of an arena's distinct rows are; of local arenas those of each occurrence."""
        embeddings, prepared = self._embeddings, self._prepared
        arena, part, weight = embeddings.layout.arenas[number], prepared.parts[number], embeddings.weights[number]
        if arena.local:
            return row_pointers([(weight, part.addresses)])
        posted = prepared.posted
        if posted is None:
            (rows,) = prepared.rows()
            self._kept.append(decode(rows))
            return row_pointers([(self._kept[-1], None)])
        addresses, self._came = posted.places()
        return addresses

    def _spread(self, addresses: Sequence[Tensor], gradients: bool) -> Tensor:
        """Addresses by sample and feature, int64 [B, F].

        Args:
            addresses: by arena, of its distinct rows; of bags that owners sum, of each that is not empty; of vectors in
                this rank's own matrices, of each occurrence.
            gradients: whether they are those of the vectors' gradients: see `open`.
        """
        embeddings, prepared = self._embeddings, self._prepared
        layout = embeddings.layout
        by_group: dict[int, Tensor] = {}
        for arena, part, of_arena in zip(layout.arenas, prepared.parts, addresses, strict=True):
            if part.bags is not None:
                number = part.groups[0][0]
                # An empty bag is zeros, and its gradient nobody's.
                spare = torch.zeros(1, self.width)
                self._kept.append(spare)
                bags = torch.full((prepared.occurrences[number].bags,), spare.data_ptr() + int(gradients))
                by_group[number] = bags.index_copy_(0, part.bags.bag, of_arena + int(gradients))
                by_group[number] = by_group[number].view(prepared.samples, layout.groups[number].pieces)
                continue
            by_row = gradients or not arena.local
            each = cpu.places(of_arena, part.sorted().inverse(), gradients) if by_row else of_arena
            for number, start, end in part.groups:
                by_group[number] = each[start:end].view(prepared.samples, layout.groups[number].pieces)
        found = [by_group[n] for n in range(len(layout.groups))]
        if len(found) == 1:
            return found[0]
        columns = [c // self.width for g in layout.groups for c in g.columns]
        return torch.cat(found, dim=1).index_select(1, torch.tensor(columns).argsort())


def _arrival(
    embeddings: LocalTables, arena: Arena, request: Request, own: Tensor, arrive: Callable[[], Delivered]
) -> Callable[[], None]:
    """What waits for the gradients of an arena's vectors, which stay where their senders wrote them."""
    found = request.duplicates(0, embeddings.runs(arena))  # sorted out before the wait

    def receive() -> None:
        came, asked = arrive(), request.asked[0]
        at = row_pointers([(own if p is None else p, None) for p in came.parts])
        nothing, bag = torch.empty(0, own.shape[1]), None if asked is None else asked.part
        embeddings.add_gradient(arena, Gradient(found, nothing, bag, at=at, kept=(own, came)))

    return receive
