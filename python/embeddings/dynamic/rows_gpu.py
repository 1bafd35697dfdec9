"""One rank's rows of a table of raw ids, on a GPU: dynamic.rows_cpu with tensors in place of arrays.

Ids are found, admitted and evicted by the same rules, and rows start with the same bits; hash tables are those of
headrace.embeddings.kernels.id_map_gpu. What comes back to the host in a step: how many ids are new, and counters.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headrace.embeddings.dynamic.admission_cpu import FREQUENCY, ID, LAST_SEEN
from headrace.embeddings.dynamic.admission_gpu import DeviceAdmissionCounts, grown_table
from headrace.embeddings.dynamic.rows import DRAW, TrainableRows, with_capacity
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels.duplicates import gather
from headrace.embeddings.kernels.hashing import initial_values, lexsort, mix, uniform
from headrace.embeddings.kernels.id_map_gpu import DeviceMap
from headrace.embeddings.storage.initialize import INIT_BOUND
from headrace.world import World


class DeviceRows(TrainableRows):
    """See headrace.embeddings.dynamic.rows_cpu.HostRows. Ids, counts and rows are int64 tensors of the device."""

    def __init__(
        self, spec: DynamicSpec, world: World, seed: int, device: torch.device, *, init_bound: float = INIT_BOUND
    ) -> None:
        super().__init__(spec, world, seed, init_bound)
        self.device = device
        self._map: DeviceMap = DeviceMap(device)
        self._records = torch.zeros(0, 3, dtype=torch.int64, device=device)
        self._waiting: DeviceAdmissionCounts = DeviceAdmissionCounts(max(1, spec.max_waiting // world.size), device)
        self._weight = torch.zeros(0, spec.dim, device=device)
        #: By row: whether it changed since `track`; and the ids whose rows went since then. None: not tracked.
        self._changed: Tensor | None = None
        self._gone: list[Tensor] = []

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
        """Row of each id [N], -1 where it has none; an id may be there once for each rank that asks `counts[i]` times.

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
        here, new = rows[known], distinct[~known]
        self._records[here, FREQUENCY] += times[known]  # distinct rows: each once
        self._records[here, LAST_SEEN] = self.batches
        admitted, seen = self._count_new(new, times[~known])
        if len(admitted):
            self._admit(admitted, seen)
            rows = self._map.find(distinct)  # an eviction renumbers
        self.counters[2:] += torch.stack([times[rows >= 0].sum(), times.sum()]).cpu().numpy()
        return rows if inverse is None else rows[inverse]

    def rows_at(self, rows: Tensor) -> Tensor:
        """The vectors of rows [N], zeros where -1: float32 [N, D]."""
        if not len(self):
            return self._weight.new_zeros(len(rows), self.spec.dim)
        found = gather(self._weight, rows.clamp(min=0))
        return torch.where((rows >= 0).unsqueeze(1), found, 0.0)

    def _count_new(self, ids: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Count distinct ids without a row; (ids, times seen) of those who get one now."""
        numbers, seen = self._waiting.find(ids)
        seen = seen + times
        ready = seen >= self.spec.admit_after
        if self.spec.admit_chance < 1.0:
            draw = uniform(mix(ids, DRAW + 1_000_003 * (self._seed + self.batches)))
            ready &= draw < 1 - (1 - self.spec.admit_chance) ** times.double()
        self._waiting.leave(numbers[ready])
        # Whoever leaves may have made the others' numbers anew.
        late, late_seen = ids[~ready], seen[~ready]
        self._waiting.put(late, self._waiting.find(late)[0], late_seen, self.batches)
        return ids[ready], seen[ready]

    def _admit(self, ids: Tensor, seen: Tensor) -> None:
        if self._limit is not None and len(self) + len(ids) > self._limit:
            # Those seen most often are first; more than the limit never get in.
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
        """Let `count` rows go, by the spec's rule."""
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
        """Let these rows go."""
        records = self._records[: len(self)]
        stay = torch.ones(len(records), dtype=torch.bool, device=self.device)
        stay[rows] = False
        # The last rows move into the holes: what stays is not copied as a whole.
        left = len(records) - len(rows)
        holes, movers = (~stay[:left]).nonzero().view(-1), left + stay[left:].nonzero().view(-1)
        if self._changed is not None:
            self._gone.append(records[rows, ID])
            self._changed[holes] = self._changed[movers]
        for full in (self._records, self._weight, *self.states.values()):
            full.index_copy_(0, holes, full.index_select(0, movers))
        self._map = DeviceMap(self.device, records[:left, ID].contiguous())
        self.numbering += 1

    def _reserve(self, rows: int) -> None:
        """Grow by half, to the limit at most."""
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
        """Forget which rows changed, came and went, and remember from now on."""
        self._changed = torch.zeros(len(self._records), dtype=torch.bool, device=self.device)
        self._gone = []

    def take_changes(self) -> dict[str, Tensor]:
        """See HostRows.take_changes; on the host."""
        if self._changed is None:
            raise RuntimeError("track_changes comes before take_changes")
        self.check_no_pending()
        rows = self._changed[: len(self)].nonzero().view(-1)
        gone = torch.unique(torch.cat([self._records.new_zeros(0), *self._gone]))
        gone = gone[self._map.find(gone) < 0]  # some came again
        found = {"ids": self.ids[rows], "gone": gone, "weight": self._weight.index_select(0, rows)}
        self.track()
        return {name: x.cpu() for name, x in found.items()}

    def put_changes(self, changes: dict[str, Tensor]) -> None:
        """Take over what `take_changes` gave of ids that are this rank's: for scoring, so limits do not hold."""
        on_device = {name: x.to(self.device) for name, x in changes.items()}
        gone = self._map.find(on_device["gone"])
        if len(gone):
            self._remove(gone[gone >= 0])
        ids = on_device["ids"]
        new, first = ids[self._map.find(ids) < 0], len(self)
        self._map.add(new)
        self._reserve(len(self))
        self._records[first : len(self)] = 0
        self._records[first : len(self), ID] = new
        self._weight.index_copy_(0, self._map.find(ids), on_device["weight"])

    # --- as a whole ------------------------------------------------------------------------------------------------

    def snapshot(self) -> DeviceRows:
        """A copy as of now, to be saved while this goes on."""
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
        """(what scoring needs, what training needs besides) on the host, rows and who waits in order of their ids."""
        self.check_no_pending()
        order = torch.argsort(self.ids)
        records = self._records[: len(self)][order].cpu()
        waiting = self._waiting.state().cpu()
        waiting = waiting[waiting[:, ID].argsort()]
        training = {"seen": records[:, FREQUENCY], "last": records[:, LAST_SEEN], "waiting": waiting}
        training |= {f"state/{name}": full.index_select(0, order).cpu() for name, full in self.states.items()}
        return {"ids": records[:, ID], "weight": self._weight.index_select(0, order).cpu()}, training

    def replace(self, scoring: dict[str, Tensor], training: dict[str, Tensor]) -> None:
        """Take over what `dump` gave (of ids that are this rank's); what `training` lacks starts at zero."""
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
