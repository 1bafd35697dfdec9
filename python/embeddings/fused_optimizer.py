"""Fused optimizer: gradients of the rows that a batch touched, and the step on them, fused table by fused table.

Gradients are not summed by row before a step needs it: a C++ loop or a kernel sums and applies them in one pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.config.embeddings import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.addressing import JaggedIndices
from headrace.embeddings.kernels import cpu
from headrace.embeddings.kernels.dispatch import Duplicates, find_duplicates
from headrace.embeddings.layout import FusedTable, Layout
from headrace.embeddings.storage import CachedSlots, RowCache, decode, empty_table, encode, noise_for
from headrace.embeddings.update_rules import RULES, FusedStep, RowUpdate, fused_step


@dataclass(frozen=True)
class Gradient:
    """Gradient of a fused table's rows on this rank from one backward pass.

    The gradient of row `duplicates.unique[u]` is the sum, over its occurrences i in `duplicates`' order, of
    weights[i] * grad[bag[i]] / divisor[bag[i]] (None: 1, row i of `grad`, 1).
    """

    #: Distinct rows of the fused table's matrix (or indices, where no other rank has any).
    duplicates: Duplicates
    #: float32 [M, D].
    grad: Tensor
    bag: Tensor | None = None
    weights: Tensor | None = None
    divisor: Tensor | None = None
    #: Memory addresses of the rows of `grad`, int64 [M]; `grad` is then [0, D].
    pointers: Tensor | None = None
    #: Owner of that memory.
    keep_alive: object = None

    @staticmethod
    def of_bags(duplicates: Duplicates, grad: Tensor, jagged: JaggedIndices) -> Gradient:
        """Create the gradient of a pooled sum."""
        return Gradient(duplicates, grad, jagged.bag_ids, jagged.weights, jagged.divisor)

    @staticmethod
    def of_rows(rows: Tensor, grad: Tensor) -> Gradient:
        """Create a gradient from rows [N] that may repeat."""
        return Gradient(find_duplicates(rows), grad)

    @staticmethod
    def of_sums(unique: Tensor, grad: Tensor) -> Gradient:
        """Create a gradient from distinct rows, sorted as `Updater.row_ranges` requires."""
        each = torch.arange(unique.numel())
        return Gradient(Duplicates(unique, each, each, each), grad)

    @property
    def rows(self) -> Tensor:
        """Distinct rows: int32 or int64 [U]."""
        return self.duplicates.unique

    def sums(self) -> Tensor:
        """Return the gradient of each distinct row: float32 [U, D]."""
        if self.pointers is not None:
            order = self.duplicates.order
            weights = None if self.weights is None else self.weights.index_select(0, order)
            pointers = self.pointers.index_select(0, order if self.bag is None else self.bag.index_select(0, order))
            return cpu.sum_pointers(pointers, self.grad.shape[1], self.duplicates.starts, weights)
        grad = self.grad if self.divisor is None else self.grad / self.divisor
        return self.duplicates.sum_rows(grad, self.bag, self.weights)

    def materialized(self) -> Gradient:
        """Return the same gradient in memory of its own."""
        return self if self.pointers is None else Gradient.of_sums(self.rows, self.sums())


class NonFiniteGradient(ArithmeticError):
    """A gradient is NaN or infinite on some rank; nothing was changed. `tables`: affected tables on this rank."""

    def __init__(self, tables: Sequence[str]) -> None:
        super().__init__(f"the gradient is not finite (tables here: {', '.join(tables) or 'none'})")
        self.tables = list(tables)


def non_finite_tables(fused: FusedTable, rows: Tensor, grad: Tensor) -> set[str]:
    """Return the tables with a NaN or infinite value in the gradient float32 [U, D] of rows [U]."""
    bad = rows[~grad.isfinite().all(dim=1)]
    return {
        b.table for b, held, first in fused.local_blocks if bool(((bad >= first) & (bad < first + len(held))).any())
    }


def merge(parts: Sequence[Gradient]) -> Gradient:
    """Merge the gradients of several backward passes (at least one)."""
    if len(parts) == 1:
        return parts[0]
    return Gradient.of_rows(torch.cat([p.rows.long() for p in parts]), torch.cat([p.sums() for p in parts]))


#: By fused table: (distinct rows int64 [U], their gradient float32 [U, width]).
Gradients = list[tuple[Tensor, Tensor]]


class RowSquares:
    """The mean of each touched row's squared gradient over all columns, also where ranks hold columns of one row.

    Every block of columns of a table is touched in the same rows, so the ranks exchange plain vectors of sums.
    """

    def __init__(self, layout: Layout, collective: Collective) -> None:
        plan = layout.plan
        self._layout = layout
        self._collective = collective
        #: Tables in several blocks, with the rank of each block.
        self._cut = {
            t.name: [b.first_rank for b in plan.blocks_of(t.name)]
            for t in plan.tables
            if len(plan.blocks_of(t.name)) > 1
        }
        for name in self._cut:
            if any(b.ranks > 1 for b in plan.blocks_of(name)):
                raise ValueError(f"rowwise_adagrad: table '{name}' is cut by columns and by rows; cut it one way")

    def mean_squares(self, fused_tables: Sequence[FusedTable], gradients: Gradients) -> list[Tensor]:
        """Return the mean squares by fused table: float32 [U, 1]. Collective where a table is in several blocks."""
        means = []
        #: Sums of this rank's blocks of cut tables, in order of their columns: (first column, fused table, start, end).
        local_segments: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in self._cut}
        for i, (fused, (rows, grad)) in enumerate(zip(fused_tables, gradients, strict=True)):
            means.append(grad.square().sum(1, keepdim=True))
            ends = [first + len(r) for _, r, first in fused.local_blocks]
            bounds = [0, *torch.searchsorted(rows, torch.tensor(ends, dtype=rows.dtype)).tolist()]
            for (block, _, _), start, end in zip(fused.local_blocks, bounds, bounds[1:], strict=False):
                if block.table in local_segments:
                    local_segments[block.table].append((block.columns.start, i, start, end))
                else:
                    means[i][start:end] /= self._layout.plan.by_name[block.table].dim
        if self._cut:
            self._complete(means, local_segments)
        return means

    def _complete(self, sums: list[Tensor], local_segments: dict[str, list[tuple[int, int, int, int]]]) -> None:
        """Replace the sums of cut tables' blocks by the means over all columns. One all-to-all."""
        size = self._collective.world.size
        message, counts = [torch.empty(0)], []
        for rank in range(size):
            parts = [
                sums[i][start:end, 0]
                for name, ranks in self._cut.items()
                if rank in ranks
                for _, i, start, end in sorted(local_segments[name])
            ]
            message += parts
            counts.append(sum(p.numel() for p in parts))
        received, back = self._collective.all_to_all(torch.cat(message), counts)
        #: (block's number among the table's, its sums), by table.
        sums_by_table: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self._cut if local_segments[name]}
        # A sender's message: tables in plan order, its blocks by column.
        for rank, sent in enumerate(torch.split(received, back)):
            offset = 0
            for name in sums_by_table:
                length = local_segments[name][0][3] - local_segments[name][0][2]
                for number in (p for p, r in enumerate(self._cut[name]) if r == rank):
                    sums_by_table[name].append((number, sent[offset : offset + length]))
                    offset += length
        for name, parts_of_table in sums_by_table.items():
            by_column = [part for _, part in sorted(parts_of_table, key=lambda x: x[0])]
            mean = torch.stack(by_column).sum(0) / self._layout.plan.by_name[name].dim
            for _, i, start, end in local_segments[name]:
                sums[i][start:end, 0] = mean


