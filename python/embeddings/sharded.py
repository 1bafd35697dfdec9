"""Embedding tables spread over the ranks by a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, post_of
from headrace.config import EmbeddingOptimizer, Optimizer
from headrace.embeddings.checkpoint import shards
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.exchange.hierarchical import NodeMail
from headrace.embeddings.exchange.row_exchange import Mail, Request
from headrace.embeddings.input.addressing import Batcher, Ragged, brought
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import placing
from headrace.embeddings.lookup.autograd import Lookup, Winners, row_gradient, sent_gradient
from headrace.embeddings.lookup.handle import Prepared
from headrace.embeddings.lookup.zero_copy import Placed, can_place, is_placed
from headrace.embeddings.optim.fused import Updater
from headrace.embeddings.optim.gradients import Gradient
from headrace.embeddings.sharding.layout import Arena, Layout
from headrace.embeddings.sharding.plan import Plan
from headrace.embeddings.storage.dtypes import encode
from headrace.embeddings.storage.host_cache import CachedRows
from headrace.embeddings.storage.huge_pages import empty_table
from headrace.embeddings.storage.initialize import INIT_BOUND, initial_rows


class ShardedEmbeddings(nn.Module):
    """The tables of a plan, this rank's blocks of them, looked up and trained together.

    Forward: codes int64 [B, S], or a `Ragged` batch -> float32 [B, F, D] for F features of one width D (`features`
    gives them apart, of any widths, and sequences too; `prepare(in_place=True)` says where in memory they are). B may
    differ between ranks and be 0, but all ranks call forward, backward and step the same number of times: they exchange
    rows. The weights are no torch parameters:
    backward leaves the gradients of touched rows with their owners, summed over the ranks, and `step` applies them.

        embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="adagrad", learning_rate=0.05))
        loss_of(embeddings(codes)).backward()   # local loss: sum over the rank's rows / rows of the global batch
        embeddings.step()

    Tables of raw ids (`dynamic`) travel in the same messages: see dynamic.tables. Optimizer, step and
    files are their own.

    Bits: the same ranks give the same bits again. A lookup gives the same bits on any number of ranks and by any plan.
    Gradients are summed in the order rank by rank, so weights after a step differ between worlds by rounding alone.

    With `device="cuda"` the tables live on the GPU, and so do batches (they are brought there), vectors and gradients;
    the kernels of headrace.embeddings.kernels look up and step. Rows of 16 bits are then rounded by chance in a step.
    Tables that the plan says are `cached` are in host memory, their hot rows on the GPU as well; results are the same,
    bit for bit.

    Args:
        plan: where every row lives.
        collective: the ranks; with tables on a GPU it must carry tensors of the GPU.
        seed: of the rows' starts.
        init_bound: rows start uniform in +- this.
        dynamic: tables of raw ids, on the same device.
        device: of this rank's rows.

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
        self._batcher = Batcher(self.layout)
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
        self._anchor = torch.zeros((), requires_grad=True)
        #: The widths of the features' vectors.
        self._dims = {plan.by_name[x.table].dim for x in plan.lookups}
        self._is_uniform = len(self._dims) <= 1 and all(x.pooling != "none" for x in plan.lookups)
        #: Messages that are made and read in shared memory.
        self.post = post_of(collective)
        self._can_place = (
            self.device.type == "cpu"
            and dynamic is None
            and self._is_uniform
            and bool(plan.lookups)
            and can_place(self.layout)
        )

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

    def prepare(
        self,
        batch: Tensor | Ragged,
        weights: Tensor | None = None,
        raw: Sequence[Tensor] = (),
        *,
        in_place: bool = False,
    ) -> Prepared:
        """Begin a lookup: sort out the ids and send them to their owners, who answer later.

        Collective, and cheap to call ahead: while the dense part works on one batch, the ids of the next travel. No
        row is read before `forward`, so the result is the same as without. Rows travel early too where it is asked
        for, still to the same result, bit for bit:

            prepared = embeddings.prepare(codes)
            while True:
                following = embeddings.prepare(next_codes)   # ids travel during the forward pass
                loss = loss_of(embeddings(prepared))
                following.fetch_ahead()                      # rows this step leaves alone: during the backward pass
                loss.backward()
                embeddings.step()
                following.start()                            # the other rows: during what comes before the lookup
                prepared = following

        Args:
            batch: codes int64 [B, S] or Ragged.
            weights: float32 [B, S], where a lookup of padded codes is weighted.
            raw: ids of each table of `dynamic`, int64 [N], any number of them.
            in_place: let `forward` give a `Placed` where it can, in place of a tensor. No step may come between
                the lookup's `start` and its backward pass.
        """
        if self.device.type != "cpu":
            with placing(self.device):
                raw = [x.to(self.device, non_blocking=True) for x in raw]
                return self._prepare(*brought(batch, weights, self.device), raw, False)
        return self._prepare(batch, weights, raw, in_place)

    def _prepare(
        self, batch: Tensor | Ragged, weights: Tensor | None, raw: Sequence[Tensor], in_place: bool
    ) -> Prepared:
        if isinstance(batch, Ragged):
            occurrences, samples = self._batcher.ragged(batch), batch.lengths.shape[1]
        else:
            occurrences, samples = self._batcher.padded(batch, weights), batch.shape[0]
        arenas = [self.layout.arenas[g.arena] for g in self.layout.groups]
        in_place = in_place and self._can_place and all(map(is_placed, arenas, occurrences))
        return Prepared(self, samples, occurrences, raw, in_place)

    def forward(self, batch: Tensor | Ragged | Prepared, weights: Tensor | None = None) -> Tensor | Placed:
        if not self._is_uniform:
            raise ValueError("the features' vectors differ in width or are sequences: call features()")
        if isinstance(batch, Prepared) and batch.in_place:
            self._open_lookup(batch)
            return Placed(self, batch)
        out = self._look_up(batch, weights)
        return out.view(out.shape[0], len(self.plan.lookups), max(self._dims, default=0))

    def features(self, batch: Tensor | Ragged | Prepared, weights: Tensor | None = None) -> list[Tensor]:
        """The vectors of each lookup, in plan order: float32 [B, dim], or [B, length, dim] of a sequence.

        A sequence's padding is zeros.
        """
        return self.layout.split(self._look_up(batch, weights))

    def _look_up(self, batch: Tensor | Ragged | Prepared, weights: Tensor | None) -> Tensor:
        prepared = batch if isinstance(batch, Prepared) else self.prepare(batch, weights)
        if not self.plan.lookups and not prepared.raw:
            return torch.zeros(prepared.samples, 0, device=self.device)
        self._open_lookup(prepared)
        out: Tensor
        with placing(self.device):
            out, *raw = Lookup.apply(self._anchor, self, prepared)  # type: ignore[no-untyped-call]
        prepared.found = list(zip(raw[: len(prepared.raw)], raw[len(prepared.raw) :], strict=True))
        return out

    def _open_lookup(self, prepared: Prepared) -> None:
        prepared.start()
        if torch.is_grad_enabled():
            self.opened += 1
            if prepared.request is not None:
                self.open_requests.append(prepared.request)

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

    def take_gradients(
        self, prepared: Prepared, of_vectors: Tensor, of_raw: Sequence[Tensor] = (), winners: Winners | None = None
    ) -> None:
        """The backward pass of a lookup: send gradients to their rows' owners, and keep those that come. Collective.

        Args:
            prepared: of the lookup.
            of_vectors: float32 [B, width].
            of_raw: of the vectors of each table of raw ids.
            winners: what `pool_max` found, by group.
        """
        by_group = self.layout.cut(of_vectors)
        for arena in self.layout.arenas:
            if arena.local:
                self.add_gradient(arena, row_gradient(self, prepared, winners or {}, arena, by_group))
        raw = [w.duplicates.sum_rows(g.contiguous()) for w, g in zip(prepared.raw, of_raw, strict=False)]
        if prepared.request is not None and self.mail is not None:
            sent = [sent_gradient(self, prepared, winners or {}, a, by_group) for a in self.remote]
            raw = self.send_gradients(prepared, [*sent, *raw])
        if self.dynamic is not None:
            self.dynamic.add_gradients(prepared.answers, raw)

    def send_gradients(self, prepared: Prepared, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients of the vectors that were asked for, by remote arena and table of raw ids; keep those of rows.

        Returns:
            Those of raw ids that came.
        """
        request = prepared.request
        assert request is not None
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

    def snapshot(self) -> ShardedEmbeddings:
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

    def save_shards(self, directory: Path, with_optimizer: bool) -> None:
        """Write this rank's rows (and optimizer states) below `directory`; see shards.save_shards."""
        shards.save_shards(self, directory, with_optimizer)

    def load_shards(self, directory: Path, with_optimizer: bool) -> shards.Loaded:
        """Read this rank's rows (and optimizer states), saved by any number of ranks; see shards.load_shards."""
        return shards.load_shards(self, directory, with_optimizer)


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
