"""What a rank holds of all tables of a plan, and how it learns: matrices, caches, gradients that wait, the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Self

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, post_of
from headrace.config import EmbeddingOptimizer, Optimizer
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.exchange.hierarchical import NodeMail
from headrace.embeddings.exchange.row_exchange import Mail, Request
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import placing
from headrace.embeddings.optim.fused import Updater
from headrace.embeddings.optim.gradients import Gradient
from headrace.embeddings.sharding.layout import Arena, Layout
from headrace.embeddings.sharding.plan import Plan
from headrace.embeddings.storage.dtypes import encode
from headrace.embeddings.storage.host_cache import CachedRows
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
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        dispatch.check(self.device)
        with placing(self.device):
            self._begin(plan, collective, seed, init_bound, dynamic)

    def _begin(
        self, plan: Plan, collective: Collective, seed: int, init_bound: float, dynamic: DynamicEmbeddings | None
    ) -> None:
        if dynamic is not None and dynamic.device != self.device:
            raise ValueError(f"tables of raw ids on {dynamic.device} beside planned tables on {self.device}")
        if plan.world_size != collective.world.size:
            raise ValueError(f"a plan for {plan.world_size} ranks in a world of {collective.world.size}")
        self.plan = plan
        self.collective = collective
        self.dynamic = dynamic
        self.layout = Layout(plan, collective.world.rank)
        #: This rank's matrix of each arena, [local rows, width]. Not in `state_dict`: storage knows ranges. Of a cached
        #: arena it is in host memory, and up to date after `flush`.
        self.weights = [_start(a, seed, init_bound) for a in self.layout.arenas]
        #: By arena: which of its rows are on the device; None: it is not cached.
        self.caches = [
            CachedRows([w], a.capacity, self.device, ends=[first + len(rows) for _, rows, first in a.held] or [0])
            if a.cached
            else None
            for a, w in zip(self.layout.arenas, self.weights, strict=True)
        ]
        self.optimizer: EmbeddingOptimizer | None = None
        self._updater: Updater | None = None
        #: Arenas whose rows travel; those whose owners sum bags are last.
        self.remote = sorted((a for a in self.layout.arenas if not a.local), key=lambda a: a.pooled)
        #: What brings messages; None: nothing is sent.
        self.mail: Mail | NodeMail | None = None
        travels = plan.world_size > 1 and (bool(self.remote) or dynamic is not None)
        if travels and 1 < plan.hop < plan.world_size:
            self.mail = NodeMail(self.remote, collective, plan.hop, plan.wire)
        elif travels:
            self.mail = Mail(self.remote, collective, plan.wire)
        #: By arena, one for each backward pass.
        self._pending: list[list[Gradient]] = [[] for _ in self.layout.arenas]
        #: Receives gradients that are on their way; None: there are none.
        self._arriving: Callable[[], None] | None = None
        #: Lookups whose gradients may come: what they asked of this rank. Until the next step.
        self.open_requests: list[Request] = []
        #: Lookups so far that may get gradients.
        self.opened = 0
        # Autograd follows a function only where some input asks for a gradient.
        self.anchor = torch.zeros((), requires_grad=True)
        #: Messages that are made and read in shared memory.
        self.post = post_of(collective)

    @property
    def weight(self) -> Tensor:
        """The rows of a plan that has one arena (or no table: [0, 0])."""
        return self.weights[0] if len(self.weights) == 1 else _no_single(self.weights)

    @property
    def state(self) -> dict[str, Tensor]:
        """The optimizer states of a plan that has one arena, by name: float32 [local rows, width or 1]."""
        states = self.states
        return states[0] if len(states) == 1 else {}

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """The optimizer states of each arena."""
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
        return self._arriving is not None or any(self._pending)

    def runs(self, arena: Arena) -> Tensor | None:
        """How the distinct rows of a gradient must be sorted for `step`: see `find_duplicates`."""
        return None if self._updater is None else self._updater.runs(arena)

    def add_gradient(self, arena: Arena, gradient: Gradient) -> None:
        """Keep what a backward pass says of this rank's rows of an arena, for `step`."""
        self._receive()
        pending = self._pending[arena.number]
        if pending:  # of several passes one alone may hold the memory of messages
            pending[-1], gradient = pending[-1].settled(), gradient.settled()
        pending.append(gradient)

    def expect(self, receive: Callable[[], None]) -> None:
        """Keep what receives gradients that are on their way, until they are needed."""
        self._receive()
        self._arriving = receive

    def _receive(self) -> None:
        receive, self._arriving = self._arriving, None
        if receive is not None:
            receive()

    def send_gradients(self, request: Request, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients of the vectors that were asked for, by remote arena and table of raw ids; keep those of rows.

        Args:
            request: of the lookup.
            vectors: the gradients.

        Returns:
            Those of raw ids that came.
        """
        assert self.mail is not None
        back = self.mail.return_gradients(request, vectors)
        for i, (arena, grad) in enumerate(zip(self.remote, back, strict=False)):
            found, asked = request.duplicates(i, self.runs(arena)), request.asked[i]
            gradient = Gradient(found, grad) if asked is None else Gradient(found, grad, asked.part, asked.weights)
            self.add_gradient(arena, gradient)
        return back[len(self.remote) :]

    def configure_optimizer(self, optimizer: EmbeddingOptimizer | Optimizer) -> None:
        """Choose the optimizer and make its states, at zero. Without one (scoring) no memory is spent on states."""
        if isinstance(optimizer, Optimizer):
            optimizer = EmbeddingOptimizer.model_validate(optimizer.model_dump())
        self.optimizer = optimizer
        with placing(self.device):
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
        self._receive()
        pending, self._pending = self._pending, [[] for _ in self.layout.arenas]
        self.open_requests = []
        with placing(self.device):
            self._updater.step(pending, lr, self.dynamic)

    def age_state(self, kept: float) -> None:
        """Multiply the states that never shrink (adagrad's sums) by `kept`, so that rows stay able to move."""
        if self._updater is not None:
            self._updater.age(kept)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._receive()
        self._pending = [[] for _ in self.layout.arenas]
        self.open_requests = []

    def track_changes(self) -> None:
        """Remember from now on which rows each step changes (a byte a row): see checkpoint.delta."""
        if self._updater is None:
            raise RuntimeError("configure_optimizer comes before track_changes")
        self._updater.track()
        for t in () if self.dynamic is None else self.dynamic.tables:
            t.track()

    def take_changes(self) -> tuple[list[Tensor], int]:
        """By arena, which rows changed since the last call (bool [local rows]), and the step it was at; begins anew."""
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

    def settle(self) -> None:
        """`flush`, and hold no cached row on the device: to be called before `weights` or `states` are written to."""
        for cache in self.caches:
            if cache is not None:
                cache.settle()

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


def _start(arena: Arena, seed: int, bound: float) -> Tensor:
    def store(values: Tensor) -> Tensor:
        return encode(values, arena.dtype)

    with torch.device("cpu") if arena.cached else nullcontext():
        weight = empty_table(arena.rows, arena.stored_width, arena.dtype)
    for block, rows, first in arena.held:
        initial_rows(block.table, rows, block.columns, seed, bound, weight[first : first + len(rows)], store)
    return weight


def _no_single(weights: Sequence[Tensor]) -> Tensor:
    if not weights:
        return torch.empty(0, 0)
    raise ValueError(f"the plan has {len(weights)} matrices, not one: see `weights` and `layout.arenas`")
