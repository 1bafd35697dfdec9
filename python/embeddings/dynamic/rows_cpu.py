"""Rows of raw ids in host memory: which ids have a row, how rows are admitted, trained and evicted."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.comm import World
from headrace.embeddings.dynamic.rows import (
    DRAW,
    FREQUENCY,
    ID,
    LAST_SEEN,
    RECORD_BYTES,
    TIDY_MARGIN,
    TrainableRows,
    with_capacity,
)
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels.dispatch import gather
from headrace.embeddings.kernels.id_map import IdMap, Ids, mix
from headrace.embeddings.storage import INIT_BOUND, initial_values


def grown_capacity(rows: int, room: int) -> int:
    """Return a capacity of at least `rows`: the current one grown by half."""
    return max(rows, room * 3 // 2, 64)


def grown_records(table: Ids, room: int) -> Ids:
    """Copy records [M, 3] into a table of `room` rows; the zeros take memory once they are written."""
    out = np.zeros((room, 3), dtype=np.int64)
    out[: len(table)] = table
    return out


class AdmissionCounts:
    """Counts of ids that have no row yet. Above the limit, the ids seen longest ago are forgotten.

    Who leaves stays in the map with a count of 0 until the dead outnumber the living: a map of open addressing cannot
    let go of one id, and to make a new one at each admission would cost a pass over all who wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._map = IdMap()
        self._table: Ids = np.zeros((0, 3), dtype=np.int64)
        self._living = 0

    def __len__(self) -> int:
        return self._living

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._map.nbytes + self._table.nbytes

    def find(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return (number, times seen) of distinct ids [N]; (-1, 0) of unknown ids."""
        numbers = self._map.find(ids)
        seen = np.zeros(len(ids), dtype=np.int64)
        seen[numbers >= 0] = self._table[numbers[numbers >= 0], FREQUENCY]
        return numbers, seen

    def put(self, ids: Ids, numbers: Ids, seen: Ids, batch: int) -> None:
        """Record that distinct ids, with the numbers from `find`, were seen `seen` times, last in `batch`."""
        old = numbers >= 0
        self._living += int((~old).sum()) + int((self._table[numbers[old], FREQUENCY] == 0).sum())
        self._table[numbers[old], FREQUENCY] = seen[old]
        self._table[numbers[old], LAST_SEEN] = batch
        first = len(self._map)
        self._map.add(ids[~old])
        if len(self._map) > len(self._table):
            self._table = grown_records(self._table, grown_capacity(len(self._map), len(self._table)))
        self._table[first : len(self._map)] = np.stack(
            [ids[~old], seen[~old], np.full((~old).sum(), batch, dtype=np.int64)], axis=1
        )
        self._tidy()

    def leave(self, numbers: Ids) -> None:
        """Remove the ids with these numbers (-1: none) from the waiting ids."""
        entries = numbers[numbers >= 0]
        self._living -= int((self._table[entries, FREQUENCY] > 0).sum())
        self._table[entries, FREQUENCY] = 0
        self._tidy()

    def state(self) -> Ids:
        """Return the waiting ids: int64 [W, 3] of id, times seen, batch seen last."""
        held = self._table[: len(self._map)]
        return held[held[:, FREQUENCY] > 0]

    def load(self, state: Ids) -> None:
        """Load the waiting ids that `state` returned, in any order."""
        self._table, self._map, self._living = state.copy(), IdMap(state[:, ID].copy()), len(state)
        self._tidy()

    def _tidy(self) -> None:
        if self._living > self._limit:
            held = self.state()
            # A tenth at once: the choice costs a pass over all.
            stay = max(1, self._limit - self._limit // 10)
            self.load(held[np.lexsort((held[:, ID], -held[:, FREQUENCY], -held[:, LAST_SEEN]))[:stay]])
        elif len(self._map) > 2 * self._living + TIDY_MARGIN:
            self.load(self.state())


#: Rows that are moved at a time: the copies in between take memory, too.
_AT_ONCE = 2**16


class HostRows(TrainableRows):
    """One rank's rows of a table of raw ids in host memory. `headrace.embeddings.dynamic.tables` brings the ids of all
    ranks.

    The order of rows means nothing and changes with evictions; nothing that is said depends on it.
    """

    def __init__(self, spec: DynamicSpec, world: World, seed: int, *, init_bound: float = INIT_BOUND) -> None:
        super().__init__(spec, world, seed, init_bound)
        self._map: IdMap = IdMap()
        #: By row: id, frequency, batch seen last. More rows than ids, as are weights and states.
        self._records: Ids = np.zeros((0, 3), dtype=np.int64)
        #: Largest number of rows so far: these were written to and take memory.
        self._peak_rows = 0
        self._waiting: AdmissionCounts = AdmissionCounts(max(1, spec.max_waiting // world.size))
        #: By row, True if it changed since `track`; and the ids removed since then. None: not tracked.
        self._changed: NDArray[np.bool_] | None = None
        self._removed_ids: list[Ids] = []

    @property
    def ids(self) -> Ids:
        """The id of each row: int64 [rows]."""
        return self._records[: len(self), ID]

    @property
    def nbytes(self) -> int:
        """Bytes of rows, states, counts (of as many as there ever were) and the hash table."""
        each = RECORD_BYTES + sum(t.shape[1] * t.element_size() for t in (self._weight, *self.states.values()))
        return self._peak_rows * each + self._map.nbytes

    # --- lookups ---------------------------------------------------------------------------------------------------

    def look_up(self, ids: Ids, counts: Ids, training: bool) -> Ids:
        """Return the row of each id [N], -1 where it has none; an id occurs once for each rank, which looks it up
        `counts[i]` times.

        In training ids are counted and admitted; else nothing changes.
        """
        if not training:
            unchanged: Ids = self._look_up_unchanged(ids, counts)
            return unchanged
        if self.world.size == 1:  # with one rank each id occurs once
            distinct, times, inverse = ids, counts, None
        else:
            distinct, inverse = np.unique(ids, return_inverse=True)
            times = np.bincount(inverse, weights=counts, minlength=len(distinct)).astype(np.int64)
        self.batches += 1
        rows = self._map.find(distinct)
        known = rows >= 0
        self._records[rows[known], FREQUENCY] += times[known]
        self._records[rows[known], LAST_SEEN] = self.batches
        admitted, seen = self._count_new(distinct[~known], times[~known])
        if len(admitted):
            numbering = self.numbering
            self._admit(admitted, seen)
            if self.numbering == numbering:
                rows[~known] = self._map.find(distinct[~known])
            else:
                rows = self._map.find(distinct)
        self.counters[2:] += (int(times[rows >= 0].sum()), int(times.sum()))
        return rows if inverse is None else rows[inverse]

    def rows_at(self, rows: Ids) -> Tensor:
        """Return the vectors of rows [N], zeros where -1: float32 [N, D]."""
        if not len(self):
            return torch.zeros(len(rows), self.spec.dim)
        vectors = gather(self._weight, torch.from_numpy(np.maximum(rows, 0)))
        absent = np.flatnonzero(rows < 0)
        return vectors.index_fill_(0, torch.from_numpy(absent), 0.0) if len(absent) else vectors

    def _count_new(self, ids: Ids, times: Ids) -> tuple[Ids, Ids]:
        """Count distinct ids without a row; return (ids, times seen) of those that are admitted now."""
        if self.spec.admit_after <= 1 and self.spec.admit_chance >= 1.0 and not len(self._waiting):
            return ids, times
        numbers, seen = self._waiting.find(ids)
        seen += times
        ready = seen >= self.spec.admit_after
        if self.spec.admit_chance < 1.0:
            draw = mix(ids, DRAW + 1_000_003 * (self._seed + self.batches)).astype(np.float64) / 2.0**64
            ready &= draw < 1 - (1 - self.spec.admit_chance) ** times
        self._waiting.leave(numbers[ready])
        # Removal may have renumbered the remaining ids.
        late, late_seen = ids[~ready], seen[~ready]
        self._waiting.put(late, self._waiting.find(late)[0], late_seen, self.batches)
        return ids[ready], seen[ready]

    def _admit(self, ids: Ids, seen: Ids) -> None:
        if self._limit is not None and len(self) + len(ids) > self._limit:
            # Ids seen most often come first; those beyond the limit are never admitted.
            order = np.lexsort((ids, -seen))[: self._limit]
            ids, seen = ids[order], seen[order]
            least = max(len(self) + len(ids) - self._limit, int(self.spec.evict_share * self._limit))
            self._evict(min(len(self), least))
        first = len(self)
        self._map.add(ids)
        self._reserve(len(self))
        self._records[first : len(self)] = np.stack([ids, seen, np.full(len(ids), self.batches)], axis=1)
        values = initial_values(self.spec.name, ids.view(np.uint64), range(self.spec.dim), self._seed, self._bound)
        self._weight[first : len(self)] = torch.from_numpy(values)
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
        self.counters[1] += count
        going, near = [], np.arange(len(records))
        # Ties are broken by the next column; at last by ~id: from the largest id down, without overflow.
        for column, sign in ((rule, 0), (tie, 0), (ID, -1)):
            values = records[near, column] ^ sign
            edge = np.partition(values, count - 1)[count - 1]
            going.append(near[values < edge])
            count -= len(going[-1])
            near = near[values == edge]
        self._remove(np.concatenate([*going, near]))

    def _remove(self, rows: Ids) -> None:
        """Remove rows."""
        records = self._records[: len(self)]
        is_retained = np.ones(len(records), dtype=bool)
        is_retained[rows] = False
        # The last rows move into the holes: the retained rows are not copied as a whole.
        remaining = len(records) - len(rows)
        holes, movers = np.flatnonzero(~is_retained[:remaining]), remaining + np.flatnonzero(is_retained[remaining:])
        if self._changed is not None:
            self._removed_ids.append(records[rows, ID])
            self._changed[holes] = self._changed[movers]
        records[holes] = records[movers]
        hole_rows, mover_rows = torch.from_numpy(holes), torch.from_numpy(movers)
        for full in (self._weight, *self.states.values()):
            for hole, mover in zip(torch.split(hole_rows, _AT_ONCE), torch.split(mover_rows, _AT_ONCE), strict=True):
                full.index_copy_(0, hole, full.index_select(0, mover))
        self._map.replace(records[:remaining, ID].copy())
        self.numbering += 1

    def _reserve(self, rows: int) -> None:
        """Reserve capacity up to the limit at once: only written pages take memory, and nothing is copied later.

        By half where there is no limit, or more than the system lets have.
        """
        self._peak_rows = max(self._peak_rows, rows)
        room = len(self._records)
        if rows <= room:
            return
        if self._limit is not None:
            try:
                return self._grow(max(rows, self._limit))
            except (MemoryError, RuntimeError):  # torch's is a RuntimeError
                pass
        self._grow(grown_capacity(rows, room))

    def _grow(self, room: int) -> None:
        records, weight = grown_records(self._records, room), with_capacity(self._weight, room)
        states = {name: with_capacity(full, room) for name, full in self.states.items()}
        if self._changed is not None:
            self._changed = np.append(self._changed, np.zeros(room - len(self._changed), dtype=bool))
        self._records, self._weight, self.states = records, weight, states

    # --- learning --------------------------------------------------------------------------------------------------

    def _find(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._map.find(ids.numpy()))

    def _note(self, rows: Tensor) -> None:
        if self._changed is not None:
            self._changed[rows.numpy()] = True

    # --- changes ---------------------------------------------------------------------------------------------------

    def track(self) -> None:
        """Start to track which rows change, are added and removed."""
        self._changed, self._removed_ids = np.zeros(len(self._records), dtype=bool), []

    def take_changes(self) -> dict[str, Tensor]:
        """Return ids and weights of rows that changed or were added since the last call, and removed ids; start
        anew.
        """
        if self._changed is None:
            raise RuntimeError("track_changes comes before take_changes")
        self.check_no_pending()
        rows = np.flatnonzero(self._changed[: len(self)])
        removed_ids = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *self._removed_ids]))
        removed_ids = removed_ids[self._map.find(removed_ids) < 0]  # some were added again
        changed = {"ids": torch.from_numpy(self.ids[rows]), "gone": torch.from_numpy(removed_ids)}
        self.track()
        return {**changed, "weight": self._weight.index_select(0, torch.from_numpy(rows))}

    def put_changes(self, changes: dict[str, Tensor]) -> None:
        """Apply changes from `take_changes` to ids of this rank: for scoring, so limits do not hold."""
        removed_rows = self._map.find(changes["gone"].numpy())
        if (removed_rows >= 0).any():
            self._remove(removed_rows[removed_rows >= 0])
        ids = changes["ids"].numpy()
        new, first = ids[self._map.find(ids) < 0], len(self)
        self._map.add(new)
        self._reserve(len(self))
        self._records[first : len(self)] = 0
        self._records[first : len(self), ID] = new
        for full in self.states.values():
            full[first : len(self)] = 0.0
        self._weight.index_copy_(0, torch.from_numpy(self._map.find(ids)), changes["weight"])

    # --- as a whole ------------------------------------------------------------------------------------------------

    def snapshot(self) -> HostRows:
        """Return a copy of the current state, to be saved while training goes on."""
        self.check_no_pending()
        twin = copy.copy(self)
        twin._records, twin._weight = self._records[: len(self)].copy(), self.weight.clone()
        twin.states = {name: full[: len(self)].clone() for name, full in self.states.items()}
        twin._waiting = copy.deepcopy(self._waiting)
        twin._map, twin._pending, twin.counters = IdMap(twin._records[:, ID].copy()), [], self.counters.copy()
        return twin

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (tensors for scoring, further tensors for training), rows and waiting ids in order of their ids."""
        self.check_no_pending()
        order = np.argsort(self.ids)
        rows, records = torch.from_numpy(order), torch.from_numpy(self._records[: len(self)][order])
        waiting = self._waiting.state()
        waiting = waiting[np.argsort(waiting[:, ID])]
        training = {"seen": records[:, FREQUENCY], "last": records[:, LAST_SEEN], "waiting": torch.from_numpy(waiting)}
        training |= {f"state/{name}": full.index_select(0, rows) for name, full in self.states.items()}
        return {"ids": records[:, ID], "weight": self._weight.index_select(0, rows)}, training

    def replace(self, scoring: dict[str, Tensor], training: dict[str, Tensor]) -> None:
        """Load tensors from `dump` with ids of this rank; states that `training` lacks start at zero."""
        ids = scoring["ids"].numpy()
        n = len(ids)
        none = torch.zeros(n, dtype=torch.int64)
        seen, last = (training.get(k, none).numpy() for k in ("seen", "last"))
        self._records = np.stack([ids, seen, last], axis=1)
        self._weight = scoring["weight"]
        self.states = {k: training.get(f"state/{k}", torch.zeros(n, *v.shape[1:])) for k, v in self.states.items()}
        if "waiting" in training:
            self._waiting.load(training["waiting"].numpy())
        self._map = IdMap(ids.copy())
        self._pending.clear()
        self.numbering += 1
        if self._changed is not None:
            self.track()
        if self._limit is not None and n > self._limit:
            self._evict(n - self._limit)
            self._records, self._weight = self._records[: self._limit].copy(), self.weight.clone()
            self.states = {k: full[: self._limit].clone() for k, full in self.states.items()}
        self._peak_rows = len(self)
