"""Zero-copy lookups: vectors that are read in place, and gradients that are summed where they are needed.

A model that reads the vectors sample by sample (headrace.models) does not need them side by side. It reads the vectors
of this rank's rows in the tables, those of other ranks' rows in the memory that the ranks share, or else in the
received message. Backward, the gradient of each distinct row is summed, sample by sample, in the message to its owner,
who reads it there in the step. So vectors and gradients are written once where they were copied three times. All bits
are those of `ShardedEmbeddings.forward`: each sum runs in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headrace.comm.base import Message, ReceivedMessage
from headrace.compute import native
from headrace.embeddings.addressing import JaggedIndices
from headrace.embeddings.exchange import RowRequest, row_pointers
from headrace.embeddings.fused_optimizer import Gradient
from headrace.embeddings.kernels import cpu
from headrace.embeddings.layout import FusedTable, Layout
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.storage import decode


def supports_zero_copy(layout: Layout) -> bool:
    """Return whether lookups by a layout need no copies: vectors of one width, each from one row or from one owner."""
    widths = {a.width for a in layout.fused_tables}
    return (
        native.library() is not None
        and len(widths) == 1
        and {layout.plan.by_name[x.table].dim for x in layout.plan.lookups} == widths
        and all(a.dtype is torch.float32 or not a.is_local for a in layout.fused_tables)
        and not any(a.cached for a in layout.fused_tables)
        and all(not a.pooled or a.one_rank_each for a in layout.fused_tables)
        and sum(not a.is_local for a in layout.fused_tables) <= 1
        and all(g.mode == "sum" for g in layout.groups)
    )


def is_zero_copy(fused: FusedTable, jagged: JaggedIndices) -> bool:
    """Return whether the vectors of a batch exist in memory: each is one row, or a bag's sum from its owner."""
    is_plain = jagged.weights is None and jagged.divisor is None
    return is_plain and (fused.pooled or jagged.offsets is None)


