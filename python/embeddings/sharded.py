"""Embedding tables spread over the ranks by a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.config import EmbeddingOptimizer, Optimizer
from headrace.embeddings import storage
from headrace.embeddings.ahead import Ahead
from headrace.embeddings.bags import Parts, cut_bags
from headrace.embeddings.batch import Batcher, Occurrences, Ragged, brought
from headrace.embeddings.collective import Collective, post_of
from headrace.embeddings.duplicates import Duplicates, find_duplicates, gather
from headrace.embeddings.dynamic import Answer, DynamicEmbeddings, read_marked
from headrace.embeddings.exchange import Mail, Request
from headrace.embeddings.gpu import dispatch
from headrace.embeddings.gpu.cache import CachedRows
from headrace.embeddings.gpu.dispatch import placing
from headrace.embeddings.gradients import Gradient
from headrace.embeddings.in_place import Placed, Posted, can_place, is_placed
from headrace.embeddings.initial import INIT_BOUND, initial_rows
from headrace.embeddings.layout import Arena, Layout
from headrace.embeddings.nodes import NodeMail
from headrace.embeddings.pages import empty_table
from headrace.embeddings.plan import Plan
from headrace.embeddings.pooling import divide, max_gradient, pool_max, pool_sum
from headrace.embeddings.rows import decode, encode
from headrace.embeddings.update import Updater

#: By group, the row that each bag's largest number is from, by column: `pool_max`.
Winners = dict[int, Tensor]


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

    Tables of raw ids (`dynamic`) travel in the same messages: see headrace.embeddings.dynamic. Optimizer, step and
    files are their own.

    Bits: the same ranks give the same bits again. A lookup gives the same bits on any number of ranks and by any plan.
    Gradients are summed in the order rank by rank, so weights after a step differ between worlds by rounding alone.

    With `device="cuda"` the tables live on the GPU, and so do batches (they are brought there), vectors and gradients;
    the kernels of headrace.embeddings.gpu look up and step. Rows of 16 bits are then rounded by chance in a step.
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
        self, plan: Plan, collective: Collective, seed: int, *, init_bound: float = INIT_BOUND,
        dynamic: DynamicEmbeddings | None = None, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
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
        self._remote = sorted((a for a in self.layout.arenas if not a.local), key=lambda a: a.pooled)
        self._mail: Mail | NodeMail | None = None
        travels = plan.world_size > 1 and (bool(self._remote) or dynamic is not None)
        if travels and 1 < plan.hop < plan.world_size:
            self._mail = NodeMail(self._remote, collective, plan.hop, plan.wire)
        elif travels:
            self._mail = Mail(self._remote, collective, plan.wire)
        #: By arena, one for each backward pass.
        self._pending: list[list[Gradient]] = [[] for _ in self.layout.arenas]
        #: Receives gradients that are on their way; None: there are none.
        self._arriving: Callable[[], None] | None = None
        #: Lookups whose gradients may come: what they asked of this rank. Until the next step.
        self._open: list[Request] = []
        #: Lookups so far that may get gradients.
        self._opened = 0
        # Autograd follows a function only where some input asks for a gradient.
        self._anchor = torch.zeros((), requires_grad=True)
        #: The widths of the features' vectors.
        self._dims = {plan.by_name[x.table].dim for x in plan.lookups}
        self._is_uniform = len(self._dims) <= 1 and all(x.pooling != "none" for x in plan.lookups)
        #: Messages that are made and read in shared memory.
        self.post = post_of(collective)
        self._can_place = (
            self.device.type == "cpu" and dynamic is None and self._is_uniform and bool(plan.lookups)
            and can_place(self.layout)
        )  # fmt: skip

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
        self, batch: Tensor | Ragged, weights: Tensor | None = None, raw: Sequence[Tensor] = (), *,
        in_place: bool = False,
    ) -> Prepared:  # fmt: skip
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
    ) -> Prepared:  # fmt: skip
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
            out, *raw = _Lookup.apply(self._anchor, self, prepared)  # type: ignore[no-untyped-call]
        prepared.found = list(zip(raw[: len(prepared.raw)], raw[len(prepared.raw) :], strict=True))
        return out

    def _open_lookup(self, prepared: Prepared) -> None:
        prepared.start()
        if torch.is_grad_enabled():
            self._opened += 1
            if prepared.request is not None:
                self._open.append(prepared.request)

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
                self.add_gradient(arena, _gradient(self, prepared, winners or {}, arena, by_group))
        raw = [w.duplicates.sum_rows(g.contiguous()) for w, g in zip(prepared.raw, of_raw, strict=False)]
        if prepared.request is not None and self._mail is not None:
            sent = [_sent_gradient(self, prepared, winners or {}, a, by_group) for a in self._remote]
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
        assert self._mail is not None
        back = self._mail.return_gradients(request, vectors)
        for i, (arena, grad) in enumerate(zip(self._remote, back, strict=False)):
            found, asked = request.duplicates(i), request.asked[i]
            gradient = Gradient(found, grad) if asked is None else Gradient(found, grad, asked.part, asked.weights)
            self.add_gradient(arena, gradient)
        return back[len(self._remote) :]

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
        self._open = []
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
        self._open = []

    def track_changes(self) -> None:
        """Remember from now on which rows each step changes (a byte a row): see headrace.embeddings.delta."""
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
        """Write this rank's rows (and optimizer states) below `directory`; see storage.save_shards."""
        storage.save_shards(self, directory, with_optimizer)

    def load_shards(self, directory: Path, with_optimizer: bool) -> storage.Loaded:
        """Read this rank's rows (and optimizer states), saved by any number of ranks; see storage.load_shards."""
        return storage.load_shards(self, directory, with_optimizer)


