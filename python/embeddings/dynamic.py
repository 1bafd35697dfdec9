"""Embedding tables of raw 64-bit ids: no vocabulary, rows come with the ids that are seen and go when others need room.

    table = DynamicEmbedding(DynamicSpec("user", 16, admit_after=3, max_rows=1_000_000), collective, seed=1)
    table.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad"))
    vectors = table(ids)                # any int64 [N] -> float32 [N, D]

Ids are dealt to the ranks by their hash, so any world holds the same rows. An id gets a row when it has been seen
`admit_after` times in training (or, each time, with a probability); until then, and in scoring when it is unknown, its
vector is zeros and learns nothing. Where rows run out, those seen least often, and of these the longest ago, make room.
A row starts where its id says, so a row that was evicted and comes again starts as it started before.

The ways of others: TorchRec's managed collisions (ZCH) remap ids into a fixed table and evict by score; HugeCTR's and
DynamicEmb's hash tables grow and evict by frequency or age; here both, and the limit is in rows of each rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from headrace.atomic import write_text
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.collective import Collective
from headrace.embeddings.exchange import find_duplicates
from headrace.embeddings.id_map import IdMap, Ids, mix
from headrace.embeddings.initial import INIT_BOUND, initial_values
from headrace.embeddings.optimizers import RULES, Touched
from headrace.embeddings.tensors import FileRecord, load_tensors, save_tensors
from headrace.errors import UserError

#: Salts of the hash: who owns an id, and whether it is drawn.
_OWNER, _DRAW = 1, 2
_META = "dynamic.json"


@dataclass(frozen=True)
class DynamicSpec:
    """A table without a vocabulary."""

    name: str
    dim: int
    #: Times that an id is seen in training before it gets a row.
    admit_after: int = 1
    #: Chance that an id gets a row each time it is seen, once `admit_after` is reached; 1: at once.
    admit_chance: float = 1.0
    #: Rows over all ranks; each rank has its even share. None: no limit.
    max_rows: int | None = None
    #: Share of a rank's rows that go at once when there is no room: each eviction costs one pass over the rows.
    evict_share: float = 0.1
    #: Ids that wait for admission over all ranks; beyond it those seen longest ago are forgotten.
    max_waiting: int = 10_000_000


@dataclass(frozen=True)
class DynamicReport:
    """One rank's table. Sum over the ranks for the whole."""

    rows: int
    waiting: int
    #: Share of the hash table's places that are taken.
    load: float
    admitted: int
    evicted: int
    #: Lookups in training that found a row, and all.
    hits: int
    lookups: int


