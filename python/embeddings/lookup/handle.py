"""Handle of a lookup in flight: ids to their owners, rows back, some of them prefetched.

Prefetched are rows of the next lookup that the step of this one does not touch. An owner knows which of its rows open
lookups touch, since they were requested from it, so the answer is exact: no gradient can change the rows that it sends
early; the rest follows after the step. With each row goes one bit: sent now, or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.embeddings.addressing import JaggedIndices
from headrace.embeddings.exchange import BagRequest, RemoteRows, RowExchange, RowRequest, bucketize_bags
from headrace.embeddings.kernels.dispatch import Duplicates, default_device, find_duplicates, gather
from headrace.embeddings.layout import FusedTable
from headrace.embeddings.lookup.local_tables import LocalTables

if TYPE_CHECKING:
    from headrace.embeddings.dynamic.tables import DynamicLookup


@dataclass
class TableLookup:
    """Lookup in one fused table."""

    #: Indices of all groups of the fused table, one after the other: int32 or int64 [N].
    indices: Tensor
    #: Groups of the fused table: number, and first and last position of their occurrences.
    groups: list[tuple[int, int, int]]
    #: None: not sorted yet (a lookup in this rank's own matrix needs it for gradients only).
    duplicates: Duplicates | None = None
    #: Ranges by which to sort: see `find_duplicates`.
    range_ends: Tensor | None = None
    #: Bags of a fused table whose owners sum them (it has one group).
    bags: BagRequest | None = None

    def sorted(self) -> Duplicates:
        if self.duplicates is None:
            self.duplicates = find_duplicates(self.indices, self.range_ends)
        return self.duplicates


class LookupHandle:
    """A lookup that has started: `ShardedEmbeddings.prepare`. Used once by `forward` or `features`."""

    def __init__(
        self,
        embeddings: LocalTables,
        samples: int,
        jagged: Sequence[JaggedIndices],
        raw: Sequence[Tensor],
        zero_copy: bool,
        *,
        is_padded: bool,
    ) -> None:
        self.samples = samples
        #: True if the codes came side by side, [B, S].
        self.is_padded = is_padded
        #: True if `forward` returns a `ZeroCopyVectors`.
        self.zero_copy = zero_copy
        #: Steps when the rows were asked for.
        self.started_at_step = 0
        self.jagged = list(jagged)
        self.lookups = [self._part(embeddings, a) for a in embeddings.layout.fused_tables]
        self._embeddings = embeddings
        dynamic = embeddings.dynamic
        #: By table of raw ids: requested ids; answers of this rank, once `start` was called.
        self.raw = [] if dynamic is None else dynamic.unique_ids(raw)
        self.answers: list[DynamicLookup] = []
        #: By table of raw ids, after the lookup: vectors float32 [N, D] (zeros: no row), True where there is a row,
        #: bool [N].
        self.raw_vectors: list[tuple[Tensor, Tensor]] = []
        #: Requests of all ranks, once the answer is here; None also where nothing is sent.
        self.request: RowRequest | None = None
        self._prefetch: RowPrefetch | None = None
        #: Lookups and steps when rows were fetched ahead.
        self._prefetched_at = (0, 0)
        self._wait: Callable[[], RowRequest] | None = None
        self._rows: Callable[[], list[Tensor]] | None = None
        if embeddings.exchange is not None:
            self._wait = embeddings.exchange.send_ids([self._requests_of(a) for a in embeddings.remote], self.raw)

    def prefetch(self) -> None:
        """Start to fetch the rows that the step after the lookups so far cannot change. Collective.

        To be called after the forward pass of the lookup before, before its backward pass. Rows that are changed
        otherwise than by `step` meanwhile (a load) would be old. A lookup between this and the step that changes other
        rows than known here is noticed, and all rows are fetched again. Messages by machines (`Plan.ranks_per_node`)
        carry ids ahead alone, as do tables on a GPU.
        """
        exchange, embeddings = self._embeddings.exchange, self._embeddings
        if not isinstance(exchange, RowExchange) or not embeddings.remote or self._rows is not None:
            return
        if embeddings.device.type != "cpu" or any(c is not None for c in embeddings.caches):
            return
        request = self._row_request()
        touched = [[r.touched(i) for r in embeddings.open_requests] for i in range(len(request.rows))]
        self._prefetch = RowPrefetch(exchange, embeddings.collective, request, self._remote_weights(), touched)
        self._prefetched_at = embeddings.lookup_count, embeddings.steps

    def start(self) -> None:
        """Start to fetch the remaining rows as they are now. Collective; further calls do nothing.

        Raw ids are counted, and admitted, now.
        """
        if self._rows is None:
            self.started_at_step = self._embeddings.steps
            with default_device(self._embeddings.device):
                self._rows = self._answer()
            if isinstance(self._rows, RemoteRows) and not self.zero_copy:
                self._rows.copy_local()

    @property
    def found(self) -> list[tuple[Tensor, Tensor]]:
        """Vectors by table of raw ids, after the lookup: float32 [N, D] (zeros: no row), True where there is a row,
        bool [N].
        """
        return self.raw_vectors

    @property
    def remote_rows(self) -> RemoteRows | None:
        """Rows of a zero-copy lookup that come through shared memory; None otherwise. After `start`."""
        return self._rows if self.zero_copy and isinstance(self._rows, RemoteRows) else None

    def _answer(self) -> Callable[[], list[Tensor]]:
        """Look up the ids requested from this rank, and start to fetch those that it requested; return what waits for
        them.
        """
        exchange, dynamic = self._embeddings.exchange, self._embeddings.dynamic
        if exchange is None:  # a single rank answers itself
            self.answers = [] if dynamic is None else dynamic.answer(self.raw)
            return list
        request, prefetch = self._row_request(), self._prefetch
        self.answers = [] if dynamic is None else dynamic.answer(request.raw)
        answers = [a.with_found_flags() for a in self.answers]
        lookup_count, steps = self._prefetched_at
        if prefetch is not None and lookup_count != self._embeddings.lookup_count and steps != self._embeddings.steps:
            prefetch.drop()
            prefetch = None
        if prefetch is not None:
            return prefetch.start_rest(answers)
        return exchange.start_rows(*self._requested_rows(request), answers)

    def rows(self) -> list[Tensor]:
        """Return rows by remote fused table, as stored, and after them vectors with a flag by table of raw ids.

        After `start`.
        """
        return [] if self._rows is None else self._rows()

    def drop(self) -> None:
        """Receive the messages in flight and discard them. Collective; in place of the lookup."""
        if self._rows is not None:
            self._rows()
        elif self._embeddings.exchange is not None:
            self._row_request()
            if self._prefetch is not None:
                self._prefetch.drop()

    def _row_request(self) -> RowRequest:
        if self.request is None:
            assert self._wait is not None
            with default_device(self._embeddings.device):
                self.request = self._wait()
        return self.request

    def _remote_weights(self) -> list[Tensor]:
        return [self._embeddings.weights[a.number] for a in self._embeddings.remote]

    def _requested_rows(self, request: RowRequest) -> tuple[RowRequest, list[Tensor]]:
        """Return the request of the ranks by rows of these matrices, by remote fused table (cached rows: slots)."""
        weights, rows, embeddings = self._remote_weights(), list(request.rows), self._embeddings
        for i, fused in enumerate(embeddings.remote):
            cache = embeddings.caches[fused.number]
            if cache is not None:
                duplicates = request.duplicates(i)
                weights[i], rows[i] = cache.look_up(duplicates, embeddings.training), duplicates.inverse()
        return replace(request, rows=rows), weights

    def _requests_of(self, fused: FusedTable) -> Tensor | BagRequest:
        lookup = self.lookups[fused.number]
        if not fused.pooled or not lookup.groups:
            return lookup.sorted().unique
        lookup.bags = bucketize_bags(fused, self.jagged[lookup.groups[0][0]])
        return lookup.bags

    def _part(self, embeddings: LocalTables, fused: FusedTable) -> TableLookup:
        groups, pieces, end = [], [], 0
        for number, group in enumerate(embeddings.layout.groups):
            if group.fused == fused.number:
                indices = self.jagged[number].indices
                groups.append((number, end, end + indices.numel()))
                end += indices.numel()
                pieces.append(indices)
        if not pieces:  # a table that no feature looks up
            return TableLookup(torch.empty(0, dtype=fused.index_dtype), [])
        # Sorted by owner; inside of an owner in the order of the batch.
        range_ends = None if fused.is_local else fused.rank_offsets[1:]
        return TableLookup(pieces[0] if len(pieces) == 1 else torch.cat(pieces), groups, range_ends=range_ends)


class RowPrefetch:
    """Prefetched part of one lookup, started by one all-to-all. A fused tables, W ranks."""

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
        #: By fused table, True for requested rows that are not sent early.
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
        """Start to fetch the other rows; the function returned gives all as `RowExchange.start_rows` does."""
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

        def all_rows() -> list[Tensor]:
            rest_rows = wait()
            for i, (mask, early_rows) in enumerate(zip(late, early, strict=True)):
                out = early_rows.new_empty(mask.numel(), early_rows.shape[1])
                out[~mask], out[mask] = early_rows, rest_rows[i]
                rest_rows[i] = out
            return rest_rows

        return all_rows

    def drop(self) -> None:
        """Receive the messages in flight and discard them."""
        self._wait()

    def _read(self) -> tuple[list[Tensor], list[Tensor]]:
        """Read the early message, by fused table: True for requested rows that come late, bool [U]; the early rows [K,
        D].
        """
        message, counts = self._wait()
        sent = self._request.sent[: self._by_row]
        kinds = [(self._exchange.to_comm_dtype(w[:0]).dtype, w.shape[1]) for w in self._weights[: self._by_row]]
        masks: list[list[Tensor]] = [[] for _ in sent]
        rows: list[list[Tensor]] = [[] for _ in sent]
        for rank, part in enumerate(torch.split(message, counts)):
            offset = 0
            for fused, of_fused in enumerate(sent):
                size = -(-of_fused[rank] // 8)
                bits = np.unpackbits(part[offset : offset + size].numpy(), count=of_fused[rank])
                masks[fused].append(torch.from_numpy(bits).bool())
                offset += size
            for fused, (dtype, width) in enumerate(kinds):
                size = int((~masks[fused][rank]).sum()) * width * dtype.itemsize
                rows[fused].append(part[offset : offset + size])
                offset += size
        early = [
            torch.cat(of_fused).view(dtype).view(-1, width)
            for of_fused, (dtype, width) in zip(rows, kinds, strict=True)
        ]
        return [torch.cat(m) for m in masks], early


def _among(rows: Tensor, sets: Sequence[Tensor]) -> Tensor:
    """Return which rows are in one of the ascending sets: bool [len(rows)]."""
    mask = torch.zeros(rows.numel(), dtype=torch.bool)
    for each in sets:
        if each.numel():
            position = torch.searchsorted(each, rows.to(each.dtype)).clamp_(max=each.numel() - 1)
            mask |= each.index_select(0, position) == rows
    return mask


def _bytes(rows: Tensor) -> Tensor:
    """View a matrix [N, D] as bytes [N, D * size of a number]."""
    return rows.view(torch.uint8).view(rows.shape[0], rows.shape[1] * rows.element_size())


def _count(mask: Tensor, counts: Sequence[int]) -> list[int]:
    return [int(part.sum()) for part in torch.split(mask, list(counts))]