@dataclass
class _Part:
    """What a lookup needs from one arena."""

    #: Of all groups of the arena, one after the other: int32 or int64 [N].
    addresses: Tensor
    #: Groups of the arena: their number, and where their occurrences begin and end.
    groups: list[tuple[int, int, int]]
    #: None: not sorted yet (a lookup in this rank's own matrix needs that for gradients only).
    duplicates: Duplicates | None = None
    #: Of an arena whose owners sum bags (it has one group).
    bags: Parts | None = None

    def sorted(self) -> Duplicates:
        if self.duplicates is None:
            self.duplicates = find_duplicates(self.addresses)
        return self.duplicates


class Prepared:
    """A lookup that has begun: `ShardedEmbeddings.prepare`. Used once by `forward` or `features`."""

    def __init__(
        self, embeddings: ShardedEmbeddings, samples: int, occurrences: Sequence[Occurrences], raw: Sequence[Tensor],
        in_place: bool,
    ) -> None:  # fmt: skip
        self.samples = samples
        #: Whether `forward` gives a `Placed`.
        self.in_place = in_place
        #: Steps when the rows were asked for.
        self.started_at = 0
        self.occurrences = list(occurrences)
        self.parts = [self._part(embeddings, a) for a in embeddings.layout.arenas]
        self._embeddings = embeddings
        dynamic = embeddings.dynamic
        #: By table of raw ids: what is wanted; what was answered here, once `start` was called.
        self.raw = [] if dynamic is None else dynamic.want(raw)
        self.answers: list[Answer] = []
        #: By table of raw ids, after the lookup: vectors float32 [N, D] (zeros: no row), which have a row: bool [N].
        self.found: list[tuple[Tensor, Tensor]] = []
        #: What the ranks asked each other for, once the answer is here; None also where nothing is sent.
        self.request: Request | None = None
        self._ahead: Ahead | None = None
        #: Lookups and steps when rows were fetched ahead.
        self._known = (0, 0)
        self._wait: Callable[[], Request] | None = None
        self._rows: Callable[[], list[Tensor]] | None = None
        if embeddings._mail is not None:
            self._wait = embeddings._mail.send_ids([self._wanted(a) for a in embeddings._remote], self.raw)

    def fetch_ahead(self) -> None:
        """Begin to fetch those rows that the step after the lookups so far cannot change. Collective.

        To be called after the forward pass of the lookup before, before its backward pass. Rows that are changed
        otherwise than by `step` meanwhile (a load) would be old. A lookup between this and the step that changes other
        rows than known here is noticed, and all rows are fetched again. Messages by machines (`Plan.hop`) carry ids
        ahead alone, as do tables on a GPU.
        """
        mail, embeddings = self._embeddings._mail, self._embeddings
        if not isinstance(mail, Mail) or not embeddings._remote or self._rows is not None:
            return
        if embeddings.device.type != "cpu" or any(c is not None for c in embeddings.caches):
            return
        request = self._answered()
        touched = [[r.touched(i) for r in embeddings._open] for i in range(len(request.rows))]
        self._ahead = Ahead(mail, embeddings.collective, request, self._remote_weights(), touched)
        self._known = embeddings._opened, embeddings.steps

    def start(self) -> None:
        """Begin to fetch the rows (those that are not here yet), as they are now. Collective; once, then it is done.

        Raw ids are counted, and admitted, now.
        """
        if self._rows is None:
            self.started_at = self._embeddings.steps
            with placing(self._embeddings.device):
                self._rows = self._answer()
            if isinstance(self._rows, Posted) and not self.in_place:
                self._rows.bring_own()

    @property
    def posted(self) -> Posted | None:
        """The rows of a lookup in place, where they come through shared memory. After `start`."""
        return self._rows if self.in_place and isinstance(self._rows, Posted) else None

    def _answer(self) -> Callable[[], list[Tensor]]:
        """Look up what was asked here, and begin to fetch what was asked for; what waits for that."""
        mail, dynamic = self._embeddings._mail, self._embeddings.dynamic
        if mail is None:  # one rank asks itself
            self.answers = [] if dynamic is None else dynamic.answer(self.raw)
            return list
        request, ahead = self._answered(), self._ahead
        self.answers = [] if dynamic is None else dynamic.answer(request.raw)
        answers = [a.marked() for a in self.answers]
        opened, steps = self._known
        if ahead is not None and opened != self._embeddings._opened and steps != self._embeddings.steps:
            ahead.drop()
            ahead = None
        if ahead is not None:
            return ahead.start_rest(answers)
        return mail.start_rows(*self._asked_here(request), answers)

    def rows(self) -> list[Tensor]:
        """Rows by remote arena, as stored, and behind them marked vectors by table of raw ids. After `start`."""
        return [] if self._rows is None else self._rows()

    def drop(self) -> None:
        """Receive what is on its way, for nothing. Collective; in place of the lookup."""
        if self._rows is not None:
            self._rows()
        elif self._embeddings._mail is not None:
            self._answered()
            if self._ahead is not None:
                self._ahead.drop()

    def _answered(self) -> Request:
        if self.request is None:
            assert self._wait is not None
            with placing(self._embeddings.device):
                self.request = self._wait()
        return self.request

    def _remote_weights(self) -> list[Tensor]:
        return [self._embeddings.weights[a.number] for a in self._embeddings._remote]

    def _asked_here(self, request: Request) -> tuple[Request, list[Tensor]]:
        """Where rows are that were asked for here: the request, by rows of these matrices, by remote arena."""
        weights, rows, embeddings = self._remote_weights(), list(request.rows), self._embeddings
        for i, arena in enumerate(embeddings._remote):
            cache = embeddings.caches[arena.number]
            if cache is not None:
                found = request.duplicates(i)
                weights[i], rows[i] = cache.look_up(found, embeddings.training), found.inverse()
        return replace(request, rows=rows), weights

    def _wanted(self, arena: Arena) -> Tensor | Parts:
        part = self.parts[arena.number]
        if not arena.pooled or not part.groups:
            return part.sorted().unique
        part.bags = cut_bags(arena, self.occurrences[part.groups[0][0]])
        return part.bags

    def _part(self, embeddings: ShardedEmbeddings, arena: Arena) -> _Part:
        found, pieces, end = [], [], 0
        for number, group in enumerate(embeddings.layout.groups):
            if group.arena == arena.number:
                addresses = self.occurrences[number].addresses
                found.append((number, end, end + addresses.numel()))
                end += addresses.numel()
                pieces.append(addresses)
        if not pieces:  # a table that no feature looks up
            return _Part(torch.empty(0, dtype=arena.index_dtype), [])
        return _Part(pieces[0] if len(pieces) == 1 else torch.cat(pieces), found)


