"""What rows of raw ids learn, wherever they are and whoever knows the ids: weights, states, gradients, steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.dynamic.memory import rows_allowed
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels.duplicates import find_duplicates
from headrace.embeddings.kernels.id_map_cpu import Ids
from headrace.embeddings.optim.fused_step import fused_step
from headrace.embeddings.optim.rules import RULES, RowUpdate
from headrace.embeddings.storage.huge_pages import empty_table
from headrace.errors import UserError
from headrace.world import World

#: Salt of the hash that says whether an id is drawn.
DRAW = 2


@dataclass(frozen=True)
class Pending:
    """The gradient of a backward pass, on its way to `step`."""

    #: Distinct or not: the rows that `ids` had by the numbering of then. int64 [N].
    rows: Tensor
    ids: Tensor
    #: float32 [N, D].
    grad: Tensor
    #: `TrainableRows.numbering` then.
    numbering: int


@dataclass(frozen=True)
class DynamicReport:
    """One rank's table. Sum over the ranks for the whole; of `load` the largest counts."""

    rows: int
    waiting: int
    #: Share of the hash table's slots that are taken.
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


class TrainableRows:
    """Rows with all that training needs of them. Who has which row is the business of those who build on it."""

    #: Which id has which row, and who waits for one: of arrays, or of a GPU's tensors.
    _map: Any
    _waiting: Any

    def __init__(self, spec: DynamicSpec, world: World, seed: int, init_bound: float) -> None:
        self.spec, self.world, self._seed = spec, world, seed
        self._bound = init_bound if spec.init_bound is None else spec.init_bound
        #: [room, D].
        self._weight = torch.zeros(0, spec.dim)
        self.states: dict[str, Tensor] = {}
        self._pending: list[Pending] = []
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
        return len(self._map)

    @property
    def ids(self) -> Any:
        """The id of each row: int64 [rows], an array or a tensor of a GPU."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        raise NotImplementedError

    @property
    def report(self) -> DynamicReport:
        """What is here and what was done."""
        admitted, evicted, hits, lookups = (int(n) for n in self.counters)
        return DynamicReport(
            len(self),
            len(self._waiting),
            self._map.load,
            admitted,
            evicted,
            hits,
            lookups,
            self._absent,
            self._asked,
            self.nbytes,
        )

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
        limit = rows_allowed(self.spec, self.world.size, self.optimizer.kind if self.optimizer else None)
        if limit == 0:
            raise UserError(
                f"train.embeddings.dynamic.{self.spec.name}.memory_mib={self.spec.memory_mib:g} has no room for a "
                f"row of {self.spec.dim} weights with its states: give more, or set max_rows instead"
            )
        return limit

    def _look_up_unchanged(self, ids: Any, counts: Any) -> Any:
        """Row of each id, -1 where it has none; only how many were asked for is counted."""
        rows = self._map.find(ids)
        self._asked += int(counts.sum())
        self._absent += int(counts[rows < 0].sum())
        return rows

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._pending.clear()

    def add_gradient(self, rows: Tensor, ids: Tensor, grad: Tensor, numbering: int) -> None:
        """Keep a gradient for `step`.

        Args:
            rows: that a lookup found, int64 [N]; -1: nobody's. They may repeat.
            ids: whose rows they were, int64 [N].
            grad: float32 [N, D].
            numbering: `self.numbering` at the lookup.
        """
        held = rows >= 0
        if not bool(held.all()):
            rows, ids, grad = rows[held], ids[held], grad[held]
        self._pending.append(Pending(rows, ids, grad, numbering))

    def _waiting_gradients(self) -> tuple[Tensor, Tensor]:
        """Rows int64 [N] as they are numbered now, which may repeat, and their gradients [N, D]; none wait any more.

        Where rows went since the lookup (another part of the step wanted room), a gradient goes to the row that its id
        has now; with no row there is nothing to learn.
        """
        found = []
        for p in self._pending:
            rows, grad = p.rows, p.grad
            if p.numbering != self.numbering:
                rows = self._find(p.ids)
                held = rows >= 0
                rows, grad = rows[held], grad[held]
            found.append((rows, grad.contiguous()))
        self._pending.clear()
        if len(found) == 1:
            return found[0]
        return torch.cat([rows for rows, _ in found]), torch.cat([grad for _, grad in found])

    def _find(self, ids: Tensor) -> Tensor:
        """The row of each id int64 [N]; -1 where it has none."""
        raise NotImplementedError

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Sum what waits for `step` by row: the squares of these sums, summed, float64 []."""
        if not self._pending:
            return self._weight.new_zeros((), dtype=torch.float64)
        rows, grad = self._waiting_gradients()
        found = find_duplicates(rows)
        summed = found.sum_rows(grad)
        ids = torch.as_tensor(self.ids).index_select(0, found.unique)
        self._pending.append(Pending(found.unique, ids, summed, self.numbering))
        return summed.double().square().sum()

    def scale_gradients(self, by: float) -> None:
        """Multiply what waits for `step`, after `squares`."""
        for p in self._pending:
            p.grad.mul_(by)

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Apply the gradients since the last step to the rows that they touch. No exchange.

        Args:
            lr: the learning rate of this step; default the configured one. A table with its own keeps the proportion.
        """
        if self.optimizer is None:
            raise RuntimeError("configure_optimizer comes before step")
        self.steps += 1
        if not self._pending:
            return
        touched, given = self._waiting_gradients()
        # Sorted in half the time where the numbers are small.
        found = find_duplicates(touched.to(torch.int32 if len(self) < 2**31 else torch.int64))
        self._note(found.unique)
        own, common = self._own, self.optimizer
        decay = common.weight_decay if own.weight_decay is None else own.weight_decay
        rate = common.learning_rate if lr is None else lr
        if own.learning_rate is not None:
            rate = own.learning_rate if lr is None else lr * own.learning_rate / common.learning_rate
        one_pass = fused_step(common.kind, self._weight)
        if one_pass is not None:
            one_pass(
                self._weight,
                list(self.states.values()),
                found.unique,
                found.starts,
                found.order,
                found.order.numel(),
                given,
                lr=rate,
                decay=decay,
                step=self.steps,
            )
            return
        rows, grad = found.unique.long(), found.sum_rows(given)
        weight = self._weight.index_select(0, rows)
        if decay:
            grad.add_(weight, alpha=decay)
        states = {name: full.index_select(0, rows) for name, full in self.states.items()}
        RULES[common.kind].update(
            RowUpdate(weight, grad, states, self.steps, grad.square().mean(1, keepdim=True)), rate
        )
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

    def check_no_pending(self) -> None:
        """Raise RuntimeError where gradients wait for `step`: a save would lose them."""
        if self._pending:
            raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")


def with_capacity(old: Tensor, room: int) -> Tensor:
    """The same rows, and room for more, which on a CPU takes memory once it is written."""
    new = empty_table(room, old.shape[1]) if old.device.type == "cpu" else old.new_zeros(room, old.shape[1])
    new[: len(old)] = old
    return new
