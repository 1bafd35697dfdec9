"""Local tables of a rank: matrices, caches, gradients that wait for a step, and the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, channel_of
from headrace.config.embeddings import EmbeddingOptimizer, Optimizer
from headrace.embeddings.exchange import RowExchange, RowRequest
from headrace.embeddings.fused_optimizer import Gradient, Updater, non_finite_tables
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import default_device
from headrace.embeddings.layout import FusedTable, Layout
from headrace.embeddings.sharding_plan import Plan
from headrace.embeddings.storage import INIT_BOUND, RowCache, decode, empty_table, encode, initial_rows

if TYPE_CHECKING:
    from headrace.embeddings.dynamic.tables import DynamicEmbeddings
    from headrace.embeddings.hierarchical_exchange import HierarchicalRowExchange


class LocalTables(nn.Module):
    """This rank's rows of the tables of a plan. ShardedEmbeddings looks them up.

    Args: see ShardedEmbeddings.

    Raises:
        UserError: there is no such device.
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
        super().__init__()
        self.device = torch.device(device)
        dispatch.check(self.device)

        def started(fused: FusedTable) -> Tensor:
            return _start(plan, fused, seed, init_bound)

        with default_device(self.device):
            self._build(plan, collective, dynamic, matrix or started)

    def _build(
        self,
        plan: Plan,
        collective: Collective,
        dynamic: DynamicEmbeddings | None,
        matrix: Callable[[FusedTable], Tensor],
    ) -> None:
        if dynamic is not None and dynamic.device != self.device:
            raise ValueError(f"tables of raw ids on {dynamic.device} beside planned tables on {self.device}")
        if plan.world_size != collective.world.size:
            raise ValueError(f"a plan for {plan.world_size} ranks in a world of {collective.world.size}")
        self.plan = plan
        self.collective = collective
        self.dynamic = dynamic
        self.layout = Layout(plan, collective.world.rank)
        #: This rank's matrix of each fused table, [local rows, width]. Not in `state_dict`: checkpoints store ranges of
        #: rows. The matrix of a cached fused table is in host memory, and up to date after `flush`.
        self.weights = [matrix(a) for a in self.layout.fused_tables]
        #: By fused table: the cache of its rows on the device; None: it is not cached.
        self.caches = [
            RowCache([w], a.capacity, self.device, ends=[first + len(rows) for _, rows, first in a.local_blocks] or [0])
            if a.cached
            else None
            for a, w in zip(self.layout.fused_tables, self.weights, strict=True)
        ]
        self.optimizer: EmbeddingOptimizer | None = None
        self._updater: Updater | None = None
        #: Fused tables whose rows travel; those whose owners sum bags are last.
        self.remote = sorted((a for a in self.layout.fused_tables if not a.is_local), key=lambda a: a.pooled)
        #: Exchange between the ranks; None: nothing is sent.
        self.exchange: RowExchange | HierarchicalRowExchange | None = None
        travels = plan.world_size > 1 and (bool(self.remote) or dynamic is not None)
        if travels and 1 < plan.ranks_per_node < plan.world_size:
            from headrace.embeddings.hierarchical_exchange import HierarchicalRowExchange

            self.exchange = HierarchicalRowExchange(self.remote, collective, plan.ranks_per_node, plan.comm_dtype)
        elif travels:
            self.exchange = RowExchange(self.remote, collective, plan.comm_dtype)
        #: By fused table, one gradient for each backward pass.
        self._pending: list[list[Gradient]] = [[] for _ in self.layout.fused_tables]
        #: Function that receives gradients in flight; None: there are none.
        self._deferred: Callable[[], None] | None = None
        #: Requests of lookups since the last step, whose gradients may come.
        self.open_requests: list[RowRequest] = []
        #: Lookups so far that may get gradients.
        self.lookup_count = 0
        # Autograd records a function only where some input requires a gradient.
        self.anchor = torch.zeros((), requires_grad=True)
        #: Messages that are written and read in shared memory.
        self.channel = channel_of(collective)

    @property
    def weight(self) -> Tensor:
        """The rows of a plan that has one fused table (or no table: [0, 0])."""
        return self.weights[0] if len(self.weights) == 1 else _no_single(self.weights)

    @property
    def state(self) -> dict[str, Tensor]:
        """The optimizer states of a plan that has one fused table, by name: float32 [local rows, width or 1]."""
        states = self.states
        return states[0] if len(states) == 1 else {}

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """The optimizer states of each fused table."""
        return [] if self._updater is None else self._updater.states

    @property
    def steps(self) -> int:
        """Steps taken."""
        return 0 if self._updater is None else self._updater.steps

    @steps.setter
    def steps(self, value: int) -> None:
        if self._updater is None:
            raise RuntimeError("configure_optimizer comes before counting steps")
        self._updater.steps = value

    @property
    def has_pending(self) -> bool:
        """True if gradients wait for `step`."""
        return self._deferred is not None or any(self._pending)

    def row_ranges(self, fused: FusedTable) -> Tensor | None:
        """Return the ranges by which the distinct rows of a gradient must be sorted for `step`: see
        `find_duplicates`.
        """
        return None if self._updater is None else self._updater.row_ranges(fused)

    def waiting_gradients(self) -> list[list[Gradient]]:
        """Return the gradients since the last step, by fused table. Receives those in flight, so all ranks call it."""
        self._receive_deferred()
        return self._pending

    def add_gradient(self, fused: FusedTable, gradient: Gradient) -> None:
        """Store a gradient of this rank's rows of a fused table, for `step`."""
        self._receive_deferred()
        pending = self._pending[fused.number]
        if pending:  # with several passes only the last may hold memory of messages
            pending[-1], gradient = pending[-1].materialized(), gradient.materialized()
        pending.append(gradient)

    def defer_gradients(self, receive: Callable[[], None]) -> None:
        """Store a function that receives gradients in flight, until they are needed."""
        self._receive_deferred()
        self._deferred = receive

    def _receive_deferred(self) -> None:
        receive, self._deferred = self._deferred, None
        if receive is not None:
            receive()

    def send_gradients(self, request: RowRequest, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients of the vectors that were asked for, by remote fused table and table of raw ids.

        Keep those of rows.

        Args:
            request: of the lookup.
            vectors: the gradients.

        Returns:
            Those of raw ids that came.
        """
        assert self.exchange is not None
        back = self.exchange.return_gradients(request, vectors)
        for i, (fused, grad) in enumerate(zip(self.remote, back, strict=False)):
            duplicates, requested = request.duplicates(i, self.row_ranges(fused)), request.requested[i]
            gradient = (
                Gradient(duplicates, grad)
                if requested is None
                else Gradient(duplicates, grad, requested.bag_ids, requested.weights)
            )
            self.add_gradient(fused, gradient)
        return back[len(self.remote) :]

    def configure_optimizer(self, optimizer: EmbeddingOptimizer | Optimizer) -> None:
        """Choose the optimizer and make its states, at zero. Without one (scoring) no memory is spent on states."""
        if isinstance(optimizer, Optimizer):
            optimizer = EmbeddingOptimizer.model_validate(optimizer.model_dump())
        self.optimizer = optimizer
        with default_device(self.device):
            self._updater = Updater(self.layout, self.weights, optimizer, self.collective, self.caches)
        self.drop_gradients()

    def step(self, lr: float | None = None) -> None:
        """Apply the gradients of all backward passes since the last step to the rows they touch.

        Collective where tables are replicated, where gradients are clipped by norm, and where a table is cut by columns
        and the optimizer works by row; otherwise nothing is exchanged. Tables of raw ids take a step of their own after
        this one; clipped they are here, with the norm over all.

        Args:
            lr: the learning rate of this step; default the configured one. Tables with their own keep the proportion.
        """
        if self._updater is None:
            raise RuntimeError("configure_optimizer comes before step")
        self._receive_deferred()
        pending, self._pending = self._pending, [[] for _ in self.layout.fused_tables]
        self.open_requests = []
        with default_device(self.device):
            self._updater.step(pending, lr, self.dynamic)

    def age_state(self, factor: float) -> None:
        """Multiply the states that never shrink (adagrad's sums) by `kept`, so that rows stay able to move."""
        if self._updater is not None:
            self._updater.age(factor)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._receive_deferred()
        self._pending = [[] for _ in self.layout.fused_tables]
        self.open_requests = []

    def track_changes(self) -> None:
        """Start to track which rows each step changes (a byte a row): see checkpoint.changes."""
        if self._updater is None:
            raise RuntimeError("configure_optimizer comes before track_changes")
        self._updater.track()
        for t in () if self.dynamic is None else self.dynamic.tables:
            t.track()

    def take_changes(self) -> tuple[list[Tensor], int]:
        """Return the rows that changed since the last call, by fused table (bool [local rows]), and the step of that
        call.

        Begins anew.
        """
        if self._updater is None or self._updater.changed is None:
            raise RuntimeError("track_changes comes before take_changes")
        changes = self._updater.changed, self._updater.changed_since
        self._updater.track()
        return changes

    def flush(self) -> None:
        """Write all rows and states of cached tables back to host memory. The others are there already."""
        for cache in self.caches:
            if cache is not None:
                cache.flush()

    def invalidate(self) -> None:
        """Flush, and drop all cached rows on the device: to be called before `weights` or `states` are written to."""
        for cache in self.caches:
            if cache is not None:
                cache.invalidate()

    def snapshot(self) -> Self:
        """Return a copy of this rank's current rows and states, to be saved while training goes on.

        Twice the memory.
        """
        if self.has_pending:
            raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")
        self.flush()
        twin = copy.copy(self)
        twin.weights = [w.clone() for w in self.weights]
        twin.caches = [None] * len(twin.weights)
        twin.drop_gradients()  # the copy gets lists of its own: those of this object will fill
        if self._updater is not None:
            twin._updater = self._updater.snapshot()
        return twin


def _start(plan: Plan, fused: FusedTable, seed: int, init_bound: float) -> Tensor:
    def store(values: Tensor) -> Tensor:
        return encode(values, fused.dtype)

    with torch.device("cpu") if fused.cached else nullcontext():
        weight = empty_table(fused.rows, fused.stored_width, fused.dtype)
    for block, rows, first in fused.local_blocks:
        table_bound = plan.by_name[block.table].init_bound
        bound = init_bound if table_bound is None else table_bound
        initial_rows(block.table, rows, block.columns, seed, bound, weight[first : first + len(rows)], store)
    return weight


def _no_single(weights: Sequence[Tensor]) -> Tensor:
    if not weights:
        return torch.empty(0, 0)
    raise ValueError(f"the plan has {len(weights)} matrices, not one: see `weights` and `layout.fused tables`")


@dataclass(frozen=True)
class CacheUse:
    """Use of a cached table over all ranks; a row that travels counts once for each rank that requests it."""

    rows: int
    #: Share of the rows that the GPUs hold at most.
    share: float
    lookups: int
    #: Lookups whose row was on the GPU before its batch.
    hits: int

    @property
    def hit_rate(self) -> float | None:
        """Share of hits; None without lookups."""
        return self.hits / self.lookups if self.lookups else None


def cache_use(embeddings: LocalTables) -> dict[str, CacheUse]:
    """Return the use of each cached table, by name. Collective where there is one; the same on all ranks."""
    fused_tables = [a for a in embeddings.layout.fused_tables if a.cached]
    names = sorted({b.table for a in fused_tables for b in a.blocks})
    if not names:
        return {}
    answered = torch.zeros(len(names), 2, dtype=torch.float64)
    for fused in fused_tables:
        cache = embeddings.caches[fused.number]
        assert cache is not None
        for (block, _, _), (hits, lookups) in zip(fused.local_blocks, cache.counts.T.tolist(), strict=False):
            answered[names.index(block.table)] += torch.tensor([hits, lookups])
    answered = answered.to(embeddings.device)
    embeddings.collective.all_reduce_sum([answered])
    tables = embeddings.plan.by_name
    return {
        name: CacheUse(tables[name].rows, tables[name].cached, int(lookups), int(hits))
        for name, (hits, lookups) in zip(names, answered.tolist(), strict=True)
    }


#: Rows that are checked at once.
_ROWS = 1 << 18


def bad_gradients(embeddings: LocalTables) -> list[str]:
    """Return tables with NaN or infinite values in this rank's gradients since the last step. Collective."""
    waiting, bad_tables = embeddings.waiting_gradients(), set[str]()
    with default_device(embeddings.device):
        for fused, parts in zip(embeddings.layout.fused_tables, waiting, strict=True):
            for part in parts:
                bad_tables |= non_finite_tables(fused, part.rows, part.sums())
    if embeddings.dynamic is not None:
        bad_tables |= {t.spec.name for t in embeddings.dynamic.tables if not bool(t.squares().isfinite())}
    return sorted(bad_tables)


def bad_rows(embeddings: LocalTables) -> list[str]:
    """Return tables with NaN or infinite values in this rank's rows or their optimizer states."""
    embeddings.flush()
    bad_tables: set[str] = set()
    states = embeddings.states or [{} for _ in embeddings.weights]
    for fused, weight, table_states in zip(embeddings.layout.fused_tables, embeddings.weights, states, strict=True):
        for block, rows, first in fused.local_blocks:
            if not all(_is_finite(x[first : first + len(rows)]) for x in (weight, *table_states.values())):
                bad_tables.add(block.table)
    for t in () if embeddings.dynamic is None else embeddings.dynamic.tables:
        if not all(_is_finite(x) for x in (t.weight, *(s[: len(t)] for s in t.states.values()))):
            bad_tables.add(t.spec.name)
    return sorted(bad_tables)


def _is_finite(stored: Tensor) -> bool:
    """Return whether all values are finite: a sum with a NaN or infinite value is not finite."""
    return all(bool(decode(part).sum().isfinite()) for part in torch.split(stored, _ROWS))