class _Lookup(torch.autograd.Function):
    """(anchor, embeddings, prepared) -> [B, width], then by table of raw ids vectors [N, D], then found [N] of each.

    Two all-to-alls forward (one in `prepare`), one backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embeddings: ShardedEmbeddings, prepared: Prepared) -> tuple[Tensor, ...]:
        layout = embeddings.layout
        stored = prepared.rows()
        fetched = {a.number: decode(r) for a, r in zip(embeddings._remote, stored, strict=False)}
        winners: dict[int, Tensor] = {}
        pooled: list[Tensor] = [anchor] * len(layout.groups)
        for arena, part in zip(layout.arenas, prepared.parts, strict=True):
            if part.bags is not None:
                occurrences = prepared.occurrences[part.groups[0][0]]
                pooled[part.groups[0][0]] = divide(part.bags.sum(fetched[arena.number], occurrences.bags), occurrences)
                continue
            rows, index = _source(embeddings, arena, fetched.get(arena.number), part)
            for number, start, end in part.groups:
                occurrences = prepared.occurrences[number]
                if layout.groups[number].mode == "sum":
                    pooled[number] = pool_sum(rows, index[start:end], occurrences)
                else:
                    pooled[number], winners[number] = pool_max(rows, index[start:end], occurrences)
        ctx.embeddings, ctx.prepared, ctx.winners = embeddings, prepared, winners
        out = layout.join(pooled, prepared.samples) if pooled else torch.zeros(prepared.samples, 0)
        told = [read_marked(x) for x in stored[len(embeddings._remote) :]]
        told = told or [(a.vectors, a.found) for a in prepared.answers]
        places = [w.duplicates.inverse() for w in prepared.raw]
        vectors = [gather(v, p) for (v, _), p in zip(told, places, strict=True)]
        found = [f.index_select(0, p) for (_, f), p in zip(told, places, strict=True)]
        ctx.mark_non_differentiable(*found)
        return (out, *vectors, *found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        with placing(ctx.embeddings.device):
            ctx.embeddings.take_gradients(ctx.prepared, grads[0], grads[1:], ctx.winners)
        # `prepared.found` knows this node: a circle, in which vectors would wait for the garbage collector.
        ctx.prepared = None
        return None, None, None


def _sent_gradient(
    embeddings: ShardedEmbeddings, prepared: Prepared, winners: Winners, arena: Arena, by_group: list[Tensor]
) -> Tensor:
    """The gradient of each vector that a rank got from an arena's owners: of distinct rows, or of parts of bags."""
    part = prepared.parts[arena.number]
    if part.bags is None:
        return _gradient(embeddings, prepared, winners, arena, by_group).sums()
    number = part.groups[0][0]
    return divide(gather(by_group[number], part.bags.bag), prepared.occurrences[number], part.bags.bag)


