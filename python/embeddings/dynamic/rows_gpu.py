"""Rows of raw ids on a GPU: dynamic.rows_cpu with tensors in place of arrays.

Ids are found, admitted and evicted by the same rules, and rows start with the same bits; the hash tables are those of
headrace.embeddings.kernels.gpu. A step copies the number of new ids and the counters to the host.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headrace.comm import World
from headrace.embeddings.dynamic.rows import DRAW, FREQUENCY, ID, LAST_SEEN, TIDY_MARGIN, TrainableRows, with_capacity
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels.dispatch import gather
from headrace.embeddings.kernels.gpu import DeviceMap
from headrace.embeddings.kernels.hashing import initial_values, lexsort, mix, uniform
from headrace.embeddings.storage import INIT_BOUND


def grown_table(table: Tensor, rows: int, limit: int | None = None) -> Tensor:
    """Copy records [M, ...] into a table of at least `rows` rows: grown by half, at most to the limit."""
    if rows <= len(table):
        return table
    room = max(rows, len(table) * 3 // 2, 64)
    out = table.new_zeros((room if limit is None else max(rows, min(room, limit)), table.shape[1]))
    out[: len(table)] = table
    return out


class DeviceAdmissionCounts:
    """AdmissionCounts on a GPU; see headrace.embeddings.dynamic.rows_cpu.

    The same methods on tensors, the same ids are forgotten.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit, self._device = limit, device
        self._map = DeviceMap(device)
        self._table = torch.zeros(0, 3, dtype=torch.int64, device=device)
        self._living = 0

    def __len__(self) -> int:
        return self._living

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._map.nbytes + self._table.numel() * 8

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (number, times seen) of distinct ids [N]; (-1, 0) of unknown ids."""
        numbers = self._map.find(ids)
        seen = torch.zeros_like(ids)
        is_present = numbers >= 0
        seen[is_present] = self._table[numbers[is_present], FREQUENCY]
        return numbers, seen

    def put(self, ids: Tensor, numbers: Tensor, seen: Tensor, batch: int) -> None:
        """Record that distinct ids, with the numbers from `find`, were seen `seen` times, last in `batch`."""
        old = numbers >= 0
        known_numbers, new = numbers[old], ids[~old]
        self._living += len(new) + int((self._table[known_numbers, FREQUENCY] == 0).sum())
        self._table[known_numbers, FREQUENCY] = seen[old]
        self._table[known_numbers, LAST_SEEN] = batch
        first = len(self._map)
        self._map.add(new)
        self._table = grown_table(self._table, len(self._map))
        self._table[first : len(self._map)] = torch.stack([new, seen[~old], torch.full_like(new, batch)], dim=1)
        self._tidy()

    def leave(self, numbers: Tensor) -> None:
        """Remove the ids with these numbers (-1: none) from the waiting ids."""
        entries = numbers[numbers >= 0]
        self._living -= int((self._table[entries, FREQUENCY] > 0).sum())
        self._table[entries, FREQUENCY] = 0
        self._tidy()

    def state(self) -> Tensor:
        """Return the waiting ids: int64 [W, 3] of id, times seen, batch seen last."""
        held = self._table[: len(self._map)]
        return held[held[:, FREQUENCY] > 0]

    def load(self, state: Tensor) -> None:
        """Load the waiting ids that `state` returned, in any order and from any device."""
        self._table = state.to(self._device, copy=True)
        self._map, self._living = DeviceMap(self._device, self._table[:, ID].contiguous()), len(state)
        self._tidy()

    def _tidy(self) -> None:
        if self._living > self._limit:
            held = self.state()
            # A tenth at once: the choice costs a pass over all.
            stay = max(1, self._limit - self._limit // 10)
            self.load(held[lexsort(held[:, ID], -held[:, FREQUENCY], -held[:, LAST_SEEN])[:stay]])
        elif len(self._map) > 2 * self._living + TIDY_MARGIN:
            self.load(self.state())


class DeviceRows(TrainableRows):
    """HostRows on a GPU; see headrace.embeddings.dynamic.rows_cpu.

    Ids, counts and rows are int64 tensors of the device.
    """

    def __init__(
        self, spec: DynamicSpec, world: World, seed: int, device: torch.device, *, init_bound: float = INIT_BOUND
    ) -> None:
        super().__init__(spec, world, seed, init_bound)
        self.device = device
        self._map: DeviceMap = DeviceMap(device)
        self._records = torch.zeros(0, 3, dtype=torch.int64, device=device)
        self._waiting: DeviceAdmissionCounts = DeviceAdmissionCounts(max(1, spec.max_waiting // world.size), device)
        self._weight = torch.zeros(0, spec.dim, device=device)
        #: By row, True if it changed since `track`; and the ids removed since then. None: not tracked.
        self._changed: Tensor | None = None
        self._removed_ids: list[Tensor] = []

    @property
    def ids(self) -> Tensor:
        """The id of each row: int64 [rows]."""
        return self._records[: len(self), ID]

    @property
    def nbytes(self) -> int:
        """Bytes of rows, states, counts and the hash table on the device, spare room included."""
        tensors = (self._weight, *self.states.values(), self._records)
        return sum(t.numel() * t.element_size() for t in tensors) + self._map.nbytes

    # --- lookups ---------------------------------------------------------------------------------------------------

    def look_up(self, ids: Tensor, counts: Tensor, training: bool) -> Tensor:
        """Return the row of each id [N], -1 where it has none; an id occurs once for each rank, which looks it up
        `counts[i]` times.

        In training ids are counted and admitted; else nothing changes.
        """
        if not training:
            unchanged: Tensor = self._look_up_unchanged(ids, counts)
            return unchanged
        distinct, times, inverse = ids, counts, None
        if self.world.size > 1:
            distinct, inverse = torch.unique(ids, return_inverse=True)
            times = torch.zeros_like(distinct).index_add_(0, inverse, counts)
        self.batches += 1
        rows = self._map.find(distinct)
        known = rows >= 0
        known_rows, new = rows[known], distinct[~known]
        self._records[known_rows, FREQUENCY] += times[known]  # distinct rows: each once
        self._records[known_rows, LAST_SEEN] = self.batches
        admitted, seen = self._count_new(new, times[~known])
        if len(admitted):
            self._admit(admitted, seen)
            rows = self._map.find(distinct)  # an eviction renumbers
        self.counters[2:] += torch.stack([times[rows >= 0].sum(), times.sum()]).cpu().numpy()
        return rows if inverse is None else rows[inverse]

    def rows_at(self, rows: Tensor) -> Tensor:
        """Return the vectors of rows [N], zeros where -1: float32 [N, D]."""
        if not len(self):
            return self._weight.new_zeros(len(rows), self.spec.dim)
        vectors = gather(self._weight, rows.clamp(min=0))
        return torch.where((rows >= 0).unsqueeze(1), vectors, 0.0)

    def _count_new(self, ids: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Count distinct ids without a row; return (ids, times seen) of those that are admitted now."""
        numbers, seen = self._waiting.find(ids)
        seen = seen + times
        ready = seen >= self.spec.admit_after
        if self.spec.admit_chance < 1.0:
            draw = uniform(mix(ids, DRAW + 1_000_003 * (self._seed + self.batches)))
            ready &= draw < 1 - (1 - self.spec.admit_chance) ** times.double()
        self._waiting.leave(numbers[ready])
        # Removal may have renumbered the remaining ids.
        late, late_seen = ids[~ready], seen[~ready]
        self._waiting.put(late, self._waiting.find(late)[0], late_seen, self.batches)
        return ids[ready], seen[ready]

    def _admit(self, ids: Tensor, seen: Tensor) -> None:
        if self._limit is not None and len(self) + len(ids) > self._limit:
            # Ids seen most often come first; those beyond the limit are never admitted.
            order = lexsort(ids, -seen)[: self._limit]
            ids, seen = ids[order], seen[order]
            least = max(len(self) + len(ids) - self._limit, int(self.spec.evict_share * self._limit))
            self._evict(min(len(self), least))
        first = len(self)
        self._map.add(ids)
        self._reserve(len(self))
        self._records[first : len(self)] = torch.stack([ids, seen, torch.full_like(ids, self.batches)], dim=1)
        self._weight[first : len(self)] = initial_values(self.spec.name, ids, self.spec.dim, self._seed, self._bound)
        for full in self.states.values():
            full[first : len(self)] = 0.0
        if self._changed is not None:
            self._changed[first : len(self)] = True
        self.counters[0] += len(ids)

    def _evict(self, count: int) -> None:
        """Evict `count` rows by the spec's rule."""
        if not count:
            return
        records = self._records[: len(self)]
        rule, tie = (FREQUENCY, LAST_SEEN) if self.spec.evict == "lfu" else (LAST_SEEN, FREQUENCY)
        edge = torch.kthvalue(records[:, rule], count).values
        near = (records[:, rule] <= edge).nonzero().view(-1)
        # ~id: from the largest id down, without overflow.
        worst = lexsort(~records[near, ID], records[near, tie], records[near, rule])[:count]
        self._remove(near[worst])
        self.counters[1] += count

    def _remove(self, rows: Tensor) -> None:
        """Remove rows."""
        records = self._records[: len(self)]
        is_retained = torch.ones(len(records), dtype=torch.bool, device=self.device)
        is_retained[rows] = False
        # The last rows move into the holes: the retained rows are not copied as a whole.
        remaining = len(records) - len(rows)
        holes, movers = (
            (~is_retained[:remaining]).nonzero().view(-1),
            remaining + is_retained[remaining:].nonzero().view(-1),
        )
        if self._changed is not None:
            self._removed_ids.append(records[rows, ID])
            self._changed[holes] = self._changed[movers]
        for full in (self._records, self._weight, *self.states.values()):
            full.index_copy_(0, holes, full.index_select(0, movers))
        self._map = DeviceMap(self.device, records[:remaining, ID].contiguous())
        self.numbering += 1

    def _reserve(self, rows: int) -> None:
        """Reserve capacity for `rows` rows: grow by half, at most to the limit."""
        self._records = grown_table(self._records, rows, self._limit)
        room = len(self._records)
        if room > len(self._weight):
            self._weight = with_capacity(self._weight, room)
            self.states = {name: with_capacity(full, room) for name, full in self.states.items()}
        if self._changed is not None:
            self._changed = torch.cat([self._changed, self._changed.new_zeros(room - len(self._changed))])

    # --- learning --------------------------------------------------------------------------------------------------

    def _find(self, ids: Tensor) -> Tensor:
        return self._map.find(ids)

    def _note(self, rows: Tensor) -> None:
        if self._changed is not None:
            self._changed[rows.long()] = True

    # --- changes ---------------------------------------------------------------------------------------------------

    def track(self) -> None:
        """Start to track which rows change, are added and removed."""
        self._changed = torch.zeros(len(self._records), dtype=torch.bool, device=self.device)
        self._removed_ids = []

    def take_changes(self) -> dict[str, Tensor]:
        """See HostRows.take_changes; on the host."""
        if self._changed is None:
            raise RuntimeError("track_changes comes before take_changes")
        self.check_no_pending()
        rows = self._changed[: len(self)].nonzero().view(-1)
        removed_ids = torch.unique(torch.cat([self._records.new_zeros(0), *self._removed_ids]))
        removed_ids = removed_ids[self._map.find(removed_ids) < 0]  # some were added again
        changed = {"ids": self.ids[rows], "gone": removed_ids, "weight": self._weight.index_select(0, rows)}
        self.track()
        return {name: x.cpu() for name, x in changed.items()}

    def put_changes(self, changes: dict[str, Tensor]) -> None:
        """Apply changes from `take_changes` to ids of this rank: for scoring, so limits do not hold."""
        on_device = {name: x.to(self.device) for name, x in changes.items()}
        removed_rows = self._map.find(on_device["gone"])
        if len(removed_rows):
            self._remove(removed_rows[removed_rows >= 0])
        ids = on_device["ids"]
        new, first = ids[self._map.find(ids) < 0], len(self)
        self._map.add(new)
        self._reserve(len(self))
        self._records[first : len(self)] = 0
        self._records[first : len(self), ID] = new
        self._weight.index_copy_(0, self._map.find(ids), on_device["weight"])

    # --- as a whole ------------------------------------------------------------------------------------------------

    def snapshot(self) -> DeviceRows:
        """Return a copy of the current state, to be saved while training goes on."""
        self.check_no_pending()
        twin = copy.copy(self)
        twin._records, twin._weight = self._records[: len(self)].clone(), self.weight.clone()
        twin.states = {name: full[: len(self)].clone() for name, full in self.states.items()}
        twin._waiting = DeviceAdmissionCounts(max(1, self.spec.max_waiting // self.world.size), self.device)
        twin._waiting.load(self._waiting.state())
        twin._map, twin._pending = DeviceMap(self.device, twin._records[:, ID].contiguous()), []
        twin.counters = self.counters.copy()
        return twin

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (tensors for scoring, further tensors for training) on the host, rows and waiting ids in order of
        their ids.
        """
        self.check_no_pending()
        order = torch.argsort(self.ids)
        records = self._records[: len(self)][order].cpu()
        waiting = self._waiting.state().cpu()
        waiting = waiting[waiting[:, ID].argsort()]
        training = {"seen": records[:, FREQUENCY], "last": records[:, LAST_SEEN], "waiting": waiting}
        training |= {f"state/{name}": full.index_select(0, order).cpu() for name, full in self.states.items()}
        return {"ids": records[:, ID], "weight": self._weight.index_select(0, order).cpu()}, training

    def replace(self, scoring: dict[str, Tensor], training: dict[str, Tensor]) -> None:
        """Load tensors from `dump` with ids of this rank; states that `training` lacks start at zero."""
        ids = scoring["ids"].to(self.device)
        none = torch.zeros_like(ids)
        seen, last = (training[k].to(self.device) if k in training else none for k in ("seen", "last"))
        self._records = torch.stack([ids, seen, last], dim=1)
        self._weight = scoring["weight"].to(self.device, copy=True)
        self.states = {
            k: training[f"state/{k}"].to(self.device, copy=True)
            if f"state/{k}" in training
            else self._weight.new_zeros(len(ids), v.shape[1])
            for k, v in self.states.items()
        }
        if "waiting" in training:
            self._waiting.load(training["waiting"])
        self._map = DeviceMap(self.device, ids.contiguous())
        self._pending.clear()
        self.numbering += 1
        if self._changed is not None:
            self.track()
        if self._limit is not None and len(ids) > self._limit:
            self._evict(len(ids) - self._limit)
            self._records, self._weight = self._records[: self._limit].clone(), self.weight.clone()
            self.states = {k: full[: self._limit].clone() for k, full in self.states.items()}
