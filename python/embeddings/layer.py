"""Sharded embedding layer: tables spread over the ranks by a plan, and the autograd function of their lookup.

Forward pools rows to vectors; backward turns gradients of vectors into gradients of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.config.embeddings import EmbeddingOptimizer
from headrace.embeddings.addressing import BatchIndexer, CodeBatch, JaggedIndices, batch_to_device, split_found_flags
from headrace.embeddings.fused_optimizer import Gradient
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import default_device, find_duplicates, gather, sum_bags
from headrace.embeddings.layout import FusedTable, JoinedRows, TableRows
from headrace.embeddings.lookup.handle import LookupHandle, TableLookup
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.sharding_plan import Plan
from headrace.embeddings.storage import INIT_BOUND, decode

if TYPE_CHECKING:
    from headrace.embeddings.dynamic.tables import DynamicEmbeddings
    from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors


class LookupFunction(torch.autograd.Function):
    """Autograd function (anchor, embeddings, handle) -> outputs of the lookup.

    The outputs are those of `Layout`, then vectors [N, D] of each table of raw ids, then has_row [N] of each. Forward
    takes two all-to-alls (one of them in `prepare`), backward one.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embeddings: LocalTables, handle: LookupHandle) -> tuple[Tensor, ...]:
        layout = embeddings.layout
        stored = handle.rows()
        fetched = {a.number: decode(r) for a, r in zip(embeddings.remote, stored, strict=False)}
        winners: dict[int, Tensor] = {}
        pooled: list[Tensor] = [anchor] * len(layout.groups)
        for fused, lookup in zip(layout.fused_tables, handle.lookups, strict=True):
            if lookup.bags is not None:
                jagged = handle.jagged[lookup.groups[0][0]]
                pooled[lookup.groups[0][0]] = divide(lookup.bags.sum(fetched[fused.number], jagged.num_bags), jagged)
                continue
            rows, index = _source(embeddings, fused, fetched.get(fused.number), lookup)
            for number, start, end in lookup.groups:
                jagged = handle.jagged[number]
                if layout.groups[number].mode == "sum":
                    pooled[number] = pool_sum(rows, index[start:end], jagged)
                else:
                    pooled[number], winners[number] = pool_max(rows, index[start:end], jagged)
        ctx.embeddings, ctx.handle, ctx.winners = embeddings, handle, winners
        outs = layout.join(pooled, handle.samples)
        answered = [split_found_flags(x) for x in stored[len(embeddings.remote) :]]
        answered = answered or [(a.vectors, a.has_row) for a in handle.answers]
        positions = [w.duplicates.inverse() for w in handle.raw]
        vectors = [gather(v, p) for (v, _), p in zip(answered, positions, strict=True)]
        has_row = [f.index_select(0, p) for (_, f), p in zip(answered, positions, strict=True)]
        ctx.mark_non_differentiable(*has_row)
        return (*outs, *vectors, *has_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        with default_device(ctx.embeddings.device):
            outputs = 1 + len(ctx.embeddings.layout.sequences)
            route_gradients(ctx.embeddings, ctx.handle, grads[:outputs], grads[outputs:], ctx.winners)
        # `handle.raw_vectors` refers to this node. Break the cycle, or the vectors stay until garbage is collected.
        ctx.handle = None
        return None, None, None


def _source(
    embeddings: LocalTables, fused: FusedTable, fetched: Tensor | None, lookup: TableLookup
) -> tuple[Tensor, Tensor]:
    """Return float32 rows, and for each looked-up code its index among them."""
    weight, cache = embeddings.weights[fused.number], embeddings.caches[fused.number]
    if fetched is not None:
        return fetched, lookup.sorted().inverse()
    if cache is not None:
        duplicates = lookup.sorted()
        return decode(cache.look_up(duplicates, embeddings.training)), duplicates.inverse()
    if dispatch.reads_directly(weight):
        return weight, lookup.indices
    duplicates = lookup.sorted()
    return decode(weight.index_select(0, duplicates.unique)), duplicates.inverse()


#: For each group, the row of each bag's largest value, by column; see `pool_max`.
Winners = dict[int, Tensor]


def route_gradients(
    embeddings: LocalTables,
    handle: LookupHandle,
    output_gradients: Sequence[Tensor],
    raw_gradients: Sequence[Tensor] = (),
    winners: Winners | None = None,
) -> None:
    """Run the backward pass of a lookup: send gradients to their rows' owners, and store those that arrive. Collective.

    Args:
        embeddings: this rank's tables.
        handle: the lookup.
        output_gradients: gradients of the layout's outputs.
        raw_gradients: gradients of the vectors of each table of raw ids.
        winners: results of `pool_max`, by group.
    """
    by_group = embeddings.layout.cut(output_gradients)
    for fused in embeddings.layout.fused_tables:
        if fused.is_local:
            embeddings.add_gradient(fused, row_gradient(embeddings, handle, winners or {}, fused, by_group))
    raw = [w.duplicates.sum_rows(g.contiguous()) for w, g in zip(handle.raw, raw_gradients, strict=False)]
    if handle.request is not None and embeddings.exchange is not None:
        sent = [remote_gradient(embeddings, handle, winners or {}, a, by_group) for a in embeddings.remote]
        raw = embeddings.send_gradients(handle.request, [*sent, *raw])
    if embeddings.dynamic is not None:
        embeddings.dynamic.add_gradients(handle.answers, raw)


def remote_gradient(
    embeddings: LocalTables, handle: LookupHandle, winners: Winners, fused: FusedTable, by_group: list[Tensor]
) -> Tensor:
    """Return the gradient of each vector that this rank fetched from a fused table's owners.

    A vector is a distinct row, or the sum of a part of a bag.
    """
    lookup = handle.lookups[fused.number]
    if lookup.bags is None:
        return row_gradient(embeddings, handle, winners, fused, by_group).sums()
    number = lookup.groups[0][0]
    return divide(gather(by_group[number], lookup.bags.bag_ids), handle.jagged[number], lookup.bags.bag_ids)


def row_gradient(
    embeddings: LocalTables, handle: LookupHandle, winners: Winners, fused: FusedTable, by_group: list[Tensor]
) -> Gradient:
    """Return the gradient of the rows of one fused table that this rank looked up."""
    groups, lookup = embeddings.layout.groups, handle.lookups[fused.number]
    duplicates = lookup.sorted()
    if len(lookup.groups) == 1 and groups[lookup.groups[0][0]].mode == "sum":
        number = lookup.groups[0][0]
        return Gradient.of_bags(duplicates, by_group[number], handle.jagged[number])
    total = torch.zeros(duplicates.unique.numel(), fused.width)
    for number, start, end in lookup.groups:
        if groups[number].mode == "sum":
            part_gradient = Gradient.of_bags(duplicates.part(start, end), by_group[number], handle.jagged[number])
            total += part_gradient.sums()
            continue
        winner = winners[number]
        if fused.is_local and not fused.cached and dispatch.reads_directly(embeddings.weights[fused.number]):
            # The winner is an index into the table; convert it to one into the distinct rows.
            winner = torch.where(
                winner < 0, winner, torch.searchsorted(duplicates.unique, winner.to(duplicates.unique.dtype))
            )
        total += max_gradient(by_group[number], winner, duplicates.unique.numel())
    return Gradient.of_sums(duplicates.unique, total)


_MAX = 2  # torch.embedding_bag's number for it


def pool_sum(rows: Tensor, index: Tensor, jagged: JaggedIndices) -> Tensor:
    """Pool rows[index[i]] over each bag's occurrences to sums, weighted sums or means: [bags, D]; zeros for empty
    bags.
    """
    if jagged.offsets is None:
        return dispatch.pool_sum(rows, index, jagged.num_bags) if dispatch.usable(rows) else gather(rows, index)
    return divide(sum_bags(rows, index, jagged.offsets, jagged.weights), jagged)


def divide(vectors: Tensor, jagged: JaggedIndices, bag: Tensor | None = None) -> Tensor:
    """Divide vectors [N, D] of bags `bag` (None: all, in order) by their bags' divisors, in place."""
    if jagged.divisor is None:
        return vectors
    return vectors.div_(jagged.divisor if bag is None else jagged.divisor.index_select(0, bag))


def pool_max(rows: Tensor, index: Tensor, jagged: JaggedIndices) -> tuple[Tensor, Tensor]:
    """Return the largest value by column of each bag [bags, D], zeros for empty bags, and its row (-1: empty).

    Of equal values the first in the bag wins, as in torch's EmbeddingBag.
    """
    if index.numel() == 0:
        empty = torch.full((jagged.num_bags, rows.shape[1]), -1)
        return rows.new_zeros(empty.shape, dtype=torch.float32), empty
    starts = torch.arange(jagged.num_bags) if jagged.offsets is None else jagged.offsets
    pooled, _, sizes, winner = torch.embedding_bag(rows, index, starts.to(index.dtype), False, _MAX)
    return pooled.float(), winner.long().masked_fill_(sizes.unsqueeze(1) == 0, -1)


def max_gradient(grad: Tensor, winner: Tensor, rows: int) -> Tensor:
    """Return the gradient of each distinct row [rows, D]: each bag's goes to its winner [bags, D], by column."""
    width = grad.shape[1]
    is_taken = winner >= 0
    position = (winner * width + torch.arange(width))[is_taken]
    if dispatch.usable(grad):  # on a GPU `index_add_` adds in any order
        duplicates = find_duplicates(position)
        sums = duplicates.sum_rows(grad[is_taken].unsqueeze(1)).squeeze(1)
        return grad.new_zeros(rows * width).index_copy_(0, duplicates.unique, sums).view(rows, width)
    # One serial pass over a vector: repeated positions are summed in order.
    return grad.new_zeros(rows * width).index_add_(0, position, grad[is_taken]).view(rows, width)


class ShardedEmbeddings(LocalTables):
    """This rank's blocks of a plan's tables, looked up and trained together with those of the other ranks.

    Forward maps codes to float32 [B, F, D], for F features of one width D. `features` returns a tensor for each lookup,
    of any width, and sequences too. `prepare(zero_copy=True)` lets forward return addresses in place of a tensor.

    Codes are int64 [B, S] with padded lists, or for each lookup in plan order a tensor ([B], [B, L]) or a
    `JaggedTensor`. B may differ between ranks and be 0. All ranks call forward, backward and step the same number of
    times, since they exchange rows. The weights are no torch parameters: backward sums the gradients of touched rows
    over the ranks and stores them with the rows' owners, and `step` applies them.

        embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="adagrad", learning_rate=0.05))
        loss_of(embeddings(codes)).backward()   # local loss: sum over the rank's rows / rows of the global batch
        embeddings.step()

    Ids of raw-id tables (`dynamic`) travel in the same messages; see dynamic.tables. These tables have an optimizer,
    a step and files of their own.

    Reproducibility: a run on the same ranks has the same bits. A lookup has the same bits on any number of ranks and by
    any plan. Gradients are summed rank by rank, so weights after a step differ between worlds by rounding only.

    With `device="cuda"` the tables, vectors and gradients are on the GPU, and batches are copied there. The kernels of
    headrace.embeddings.kernels look up and step, and round 16-bit rows stochastically. Tables that the plan caches are
    in host memory, with their hot rows on the GPU as well; results are the same, bit for bit.

    Args:
        plan: placement of every row.
        collective: the ranks; with tables on a GPU it must carry tensors of the GPU.
        seed: seed of the rows' initial values.
        init_bound: initial values are uniform in [-init_bound, init_bound].
        dynamic: tables of raw ids, on the same device.
        device: device of this rank's rows.
        matrix: returns the memory of a fused table, [rows, stored width] of its type, which is used as it is; None: new
            memory, with initial rows.

    Raises:
        UserError: the device does not exist.
    """

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        seed: int,
        *,
        init_bound: float = INIT_BOUND,
        dynamic: DynamicEmbeddings | None = None,
        device: str | torch.device = "cpu",
        matrix: Callable[[FusedTable], Tensor] | None = None,
    ) -> None:
        super().__init__(plan, collective, seed, init_bound=init_bound, dynamic=dynamic, device=device, matrix=matrix)
        with default_device(self.device):
            self._indexer = BatchIndexer(self.layout)
        #: Joined rows of tables that no rank holds, by number of the fused table.
        self._joined = {a.number: JoinedRows(plan, a) for a in self.layout.fused_tables if a.joined}
        #: Widths of the features' vectors.
        self._dims = {plan.by_name[x.table].dim for x in plan.lookups}
        self._has_equal_widths = len(self._dims) <= 1 and all(x.pooling != "none" for x in plan.lookups)

    @cached_property
    def _supports_zero_copy(self) -> bool:
        from headrace.embeddings.lookup.zero_copy import supports_zero_copy

        is_plain = self.device.type == "cpu" and self.dynamic is None and self._has_equal_widths
        return is_plain and bool(self.plan.lookups) and supports_zero_copy(self.layout)

    def set_joined(self, rows: Mapping[str, TableRows]) -> None:
        """Replace the rows of the plan's joined tables, by name.

        The next lookups may request only these rows, and return the same bits as with complete tables. A table that is
        not named has no rows.
        """
        for number, joined in self._joined.items():
            self.weights[number] = joined.set(rows)

    def prepare(
        self, batch: CodeBatch, weights: Tensor | None = None, raw: Sequence[Tensor] = (), *, zero_copy: bool = False
    ) -> LookupHandle:
        """Start a lookup: deduplicate the ids and send them to their owners, who answer later. Collective.

        Call it one batch ahead: the ids of the next batch travel while the dense part works on this one. No row is
        read before `forward`, so the result does not change. On request rows travel early too, with the same result,
        bit for bit:

            prepared = embeddings.prepare(codes)
            while True:
                following = embeddings.prepare(next_codes)   # ids travel during the forward pass
                loss = loss_of(embeddings(prepared))
                following.prefetch()                      # rows that this step keeps: during the backward pass
                loss.backward()
                embeddings.step()
                following.start()                            # the other rows: during what comes before the lookup
                prepared = following

        Args:
            batch: codes int64 [B, S], or one tensor a lookup; see the class.
            weights: float32 [B, S]; needed if a lookup of padded codes is weighted.
            raw: ids of each table of `dynamic`, int64 [N] of any length.
            zero_copy: let `forward` return a `ZeroCopyVectors` where possible, in place of a tensor. No step may come
                between the lookup's `start` and its backward pass.
        """
        if self.device.type != "cpu":
            with default_device(self.device):
                raw = [x.to(self.device, non_blocking=True) for x in raw]
                return self._prepare(*batch_to_device(batch, weights, self.device), raw, False)
        return self._prepare(batch, weights, raw, zero_copy)

    def _prepare(
        self, batch: CodeBatch, weights: Tensor | None, raw: Sequence[Tensor], zero_copy: bool
    ) -> LookupHandle:
        if isinstance(batch, Tensor):
            jagged, samples = self._indexer.padded(batch, weights), batch.shape[0]
        else:
            jagged, samples = self._indexer.jagged(batch), _samples_of(batch, self.plan)
        fused_tables = [self.layout.fused_tables[g.fused] for g in self.layout.groups]
        jagged = [self._joined_positions(fused, x) for fused, x in zip(fused_tables, jagged, strict=True)]
        if zero_copy:
            from headrace.embeddings.lookup.zero_copy import is_zero_copy

            zero_copy = self._supports_zero_copy and all(map(is_zero_copy, fused_tables, jagged))
        return LookupHandle(self, samples, jagged, raw, zero_copy, is_padded=isinstance(batch, Tensor))

    def _joined_positions(self, fused: FusedTable, jagged: JaggedIndices) -> JaggedIndices:
        """Convert the indices of a joined table to positions among its joined rows."""
        if not fused.joined:
            return jagged
        return replace(jagged, indices=self._joined[fused.number].places(jagged.indices))

    def forward(self, batch: CodeBatch | LookupHandle, weights: Tensor | None = None) -> Tensor | ZeroCopyVectors:
        if not self._has_equal_widths:
            raise ValueError("the features' vectors differ in width or are sequences: call features()")
        handle = batch if isinstance(batch, LookupHandle) else self.prepare(batch, weights)
        if handle.zero_copy:
            from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors

            self._register_lookup(handle)
            return ZeroCopyVectors(self, handle)
        out = self.outputs(handle)[0]
        return out.view(out.shape[0], len(self.plan.lookups), max(self._dims, default=0))

    def features(self, batch: CodeBatch | LookupHandle, weights: Tensor | None = None) -> list[Tensor]:
        """Return the vectors of each lookup, in plan order: float32 [B, dim].

        A sequence has a vector for each code: [N, dim], or [B, length, dim] for padded codes, with zeros for padding.
        """
        handle = batch if isinstance(batch, LookupHandle) else self.prepare(batch, weights)
        vectors = self.layout.split(self.outputs(handle))
        if handle.is_padded:
            for i in self.layout.sequences:
                vectors[i] = vectors[i].view(handle.samples, self.plan.lookups[i].length, vectors[i].shape[1])
        return vectors

    def configure_all(self, optimizer: EmbeddingOptimizer) -> None:
        """Configure the optimizer of these tables and of the tables of raw ids; `optimizer.tables` may name both."""
        if self.dynamic is not None:
            self.dynamic.configure_optimizer(optimizer)
            names = {t.spec.name for t in self.dynamic.tables}
            planned_settings = {name: settings for name, settings in optimizer.tables.items() if name not in names}
            optimizer = optimizer.model_copy(update={"tables": planned_settings})
        self.configure_optimizer(optimizer)

    def step_all(self, lr: float | None = None) -> None:
        """Take a step on these tables, then on those of raw ids."""
        self.step(lr)
        if self.dynamic is not None:
            self.dynamic.step(lr)

    def outputs(self, handle: LookupHandle) -> list[Tensor]:
        """Return the vectors of all pooled lookups side by side, [B, sum of widths], then those of each sequence.

        The vectors of raw ids are then in `handle.raw_vectors`.
        """
        if not self.plan.lookups and not handle.raw:
            return [torch.zeros(handle.samples, 0, device=self.device)]
        self._register_lookup(handle)
        with default_device(self.device):
            results: tuple[Tensor, ...] = LookupFunction.apply(self.anchor, self, handle)  # type: ignore[no-untyped-call]
        outputs = 1 + len(self.layout.sequences)
        raw = results[outputs:]
        handle.raw_vectors = list(zip(raw[: len(handle.raw)], raw[len(handle.raw) :], strict=True))
        return list(results[:outputs])

    def _register_lookup(self, handle: LookupHandle) -> None:
        handle.start()
        if torch.is_grad_enabled():
            self.lookup_count += 1
            if handle.request is not None:
                self.open_requests.append(handle.request)


def _samples_of(batch: Sequence[Tensor | JaggedTensor], plan: Plan) -> int:
    pooled = (x for x, lookup in zip(batch, plan.lookups, strict=True) if lookup.pooling != "none")
    return next((x.samples if isinstance(x, JaggedTensor) else len(x) for x in pooled), 0)