def _gradient(
    embeddings: ShardedEmbeddings, prepared: Prepared, winners: Winners, arena: Arena, by_group: list[Tensor]
) -> Gradient:
    """The gradient of the rows of one arena that a rank looked up."""
    groups, part = embeddings.layout.groups, prepared.parts[arena.number]
    found = part.sorted()
    if len(part.groups) == 1 and groups[part.groups[0][0]].mode == "sum":
        number = part.groups[0][0]
        return Gradient.of_bags(found, by_group[number], prepared.occurrences[number])
    total = torch.zeros(found.unique.numel(), arena.width)
    for number, start, end in part.groups:
        if groups[number].mode == "sum":
            one = Gradient.of_bags(found.part(start, end), by_group[number], prepared.occurrences[number])
            total += one.sums()
            continue
        winner = winners[number]
        if arena.local and not arena.cached and dispatch.by_address(embeddings.weights[arena.number]):
            # Looked up by address, not by distinct row.
            winner = torch.where(winner < 0, winner, torch.searchsorted(found.unique, winner.to(found.unique.dtype)))
        total += max_gradient(by_group[number], winner, found.unique.numel())
    return Gradient.of_sums(found.unique, total)


def _source(embeddings: ShardedEmbeddings, arena: Arena, fetched: Tensor | None, part: _Part) -> tuple[Tensor, Tensor]:
    """Float32 rows, and the index into them of each occurrence."""
    weight, cache = embeddings.weights[arena.number], embeddings.caches[arena.number]
    if fetched is not None:
        return fetched, part.sorted().inverse()
    if cache is not None:
        found = part.sorted()
        return decode(cache.look_up(found, embeddings.training)), found.inverse()
    if dispatch.by_address(weight):
        return weight, part.addresses
    found = part.sorted()
    return decode(weight.index_select(0, found.unique)), found.inverse()


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
