"""Rows of raw ids as CPUs and GPUs share them: weights, optimizer states, gradients, and limits of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.comm import World
from headrace.config.embeddings import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels.dispatch import find_duplicates
from headrace.embeddings.kernels.id_map import SLOT_BYTES, Ids, slots_for
from headrace.embeddings.storage import empty_table
from headrace.embeddings.update_rules import RULES, RowUpdate, fused_step, state_bytes_per_row
from headrace.errors import UserError

_MIB = 2**20
#: Columns of a table of frequency counts: int64.
ID, FREQUENCY, LAST_SEEN = 0, 1, 2
#: Bytes of an id's record.
RECORD_BYTES = 24
#: Dead entries that are tolerated before the table is compacted.
TIDY_MARGIN = 1_024


def bytes_for(rows: int, dim: int, optimizer: str | None) -> int:
    """Return the bytes of `rows` rows with their states, records and hash table."""
    each = 4 * dim + RECORD_BYTES + (state_bytes_per_row(optimizer, dim) if optimizer else 0)
    return rows * each + SLOT_BYTES * slots_for(rows)


def rows_within(limit: float, dim: int, optimizer: str | None) -> int:
    """Return the largest number of rows that take at most `limit` bytes."""
    low, high = 0, int(limit) // (4 * dim) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(middle, dim, optimizer) <= limit else (low, middle)
    return low


def rows_allowed(spec: DynamicSpec, world_size: int, optimizer: str | None) -> int | None:
    """Return the largest number of rows of a rank; None: no limit."""
    limits = []
    if spec.max_rows is not None:
        limits.append(max(1, spec.max_rows // world_size))
    if spec.memory_mib is not None:
        limits.append(rows_within(spec.memory_mib * _MIB, spec.dim, optimizer))
    return min(limits, default=None)


def most_bytes(spec: DynamicSpec, world_size: int, optimizer: str) -> int | None:
    """Return the largest number of bytes of a rank's part of a table, waiting ids included; None: no limit."""
    rows = rows_allowed(spec, world_size, optimizer)
    if rows is None:
        return None
    may_wait = spec.admit_after > 1 or spec.admit_chance < 1
    return bytes_for(rows, spec.dim, optimizer) + may_wait * waiting_bytes(max(1, spec.max_waiting // world_size))


def step_bytes(ids: float, dim: int, world_size: int) -> float:
    """Return the bytes that a step takes on a rank that looks up `ids` distinct raw ids.

    Hashes, their sort, numbers and counts of ids, here and (on several ranks) of those that others ask for; at a time
    four vectors of each (found, gathered, two gradients), or five where they travel. See bench.bench_embeddings.
    """
    if world_size == 1:
        return ids * (200 + 4 * 4 * dim)
    return ids * (300 + 5 * 4 * dim)


def dynamic_table_bytes(
    specs: Sequence[DynamicSpec], ids: Sequence[int], batch_size: int, world_size: int, optimizer: str, copies: int = 1
) -> float:
    """Return the bytes that tables of raw ids take on each rank, a step included; tables without a limit count by the
    step alone.

    Args:
        specs: the tables.
        ids: most ids of each in a row of the batch.
        batch_size: rows of a step over all ranks.
        world_size: ranks.
        optimizer: kind of the optimizer.
        copies: that are there at a time: 2 where tables are saved while training goes on.
    """
    each = [
        copies * (most_bytes(s, world_size, optimizer) or 0)
        + step_bytes(n * batch_size / world_size, s.dim, world_size)
        for s, n in zip(specs, ids, strict=True)
    ]
    return float(sum(each))


def waiting_bytes(limit: int) -> int:
    """Return the largest number of bytes of `AdmissionCounts`: as many dead entries as living ones, grown by half."""
    most = 2 * limit + TIDY_MARGIN
    return RECORD_BYTES * most * 3 // 2 + SLOT_BYTES * slots_for(most)


#: Salt of the hash that decides whether an id is drawn for admission.
DRAW = 2


@dataclass(frozen=True)
class Pending:
    """Gradient of a backward pass that waits for `step`."""

    #: Rows of `ids` by the numbering at the lookup, which may repeat: int64 [N].
    rows: Tensor
    ids: Tensor
    #: float32 [N, D].
    grad: Tensor
    #: `TrainableRows.numbering` then.
    numbering: int


@dataclass(frozen=True)
class DynamicReport:
    """Report of one rank's table. Sums over the ranks describe the whole table; of `load` the largest counts."""

    rows: int
    waiting: int
    #: Share of the hash table's slots that are taken.
    load: float
    #: Since the table was created, earlier days included.
    admitted: int
    evicted: int
    #: Lookups in training that found a row, and all.
    hits: int
    lookups: int
    #: Lookups since the last evaluation began that found no row, and all.
    absent: int
    asked: int
    #: Of rows, states, counts and the hash table.
    nbytes: int

    @property
    def oov_share(self) -> float | None:
        """Share of the last evaluation's lookups that found no row; None: there were none."""
        return self.absent / self.asked if self.asked else None


class TrainableRows:
    """Trainable rows: weights, states, gradients. Subclasses map ids to rows."""

    #: Map from ids to rows, and the ids that wait for one: arrays, or a GPU's tensors.
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
        self._table_settings = TableOptimizer()
        self._limit = self._rows_allowed()
        self.steps = 0
        #: Forward passes in training.
        self.batches = 0
        #: Number of times that rows were renumbered.
        self.numbering = 0
        #: admitted, evicted, hits, lookups.
        self.counters: Ids = np.zeros(4, dtype=np.int64)
        self._eval_misses = self._eval_lookups = 0

    def __len__(self) -> int:
        return len(self._map)

    @property
    def ids(self) -> Any:
        """The id of each row: int64 [rows], an array or a tensor of a GPU."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of rows, states, counts and the hash table."""
        raise NotImplementedError

    @property
    def report(self) -> DynamicReport:
        """Size of the table and counters of its lookups."""
        admitted, evicted, hits, lookups = (int(n) for n in self.counters)
        return DynamicReport(
            len(self),
            len(self._waiting),
            self._map.load,
            admitted,
            evicted,
            hits,
            lookups,
            self._eval_misses,
            self._eval_lookups,
            self.nbytes,
        )

    @property
    def weight(self) -> Tensor:
        """The rows: float32 [rows, D]."""
        return self._weight[: len(self)]

    @property
    def has_pending(self) -> bool:
        """True if gradients wait for `step`."""
        return bool(self._pending)

    def configure_optimizer(self, optimizer: EmbeddingOptimizer) -> None:
        """Choose the optimizer and make its states, at zero.

        Raises:
            UserError: the limit of memory has no room for a row.
        """
        self.optimizer, self._table_settings = optimizer, optimizer.tables.get(self.spec.name, TableOptimizer())
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
        """Return the row of each id, -1 where it has none; only the number of lookups is counted."""
        rows = self._map.find(ids)
        self._eval_lookups += int(counts.sum())
        self._eval_misses += int(counts[rows < 0].sum())
        return rows

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._pending.clear()

    def add_gradient(self, rows: Tensor, ids: Tensor, grad: Tensor, numbering: int) -> None:
        """Store a gradient for `step`.

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
        """Take the waiting gradients: rows int64 [N] by the current numbering, which may repeat, and gradients [N, D].

        Where rows went since the lookup (another part of the step wanted room), a gradient goes to the row that its id
        has now; with no row there is nothing to learn.
        """
        gradients = []
        for p in self._pending:
            rows, grad = p.rows, p.grad
            if p.numbering != self.numbering:
                rows = self._find(p.ids)
                held = rows >= 0
                rows, grad = rows[held], grad[held]
            gradients.append((rows, grad.contiguous()))
        self._pending.clear()
        if len(gradients) == 1:
            return gradients[0]
        return torch.cat([rows for rows, _ in gradients]), torch.cat([grad for _, grad in gradients])

    def _find(self, ids: Tensor) -> Tensor:
        """Return the row of each id int64 [N]; -1 where it has none."""
        raise NotImplementedError

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Sum the waiting gradients by row; return the sum of the squares of these sums, float64 []."""
        if not self._pending:
            return self._weight.new_zeros((), dtype=torch.float64)
        rows, grad = self._waiting_gradients()
        duplicates = find_duplicates(rows)
        summed = duplicates.sum_rows(grad)
        ids = torch.as_tensor(self.ids).index_select(0, duplicates.unique)
        self._pending.append(Pending(duplicates.unique, ids, summed, self.numbering))
        return summed.double().square().sum()

    def scale_gradients(self, by: float) -> None:
        """Multiply the gradients that wait for `step`, after `squares`."""
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
        touched, gradients = self._waiting_gradients()
        # int32 is sorted in half the time.
        duplicates = find_duplicates(touched.to(torch.int32 if len(self) < 2**31 else torch.int64))
        self._note(duplicates.unique)
        table_settings, common = self._table_settings, self.optimizer
        decay = common.weight_decay if table_settings.weight_decay is None else table_settings.weight_decay
        rate = common.learning_rate if lr is None else lr
        if table_settings.learning_rate is not None:
            rate = (
                table_settings.learning_rate if lr is None else lr * table_settings.learning_rate / common.learning_rate
            )
        one_pass = fused_step(common.kind, self._weight)
        if one_pass is not None:
            one_pass(
                self._weight,
                list(self.states.values()),
                duplicates.unique,
                duplicates.starts,
                duplicates.order,
                duplicates.order.numel(),
                gradients,
                lr=rate,
                decay=decay,
                step=self.steps,
            )
            return
        rows, grad = duplicates.unique.long(), duplicates.sum_rows(gradients)
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
        """Record that a step changes these rows."""
        raise NotImplementedError

    def age_state(self, factor: float) -> None:
        """Multiply the states that never shrink by `kept`; see ShardedEmbeddings.age_state."""
        if self.optimizer is not None:
            for name in RULES[self.optimizer.kind].growing:
                self.states[name].mul_(factor)

    def begin_evaluation(self) -> None:
        """Count lookups outside training from 0."""
        self._eval_misses = self._eval_lookups = 0

    def check_no_pending(self) -> None:
        """Raise RuntimeError where gradients wait for `step`: a save would lose them."""
        if self._pending:
            raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")


def with_capacity(old: Tensor, room: int) -> Tensor:
    """Copy rows into a matrix of `room` rows; on a CPU the rest takes memory once it is written."""
    new = empty_table(room, old.shape[1]) if old.device.type == "cpu" else old.new_zeros(room, old.shape[1])
    new[: len(old)] = old
    return new
