"""What rows of raw ids learn, wherever they are and whoever knows the ids: weights, states, gradients, steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.duplicates import find_duplicates
from headrace.embeddings.dynamic_spec import DynamicSpec
from headrace.embeddings.gpu import dispatch
from headrace.embeddings.id_map import PLACE_BYTES, Ids, places_for
from headrace.embeddings.optimizers import RULES, Touched, state_bytes_per_row
from headrace.embeddings.sightings import RECORD_BYTES
from headrace.errors import UserError
from headrace.world import World

_MIB = 2**20


@dataclass(frozen=True)
class DynamicReport:
    """One rank's table. Sum over the ranks for the whole; of `load` the largest counts."""

    rows: int
    waiting: int
    #: Share of the hash table's places that are taken.
    load: float
    #: Since the table began, days before included.
    admitted: int
    evicted: int
    #: Lookups in training that found a row, and all.
    hits: int
    lookups: int
    #: Lookups since evaluation last began that found no row, and all.
    absent: int
    asked: int
    #: Of rows, states, counts and the hash table.
    nbytes: int

    @property
    def oov_share(self) -> float | None:
        """Share of the last evaluation's lookups that found no row; None: there were none."""
        return self.absent / self.asked if self.asked else None


def bytes_for(rows: int, dim: int, optimizer: str | None) -> int:
    """Bytes of so many rows with all that belongs to them."""
    each = 4 * dim + RECORD_BYTES + (state_bytes_per_row(optimizer, dim) if optimizer else 0)
    return rows * each + PLACE_BYTES * places_for(rows)


def rows_within(limit: float, dim: int, optimizer: str | None) -> int:
    """The most rows that take at most `limit` bytes."""
    low, high = 0, int(limit) // (4 * dim) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(middle, dim, optimizer) <= limit else (low, middle)
    return low


class LearnedRows:
    """Rows with all that training needs of them. Who has which row is the business of those who build on it."""

    def __init__(self, spec: DynamicSpec, world: World, seed: int, init_bound: float) -> None:
        self.spec, self.world, self._seed, self._bound = spec, world, seed, init_bound
        #: [room, D].
        self._weight = torch.zeros(0, spec.dim)
        self.states: dict[str, Tensor] = {}
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.optimizer: EmbeddingOptimizer | None = None
        self._own = TableOptimizer()
        self._limit = self._rows_allowed()
        self.steps = 0
        #: Forward passes in training.
        self.batches = 0
        #: How often rows were renumbered.
        self.numbering = 0
        #: admitted, evicted, hits, lookups.
        self.counters: Ids = np.zeros(4, dtype=np.int64)
        self._absent = self._asked = 0

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The rows: float32 [rows, D]."""
        return self._weight[: len(self)]

    @property
    def has_pending(self) -> bool:
        """Whether gradients wait for `step`."""
        return bool(self._pending)

    def configure_optimizer(self, optimizer: EmbeddingOptimizer) -> None:
        """Choose the optimizer and make its states, at zero.

        Raises:
            UserError: the limit of memory has no room for a row.
        """
        self.optimizer, self._own = optimizer, optimizer.tables.get(self.spec.name, TableOptimizer())
        self._limit = self._rows_allowed()
        rule = RULES[optimizer.kind]
        width = 1 if rule.by_row else self.spec.dim
        self.states = {name: self._weight.new_zeros(len(self._weight), width) for name in rule.state}
        self.steps = 0
        self._pending.clear()

    def _rows_allowed(self) -> int | None:
        limits = []
        if self.spec.max_rows is not None:
            limits.append(max(1, self.spec.max_rows // self.world.size))
        if self.spec.memory_mib is not None:
            kind = self.optimizer.kind if self.optimizer else None
            limits.append(rows_within(self.spec.memory_mib * _MIB, self.spec.dim, kind))
            if not limits[-1]:
                raise UserError(
                    f"train.embeddings.dynamic.{self.spec.name}.memory_mib={self.spec.memory_mib:g} has no room for a "
                    f"row of {self.spec.dim} weights with its states: give more, or set max_rows instead"
                )
        return min(limits, default=None)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._pending.clear()

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Apply the gradients since the last step to the rows that they touch. No exchange.

        Args:
            lr: the learning rate of this step; default the configured one. A table with its own keeps the proportion.
        """
        if self.optimizer is None:
            raise RuntimeError("configure_optimizer comes before step")
        self.steps += 1
        pending, self._pending = self._pending, []
        if not pending:
            return
        # Sorted in half the time where the numbers are small.
        index = torch.int32 if len(self) < 2**31 else torch.int64
        found = find_duplicates(torch.cat([rows for rows, _ in pending]).to(index))
        self._note(found.unique)
        given = pending[0][1].contiguous() if len(pending) == 1 else torch.cat([g for _, g in pending])
        own, common = self._own, self.optimizer
        decay = common.weight_decay if own.weight_decay is None else own.weight_decay
        rate = common.learning_rate if lr is None else lr
        if own.learning_rate is not None:
            rate = own.learning_rate if lr is None else lr * own.learning_rate / common.learning_rate
        one_pass = dispatch.fused(common.kind, self._weight)
        if one_pass is not None:
            one_pass(
                common.kind, self._weight, list(self.states.values()), found.unique, found.starts, found.order,
                found.order.numel(), given, bag=None, weights=None, divisor=None, lr=rate, decay=decay, step=self.steps,
            )  # fmt: skip
            return
        rows, grad = found.unique.long(), found.sum_rows(given)
        weight = self._weight.index_select(0, rows)
        if decay:
            grad.add_(weight, alpha=decay)
        states = {name: full.index_select(0, rows) for name, full in self.states.items()}
        touched = Touched(weight, grad, states, self.steps, grad.square().mean(1, keepdim=True))
        RULES[common.kind].update(touched, rate)
        self._weight.index_copy_(0, rows, weight)
        for name, full in self.states.items():
            full.index_copy_(0, rows, states[name])

    def _note(self, rows: Tensor) -> None:
        """Take note that a step changes these rows."""
        raise NotImplementedError

    def age_state(self, kept: float) -> None:
        """Multiply the states that never shrink by `kept`; see ShardedEmbeddings.age_state."""
        if self.optimizer is not None:
            for name in RULES[self.optimizer.kind].growing:
                self.states[name].mul_(kept)

    def begin_evaluation(self) -> None:
        """Count lookups outside training from 0."""
        self._absent = self._asked = 0

    def check_settled(self) -> None:
        """Raise RuntimeError where gradients wait for `step`: a save would lose them."""
        if self._pending:
            raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")


def with_room(old: Tensor, room: int) -> Tensor:
    """The same rows, and zeros to `room` rows."""
    new = old.new_zeros(room, old.shape[1])
    new[: len(old)] = old
    return new