class OtherGradients(Protocol):
    """Gradients of other tables that are clipped together with these: headrace.embeddings.dynamic."""

    def squares(self) -> Tensor:
        """Return the sum of their squares on this rank, float64 [1]."""
        ...

    def scale_gradients(self, by: float) -> None:
        """Multiply them."""
        ...


class Updater:
    """Optimizer states of this rank's rows, and their update."""

    def __init__(
        self,
        layout: Layout,
        weights: Sequence[Tensor],
        optimizer: EmbeddingOptimizer,
        collective: Collective,
        caches: Sequence[RowCache | None] = (),
    ) -> None:
        unknown = sorted(optimizer.tables.keys() - layout.plan.by_name.keys())
        if unknown:
            raise ValueError(f"an optimizer for tables {unknown}, which are not planned")
        self._layout = layout
        self._weights = weights
        #: By fused table: the cache in which its rows are updated, if any.
        self._caches = list(caches) or [None] * len(layout.fused_tables)
        self._optimizer = optimizer
        self._collective = collective
        self._rule = RULES[optimizer.kind]
        #: By fused table and name: float32 [local rows, width], or [local rows, 1] where the rule works by row.
        self.states = [self._start(a) for a in layout.fused_tables]
        for number, cache in enumerate(self._caches):
            if cache is not None:
                cache.set_matrices([weights[number], *self.states[number].values()])
        self.steps = 0
        #: By fused table, bool [local rows]: rows that steps after `changed_since` touched; None: not tracked.
        self.changed: list[Tensor] | None = None
        self.changed_since = 0
        self._segments = [_segments(a, optimizer) for a in layout.fused_tables]
        self._squares = RowSquares(layout, collective) if self._rule.by_row else None
        cut = {t.name for t in layout.plan.tables if len(layout.plan.blocks_of(t.name)) > 1}
        #: By fused table: the C++ loop or GPU kernel that does its step in one pass, where there is one and the step
        #: needs no data of other ranks or fused tables. The same on all ranks.
        self._fused = [
            fused_step(optimizer.kind, self._matrix(a.number))
            if not a.replicated
            and optimizer.clip_norm is None
            and not (self._rule.by_row and any(b.table in cut for b in a.blocks))
            else None
            for a in layout.fused_tables
        ]

    def _start(self, fused: FusedTable) -> dict[str, Tensor]:
        width = 1 if self._rule.by_row else fused.width
        with self._weights[fused.number].device:  # states of rows in host memory are there too
            return {name: empty_table(fused.rows, width).zero_() for name in self._rule.state}

    def _matrix(self, number: int) -> Tensor:
        """Return the matrix in which rows of a fused table are updated."""
        cache = self._caches[number]
        return self._weights[number] if cache is None else cache.on_device[0]

    def _acquire(self, number: int, rows: Tensor) -> CachedSlots:
        cache = self._caches[number]
        return (
            CachedSlots(rows, [self._weights[number], *self.states[number].values()], rows)
            if cache is None
            else (cache.acquire(rows))
        )

    def _commit(self, number: int, cached: CachedSlots) -> None:
        cache = self._caches[number]
        if cache is not None:
            cache.commit(cached)

    @torch.no_grad()
    def step(
        self, pending: Sequence[Sequence[Gradient]], lr: float | None, raw_gradients: OtherGradients | None = None
    ) -> None:
        """Apply gradients: by fused table, one for each backward pass.

        Args:
            pending: the gradients.
            lr: of this step.
            raw_gradients: tables of raw ids, whose gradients are clipped together with these.
        """
        self.steps += 1
        scale = 1.0 if lr is None else lr / self._optimizer.learning_rate
        slow = []
        for fused, parts in zip(self._layout.fused_tables, pending, strict=True):
            in_one_pass = self._fused[fused.number]
            if in_one_pass is None:
                slow.append(fused)
            elif parts:
                self._by_loop(in_one_pass, fused.number, merge(parts), scale)
        gradients = [self._merge(a, pending[a.number]) for a in slow]
        if self._optimizer.clip_norm is not None:  # in this case no fused table is updated in one pass
            self._clip(slow, gradients, self._optimizer.clip_norm, raw_gradients)
        if slow:
            self._by_torch(slow, gradients, scale)

    def row_ranges(self, fused: FusedTable) -> Tensor | None:
        """Return the ends of the runs of rows that a gradient must hold one after the other; None: all rows ascend.

        Rows of bags' sums ascend: the gradients of bags are not read front to back in any order.
        """
        if self._fused[fused.number] is None or fused.pooled:
            return None
        return torch.tensor([end for _, end in self._segments[fused.number]])

    def track(self) -> None:
        """Start to track which rows change."""
        self.changed = [torch.zeros(len(w), dtype=torch.bool, device=w.device) for w in self._weights]
        self.changed_since = self.steps

    def _note(self, number: int, rows: Tensor) -> None:
        if self.changed is not None:
            self.changed[number].index_fill_(0, rows.long().to(self.changed[number].device), True)

    def _by_loop(self, in_one_pass: FusedStep, number: int, gradient: Gradient, scale: float) -> None:
        """Sum and apply in one pass."""
        duplicates = gradient.duplicates
        self._note(number, duplicates.unique)
        cached = self._acquire(number, duplicates.unique)
        is_plain = gradient.weights is None and gradient.divisor is None and not in_one_pass.on_gpu
        grad: Tensor | None = gradient.grad
        if gradient.pointers is not None:
            pointers = (
                gradient.pointers if gradient.bag is None else cpu.gather_pointers(gradient.pointers, gradient.bag)
            )
            (order, starts), bag, grad = duplicates.in_order(pointers), None, None
        elif gradient.bag is not None and is_plain:
            (order, starts), bag = duplicates.in_order(gradient.bag), None
        else:
            order, starts, bag = duplicates.order, duplicates.starts, gradient.bag
        table, *states = cached.matrices
        # Rounded as if they were in the table itself.
        named = {"names": duplicates.unique} if in_one_pass.on_gpu else {}
        for settings, start, end in _cuts(duplicates.unique, self._segments[number]):
            assert settings.learning_rate is not None
            last = order.numel() if end == duplicates.unique.numel() else int(starts[end])
            in_one_pass(
                table,
                states,
                cached.slots[start:end],
                starts[start:end],
                order,
                last,
                grad,
                bag=bag,
                weights=gradient.weights,
                divisor=gradient.divisor,
                lr=settings.learning_rate * scale,
                decay=settings.weight_decay or 0.0,
                step=self.steps,
                **{name: rows[start:end] for name, rows in named.items()},
            )
        self._commit(number, cached)

    def _by_torch(self, fused_tables: Sequence[FusedTable], gradients: Gradients, scale: float) -> None:
        cached = [self._acquire(a.number, rows) for a, (rows, _) in zip(fused_tables, gradients, strict=True)]
        touched = [decode(o.matrices[0].index_select(0, o.slots)) for o in cached]
        cuts = [_cuts(rows, self._segments[a.number]) for a, (rows, _) in zip(fused_tables, gradients, strict=True)]
        for weight, (_, grad), parts in zip(touched, gradients, cuts, strict=True):
            for settings, start, end in parts:
                if settings.weight_decay:
                    grad[start:end].add_(weight[start:end], alpha=settings.weight_decay)
        squares = None if self._squares is None else self._squares.mean_squares(fused_tables, gradients)
        for i, (fused, weight, (rows, grad), parts) in enumerate(
            zip(fused_tables, touched, gradients, cuts, strict=True)
        ):
            full_weight, *full_states = cached[i].matrices
            slots = cached[i].slots
            states = [full.index_select(0, slots) for full in full_states]
            for settings, start, end in parts:
                rows_of_table = RowUpdate(
                    weight[start:end],
                    grad[start:end],
                    {name: s[start:end] for name, s in zip(self._rule.state, states, strict=True)},
                    self.steps,
                    None if squares is None else squares[i][start:end],
                )
                assert settings.learning_rate is not None
                self._rule.update(rows_of_table, settings.learning_rate * scale)
            self._note(fused.number, rows)
            full_weight.index_copy_(0, slots, encode(weight, full_weight.dtype, self._noise(fused, rows)))
            for full, state in zip(full_states, states, strict=True):
                full.index_copy_(0, slots, state)
            self._commit(fused.number, cached[i])

    def _noise(self, fused: FusedTable, rows: Tensor) -> Tensor | None:
        """Return the noise that rounds int8 rows at this step; the same on all ranks that hold the same rows."""
        if fused.dtype is not torch.uint8:
            return None
        first = 0 if fused.replicated else self._collective.world.rank << 40
        return noise_for(rows + first + (fused.number << 54), fused.width, self.steps)

    def snapshot(self) -> Updater:
        """Return a copy of the current states and the count of steps."""
        twin = copy.copy(self)
        twin.states = [{name: full.clone() for name, full in states.items()} for states in self.states]
        twin._caches = [None] * len(self._caches)
        return twin

    @torch.no_grad()
    def age(self, factor: float) -> None:
        """Multiply the states that never shrink by `kept`."""
        for states, cache in zip(self.states, self._caches, strict=True):
            for number, name in enumerate(self._rule.state):
                if name in self._rule.growing:
                    states[name].mul_(factor) if cache is None else cache.scale(1 + number, factor)

    def _merge(self, fused: FusedTable, parts: Sequence[Gradient]) -> tuple[Tensor, Tensor]:
        if fused.replicated:
            return self._reduce(fused, parts)
        if not parts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, fused.width)
        merged = merge(parts)
        return merged.rows.long(), merged.sums()

    def _reduce(self, fused: FusedTable, parts: Sequence[Gradient]) -> tuple[Tensor, Tensor]:
        """Sum a replicated fused table's gradients over the ranks: all get the same bits.

        The last column counts touches.
        """
        dense = torch.zeros(fused.rows, fused.width + 1)
        for part in parts:
            dense[:, :-1].index_add_(0, part.rows, part.sums())
            dense[:, -1].index_add_(0, part.rows, torch.ones(part.rows.numel()))
        self._collective.all_reduce_sum([dense])
        rows = dense[:, -1].nonzero().flatten()
        return rows, dense.index_select(0, rows)[:, :-1].contiguous()

    def _clip(
        self,
        fused_tables: Sequence[FusedTable],
        gradients: Gradients,
        limit: float,
        raw_gradients: OtherGradients | None,
    ) -> None:
        """Scale all gradients so that their norm over all rows of all ranks is at most `limit`.

        Raises:
            NonFiniteGradient: there is no norm.
        """
        sharded, replicated = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for fused, (_, grad) in zip(fused_tables, gradients, strict=True):
            (replicated if fused.replicated else sharded).add_(grad.double().square().sum())
        if raw_gradients is not None:
            sharded.add_(raw_gradients.squares())
        self._collective.all_reduce_sum([sharded])
        norm = float((sharded + replicated).sqrt())
        if not math.isfinite(norm):  # the same on all ranks
            bad_tables = [
                non_finite_tables(t, rows, grad) for t, (rows, grad) in zip(fused_tables, gradients, strict=True)
            ]
            raise NonFiniteGradient(sorted(set().union(*bad_tables)))
        if norm > limit:
            for _, grad in gradients:
                grad.mul_(limit / norm)
            if raw_gradients is not None:
                raw_gradients.scale_gradients(limit / norm)


