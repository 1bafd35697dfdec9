"""One search for a plan: greedy, the largest (or longest) table first.

Then the tables of the slowest rank are tried again elsewhere while that helps. A few vector operations of the world's
length for each table and option, so that hundreds of tables on thousands of ranks are planned in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.config import ShardingKind
from headrace.embeddings.planner.cost import GIB, Load, Vector, Workload, load_of
from headrace.embeddings.planner.memory import insufficient_memory
from headrace.embeddings.planner.options import ShardingOption, rule_of, sharding_options
from headrace.embeddings.planner.traffic import ExchangeTraffic, choose_exchange
from headrace.embeddings.sharding.plan import Block, Plan, Table, blocks_for

_MOVES = 400
#: Tables of a rank that take less than this need no balance.
_SMALL = 2**30


@dataclass(frozen=True)
class Planned:
    """A plan and what it is expected to cost."""

    plan: Plan
    work: Workload
    #: With direct messages.
    load: Load
    #: Direct messages beside those by machines; None where these are not possible.
    traffic: ExchangeTraffic | None = None


def even_memory(work: Workload, share: float = 1.0) -> float:
    """Bytes of weights and states of a rank above which memory comes before time; `share`: of what is allowed."""
    imbalance = work.settings.memory_imbalance
    return np.inf if imbalance is None else max(_SMALL, share * imbalance * work.table_bytes / work.world_size)


def memory_over(load: Load, even: float) -> float:
    """How far the fullest rank is above `even`."""
    return max(0.0, float(load.memory.max()) - even)


class Planner:
    """Searches."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._world = work.world_size
        limit = work.settings.memory_gib
        self._limit = np.inf if limit is None else limit * GIB - work.other_memory.raw_ids
        self._even = even_memory(work)
        self._total = Load.zero(self._world)
        #: By table: blocks, load, and seconds of each rank, [W].
        self._chosen: dict[str, tuple[list[Block], Load, Vector]] = {}
        self._shared: dict[tuple[str, str, int, bool], Load] = {}

    def plan(self, bound: float | None = None, share: float = 1.0) -> Planned:
        """One search.

        Args:
            bound: None: the largest table first, each cut as is best for the slowest rank. Else tables are cut first,
                each as costs all ranks together least, among the options that take no rank longer than so many seconds;
                then the longest are assigned first. (Turek, Wolf and Yu, "Approximate algorithms for scheduling
                parallelizable tasks", 1992, choose widths and then a schedule in this way.)
            share: of the imbalance of memory that the settings allow.

        Raises:
            UserError: nothing fits.
        """
        self._total, self._chosen, self._even = Load.zero(self._world), {}, even_memory(self._work, share)
        options = {t.name: sharding_options(self._work, t, self._limit) for t in self._work.tables}
        cost = {t.name: float(self._work.bytes_of(t)) for t in self._work.tables}
        if bound is not None:
            for t in self._work.tables:
                found = [(self._alone(t, option, bound), option) for option in options[t.name]]
                (*_, cost[t.name]), option = min(found, key=lambda x: x[0][:3])
                options[t.name] = [option]
        order = sorted(self._work.tables, key=lambda t: (-cost[t.name], t.name))
        # What cannot move is assigned first.
        for table in sorted(order, key=lambda t: not self._fixed(t)):
            self._assign(table, options[table.name])
        self._improve()
        blocks = tuple(b for t in self._work.tables for b in self._chosen[t.name][0])
        ranks_per_node, traffic = choose_exchange(self._work, blocks)
        plan = Plan(
            self._work.tables, self._work.lookups, blocks, self._world, self._work.settings.wire, ranks_per_node
        )
        return Planned(plan, self._work, self._total, traffic)

    def _alone(self, table: Table, option: ShardingOption, bound: float) -> tuple[float, float, float, float]:
        """What is above the even share of memory and above the bound, the time of all ranks, and of the slowest."""
        kind, parts, pooled = option
        _, load = self._load(table, kind, 0, parts, pooled)
        seconds = load.seconds(self._work.settings)
        slowest = float(seconds.max())
        return memory_over(load, self._even), max(0.0, slowest - bound), float(seconds.sum()), slowest

    def _fixed(self, table: Table) -> bool:
        return rule_of(self._work, table).kind is not None

    def _load(self, table: Table, kind: ShardingKind, first: int, parts: int, pooled: bool) -> tuple[list[Block], Load]:
        """Blocks and their load; that of another first rank is the same, turned."""
        blocks = blocks_for(table, kind, self._world, first, parts, pooled)
        key = (table.name, kind, parts, pooled)
        if key not in self._shared:
            self._shared[key] = load_of(self._work, blocks_for(table, kind, self._world, 0, parts, pooled))
        base = self._shared[key]
        return blocks, Load(*(np.roll(v, first) for v in vars(base).values())) if first else base

    def _starts(self, kind: ShardingKind, parts: int) -> list[int]:
        """First ranks that are worth a try: where the next parts ranks have most room, and are fastest."""
        if kind == "data_parallel":
            return [0]
        seconds = self._total.seconds(self._work.settings)
        if parts == self._world:  # the first row is the most popular: it goes where there is least to do
            return [int(np.argmin(seconds))]
        starts = set()
        for measure in (seconds, self._total.memory + self._total.buffers):
            doubled = np.concatenate([measure, measure[: parts - 1]])
            windows = np.lib.stride_tricks.sliding_window_view(doubled, parts).max(axis=1) if parts > 1 else measure
            starts.add(int(np.argmin(windows)))
        return sorted(starts)

    def _score(self, extra: Load) -> tuple[float, float, float] | None:
        """(bytes of the fullest rank above the even share, time of the slowest, time of all); None: it does not fit."""
        memory = self._total.memory + self._total.buffers + extra.memory + extra.buffers
        if memory.max() > self._limit:
            return None
        both = Load(*(a + b for a, b in zip(vars(self._total).values(), vars(extra).values(), strict=True)))
        seconds = both.seconds(self._work.settings)
        return memory_over(both, self._even), float(seconds.max()), float(seconds.sum())

    def _best(
        self, table: Table, options: Sequence[ShardingOption]
    ) -> tuple[tuple[float, float, float], list[Block], Load] | None:
        best = None
        for kind, parts, pooled in options:
            for first in self._starts(kind, min(parts, self._world)):
                blocks, load = self._load(table, kind, first, parts, pooled)
                score = self._score(load)
                if score is not None and (best is None or score < best[0]):
                    best = score, blocks, load
        return best

    def _assign(self, table: Table, options: Sequence[ShardingOption]) -> None:
        best = self._best(table, options)
        if best is None:
            raise insufficient_memory(self._work, table, float(self._limit))
        self._total.add(best[2])
        self._choose(table, best[1], best[2])

    def _choose(self, table: Table, blocks: list[Block], load: Load) -> None:
        self._chosen[table.name] = blocks, load, load.seconds(self._work.settings)

    def _improve(self) -> None:
        """Try the tables of the slowest rank (of the fullest, where it is too full) again, the most costly first."""
        moves = min(_MOVES, 4 * len(self._chosen))
        stuck: set[str] = set()
        for _ in range(moves):
            over, before = memory_over(self._total, self._even), self._total.seconds(self._work.settings)
            worst = int(np.argmax(self._total.memory if over else before))
            costs = sorted(
                (-float((load.memory if over else seconds)[worst]), name)
                for name, (_, load, seconds) in self._chosen.items()
                if name not in stuck
            )
            if not costs:
                return
            name = costs[0][1]
            blocks, load, _ = self._chosen[name]
            self._total.add(load, -1.0)
            table = self._work.by_name[name]
            found = self._best(table, sharding_options(self._work, table, self._limit))
            if found is not None and found[0] < (over, float(before.max()) * (1 - 1e-9), float(before.sum())):
                blocks, load = found[1], found[2]
                stuck.clear()
            stuck.add(name)
            self._choose(table, blocks, load)
            self._total.add(load)
