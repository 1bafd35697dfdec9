"""Exchange of a step: ids to their owners and rows back; gradients to the owners.

Pure functions over a rank's indices (headrace.embeddings.layout) and a collective. All tables travel in one message
each way, whatever their widths and storage: each distinct row once, or, where the plan has bags summed by their owners
(`Block.pooled`), each id and one vector a bag. Tables of raw ids (headrace.embeddings.addressing) travel along.

Which of the two is less depends on the batch: long bags with few duplicates are cheaper summed by owners, single ids
never. Where one rank has all rows of a bag, it sums them front to back as the requesting rank would: the same bits.
With rows on several ranks, each owner sums its part of a bag, and the parts are summed in order of the owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import MessageChannel, ReceivedMessage, channel_of
from headrace.compute import native
from headrace.embeddings.addressing import JaggedIndices, RawIdRequest, pack, unpack
from headrace.embeddings.kernels import cpu
from headrace.embeddings.kernels.dispatch import Duplicates, find_duplicates, gather, sum_bags
from headrace.embeddings.layout import FusedTable
from headrace.embeddings.sharding_plan import CommDtype
from headrace.embeddings.storage import DTYPES, decode

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class RowRequest:
    """Rows that this rank requested, and rows that were requested from it, in one lookup.

    W ranks, A fused tables, T tables of raw ids.
    """

    #: Vectors requested, by fused table (then table of raw ids) and owner: distinct rows, or parts of bags: [A + T][W].
    sent: list[list[int]]
    #: Rows of this rank's matrices that the ranks request, by fused table, ranks in order: int32 or int64 [R_a].
    rows: list[Tensor]
    #: Number of vectors that each rank requests: [A + T][W].
    received: list[list[int]]
    #: By fused table: bags whose rows are summed here; None: each row is one vector.
    requested: list[RequestedBags | None]
    #: Requests of the ranks by table of raw ids.
    raw: list[RawIdRequest] = field(default_factory=list)
    _sorted: dict[int, Duplicates] = field(default_factory=dict)

    def duplicates(self, fused: int, ends: Tensor | None = None) -> Duplicates:
        """Return the duplicates of `rows` of one fused table, sorted once by the `ends` of the first call."""
        if fused not in self._sorted:
            self._sorted[fused] = find_duplicates(self.rows[fused], ends)
        return self._sorted[fused]

    def touched(self, fused: int) -> Tensor:
        """Return the distinct requested rows of one fused table, ascending."""
        return find_duplicates(self.rows[fused]).unique


class PartitionedTable(Protocol):
    """The part of a fused table that `RowExchange` uses."""

    @property
    def rank_offsets(self) -> Tensor:
        """First index of each rank, and the end: int64 [W + 1]."""
        ...

    @property
    def pooled(self) -> bool:
        """True if owners sum bags."""
        ...


class AllToAllRanks(Protocol):
    """The part of a collective that `RowExchange` uses."""

    @property
    def world(self) -> World: ...

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]: ...


class RowExchange:
    """Exchange of rows of the sharded fused tables of a layout between the ranks.

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
        #: First row of each fused table in an owner's numbering of all its rows: [A, W]; and the end.
        self._base = torch.cat([rank_rows.new_zeros(1, self._world), rank_rows.cumsum(0)])
        self._dtype = torch.int32 if int(self._base[-1].max()) <= _INT32_MAX else torch.int64
        self._by_row = sum(not a.pooled for a in self._fused_tables)
        self._channel = channel_of(collective)

    def send_ids(
        self, requests: Sequence[Tensor | BagRequest], raw: Sequence[RawIdRequest] = ()
    ) -> Callable[[], RowRequest]:
        """Send the row numbers that this rank needs to their owners; learn which rows others need from here.

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
            # Indices need not ascend inside of an owner's range.
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
            sent += [r.ids_per_rank for r in raw]
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
                local_rows, starts, part = cpu.decode_requests(numbers)
                ends = torch.searchsorted(starts, torch.tensor([0, *lengths]).cumsum(0)).diff().tolist()
                return RowRequest(
                    sent,
                    [local_rows],
                    [ends] + [r.ids_per_rank for r in raw_requests],
                    [RequestedBags(starts, part, weight)],
                    raw_requests,
                )
            rows, begins, of_sender = self._split_by_fused_table(numbers, lengths)
            weights: list[Tensor | None] = [None] * len(rows)
            if wait_for_weights is not None:
                weighted_tables = [i for i, w in enumerate(weighted) if w]
                received_weights, _ = wait_for_weights()
                pieces = torch.split(
                    received_weights, [of_sender[i][w] for w in range(self._world) for i in weighted_tables]
                )
                for k, i in enumerate(weighted_tables):
                    weights[i] = torch.cat(pieces[k :: len(weighted_tables)])
            received = [
                of_sender[i] if b is None else [int(p.sum()) for p in torch.split(b, of_sender[i])]
                for i, b in enumerate(begins)
            ]
            requested = [
                None if b is None else RequestedBags.from_begins(b, w) for b, w in zip(begins, weights, strict=True)
            ]
            return RowRequest(sent, rows, received + [r.ids_per_rank for r in raw_requests], requested, raw_requests)

        return answer

    def _split_by_fused_table(
        self, numbers: Tensor, counts: list[int]
    ) -> tuple[list[Tensor], list[Tensor | None], list[list[int]]]:
        """Split received numbers by fused table: rows, which begin a part (None: no parts), and how many each rank
        sent.
        """
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
        """Start to fetch the requested vectors, by fused table in the order of the request: [U_a, D_a].

        Rows come as stored, sums of bags as float32; both as the plan's `comm_dtype` where they are float32. One
        all-to-all; what is returned waits for it.

        Args:
            request: what is looked up.
            weights: this rank's matrices, by fused table.
            answers: by table of raw ids, the vectors that the ranks asked for here.
        """
        if self._channel is not None and self._can_send_zero_copy(weights, answers):
            return self._send_zero_copy(self._channel, request, weights[0])
        vectors = [
            gather(w, rows) if requested is None else requested.sums(w, rows)
            for w, rows, requested in zip(weights, request.rows, request.requested, strict=True)
        ]
        return self._start_swap([*vectors, *answers], request.received, request.sent)

    def _can_send_zero_copy(self, weights: Sequence[Tensor], answers: Sequence[Tensor]) -> bool:
        """Return whether the vectors of one matrix travel without a copy."""
        return len(weights) == 1 and not answers and self._comm_dtype is torch.float32 and cpu.usable(weights[0])

    def _send_zero_copy(self, channel: MessageChannel, request: RowRequest, weight: Tensor) -> RemoteRows:
        counts, rank, requested = request.received[0], self._collective.world.rank, request.requested[0]
        message = channel.reserve(counts, weight.shape[1:], weight.dtype)
        if requested is not None:
            local_sums = weight.new_empty(counts[rank], weight.shape[1])
            requested.sums_into([local_sums if p is None else p for p in message.parts], weight, request.rows[0])
            return RemoteRows(message.send(), local_sums, None, request.sent[0], rank)
        requests = torch.split(request.rows[0], counts)
        for part, rows in zip(message.parts, requests, strict=True):
            if part is not None:
                cpu.pool_sum(weight, rows, rows.numel(), out=part)
        return RemoteRows(message.send(), weight, requests[rank], request.sent[0], rank)

    def to_comm_dtype(self, vectors: Tensor) -> Tensor:
        """Convert float32 vectors to the plan's `comm_dtype`; leave others unchanged."""
        return vectors.to(self._comm_dtype) if vectors.dtype is torch.float32 else vectors

    def return_gradients(self, request: RowRequest, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients [U_a, D_a] of fetched vectors to their owners; return those that arrive here, float32."""
        return [g.float() for g in self._start_swap(gradients, request.sent, request.received)()]

    def _start_swap(
        self, parts: Sequence[Tensor], sent: list[list[int]], received: list[list[int]]
    ) -> Callable[[], list[Tensor]]:
        """Send rows of matrices to the ranks, receive theirs for the same matrices. One all-to-all."""
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
    """Merge vectors by fused table, each in order of ranks, into one in order of ranks, then fused tables."""
    if len(parts) == 1:
        return parts[0]
    pieces = [torch.split(p, list(n)) for p, n in zip(parts, counts, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def _loops(x: Tensor) -> bool:
    """Return whether the C++ loops work on a vector."""
    return x.device.type == "cpu" and native.library() is not None


def _encode_requests(
    indices: Tensor, counts: list[int], shift: Tensor, begins: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Encode requests by C++ or torch; see cpu.encode_requests."""
    if _loops(indices):
        return cpu.encode_requests(indices, counts, shift, begins, dtype)
    each = torch.repeat_interleave(shift, torch.tensor(counts, device=shift.device), output_size=indices.numel())
    rows = (indices + each).to(dtype)
    return rows if begins is None else torch.where(begins, -1 - rows, rows)


class RemoteRows:
    """Requested vectors of other ranks in shared memory, read where their owners wrote them; local rows are read in
    place.
    """

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
        """Return all vectors in order of their owners: one matrix [U, D]."""
        received = self._receive_message()
        self.copy_local()
        out = torch.cat([self._matrix if p is None else p for p in received.parts])
        received.release()
        return [out]

    def pointers(self) -> tuple[Tensor, ReceivedMessage]:
        """Return the vectors' addresses in order of their owners, int64 [U], and the message that owns the remote
        ones.
        """
        received = self._receive_message()
        return row_pointers(
            [(self._matrix, self._local_rows) if p is None else (p, None) for p in received.parts]
        ), received


def row_pointers(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Return the addresses of matrices' rows (None: all rows): int64, one matrix after the other."""
    counts = [matrix.shape[0] if rows is None else rows.numel() for matrix, rows in parts]
    out = torch.empty(sum(counts), dtype=torch.int64)
    for (matrix, rows), out_part in zip(parts, torch.split(out, counts), strict=True):
        cpu.row_pointers(matrix, rows, out_part)
    return out


@dataclass(frozen=True)
class BagRequest:
    """Bags of a batch in one fused table, bucketized by owner, as the requesting rank has them.

    N ids, P parts that are not empty.
    """

    #: Indices by owner, then by bag, in each bag front to back: [N].
    indices: Tensor
    #: float32 [N], where a lookup is weighted.
    weights: Tensor | None
    #: True for indices that begin a part of a bag: bool [N].
    begins: Tensor
    #: Bag of each part: int64 [P].
    bag_ids: Tensor
    #: Indices, and parts of bags, for each owner: [W].
    ids_per_rank: list[int]
    bags_per_rank: list[int]

    def sum(self, vectors: Tensor, bags: int) -> Tensor:
        """Sum the parts' vectors [P, D] by bag: [bags, D]; zeros for empty bags."""
        if cpu.usable(vectors):
            return sum_bags(vectors, *cpu.group(self.bag_ids, bags))
        order = torch.argsort(self.bag_ids, stable=True)
        counts = torch.bincount(self.bag_ids, minlength=bags)
        return sum_bags(vectors, order, counts.cumsum(0) - counts)


def bucketize_bags(fused: FusedTable, jagged: JaggedIndices) -> BagRequest:
    """Sort the occurrences of a batch by owner."""
    world = len(fused.rank_offsets) - 1
    assert jagged.bag_ids is not None
    if jagged.indices.device.type == "cpu" and native.library() is not None:
        return BagRequest(*cpu.bucketize_bags(jagged.indices, jagged.bag_ids, jagged.weights, fused.rank_offsets))
    ends = fused.rank_offsets[1:].to(jagged.indices.dtype)
    owner = torch.bucketize(jagged.indices, ends, right=True, out_int32=True)
    order = torch.argsort(owner, stable=True)
    owner, bag = owner.index_select(0, order), jagged.bag_ids.index_select(0, order)
    begins = torch.ones(bag.numel(), dtype=torch.bool)
    torch.ne(bag[1:], bag[:-1], out=begins[1:])
    begins[1:] |= owner[1:] != owner[:-1]
    return BagRequest(
        indices=jagged.indices.index_select(0, order),
        weights=None if jagged.weights is None else jagged.weights.index_select(0, order),
        begins=begins,
        bag_ids=bag[begins],
        ids_per_rank=torch.bincount(owner, minlength=world).tolist(),
        bags_per_rank=torch.bincount(owner[begins], minlength=world).tolist(),
    )


@dataclass(frozen=True)
class RequestedBags:
    """Bags of one fused table that the ranks request from this owner, which sums them; parts in order of the ranks."""

    #: First index of each part of a bag: int64 [P].
    offsets: Tensor
    #: Part of a bag of each index: int64 [N].
    bag_ids: Tensor
    #: float32 [N], where a lookup is weighted.
    weights: Tensor | None

    @staticmethod
    def from_begins(begins: Tensor, weights: Tensor | None) -> RequestedBags:
        """Create the bags from a mask of ids that begin a part: bool [N]."""
        return RequestedBags(begins.nonzero().view(-1), begins.cumsum(0) - 1, weights)

    def sums_into(self, parts: Sequence[Tensor], weight: Tensor, rows: Tensor) -> None:
        """Write `sums` of a float32 matrix into consecutive pieces of memory, by the C++ loop: float32 [P_r, D]
        each.
        """
        starts, first = torch.split(self.offsets, [len(p) for p in parts]), 0
        for number, (part, of_part) in enumerate(zip(parts, starts, strict=True)):
            following = next((int(s[0]) for s in starts[number + 1 :] if len(s)), rows.numel())
            if len(part):
                weights = None if self.weights is None else self.weights[first:following]
                cpu.pool_sum(weight, rows[first:following], len(part), of_part - first, weights, part)
            first = following

    def sums(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Sum the parts: float32 [P, D]; in another storage each distinct row is decoded once."""
        if weight.dtype is not torch.float32:
            duplicates = find_duplicates(rows)
            weight, rows = decode(weight.index_select(0, duplicates.unique)), duplicates.inverse()
        return sum_bags(weight, rows, self.offsets, self.weights)