class DynamicEmbedding(nn.Module):
    """One table, sharded by the hash of the id. Ids int64 [N] -> float32 [N, D].

    Collective like ShardedEmbeddings: all ranks call forward, backward and step the same number of times, N may differ
    and be 0. In training (`self.training`) ids are counted and admitted; in scoring nothing changes.
    """

    def __init__(self, spec: DynamicSpec, collective: Collective, seed: int, *, init_bound: float = INIT_BOUND) -> None:
        super().__init__()
        self.spec, self.collective, self._seed, self._bound = spec, collective, seed, init_bound
        self._limit = None if spec.max_rows is None else max(1, spec.max_rows // collective.world.size)
        self._map, self._waiting = IdMap(), IdMap()
        #: By row of this rank: its id, how often it was seen, the step when it was seen last.
        self.ids: Ids = np.empty(0, dtype=np.int64)
        self._seen: Ids = np.empty(0, dtype=np.int64)
        self._last: Ids = np.empty(0, dtype=np.int64)
        #: Of those that wait: the same.
        self._waiting_ids: Ids = np.empty(0, dtype=np.int64)
        self._waiting_seen: Ids = np.empty(0, dtype=np.int64)
        self._waiting_last: Ids = np.empty(0, dtype=np.int64)
        #: [room, D]: more rows than there are ids, so that most batches need no new memory.
        self._weight = torch.empty(0, spec.dim)
        self._states: dict[str, Tensor] = {}
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.optimizer: EmbeddingOptimizer | None = None
        self.steps = 0
        #: How often rows were renumbered.
        self._numbering = 0
        self._batches = self._admitted = self._evicted = self._hits = self._lookups = 0
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def weight(self) -> Tensor:
        """Rows of `ids`: float32 [rows, D]."""
        return self._weight[: len(self.ids)]

    @property
    def report(self) -> DynamicReport:
        """What this rank holds and has done."""
        return DynamicReport(
            len(self.ids), len(self._waiting), self._map.load, self._admitted, self._evicted, self._hits, self._lookups
        )

    def configure_optimizer(self, optimizer: EmbeddingOptimizer) -> None:
        """Choose the optimizer and make its states, at zero."""
        self.optimizer = optimizer
        rule = RULES[optimizer.kind]
        width = 1 if rule.by_row else self.spec.dim
        self._states = {name: torch.zeros(len(self._weight), width) for name in rule.state}
        self.steps = 0
        self._pending.clear()

    def forward(self, ids: Tensor) -> Tensor:
        if ids.ndim != 1 or ids.dtype != torch.int64:
            raise ValueError(f"ids must be int64 [N], not {ids.dtype} {list(ids.shape)}")
        out: Tensor = _LookUp.apply(self._anchor, self, ids)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Apply the gradients since the last step to the rows that they touch. No exchange."""
        if self.optimizer is None:
            raise RuntimeError("configure_optimizer comes before step")
        self.steps += 1
        pending, self._pending = self._pending, []
        if not pending:
            return
        found = find_duplicates(torch.cat([rows for rows, _ in pending]))
        rows, grad = found.unique, found.sum_rows(torch.cat([g for _, g in pending]))
        weight = self._weight.index_select(0, rows)
        if self.optimizer.weight_decay:
            grad.add_(weight, alpha=self.optimizer.weight_decay)
        states = {name: full.index_select(0, rows) for name, full in self._states.items()}
        touched = Touched(weight, grad, states, self.steps, grad.square().mean(1, keepdim=True))
        RULES[self.optimizer.kind].update(touched, self.optimizer.learning_rate if lr is None else lr)
        self._weight.index_copy_(0, rows, weight)
        for name, full in self._states.items():
            full.index_copy_(0, rows, states[name])

    def owners(self, ids: Ids) -> Ids:
        """The rank of each id."""
        return (mix(ids, _OWNER) % np.uint64(self.collective.world.size)).astype(np.int64)

    def _rows_of(self, ids: Ids, counts: Ids) -> Ids:
        """This rank's rows of ids that repeat at most once a sender: -1 where there is none. Counts and admits."""
        if not self.training:
            return self._map.find(ids)
        distinct, inverse = np.unique(ids, return_inverse=True)
        times = np.bincount(inverse, weights=counts, minlength=len(distinct)).astype(np.int64)
        self._batches += 1
        rows = self._map.find(distinct)
        known = rows >= 0
        self._seen[rows[known]] += times[known]
        self._last[rows[known]] = self._batches
        admitted = self._sight(distinct[~known], times[~known])
        if len(admitted):
            self._admit(*admitted.T)
            rows = self._map.find(distinct)  # an eviction renumbers
        self._lookups += int(times.sum())
        self._hits += int(times[rows >= 0].sum())
        return rows[inverse]

    def _sight(self, ids: Ids, times: Ids) -> Ids:
        """Count ids without a row; (id, times seen) of those who get one now: int64 [A, 2]."""
        numbers = self._waiting.find(ids)
        new = numbers < 0
        seen = times.copy()
        seen[~new] += self._waiting_seen[numbers[~new]]
        ready = seen >= self.spec.admit_after
        if self.spec.admit_chance < 1.0:
            draw = mix(ids, _DRAW + 1_000_003 * (self._seed + self._batches)).astype(np.float64) / 2.0**64
            ready &= draw < 1 - (1 - self.spec.admit_chance) ** times
        self._waiting_seen[numbers[~new]] = seen[~new]
        self._waiting_last[numbers[~new]] = self._batches
        late = new & ~ready
        self._waiting.add(ids[late])
        self._waiting_ids = np.concatenate([self._waiting_ids, ids[late]])
        self._waiting_seen = np.concatenate([self._waiting_seen, seen[late]])
        self._waiting_last = np.concatenate([self._waiting_last, np.full(late.sum(), self._batches)])
        gone = numbers[ready & ~new]
        limit = max(1, self.spec.max_waiting // self.collective.world.size)
        if len(gone) or len(self._waiting) > limit:
            stay = np.ones(len(self._waiting_ids), dtype=bool)
            stay[gone] = False
            if stay.sum() > limit:
                order = np.lexsort((self._waiting_ids, -self._waiting_seen, -self._waiting_last))
                stay[[i for i in order if stay[i]][limit:]] = False
            self._waiting_ids, self._waiting_seen = self._waiting_ids[stay], self._waiting_seen[stay]
            self._waiting_last = self._waiting_last[stay]
            self._waiting = IdMap(self._waiting_ids)
        return np.stack([ids[ready], seen[ready]], axis=1)

    def _admit(self, ids: Ids, seen: Ids) -> None:
        if self._limit is not None and len(self.ids) + len(ids) > self._limit:
            # Those seen most often are first; more than the limit never get in.
            order = np.lexsort((ids, -seen))[: self._limit]
            ids, seen = ids[order], seen[order]
            least = max(len(self.ids) + len(ids) - self._limit, int(self.spec.evict_share * self._limit))
            self._evict(min(len(self.ids), least))
        first = len(self.ids)
        self._map.add(ids)
        self.ids = np.concatenate([self.ids, ids])
        self._seen = np.concatenate([self._seen, seen])
        self._last = np.concatenate([self._last, np.full(len(ids), self._batches)])
        self._make_room(len(self.ids))
        values = initial_values(self.spec.name, ids.view(np.uint64), range(self.spec.dim), self._seed, self._bound)
        self._weight[first : len(self.ids)] = torch.from_numpy(values)
        for full in self._states.values():
            full[first : len(self.ids)] = 0.0
        self._admitted += len(ids)

    def _evict(self, count: int) -> None:
        """Let the rows go that were seen least often; of equals those seen longest ago. Nothing may be pending."""
        if self._pending:
            raise RuntimeError("gradients wait for step(): rows cannot be evicted between backward and step")
        order = np.lexsort((self.ids, -self._last, -self._seen))
        stay = np.sort(order[: len(order) - count])
        kept = torch.from_numpy(stay)
        for full in (self._weight, *self._states.values()):
            full[: len(stay)] = full.index_select(0, kept)
        self.ids, self._seen, self._last = self.ids[stay], self._seen[stay], self._last[stay]
        self._map = IdMap(self.ids)
        self._evicted += count
        self._numbering += 1

    def _make_room(self, rows: int) -> None:
        """Grow by half, to the limit at most."""
        if rows <= len(self._weight):
            return
        room = max(rows, len(self._weight) * 3 // 2, 64)
        room = room if self._limit is None else max(rows, min(room, self._limit))
        for holder, name in ((self.__dict__, "_weight"), *((self._states, n) for n in self._states)):
            old = holder[name]
            grown = torch.zeros(room, old.shape[1])
            grown[: len(old)] = old
            holder[name] = grown

    # --- on disk ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write this rank's rows, states and counts, and what is waiting. Speaks to no other rank."""
        if self._pending:
            raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")
        rank = self.collective.world.rank
        rows = len(self.ids)
        tensors = {
            "weight": self.weight,
            "ids": _tensor(self.ids),
            "seen": _tensor(self._seen),
            "last": _tensor(self._last),
        }
        tensors |= {f"state/{name}": full[:rows] for name, full in self._states.items()}
        tensors |= {"waiting/ids": _tensor(self._waiting_ids), "waiting/seen": _tensor(self._waiting_seen),
                    "waiting/last": _tensor(self._waiting_last)}  # fmt: skip
        record = save_tensors(folder / f"{self.spec.name}-{rank:05d}.safetensors", tensors)
        meta = _Meta(
            dim=self.spec.dim, world_size=self.collective.world.size, steps=self.steps, batches=self._batches,
            optimizer=self.optimizer.kind if self.optimizer else None, file=record,
        )  # fmt: skip
        write_text(folder / f"{self.spec.name}-{rank:05d}-{_META}", meta.signed().model_dump_json() + "\n")

    def load(self, folder: Path) -> None:
        """Read this rank's ids, saved by any number of ranks, in place of all that it holds.

        Raises:
            UserError: a file is missing or damaged, or another dim or optimizer.
        """
        first = _read_meta(folder, self.spec.name, 0)
        metas = [first, *(_read_meta(folder, self.spec.name, r) for r in range(1, first.world_size))]
        kind = self.optimizer.kind if self.optimizer else None
        if first.dim != self.spec.dim:
            raise UserError(
                f"{folder}: table '{self.spec.name}' was saved with dim {first.dim}, it has {self.spec.dim}"
            )
        if kind is not None and first.optimizer != kind:
            raise UserError(
                f"{folder}: table '{self.spec.name}' was saved with optimizer {first.optimizer}, it has {kind}"
            )
        parts = []
        for meta in metas:
            tensors = load_tensors(folder, meta.file)
            mine = torch.from_numpy(self.owners(tensors["ids"].numpy()) == self.collective.world.rank)
            wait = torch.from_numpy(self.owners(tensors["waiting/ids"].numpy()) == self.collective.world.rank)
            parts.append({k: t[wait if k.startswith("waiting/") else mine] for k, t in tensors.items()})
        whole = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
        # In order of ids: the same whoever saved.
        order = torch.argsort(whole["ids"])
        self.ids, self._seen, self._last = (whole[k][order].numpy() for k in ("ids", "seen", "last"))
        self._weight = whole["weight"][order]
        for name in self._states:
            self._states[name] = whole[f"state/{name}"][order]
        order = torch.argsort(whole["waiting/ids"])
        self._waiting_ids, self._waiting_seen, self._waiting_last = (
            whole[f"waiting/{k}"][order].numpy() for k in ("ids", "seen", "last")
        )
        self._map, self._waiting = IdMap(self.ids), IdMap(self._waiting_ids)
        self.steps, self._batches = first.steps, first.batches
        self._pending.clear()
        if self._limit is not None and len(self.ids) > self._limit:
            self._evict(len(self.ids) - self._limit)


class _LookUp(torch.autograd.Function):
    """(anchor, table, ids [N]) -> [N, D]; three all-to-alls forward (ids, counts, rows), one backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: DynamicEmbedding, ids: Tensor) -> Tensor:
        collective = table.collective
        distinct, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        owners = torch.from_numpy(table.owners(distinct.numpy()))
        order = torch.argsort(owners, stable=True)
        sent = torch.bincount(owners, minlength=collective.world.size).tolist()
        asked, received = collective.all_to_all(distinct[order], sent)
        times, _ = collective.all_to_all(counts[order], sent)
        rows = torch.from_numpy(table._rows_of(asked.numpy().copy(), times.numpy()))
        found = (
            table._weight.index_select(0, rows.clamp(min=0))
            if len(table._weight)
            else torch.zeros(len(rows), table.spec.dim)
        )
        found[rows < 0] = 0.0
        answer, _ = collective.all_to_all(found, received)
        ctx.table, ctx.rows, ctx.sent, ctx.numbering = table, rows, sent, table._numbering
        # Where each id's answer is: order is a permutation of the distinct ids.
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        ctx.place = place[inverse]
        return answer.index_select(0, ctx.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        table: DynamicEmbedding = ctx.table
        summed = torch.zeros(sum(ctx.sent), table.spec.dim)
        found = find_duplicates(ctx.place)
        summed[found.unique] = found.sum_rows(grads[0].contiguous())
        back, _ = table.collective.all_to_all(summed, ctx.sent)
        if table._numbering != ctx.numbering:
            raise RuntimeError(
                "rows were evicted by another forward before this backward: take a step after each forward"
            )
        held = ctx.rows >= 0
        table._pending.append((ctx.rows[held], back[held]))
        return None, None, None


class _Meta(BaseModel):
    """What one rank wrote. `sha256` is of this record with an empty one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dim: int
    world_size: int
    steps: int
    batches: int
    optimizer: str | None
    file: FileRecord
    sha256: str = ""

    def signed(self) -> _Meta:
        bare = self.model_copy(update={"sha256": ""})
        return bare.model_copy(update={"sha256": hashlib.sha256(bare.model_dump_json().encode()).hexdigest()})


def _read_meta(folder: Path, name: str, rank: int) -> _Meta:
    path = folder / f"{name}-{rank:05d}-{_META}"
    try:
        meta = _Meta.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the save of {folder} did not finish or was damaged") from None
    except ValidationError as e:
        raise UserError(f"{path} is damaged or of another version: {e.errors()[0]['msg']}") from None
    if meta.signed() != meta:
        raise UserError(f"{path} is damaged: its contents do not match its checksum")
    return meta


def total(reports: Sequence[DynamicReport]) -> DynamicReport:
    """The ranks' reports as one; `load` is that of the fullest."""
    sums = {k: sum(getattr(r, k) for r in reports) for k in asdict(reports[0]) if k != "load"}
    return DynamicReport(load=max(r.load for r in reports), **sums)


def _tensor(ids: Ids) -> Tensor:
    return torch.from_numpy(ids)
