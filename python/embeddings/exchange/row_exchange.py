"""The messages of a step: ids to their owners and rows back; gradients to the owners.

Pure functions over a rank's indices (sharding.layout) and a collective. All tables travel in one message
each way, whatever their widths and storage: each distinct row once, or, where the plan has bags summed by their owners
(exchange.pooled), each id and one vector a bag. Tables of raw ids (input.raw_ids) travel along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headrace import native
from headrace.comm.base import MessageChannel, channel_of
from headrace.embeddings.exchange.pooled import BagRequest, RequestedBags
from headrace.embeddings.exchange.remote_rows import RemoteRows
from headrace.embeddings.input.raw_ids import RawIdRequest, pack, unpack
from headrace.embeddings.kernels import cpu, index_cpu
from headrace.embeddings.kernels.duplicates import Duplicates, find_duplicates, gather
from headrace.embeddings.sharding.plan import CommDtype
from headrace.embeddings.storage.dtypes import DTYPES
from headrace.world import World

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class RowRequest:
    """What this rank asked for, and what it was asked for, in one lookup.

    W ranks, A fused tables, T tables of raw ids.
    """

    #: Vectors asked for, by fused table (then table of raw ids) and owner: distinct rows, or parts of bags: [A + T][W].
    sent: list[list[int]]
    #: Rows of the own matrices that the ranks ask for, by fused table, ranks in order: int32 or int64 [R_a].
    rows: list[Tensor]
    #: How many vectors each rank asks for: [A + T][W].
    received: list[list[int]]
    #: By fused table: how its rows are summed to vectors; None: each row is one.
    requested: list[RequestedBags | None]
    #: By table of raw ids: what the ranks ask for.
    raw: list[RawIdRequest] = field(default_factory=list)
    _sorted: dict[int, Duplicates] = field(default_factory=dict)

    def duplicates(self, fused: int, ends: Tensor | None = None) -> Duplicates:
        """Those of `rows` of one fused table, sorted once, by the `ends` of the first call: see `find_duplicates`."""
        if fused not in self._sorted:
            self._sorted[fused] = find_duplicates(self.rows[fused], ends)
        return self._sorted[fused]

    def touched(self, fused: int) -> Tensor:
        """Distinct rows of one fused table, ascending."""
        return find_duplicates(self.rows[fused]).unique


class PartitionedTable(Protocol):
    """What `RowExchange` needs of a fused table."""

    @property
    def rank_offsets(self) -> Tensor:
        """First index of each rank, and the end: int64 [W + 1]."""
        ...

    @property
    def pooled(self) -> bool:
        """Whether owners sum bags."""
        ...


class AllToAllRanks(Protocol):
    """What `RowExchange` needs of a collective."""

    @property
    def world(self) -> World: ...

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]: ...


class RowExchange:
    """The sharded fused tables of a layout and the ranks between which their rows travel.

    Fused tables whose bags are summed by their owners come last.
    """

    def __init__(
        self, fused_tables: Sequence[PartitionedTable], collective: AllToAllRanks, comm_dtype: CommDtype = "fp32"
    ) -> None:
        self._fused_tables = list(fused_tables)
        self._collective = collective
        self._world = collective.world.size
        self._comm_dtype = DTYPES[comm_dtype]
        none = torch.zeros(0, self._world, dtype=torch.int64)
        rank_rows = torch.stack([a.rank_offsets.diff() for a in fused_tables]) if fused_tables else none  # [A, W]
        #: Where each fused table's rows begin in an owner's one numbering of all its rows: [A, W]; and the end.
        self._base = torch.cat([rank_rows.new_zeros(1, self._world), rank_rows.cumsum(0)])
        self._dtype = torch.int32 if int(self._base[-1].max()) <= _INT32_MAX else torch.int64
        self._by_row = sum(not a.pooled for a in self._fused_tables)
        self._channel = channel_of(collective)

    def send_ids(
        self, requests: Sequence[Tensor | BagRequest], raw: Sequence[RawIdRequest] = ()
    ) -> Callable[[], RowRequest]:
        """Tell the owners which rows this rank needs; learn which others need from here.

        One all-to-all, and one more where bags that owners sum are weighted. The owner's own row numbers travel, so
        that the owner has nothing to decode; v that begins a part of a bag travels as -1 - v.

        Args:
            requests: by fused table, distinct indices, owner by owner: [U_a]; or parts of bags.
            raw: by table, raw ids.

        Returns:
            What waits for the answer: the message may travel meanwhile.
        """
        sent, local, counts = [], [], []
        weighted_parts: list[tuple[Tensor, list[int]]] = []
        for i, (fused, request_of) in enumerate(zip(self._fused_tables, requests, strict=True)):
            indices, begins = (
                (request_of.indices, request_of.begins) if isinstance(request_of, BagRequest) else (request_of, None)
            )
            starts = fused.rank_offsets.to(indices.dtype)
            # They need not ascend for that inside of an owner's.
            counts.append(
                request_of.ids_per_rank
                if isinstance(request_of, BagRequest)
                else torch.searchsorted(request_of, starts).diff().tolist()
            )
            sent.append(request_of.bags_per_rank if isinstance(request_of, BagRequest) else counts[-1])
            shift = self._base[i] - fused.rank_offsets[:-1]
            local.append(_encode_requests(indices, counts[-1], shift, begins, self._dtype))
            if isinstance(request_of, BagRequest) and request_of.weights is not None:
                weighted_parts.append((request_of.weights, request_of.ids_per_rank))
        if raw:
            message, lengths = pack(raw, self._dtype)
            local.insert(0, message)
            counts.insert(0, lengths)
            sent += [r.of_rank for r in raw]
        wait = self._collective.start_all_to_all(_by_rank(local, counts), [sum(n) for n in zip(*counts, strict=True)])
        wait_for_weights = None
        if weighted_parts:
            each = [n for _, n in weighted_parts]
            wait_for_weights = self._collective.start_all_to_all(
                _by_rank([w for w, _ in weighted_parts], each), [sum(n) for n in zip(*each, strict=True)]
            )
        weighted = [isinstance(x, BagRequest) and x.weights is not None for x in requests]

        def answer() -> RowRequest:
            numbers, lengths = wait()
            raw_requests: list[RawIdRequest] = []
            if raw:
                raw_requests, numbers, lengths = unpack(numbers, lengths, len(raw))
            if self._by_row == 0 and len(self._fused_tables) == 1 and _loops(numbers):
                weight = None if wait_for_weights is None else wait_for_weights()[0]
                own, starts, part = index_cpu.decode_requests(numbers)
                ends = torch.searchsorted(starts, torch.tensor([0, *lengths]).cumsum(0)).diff().tolist()
                return RowRequest(
                    sent,
                    [own],
                    [ends] + [r.of_rank for r in raw_requests],
                    [RequestedBags(starts, part, weight)],
                    raw_requests,
                )
            rows, begins, of_sender = self._split_by_fused_table(numbers, lengths)
            weights: list[Tensor | None] = [None] * len(rows)
            if wait_for_weights is not None:
                which = [i for i, w in enumerate(weighted) if w]
                got, _ = wait_for_weights()
                pieces = torch.split(got, [of_sender[i][w] for w in range(self._world) for i in which])
                for k, i in enumerate(which):
                    weights[i] = torch.cat(pieces[k :: len(which)])
            received = [
                of_sender[i] if b is None else [int(p.sum()) for p in torch.split(b, of_sender[i])]
                for i, b in enumerate(begins)
            ]
            requested = [None if b is None else RequestedBags.of(b, w) for b, w in zip(begins, weights, strict=True)]
            return RowRequest(sent, rows, received + [r.of_rank for r in raw_requests], requested, raw_requests)

        return answer

    def _split_by_fused_table(
        self, numbers: Tensor, counts: list[int]
    ) -> tuple[list[Tensor], list[Tensor | None], list[list[int]]]:
        """By fused table: rows, which of them begin a part (None: there are no parts), how many are from each rank."""
        if not self._fused_tables:
            return [], [], []
        if self._by_row == len(self._fused_tables) == 1:
            return [numbers], [None], [counts]
        pooled = self._by_row < len(self._fused_tables)
        first = numbers < 0
        rows = torch.where(first, -1 - numbers, numbers) if pooled else numbers
        if len(self._fused_tables) == 1:
            return [rows], [first], [counts]
        base = self._base[:, self._collective.world.rank].to(rows.dtype)
        # Each sender's rows are in order of fused tables.
        fused = torch.bucketize(rows, base[1:-1], right=True, out_int32=True)
        senders = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts), output_size=rows.numel())
        of_sender = torch.bincount(
            senders * len(self._fused_tables) + fused, minlength=len(counts) * len(self._fused_tables)
        )
        cuts = of_sender.tolist()
        pieces, marks = torch.split(rows, cuts), torch.split(first, cuts)
        number = len(self._fused_tables)
        return (
            [torch.cat(pieces[i::number]) - base[i] for i in range(number)],
            [torch.cat(marks[i::number]) if i >= self._by_row else None for i in range(number)],
            [cuts[i::number] for i in range(number)],
        )

    def start_rows(
        self, request: RowRequest, weights: Sequence[Tensor], answers: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Begin to fetch the vectors asked for, by fused table in the order of the asking: [U_a, D_a].

        Rows come as stored, sums of bags as float32; both as the plan's `comm_dtype` where they are float32. One
        all-to-all; what is returned waits for it.

        Args:
            request: what is looked up.
            weights: this rank's matrices, by fused table.
            answers: by table of raw ids, the vectors that the ranks asked for here.
        """
        if self._channel is not None and self._can_send_zero_copy(weights, answers):
            return self._send_zero_copy(self._channel, request, weights[0])
        found = [
            gather(w, rows) if requested is None else requested.sums(w, rows)
            for w, rows, requested in zip(weights, request.rows, request.requested, strict=True)
        ]
        return self._start_swap([*found, *answers], request.received, request.sent)

    def _can_send_zero_copy(self, weights: Sequence[Tensor], answers: Sequence[Tensor]) -> bool:
        """Whether one matrix's vectors travel as they are."""
        return len(weights) == 1 and not answers and self._comm_dtype is torch.float32 and cpu.usable(weights[0])

    def _send_zero_copy(self, channel: MessageChannel, request: RowRequest, weight: Tensor) -> RemoteRows:
        counts, rank, requested = request.received[0], self._collective.world.rank, request.requested[0]
        message = channel.reserve(counts, weight.shape[1:], weight.dtype)
        if requested is not None:
            own = weight.new_empty(counts[rank], weight.shape[1])
            requested.sums_into([own if p is None else p for p in message.parts], weight, request.rows[0])
            return RemoteRows(message.send(), own, None, request.sent[0], rank)
        requests = torch.split(request.rows[0], counts)
        for part, rows in zip(message.parts, requests, strict=True):
            if part is not None:
                cpu.pool_sum(weight, rows, rows.numel(), out=part)
        return RemoteRows(message.send(), weight, requests[rank], request.sent[0], rank)

    def to_comm_dtype(self, vectors: Tensor) -> Tensor:
        """As they travel: float32 numbers as the plan's `comm_dtype`, others as they are."""
        return vectors.to(self._comm_dtype) if vectors.dtype is torch.float32 else vectors

    def return_gradients(self, request: RowRequest, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients [U_a, D_a] of the vectors asked for to their owners; those asked for here arrive, float32."""
        return [g.float() for g in self._start_swap(gradients, request.sent, request.received)()]

    def _start_swap(
        self, parts: Sequence[Tensor], sent: list[list[int]], received: list[list[int]]
    ) -> Callable[[], list[Tensor]]:
        """Send matrices' rows to the ranks, receive theirs: the same matrices' other rows. One all-to-all."""
        parts = [self.to_comm_dtype(p) for p in parts]
        if len(parts) == 1:
            wait_for_rows = self._collective.start_all_to_all(parts[0], sent[0])
            return lambda: [wait_for_rows()[0]]
        # One message of numbers, or of bytes where storages differ.
        dtype = parts[0].dtype if len({p.dtype for p in parts}) == 1 else torch.uint8
        flat = [p.contiguous().view(dtype).view(-1) for p in parts]
        widths = [p.shape[1] * p.element_size() // flat[i].element_size() for i, p in enumerate(parts)]
        out = [[n * w for n in row] for row, w in zip(sent, widths, strict=True)]
        back = [[n * w for n in row] for row, w in zip(received, widths, strict=True)]
        kinds = [(p.dtype, p.shape[1]) for p in parts]
        wait = self._collective.start_all_to_all(_by_rank(flat, out), [sum(n) for n in zip(*out, strict=True)])

        def answer() -> list[Tensor]:
            pieces = torch.split(wait()[0], [n for of_rank in zip(*back, strict=True) for n in of_rank])
            return [torch.cat(pieces[i :: len(kinds)]).view(d).view(-1, width) for i, (d, width) in enumerate(kinds)]

        return answer


def _by_rank(parts: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
    """Vectors by fused table, each in order of ranks, as one vector in order of ranks, then fused tables."""
    if len(parts) == 1:
        return parts[0]
    pieces = [torch.split(p, list(n)) for p, n in zip(parts, counts, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def _loops(x: Tensor) -> bool:
    """Whether the C++ loops work on a vector."""
    return x.device.type == "cpu" and native.library() is not None


def _encode_requests(
    indices: Tensor, counts: list[int], shift: Tensor, begins: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See cpu.encode_requests."""
    if _loops(indices):
        return index_cpu.encode_requests(indices, counts, shift, begins, dtype)
    each = torch.repeat_interleave(shift, torch.tensor(counts, device=shift.device), output_size=indices.numel())
    rows = (indices + each).to(dtype)
    return rows if begins is None else torch.where(begins, -1 - rows, rows)