class ZeroCopyVectors:
    """Vectors of a lookup: float32 [B, F, D], each somewhere in memory.

    They stay as they are until the backward pass, or until nothing refers to this any more. Its user computes the
    vectors' gradients at one go between `gradient_pointers` and `send_gradient`, or gives them to `set_gradient`.
    """

    def __init__(self, embeddings: LocalTables, handle: LookupHandle) -> None:
        """Wait for the rows of a started lookup and locate its vectors."""
        self._embeddings, self._handle = embeddings, handle
        #: Width of a vector, D.
        self.width = embeddings.layout.fused_tables[0].width
        self._received: ReceivedMessage | None = None
        self._keep_alive: list[Tensor] = []
        self._message: Message | None = None
        #: By fused table, the sums of gradients that stay local: of all distinct rows, or of this rank's.
        self._sums: list[Tensor] = []
        #: Context around the computation of gradients; see headrace.train.callbacks.tracing.
        self.span: Callable[[], AbstractContextManager[None]] = nullcontext
        #: A tensor that requires a gradient, for autograd.
        self.anchor: Tensor = embeddings.anchor
        #: Addresses of the vectors: int64 [B, F].
        self.pointers: Tensor | None = self._pointers_by_feature(
            [self._vector_pointers(n) for n in range(len(handle.lookups))], False
        )
        self.check()

    def release(self) -> None:
        """Release the memory of the vectors."""
        self.pointers = None
        self._keep_alive = []
        if self._received is not None:
            self._received.release()

    def gradient_pointers(self) -> Tensor:
        """Return addresses of the vectors' gradients, int64 [B, F]: an odd one, less 1, is stored to, others are added
        to.

        Front to back, so by one thread.
        """
        self.check()
        return self._pointers_by_feature(
            [row_pointers([(p, None) for p in buffers]) for buffers in self._reserve()], True
        )

    def set_gradient(self, gradient: Tensor) -> None:
        """Set the gradients of all vectors, float32 [B, F, D], in place of `gradient_pointers`.

        Collective, as `send_gradient`.
        """
        self.check()
        by_group = self._embeddings.layout.cut([gradient.flatten(1)])
        for lookup, buffers in zip(self._handle.lookups, self._reserve(), strict=True):
            if not lookup.groups:
                continue
            of_group = by_group[lookup.groups[0][0]]
            counts = [p.shape[0] for p in buffers]
            if lookup.bags is not None:
                for buffer, bags in zip(buffers, torch.split(lookup.bags.bag_ids, counts), strict=True):
                    cpu.pool_sum(of_group, bags, bags.numel(), out=buffer)
                continue
            duplicates = lookup.sorted()
            range_ends = torch.cat([duplicates.starts, torch.tensor([duplicates.order.numel()])])
            cuts = range_ends[torch.tensor([0, *counts]).cumsum(0)].tolist()
            starts = torch.split(duplicates.starts, counts)
            for buffer, of_place, first, last in zip(buffers, starts, cuts, cuts[1:], strict=False):
                cpu.pool_sum(of_group, duplicates.order[first:last], buffer.shape[0], of_place - first, out=buffer)
        self.send_gradient()

    def _reserve(self) -> list[list[Tensor]]:
        """Reserve memory for the gradients of distinct rows (or parts of bags), by fused table.

        Matrices, one after the other.
        """
        embeddings, handle = self._embeddings, self._handle
        all_buffers = []
        for fused, lookup in zip(embeddings.layout.fused_tables, handle.lookups, strict=True):
            if fused.is_local:
                lookup.range_ends = embeddings.row_ranges(fused)
            counts = [lookup.sorted().unique.numel() if lookup.bags is None else lookup.bags.bag_ids.numel()]
            buffers: list[Tensor | None] = [None]
            remote_rows = None if fused.is_local else handle.remote_rows
            if remote_rows is not None and embeddings.channel is not None:
                self._message = embeddings.channel.reserve(remote_rows.counts, (self.width,), torch.float32)
                counts, buffers = remote_rows.counts, list(self._message.parts)
            local_sums = torch.empty(sum(n for n, p in zip(counts, buffers, strict=True) if p is None), self.width)
            self._sums.append(local_sums)
            all_buffers.append([local_sums if p is None else p for p in buffers])
        return all_buffers

    def send_gradient(self) -> None:
        """Send the gradients, once they are computed, to the owners of their rows. Collective.

        Those that come are waited for when the embeddings need them, while the rest of the backward pass runs.
        """
        embeddings, handle = self._embeddings, self._handle
        for fused, lookup, local_sums in zip(embeddings.layout.fused_tables, handle.lookups, self._sums, strict=True):
            if fused.is_local:
                embeddings.add_gradient(fused, Gradient.of_sums(lookup.sorted().unique, local_sums))
            elif self._message is None:
                assert handle.request is not None
                embeddings.send_gradients(handle.request, [local_sums])
            else:
                assert handle.request is not None
                embeddings.defer_gradients(
                    _deferred_gradients(embeddings, fused, handle.request, local_sums, self._message.send())
                )
        self._sums, self._message = [], None
        self.release()

    def check(self) -> None:
        """Raise RuntimeError unless the vectors are there, as they were."""
        if self.pointers is None:
            raise RuntimeError("a second backward pass of one lookup: its vectors are gone")
        if self._handle.started_at_step != self._embeddings.steps:
            raise RuntimeError("a step between start and backward of a lookup without copies: its vectors have changed")

    def _vector_pointers(self, number: int) -> Tensor:
        """Return addresses of the vectors of a fused table's distinct rows; in a local fused table of each
        occurrence.
        """
        embeddings, handle = self._embeddings, self._handle
        fused, lookup, weight = (
            embeddings.layout.fused_tables[number],
            handle.lookups[number],
            embeddings.weights[number],
        )
        if fused.is_local:
            return row_pointers([(weight, lookup.indices)])
        remote_rows = handle.remote_rows
        if remote_rows is None:
            (rows,) = handle.rows()
            self._keep_alive.append(decode(rows))
            return row_pointers([(self._keep_alive[-1], None)])
        pointers, self._received = remote_rows.pointers()
        return pointers

    def _pointers_by_feature(self, pointers: Sequence[Tensor], gradients: bool) -> Tensor:
        """Return addresses by sample and feature, int64 [B, F].

        Args:
            pointers: by fused table, of its distinct rows; of bags that owners sum, of each that is not empty; of
                vectors in this rank's own matrices, of each occurrence.
            gradients: whether they are those of the vectors' gradients: see `gradient_pointers`.
        """
        embeddings, handle = self._embeddings, self._handle
        layout = embeddings.layout
        by_group: dict[int, Tensor] = {}
        for fused, lookup, of_fused in zip(layout.fused_tables, handle.lookups, pointers, strict=True):
            if lookup.bags is not None:
                number = lookup.groups[0][0]
                # An empty bag is zeros, and its gradient is discarded.
                spare = torch.zeros(1, self.width)
                self._keep_alive.append(spare)
                bags = torch.full((handle.jagged[number].num_bags,), spare.data_ptr() + int(gradients))
                by_group[number] = bags.index_copy_(0, lookup.bags.bag_ids, of_fused + int(gradients))
                by_group[number] = by_group[number].view(handle.samples, layout.groups[number].pieces)
                continue
            by_row = gradients or not fused.is_local
            each = cpu.gather_pointers(of_fused, lookup.sorted().inverse(), gradients) if by_row else of_fused
            for number, start, end in lookup.groups:
                by_group[number] = each[start:end].view(handle.samples, layout.groups[number].pieces)
        group_pointers = [by_group[n] for n in range(len(layout.groups))]
        if len(group_pointers) == 1:
            return group_pointers[0]
        columns = [c // self.width for g in layout.groups for c in g.columns]
        return torch.cat(group_pointers, dim=1).index_select(1, torch.tensor(columns).argsort())


def _deferred_gradients(
    embeddings: LocalTables,
    fused: FusedTable,
    request: RowRequest,
    local_sums: Tensor,
    wait: Callable[[], ReceivedMessage],
) -> Callable[[], None]:
    """Return a function that waits for the gradients of a fused table's vectors, which stay in the senders' memory."""
    duplicates = request.duplicates(0, embeddings.row_ranges(fused))  # computed before the wait

    def receive() -> None:
        received, requested = wait(), request.requested[0]
        pointers = row_pointers([(local_sums if p is None else p, None) for p in received.parts])
        empty_grad, bag = torch.empty(0, local_sums.shape[1]), None if requested is None else requested.bag_ids
        embeddings.add_gradient(
            fused, Gradient(duplicates, empty_grad, bag, pointers=pointers, keep_alive=(local_sums, received))
        )

    return receive
