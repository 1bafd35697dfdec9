"""The messages of a step: ids to their owners and rows back; gradients to the owners.

Pure functions over a rank's addresses (headrace.embeddings.layout) and a collective. All tables travel in one message
each way, whatever their widths and storage, each distinct row once. Duplicates are found by one stable sort, and sums
over duplicates run in that order (embedding_bag sums a bag front to back), so the same input gives the same bits:
`index_add_` would be neither parallel nor faster here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from headrace.embeddings import native
from headrace.embeddings.collective import Collective
from headrace.embeddings.layout import Arena

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Duplicates:
    """Equal values of a vector [N], found by sorting it."""

    #: Distinct values, ascending: [U].
    unique: Tensor
    #: Positions in the vector, grouped by value, first position first: int64 [N].
    order: Tensor
    #: Where each value's group starts in `order`: int64 [U].
    starts: Tensor
    #: Index into `unique` by place in `order`: int64 [N].
    group: Tensor

    def inverse(self) -> Tensor:
        """Index into `unique` of each element of the vector: int64 [N]."""
        return torch.empty_like(self.order).scatter_(0, self.order, self.group)

    def sum_rows(self, x: Tensor, row_of: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Sum over equal values, float32 [U, D]: element i adds weights[i] * x[row_of[i]] (None: 1, x[i])."""
        rows = self.order if row_of is None else row_of.index_select(0, self.order)
        return sum_bags(x, rows, self.starts, None if weights is None else weights.index_select(0, self.order))

    def part(self, start: int, end: int) -> Duplicates:
        """The same distinct values, of the vector's elements [start, end) alone; a value may have none there."""
        inside = (self.order >= start) & (self.order < end)
        group = self.group[inside]
        counts = torch.bincount(group, minlength=self.unique.numel())
        return Duplicates(self.unique, self.order[inside] - start, counts.cumsum(0) - counts, group)


def find_duplicates(x: Tensor) -> Duplicates:
    """Sort out the duplicates of an integer vector [N], none negative."""
    if x.dtype is torch.int32 and x.device.type == "cpu" and native.library() is not None:
        return Duplicates(*native.duplicates(x))
    values, order = torch.sort(x, stable=True)
    is_first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=is_first[1:])
    starts = is_first.nonzero().view(-1)
    return Duplicates(values.index_select(0, starts), order, starts, is_first.cumsum(0) - 1)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: [len(rows), D]."""
    if native.usable(x):
        return native.pool_sum(x, rows, rows.numel())
    return x.index_select(0, rows)


def sum_bags(x: Tensor, rows: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of weights[j] * x[rows[j]] over j in starts[i] : starts[i + 1]: [len(starts), D]; an empty bag is zero."""
    if rows.numel() == 0:
        return x.new_zeros(starts.numel(), x.shape[1])
    if native.usable(x):
        return native.pool_sum(x, rows, starts.numel(), starts, weights)
    return embedding_bag(rows, x, starts.to(rows.dtype), mode="sum", per_sample_weights=weights)


@dataclass(frozen=True)
class Request:
    """What this rank asked for, and what it was asked for, in one lookup. W ranks, A arenas."""

    #: Distinct rows asked for, by arena and owner: [A][W].
    sent: list[list[int]]
    #: Rows of the own matrices that the ranks ask for, by arena, ranks in order: int32 or int64 [R_a].
    rows: list[Tensor]
    #: How many of them each rank asks for: [A][W].
    received: list[list[int]]
    _sorted: dict[int, Duplicates] = field(default_factory=dict)

    def duplicates(self, arena: int) -> Duplicates:
        """Those of `rows` of one arena, found once."""
        if arena not in self._sorted:
            self._sorted[arena] = find_duplicates(self.rows[arena])
        return self._sorted[arena]

    def touched(self, arena: int) -> Tensor:
        """Distinct rows of one arena, ascending."""
        return self.duplicates(arena).unique


class Mail:
    """The sharded arenas of a layout and the ranks between which their rows travel."""

    def __init__(self, arenas: Sequence[Arena], collective: Collective) -> None:
        self._arenas = list(arenas)
        self._collective = collective
        self._world = collective.world.size
        rank_rows = torch.stack([a.rank_starts.diff() for a in arenas])  # [A, W]
        #: Where each arena's rows begin in an owner's one numbering of all its rows: [A, W]; and the end.
        self._base = torch.cat([rank_rows.new_zeros(1, self._world), rank_rows.cumsum(0)])
        self._dtype = torch.int32 if int(self._base[-1].max()) <= _INT32_MAX else torch.int64

    def send_ids(self, uniques: Sequence[Tensor]) -> Callable[[], Request]:
        """Tell the owners which rows are wanted; learn which are wanted from here. One all-to-all.

        The owner's own row numbers travel, so that the owner has nothing to decode.

        Args:
            uniques: addresses by arena, ascending: [U_a].

        Returns:
            What waits for the answer: the message may travel meanwhile.
        """
        sent, local = [], []
        for i, (arena, unique) in enumerate(zip(self._arenas, uniques, strict=True)):
            starts = arena.rank_starts.to(unique.dtype)
            counts = torch.searchsorted(unique, starts).diff()
            shift = self._base[i].to(unique.dtype) - starts[:-1]
            local.append((unique + torch.repeat_interleave(shift, counts, output_size=unique.numel())).to(self._dtype))
            sent.append([int(n) for n in counts])
        wait = self._collective.start_all_to_all(_by_rank(local, sent), [sum(n) for n in zip(*sent, strict=True)])

        def answer() -> Request:
            asked, counts = wait()
            return Request(sent, *self._sort_by_arena(asked, counts))

        return answer

    def _sort_by_arena(self, asked: Tensor, counts: list[int]) -> tuple[list[Tensor], list[list[int]]]:
        if len(self._arenas) == 1:
            return [asked], [counts]
        base = self._base[:, self._collective.world.rank].to(asked.dtype)
        # Each sender's rows are ascending, and so by arena.
        parts = [torch.split(p, torch.searchsorted(p, base).diff().tolist()) for p in torch.split(asked, counts)]
        rows = [torch.cat(of_arena) - base[i] for i, of_arena in enumerate(zip(*parts, strict=True))]
        return rows, [[p.numel() for p in of_arena] for of_arena in zip(*parts, strict=True)]

    def start_rows(self, request: Request, weights: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to fetch the rows asked for, by arena in the order of the addresses, as stored: [U_a, D_a].

        One all-to-all; what is returned waits for it.
        """
        found = [gather(w, rows) for w, rows in zip(weights, request.rows, strict=True)]
        return self._start_swap(found, request.received, request.sent)

    def return_gradients(self, request: Request, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients [U_a, D_a] of the rows asked for to their owners; those of `request.rows` arrive."""
        return self._start_swap(gradients, request.sent, request.received)()

    def _start_swap(
        self, parts: Sequence[Tensor], sent: list[list[int]], received: list[list[int]]
    ) -> Callable[[], list[Tensor]]:
        """Send matrices' rows to the ranks, receive theirs: the same matrices' other rows. One all-to-all."""
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
    """Vectors by arena, each in order of ranks, as one vector in order of ranks, then arenas."""
    if len(parts) == 1:
        return parts[0]
    pieces = [torch.split(p, list(n)) for p, n in zip(parts, counts, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])