def _segments(fused: FusedTable, optimizer: EmbeddingOptimizer) -> list[tuple[TableOptimizer, int]]:
    """Return runs of rows of a fused table with the same settings: (settings, end), ascending."""
    segments: list[tuple[TableOptimizer, int]] = []
    for block, rows, first in fused.local_blocks:
        settings_of_table = optimizer.tables.get(block.table, TableOptimizer())
        settings = TableOptimizer(
            learning_rate=settings_of_table.learning_rate or optimizer.learning_rate,
            weight_decay=optimizer.weight_decay
            if settings_of_table.weight_decay is None
            else settings_of_table.weight_decay,
        )
        if segments and segments[-1][0] == settings:
            segments.pop()
        segments.append((settings, first + len(rows)))
    return segments


def _cuts(rows: Tensor, segments: list[tuple[TableOptimizer, int]]) -> list[tuple[TableOptimizer, int, int]]:
    """Split rows, sorted by segment, at the segments: (settings, start, end)."""
    if len(segments) == 1:
        return [(segments[0][0], 0, rows.numel())]
    ends = torch.searchsorted(rows, torch.tensor([end for _, end in segments], dtype=rows.dtype)).tolist()
    return [(s, start, end) for (s, _), start, end in zip(segments, [0, *ends], ends, strict=False)]
