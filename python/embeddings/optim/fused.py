"""The step of an optimizer on the rows that a batch touched, arena by arena."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.kernels import cpu
from headrace.embeddings.optim.fused_step import FusedStep, fused_step
from headrace.embeddings.optim.gradients import Gradient, merge
from headrace.embeddings.optim.row_squares import Gradients, RowSquares
from headrace.embeddings.optim.rules import RULES, Touched
from headrace.embeddings.sharding.layout import Arena, Layout
from headrace.embeddings.storage.dtypes import decode, encode, noise_for
from headrace.embeddings.storage.host_cache import CachedRows, Opened
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
        caches: Sequence[CachedRows | None] = (),
    ) -> None:
        unknown = sorted(optimizer.tables.keys() - layout.plan.by_name.keys())
        if unknown:
            raise ValueError(f"an optimizer for tables {unknown}, which are not planned")
        self._layout = layout
        self._weights = weights
        #: By arena: where its rows are worked on, if not in its matrix.
        self._caches = list(caches) or [None] * len(layout.arenas)
        self._optimizer = optimizer
        self._collective = collective
        self._rule = RULES[optimizer.kind]
        #: By arena and name: float32 [local rows, width], or [local rows, 1] where the rule works by row.
        self.states = [self._start(a) for a in layout.arenas]
        for number, cache in enumerate(self._caches):
            if cache is not None:
                cache.hold([weights[number], *self.states[number].values()])
        self.steps = 0
        #: By arena, bool [local rows]: rows that steps after `changed_since` touched; None: not tracked.
        self.changed: list[Tensor] | None = None
        self.changed_since = 0
        self._segments = [_segments(a, optimizer) for a in layout.arenas]
        self._squares = RowSquares(layout, collective) if self._rule.by_row else None
        cut = {t.name for t in layout.plan.tables if len(layout.plan.blocks_of(t.name)) > 1}
        #: By arena: the loop (C++) or kernel (a GPU) that does its step in one pass, where there is one and the step
        #: needs nothing of other ranks or arenas. There or not alike on all ranks.
        self._fused = [
            fused_step(optimizer.kind, self._matrix(a.number))
            if not a.replicated
            and optimizer.clip_norm is None
            and not (self._rule.by_row and any(b.table in cut for b in a.blocks))
            else None
            for a in layout.arenas
        ]

    def _start(self, arena: Arena) -> dict[str, Tensor]:
        width = 1 if self._rule.by_row else arena.width
        with self._weights[arena.number].device:  # of rows in host memory there too
            return {name: empty_table(arena.rows, width).zero_() for name in self._rule.state}

    def _matrix(self, number: int) -> Tensor:
        """What rows of an arena are worked on in."""
        cache = self._caches[number]
        return self._weights[number] if cache is None else cache.here[0]

    def _open(self, number: int, rows: Tensor) -> Opened:
        cache = self._caches[number]
        return (
            Opened(rows, [self._weights[number], *self.states[number].values()], rows)
            if cache is None
            else (cache.open(rows))
        )

    def _close(self, number: int, opened: Opened) -> None:
        cache = self._caches[number]
        if cache is not None:
            cache.close(opened)

    @torch.no_grad()
    def step(
        self, pending: Sequence[Sequence[Gradient]], lr: float | None, beside: OtherGradients | None = None
    ) -> None:
        """Apply gradients: by arena, one for each backward pass.

        Args:
            pending: the gradients.
            lr: of this step.
            beside: tables of raw ids, whose gradients are clipped together with these.
        """
        self.steps += 1
        scale = 1.0 if lr is None else lr / self._optimizer.learning_rate
        slow = []
        for arena, parts in zip(self._layout.arenas, pending, strict=True):
            in_one_pass = self._fused[arena.number]
            if in_one_pass is None:
                slow.append(arena)
            elif parts:
                self._by_loop(in_one_pass, arena.number, merge(parts), scale)
        gradients = [self._merge(a, pending[a.number]) for a in slow]
        if self._optimizer.clip_norm is not None:  # then no arena is updated in one pass
            self._clip(slow, gradients, self._optimizer.clip_norm, beside)
        if slow:
            self._by_torch(slow, gradients, scale)

    def runs(self, arena: Arena) -> Tensor | None:
        """Ends of the runs of an arena's rows that must come one after the other in a gradient; None: all ascend.

        Rows of bags' sums ascend: the gradients of bags are not read front to back in any order.
        """
        if self._fused[arena.number] is None or arena.pooled:
            return None
        return torch.tensor([end for _, end in self._segments[arena.number]])

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
        opened = self._open(number, found.unique)
        is_plain = gradient.weights is None and gradient.divisor is None and not in_one_pass.on_gpu
        grad: Tensor | None = gradient.grad
        if gradient.at is not None:
            at = gradient.at if gradient.bag is None else cpu.places(gradient.at, gradient.bag)
            (order, starts), bag, grad = found.in_order(at), None, None
        elif gradient.bag is not None and is_plain:
            (order, starts), bag = found.in_order(gradient.bag), None
        else:
            order, starts, bag = found.order, found.starts, gradient.bag
        table, *states = opened.matrices
        # Rounded as if they were in their own places.
        named = {"names": found.unique} if in_one_pass.on_gpu else {}
        for settings, start, end in _cuts(found.unique, self._segments[number]):
            assert settings.learning_rate is not None
            last = order.numel() if end == found.unique.numel() else int(starts[end])
            in_one_pass(
                table,
                states,
                opened.places[start:end],
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
        self._close(number, opened)

    def _by_torch(self, arenas: Sequence[Arena], gradients: Gradients, scale: float) -> None:
        opened = [self._open(a.number, rows) for a, (rows, _) in zip(arenas, gradients, strict=True)]
        touched = [decode(o.matrices[0].index_select(0, o.places)) for o in opened]
        cuts = [_cuts(rows, self._segments[a.number]) for a, (rows, _) in zip(arenas, gradients, strict=True)]
        for weight, (_, grad), parts in zip(touched, gradients, cuts, strict=True):
            for settings, start, end in parts:
                if settings.weight_decay:
                    grad[start:end].add_(weight[start:end], alpha=settings.weight_decay)
        squares = None if self._squares is None else self._squares.of(arenas, gradients)
        for i, (arena, weight, (rows, grad), parts) in enumerate(zip(arenas, touched, gradients, cuts, strict=True)):
            full_weight, *full_states = opened[i].matrices
            places = opened[i].places
            states = [full.index_select(0, places) for full in full_states]
            for settings, start, end in parts:
                rows_of_table = Touched(
                    weight[start:end],
                    grad[start:end],
                    {name: s[start:end] for name, s in zip(self._rule.state, states, strict=True)},
                    self.steps,
                    None if squares is None else squares[i][start:end],
                )
                assert settings.learning_rate is not None
                self._rule.update(rows_of_table, settings.learning_rate * scale)
            self._note(arena.number, rows)
            full_weight.index_copy_(0, places, encode(weight, full_weight.dtype, self._noise(arena, rows)))
            for full, state in zip(full_states, states, strict=True):
                full.index_copy_(0, places, state)
            self._close(arena.number, opened[i])

    def _noise(self, arena: Arena, rows: Tensor) -> Tensor | None:
        """What rounds int8 rows at this step; the same on all ranks that hold the same rows."""
        if arena.dtype is not torch.uint8:
            return None
        first = 0 if arena.replicated else self._collective.world.rank << 40
        return noise_for(rows + first + (arena.number << 54), arena.width, self.steps)

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

    def _merge(self, arena: Arena, parts: Sequence[Gradient]) -> tuple[Tensor, Tensor]:
        if arena.replicated:
            return self._reduce(arena, parts)
        if not parts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, arena.width)
        merged = merge(parts)
        return merged.rows.long(), merged.sums()

    def _reduce(self, arena: Arena, parts: Sequence[Gradient]) -> tuple[Tensor, Tensor]:
        """Sum a replicated arena's gradients over the ranks: all get the same bits. The last column counts touches."""
        dense = torch.zeros(arena.rows, arena.width + 1)
        for part in parts:
            dense[:, :-1].index_add_(0, part.rows, part.sums())
            dense[:, -1].index_add_(0, part.rows, torch.ones(part.rows.numel()))
        self._collective.all_reduce_sum([dense])
        rows = dense[:, -1].nonzero().flatten()
        return rows, dense.index_select(0, rows)[:, :-1].contiguous()

    def _clip(self, arenas: Sequence[Arena], gradients: Gradients, limit: float, beside: OtherGradients | None) -> None:
        """Scale all gradients so that their norm over all rows of all ranks is at most `limit`."""
        sharded, replicated = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for arena, (_, grad) in zip(arenas, gradients, strict=True):
            (replicated if arena.replicated else sharded).add_(grad.double().square().sum())
        if beside is not None:
            sharded.add_(beside.squares())
        self._collective.all_reduce_sum([sharded])
        norm = float((sharded + replicated).sqrt())
        if norm > limit:
            for _, grad in gradients:
                grad.mul_(limit / norm)
            if beside is not None:
                beside.scale_gradients(limit / norm)


def _segments(arena: Arena, optimizer: EmbeddingOptimizer) -> list[tuple[TableOptimizer, int]]:
    """Runs of rows of an arena with the same settings: (settings, end), ascending."""
    found: list[tuple[TableOptimizer, int]] = []
    for block, rows, first in arena.held:
        own = optimizer.tables.get(block.table, TableOptimizer())
        settings = TableOptimizer(
            learning_rate=own.learning_rate or optimizer.learning_rate,
            weight_decay=optimizer.weight_decay if own.weight_decay is None else own.weight_decay,
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
