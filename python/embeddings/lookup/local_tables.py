"""What a rank holds of all tables of a plan, and how it learns: matrices, caches, gradients that wait, the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Self

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, channel_of
from headrace.config import EmbeddingOptimizer, Optimizer
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.exchange.hierarchical import HierarchicalRowExchange
from headrace.embeddings.exchange.row_exchange import RowExchange, RowRequest
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import default_device
from headrace.embeddings.optim.fused import Updater
from headrace.embeddings.optim.gradients import Gradient
from headrace.embeddings.sharding.layout import FusedTable, Layout
from headrace.embeddings.sharding.plan import Plan
from headrace.embeddings.storage.dtypes import encode
from headrace.embeddings.storage.host_cache import RowCache
from headrace.embeddings.storage.huge_pages import empty_table
from headrace.embeddings.storage.initialize import INIT_BOUND, initial_rows


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
        #: This rank's matrix of each fused table, [local rows, width]. Not in `state_dict`: storage knows ranges. Of a
        #: cached fused table it is in host memory, and up to date after `flush`.
        self.weights = [matrix(a) for a in self.layout.fused_tables]
        #: By fused table: which of its rows are on the device; None: it is not cached.
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
        #: What brings messages; None: nothing is sent.
        self.exchange: RowExchange | HierarchicalRowExchange | None = None
        travels = plan.world_size > 1 and (bool(self.remote) or dynamic is not None)
        if travels and 1 < plan.ranks_per_node < plan.world_size:
            self.exchange = HierarchicalRowExchange(self.remote, collective, plan.ranks_per_node, plan.comm_dtype)
        elif travels:
            self.exchange = RowExchange(self.remote, collective, plan.comm_dtype)
        #: By fused table, one for each backward pass.
        self._pending: list[list[Gradient]] = [[] for _ in self.layout.fused_tables]
        #: Receives gradients that are on their way; None: there are none.
        self._deferred: Callable[[], None] | None = None
        #: Lookups whose gradients may come: what they asked of this rank. Until the next step.
        self.open_requests: list[RowRequest] = []
        #: Lookups so far that may get gradients.
        self.lookup_count = 0
        # Autograd follows a function only where some input asks for a gradient.
        self.anchor = torch.zeros((), requires_grad=True)
        #: Messages that are made and read in shared memory.
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
        """Whether gradients wait for `step`."""
        return self._deferred is not None or any(self._pending)

    def row_ranges(self, fused: FusedTable) -> Tensor | None:
        """How the distinct rows of a gradient must be sorted for `step`: see `find_duplicates`."""
        return None if self._updater is None else self._updater.row_ranges(fused)

    def waiting_gradients(self) -> list[list[Gradient]]:
        """By fused table, those since the last step. Receives what is on its way, so all ranks call it."""
        self._receive_deferred()
        return self._pending

    def add_gradient(self, fused: FusedTable, gradient: Gradient) -> None:
        """Keep what a backward pass says of this rank's rows of a fused table, for `step`."""
        self._receive_deferred()
        pending = self._pending[fused.number]
        if pending:  # of several passes one alone may hold the memory of messages
            pending[-1], gradient = pending[-1].materialized(), gradient.materialized()
        pending.append(gradient)

    def defer_gradients(self, receive: Callable[[], None]) -> None:
        """Keep what receives gradients that are on their way, until they are needed."""
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
            found, requested = request.duplicates(i, self.row_ranges(fused)), request.requested[i]
            gradient = (
                Gradient(found, grad)
                if requested is None
                else Gradient(found, grad, requested.bag_ids, requested.weights)
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

    def age_state(self, kept: float) -> None:
        """Multiply the states that never shrink (adagrad's sums) by `kept`, so that rows stay able to move."""
        if self._updater is not None:
            self._updater.age(kept)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._receive_deferred()
        self._pending = [[] for _ in self.layout.fused_tables]
        self.open_requests = []

    def track_changes(self) -> None:
        """Remember from now on which rows each step changes (a byte a row): see checkpoint.delta."""
        if self._updater is None:
            raise RuntimeError("configure_optimizer comes before track_changes")
        self._updater.track()
        for t in () if self.dynamic is None else self.dynamic.tables:
            t.track()

    def take_changes(self) -> tuple[list[Tensor], int]:
        """By fused table, which rows changed since the last call (bool [local rows]), and the step it was at.

        Begins anew.
        """
        if self._updater is None or self._updater.changed is None:
            raise RuntimeError("track_changes comes before take_changes")
        found = self._updater.changed, self._updater.changed_since
        self._updater.track()
        return found

    def flush(self) -> None:
        """Let host memory hold all rows and states of cached tables as they are now. The others are where they are."""
        for cache in self.caches:
            if cache is not None:
                cache.flush()

    def invalidate(self) -> None:
        """`flush`, and hold no cached row on the device: to be called before `weights` or `states` are written to."""
        for cache in self.caches:
            if cache is not None:
                cache.invalidate()

    def snapshot(self) -> Self:
        """A copy of this rank's rows and states as they are now, to be saved while this goes on. Twice the memory."""
        if self.has_pending:
            raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")
        self.flush()
        twin = copy.copy(self)
        twin.weights = [w.clone() for w in self.weights]
        twin.caches = [None] * len(twin.weights)
        twin.drop_gradients()  # its own, empty: this one's will fill
        if self._updater is not None:
            twin._updater = self._updater.snapshot()
        return twin


def _start(plan: Plan, fused: FusedTable, seed: int, init_bound: float) -> Tensor:
    def store(values: Tensor) -> Tensor:
        return encode(values, fused.dtype)

    with torch.device("cpu") if fused.cached else nullcontext():
        weight = empty_table(fused.rows, fused.stored_width, fused.dtype)
    for block, rows, first in fused.local_blocks:
        own = plan.by_name[block.table].init_bound
        bound = init_bound if own is None else own
        initial_rows(block.table, rows, block.columns, seed, bound, weight[first : first + len(rows)], store)
    return weight


def _no_single(weights: Sequence[Tensor]) -> Tensor:
    if not weights:
        return torch.empty(0, 0)
    raise ValueError(f"the plan has {len(weights)} matrices, not one: see `weights` and `layout.fused tables`")
