"""A lookup on its way: ids to their owners, rows back, some of them early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.embeddings.dynamic.tables import DynamicLookup
from headrace.embeddings.exchange.pooled import BagRequest, bucketize_bags
from headrace.embeddings.exchange.prefetch import RowPrefetch
from headrace.embeddings.exchange.remote_rows import RemoteRows
from headrace.embeddings.exchange.row_exchange import RowExchange, RowRequest
from headrace.embeddings.input.addressing import JaggedIndices
from headrace.embeddings.kernels.dispatch import default_device
from headrace.embeddings.kernels.duplicates import Duplicates, find_duplicates
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.sharding.layout import FusedTable


@dataclass
class TableLookup:
    """What a lookup needs from one fused table."""

    #: Of all groups of the fused table, one after the other: int32 or int64 [N].
    indices: Tensor
    #: Groups of the fused table: their number, and where their occurrences begin and end.
    groups: list[tuple[int, int, int]]
    #: None: not sorted yet (a lookup in this rank's own matrix needs that for gradients only).
    duplicates: Duplicates | None = None
    #: How to sort: see `find_duplicates`.
    range_ends: Tensor | None = None
    #: Of a fused table whose owners sum bags (it has one group).
    bags: BagRequest | None = None

    def sorted(self) -> Duplicates:
        if self.duplicates is None:
            self.duplicates = find_duplicates(self.indices, self.range_ends)
        return self.duplicates


class LookupHandle:
    """A lookup that has begun: `ShardedEmbeddings.prepare`. Used once by `forward` or `features`."""

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
        #: Whether the codes came side by side, [B, S].
        self.is_padded = is_padded
        #: Whether `forward` gives a `ZeroCopyVectors`.
        self.zero_copy = zero_copy
        #: Steps when the rows were asked for.
        self.started_at_step = 0
        self.jagged = list(jagged)
        self.lookups = [self._part(embeddings, a) for a in embeddings.layout.fused_tables]
        self._embeddings = embeddings
        dynamic = embeddings.dynamic
        #: By table of raw ids: what is wanted; what was answered here, once `start` was called.
        self.raw = [] if dynamic is None else dynamic.unique_ids(raw)
        self.answers: list[DynamicLookup] = []
        #: By table of raw ids, after the lookup: vectors float32 [N, D] (zeros: no row), which have a row: bool [N].
        self.found: list[tuple[Tensor, Tensor]] = []
        #: What the ranks asked each other for, once the answer is here; None also where nothing is sent.
        self.request: RowRequest | None = None
        self._prefetch: RowPrefetch | None = None
        #: Lookups and steps when rows were fetched ahead.
        self._prefetched_at = (0, 0)
        self._wait: Callable[[], RowRequest] | None = None
        self._rows: Callable[[], list[Tensor]] | None = None
        if embeddings.exchange is not None:
            self._wait = embeddings.exchange.send_ids([self._requests_of(a) for a in embeddings.remote], self.raw)

    def prefetch(self) -> None:
        """Begin to fetch those rows that the step after the lookups so far cannot change. Collective.

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
        """Begin to fetch the rows (those that are not here yet), as they are now. Collective; once, then it is done.

        Raw ids are counted, and admitted, now.
        """
        if self._rows is None:
            self.started_at_step = self._embeddings.steps
            with default_device(self._embeddings.device):
                self._rows = self._answer()
            if isinstance(self._rows, RemoteRows) and not self.zero_copy:
                self._rows.copy_local()

    @property
    def remote_rows(self) -> RemoteRows | None:
        """The rows of a lookup without copies, where they come through shared memory. After `start`."""
        return self._rows if self.zero_copy and isinstance(self._rows, RemoteRows) else None

    def _answer(self) -> Callable[[], list[Tensor]]:
        """Look up what was asked here, and begin to fetch what was asked for; what waits for that."""
        exchange, dynamic = self._embeddings.exchange, self._embeddings.dynamic
        if exchange is None:  # one rank asks itself
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
        """Rows by remote fused table, as stored, and behind them vectors with a flag by table of raw ids.

        After `start`.
        """
        return [] if self._rows is None else self._rows()

    def drop(self) -> None:
        """Receive what is on its way, for nothing. Collective; in place of the lookup."""
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
        """Where rows are that were asked for here: the request, by rows of these matrices, by remote fused table."""
        weights, rows, embeddings = self._remote_weights(), list(request.rows), self._embeddings
        for i, fused in enumerate(embeddings.remote):
            cache = embeddings.caches[fused.number]
            if cache is not None:
                found = request.duplicates(i)
                weights[i], rows[i] = cache.look_up(found, embeddings.training), found.inverse()
        return replace(request, rows=rows), weights

    def _requests_of(self, fused: FusedTable) -> Tensor | BagRequest:
        lookup = self.lookups[fused.number]
        if not fused.pooled or not lookup.groups:
            return lookup.sorted().unique
        lookup.bags = bucketize_bags(fused, self.jagged[lookup.groups[0][0]])
        return lookup.bags

    def _part(self, embeddings: LocalTables, fused: FusedTable) -> TableLookup:
        found, pieces, end = [], [], 0
        for number, group in enumerate(embeddings.layout.groups):
            if group.fused == fused.number:
                indices = self.jagged[number].indices
                found.append((number, end, end + indices.numel()))
                end += indices.numel()
                pieces.append(indices)
        if not pieces:  # a table that no feature looks up
            return TableLookup(torch.empty(0, dtype=fused.index_dtype), [])
        # By owner; each owner's in the order of the batch.
        range_ends = None if fused.is_local else fused.rank_offsets[1:]
        return TableLookup(pieces[0] if len(pieces) == 1 else torch.cat(pieces), found, range_ends=range_ends)
