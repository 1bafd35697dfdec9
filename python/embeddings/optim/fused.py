"""The step of an optimizer on the rows that a batch touched, fused table by fused table."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.kernels import cpu
from headrace.embeddings.optim.fused_step import FusedStep, fused_step
from headrace.embeddings.optim.gradients import Gradient, NonFiniteGradient, merge, non_finite_tables
from headrace.embeddings.optim.row_squares import Gradients, RowSquares
from headrace.embeddings.optim.rules import RULES, RowUpdate
from headrace.embeddings.sharding.layout import FusedTable, Layout
from headrace.embeddings.storage.dtypes import decode, encode, noise_for
from headrace.embeddings.storage.host_cache import CachedSlots, RowCache
from headrace.embeddings.storage.huge_pages import empty_table


class OtherGradients(Protocol):
    """Gradients of other tables that are clipped together with these: headrace.embeddings.dynamic."""

    def squares(self) -> Tensor:
        """The sum of their squares on this rank, float64 [1]."""
        ...

    def scale_gradients(self, by: float) -> None:
        """Multiply them."""
        ...


class Updater:
    """Optimizer states of this rank's rows, and the update."""

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
        #: By fused table: where its rows are worked on, if not in its matrix.
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
        #: By fused table: the loop (C++) or kernel (a GPU) that does its step in one pass, where there is one and the
        #: step needs nothing of other ranks or fused tables. There or not alike on all ranks.
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
        with self._weights[fused.number].device:  # of rows in host memory there too
            return {name: empty_table(fused.rows, width).zero_() for name in self._rule.state}

    def _matrix(self, number: int) -> Tensor:
        """What rows of a fused table are worked on in."""
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
        self, pending: Sequence[Sequence[Gradient]], lr: float | None, others: OtherGradients | None = None
    ) -> None:
        """Apply gradients: by fused table, one for each backward pass.

        Args:
            pending: the gradients.
            lr: of this step.
            others: tables of raw ids, whose gradients are clipped together with these.
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
        if self._optimizer.clip_norm is not None:  # then no fused table is updated in one pass
            self._clip(slow, gradients, self._optimizer.clip_norm, others)
        if slow:
            self._by_torch(slow, gradients, scale)

    def row_ranges(self, fused: FusedTable) -> Tensor | None:
        """Ends of the runs of a fused table's rows that must come one after the other in a gradient; None: all ascend.

        Rows of bags' sums ascend: the gradients of bags are not read front to back in any order.
        """
        if self._fused[fused.number] is None or fused.pooled:
            return None
        return torch.tensor([end for _, end in self._segments[fused.number]])

    def track(self) -> None:
        """Forget which rows changed, and remember from now on."""
        self.changed = [torch.zeros(len(w), dtype=torch.bool, device=w.device) for w in self._weights]
        self.changed_since = self.steps

    def _note(self, number: int, rows: Tensor) -> None:
        if self.changed is not None:
            self.changed[number].index_fill_(0, rows.long().to(self.changed[number].device), True)

    def _by_loop(self, in_one_pass: FusedStep, number: int, gradient: Gradient, scale: float) -> None:
        """Sum and apply in one pass."""
        found = gradient.duplicates
        self._note(number, found.unique)
        cached = self._acquire(number, found.unique)
        is_plain = gradient.weights is None and gradient.divisor is None and not in_one_pass.on_gpu
        grad: Tensor | None = gradient.grad
        if gradient.pointers is not None:
            pointers = (
                gradient.pointers if gradient.bag is None else cpu.gather_pointers(gradient.pointers, gradient.bag)
            )
            (order, starts), bag, grad = found.in_order(pointers), None, None
        elif gradient.bag is not None and is_plain:
            (order, starts), bag = found.in_order(gradient.bag), None
        else:
            order, starts, bag = found.order, found.starts, gradient.bag
        table, *states = cached.matrices
        # Rounded as if they were in the table itself.
        named = {"names": found.unique} if in_one_pass.on_gpu else {}
        for settings, start, end in _cuts(found.unique, self._segments[number]):
            assert settings.learning_rate is not None
            last = order.numel() if end == found.unique.numel() else int(starts[end])
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
        squares = None if self._squares is None else self._squares.of(fused_tables, gradients)
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
        """What rounds int8 rows at this step; the same on all ranks that hold the same rows."""
        if fused.dtype is not torch.uint8:
            return None
        first = 0 if fused.replicated else self._collective.world.rank << 40
        return noise_for(rows + first + (fused.number << 54), fused.width, self.steps)

    def snapshot(self) -> Updater:
        """A copy of the states and the count of steps as they are now."""
        twin = copy.copy(self)
        twin.states = [{name: full.clone() for name, full in states.items()} for states in self.states]
        twin._caches = [None] * len(self._caches)
        return twin

    @torch.no_grad()
    def age(self, kept: float) -> None:
        """Multiply the states that never shrink by `kept`."""
        for states, cache in zip(self.states, self._caches, strict=True):
            for number, name in enumerate(self._rule.state):
                if name in self._rule.growing:
                    states[name].mul_(kept) if cache is None else cache.scale(1 + number, kept)

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
        self, fused_tables: Sequence[FusedTable], gradients: Gradients, limit: float, others: OtherGradients | None
    ) -> None:
        """Scale all gradients so that their norm over all rows of all ranks is at most `limit`.

        Raises:
            NonFiniteGradient: there is no norm.
        """
        sharded, replicated = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for fused, (_, grad) in zip(fused_tables, gradients, strict=True):
            (replicated if fused.replicated else sharded).add_(grad.double().square().sum())
        if others is not None:
            sharded.add_(others.squares())
        self._collective.all_reduce_sum([sharded])
        norm = float((sharded + replicated).sqrt())
        if not math.isfinite(norm):  # on all ranks alike
            found = [non_finite_tables(t, rows, grad) for t, (rows, grad) in zip(fused_tables, gradients, strict=True)]
            raise NonFiniteGradient(sorted(set().union(*found)))
        if norm > limit:
            for _, grad in gradients:
                grad.mul_(limit / norm)
            if others is not None:
                others.scale_gradients(limit / norm)


def _segments(fused: FusedTable, optimizer: EmbeddingOptimizer) -> list[tuple[TableOptimizer, int]]:
    """Runs of rows of a fused table with the same settings: (settings, end), ascending."""
    found: list[tuple[TableOptimizer, int]] = []
    for block, rows, first in fused.local_blocks:
        settings_of_table = optimizer.tables.get(block.table, TableOptimizer())
        settings = TableOptimizer(
            learning_rate=settings_of_table.learning_rate or optimizer.learning_rate,
            weight_decay=optimizer.weight_decay
            if settings_of_table.weight_decay is None
            else settings_of_table.weight_decay,
        )
        if found and found[-1][0] == settings:
            found.pop()
        found.append((settings, first + len(rows)))
    return found


def _cuts(rows: Tensor, segments: list[tuple[TableOptimizer, int]]) -> list[tuple[TableOptimizer, int, int]]:
    """Where rows, sorted by segment, fall into segments: (settings, start, end)."""
    if len(segments) == 1:
        return [(segments[0][0], 0, rows.numel())]
    ends = torch.searchsorted(rows, torch.tensor([end for _, end in segments], dtype=rows.dtype)).tolist()
    return [(s, start, end) for (s, _), start, end in zip(segments, [0, *ends], ends, strict=False)]
