"""Choose where tables live: the cheapest kind for each, by the cost model, within the memory and the constraints.

Greedy, the largest table first; then the tables of the slowest rank are tried again elsewhere while that helps. The
same input gives the same plan. A few vector operations of the world's length for each table and kind, so that hundreds
of tables on thousands of ranks are planned in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from headrace.config import Sharding, TableSharding
from headrace.embeddings.optim.rules import state_bytes_per_row
from headrace.embeddings.planner.cost import GIB, Load, OtherMemory, Vector, Workload, load_of
from headrace.embeddings.planner.popularity import Popularity
from headrace.embeddings.planner.traffic import ExchangeTraffic, choose_exchange
from headrace.embeddings.sharding.plan import Block, Lookup, Plan, ShardingKind, Table, blocks_for, can_pool
from headrace.embeddings.storage.row_format import row_bytes
from headrace.errors import UserError

#: Narrower blocks of columns cost more in ids than they win.
_MIN_COLUMNS = 16
#: A table is replicated only if that takes less than this share of a rank's memory (without a limit: this many bytes).
_REPLICATED_SHARE, _REPLICATED_BYTES = 0.02, 256 * 2**20
_MOVES = 400
#: Bounds that are tried, as shares of the slowest rank's time by the first plan.
_BOUNDS = (1.0, 0.6, 0.35)
#: Shares of the imbalance that is allowed.
_SHARES = (1.0, 0.7)
#: A plan is as good as another that is no more than so much faster.
_AS_GOOD = 1.02
#: Shares of the rows of cached tables that GPUs hold, tried from the first on.
_CACHED = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
#: Tables of a rank that take less than this need no balance.
_SMALL = 2**30
_NOTHING = OtherMemory()

#: How a table is cut: kind, number of parts, whether owners sum bags.
ShardingOption = tuple[ShardingKind, int, bool]


class InsufficientMemory(UserError):
    """The tables do not fit the ranks' memory."""


@dataclass(frozen=True)
class Planned:
    """A plan and what it is expected to cost."""

    plan: Plan
    work: Workload
    #: With direct messages.
    load: Load
    #: Direct messages beside those by machines; None where these are not possible.
    traffic: ExchangeTraffic | None = None


def plan_tables(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    world_size: int,
    *,
    batch_size: int,
    optimizer: str,
    settings: Sharding,
    popularity: Mapping[str, Popularity] | None = None,
    other_memory: OtherMemory = _NOTHING,
    card: bool = False,
) -> Planned:
    """Make the plan that `settings` asks for.

    Args:
        tables: of the model.
        lookups: who looks them up.
        world_size: ranks.
        batch_size: rows of a step over all ranks.
        optimizer: kind of the optimizer.
        settings: kinds, constraints, bandwidths.
        popularity: what is known of how often rows are looked up, by table; else Zipf with `settings.zipf`.
        other_memory: what else takes memory of the ranks.
        card: ranks compute on GPUs, whose memory is `settings.memory_gib`. What does not fit there is cached: its rows
            are in host memory, as large a share of them as fits on the GPU too; the largest tables first, and no more
            of them than needed.

    Raises:
        UserError: a constraint names no table or cannot be met, or the tables do not fit; says what would make them.
    """
    unknown = sorted(settings.tables.keys() - {t.name for t in tables})
    if unknown:
        known = ", ".join(sorted(t.name for t in tables)[:20])
        raise UserError(f"train.sharding.tables: no table '{unknown[0]}' in the model; its tables: {known}")
    own = settings.tables
    for name, rule in own.items():
        if rule.pooled and not can_pool(name, lookups):
            raise UserError(
                f"train.sharding.tables.{name}.pooled: owners can sum only where every feature of the table is a list "
                f"with pooling sum or mean"
            )
    rules = {t.name: own.get(t.name, TableSharding()) for t in tables}
    stored = tuple(
        replace(t, storage=rules[t.name].storage or settings.storage, cached=(rules[t.name].cached or 1) if card else 1)
        for t in tables
    )
    if settings.memory_gib is not None and other_memory.raw_ids >= settings.memory_gib * GIB:
        raise UserError(
            f"tables of raw ids take up to {other_memory.raw_ids / GIB:.3g} GiB of each rank, which has "
            f"{settings.memory_gib:.3g} (train.sharding.memory_gib): lower max_rows or memory_mib of "
            f"train.embeddings.dynamic, or take more ranks"
        )
    for t in stored:
        if t.storage == "int8" and own.get(t.name, TableSharding()).kind == "column_wise":
            raise UserError(
                f"train.sharding.tables.{t.name}: int8 stores whole rows, so kind cannot be column_wise: cut it by rows"
            )

    def work_of(tables: Sequence[Table]) -> Workload:
        return Workload(
            tuple(tables), tuple(lookups), world_size, batch_size, optimizer, settings, popularity or {}, other_memory
        )

    try:
        return _search(work_of(stored))
    except InsufficientMemory:
        free = [n for n, r in rules.items() if r.cached is None and r.kind != "data_parallel"]
        fitted = _cache_some(stored, free, work_of) if card else None
        if fitted is None:
            raise
        return _search(fitted)


def _cache_some(
    tables: Sequence[Table], free: Sequence[str], work_of: Callable[[Sequence[Table]], Workload]
) -> Workload | None:
    """The workload in which as few of the `free` tables as possible are cached; None: it fits not even with all."""
    order = sorted((t for t in tables if t.name in free), key=lambda t: (-t.rows * t.dim, t.name))

    def cached(count: int, share: float) -> Workload:
        names = {t.name for t in order[:count]}
        return work_of([replace(t, cached=share) if t.name in names else t for t in tables])

    def fits(count: int, share: float) -> bool:
        try:
            Planner(cached(count, share)).plan()
        except InsufficientMemory:
            return False
        return True

    if not fits(len(order), _CACHED[-1]):
        return None
    count = bisect_left(range(1, len(order)), True, key=lambda n: fits(n, _CACHED[-1])) + 1
    place = bisect_left(_CACHED[:-1], True, key=lambda share: fits(count, share))
    return cached(count, _CACHED[place])


def _search(work: Workload) -> Planned:
    """The best plan of tables whose storage and memory are decided."""
    settings = work.settings
    planner = Planner(work)
    found = [planner.plan()]
    pools = any(can_pool(t.name, work.lookups) for t in work.tables)
    if work.world_size == 1 or settings.kind == "row_wise" or not pools:
        return found[0]
    # Table by table, each takes what is best for the slowest rank: mostly rows on all of them. Where tables are cut no
    # further than the slowest rank's time asks for, all ranks have less to do.
    slowest = float(found[0].load.seconds(settings).max())
    for bound, share in product(_BOUNDS, _SHARES):
        try:
            found.append(planner.plan(bound * slowest, share))
        except InsufficientMemory:
            continue
    limit = _even(work)
    even = [p for p in found if _over(p.load, limit) == 0] or [min(found, key=lambda p: _over(p.load, limit))]
    best = min(float(p.load.seconds(settings).max()) for p in even)
    # Of those that are as good as the fastest, the most even.
    as_good = [p for p in even if float(p.load.seconds(settings).max()) <= _AS_GOOD * best]
    return min(
        as_good, key=lambda p: (round(p.load.memory.max() / p.load.memory.mean(), 2), p.load.seconds(settings).max())
    )


def _even(work: Workload, share: float = 1.0) -> float:
    """Bytes of weights and states of a rank above which memory comes before time; `share`: of what is allowed."""
    imbalance = work.settings.memory_imbalance
    return np.inf if imbalance is None else max(_SMALL, share * imbalance * work.table_bytes / work.world_size)


def _over(load: Load, even: float) -> float:
    """How far the fullest rank is above `even`."""
    return max(0.0, float(load.memory.max()) - even)


class Planner:
    """Searches."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._world = work.world_size
        limit = work.settings.memory_gib
        self._limit = np.inf if limit is None else limit * GIB - work.other_memory.raw_ids
        self._even = _even(work)
        self._total = Load.zero(self._world)
        #: By table: blocks, load, and seconds of each rank, [W].
        self._chosen: dict[str, tuple[list[Block], Load, Vector]] = {}
        self._shared: dict[tuple[str, str, int, bool], Load] = {}

    def plan(self, bound: float | None = None, share: float = 1.0) -> Planned:
        """One search.

        Args:
            bound: None: the largest table first, each cut as is best for the slowest rank. Else tables are cut first,
                each as costs all ranks together least, among the ways that take no rank longer than so many seconds;
                then the longest are placed first. (Turek, Wolf and Yu, "Approximate algorithms for scheduling
                parallelizable tasks", 1992, choose widths and then a schedule in this way.)
            share: of the imbalance of memory that the settings allow.

        Raises:
            UserError: nothing fits.
        """
        self._total, self._chosen, self._even = Load.zero(self._world), {}, _even(self._work, share)
        ways = {t.name: self._every_way(t) for t in self._work.tables}
        cost = {t.name: float(self._work.bytes_of(t)) for t in self._work.tables}
        if bound is not None:
            for t in self._work.tables:
                found = [(self._alone(t, way, bound), way) for way in ways[t.name]]
                (*_, cost[t.name]), way = min(found, key=lambda x: x[0][:3])
                ways[t.name] = [way]
        order = sorted(self._work.tables, key=lambda t: (-cost[t.name], t.name))
        # What cannot move takes its place first.
        for table in sorted(order, key=lambda t: not self._fixed(t)):
            self._place(table, ways[table.name])
        self._improve()
        blocks = tuple(b for t in self._work.tables for b in self._chosen[t.name][0])
        ranks_per_node, traffic = choose_exchange(self._work, blocks)
        plan = Plan(
            self._work.tables, self._work.lookups, blocks, self._world, self._work.settings.wire, ranks_per_node
        )
        return Planned(plan, self._work, self._total, traffic)

    def _every_way(self, table: Table) -> list[ShardingOption]:
        return [(kind, parts, pooled) for kind, parts in self._options(table) for pooled in self._sums(table, kind)]

    def _alone(self, table: Table, way: ShardingOption, bound: float) -> tuple[float, float, float, float]:
        """What is above the even share of memory and above the bound, the time of all ranks, and of the slowest."""
        kind, parts, pooled = way
        _, load = self._load(table, kind, 0, parts, pooled)
        seconds = load.seconds(self._work.settings)
        slowest = float(seconds.max())
        return _over(load, self._even), max(0.0, slowest - bound), float(seconds.sum()), slowest

    def _rule(self, table: Table) -> TableSharding:
        return self._work.settings.tables.get(table.name, TableSharding())

    def _fixed(self, table: Table) -> bool:
        return self._rule(table).kind is not None

    def _options(self, table: Table) -> Iterator[tuple[ShardingKind, int]]:
        """Kinds, and numbers of parts, that are tried."""
        rule = self._rule(table)
        if self._world == 1:
            yield ("data_parallel" if rule.kind == "data_parallel" else "table_wise"), 1
            return
        default: ShardingKind | None = "row_wise" if self._work.settings.kind == "row_wise" else None
        kind = rule.kind or default
        if kind in (None, "row_wise"):
            node = self._work.settings.ranks_per_node
            yield "row_wise", rule.parts or self._world
            if kind is None and rule.parts is None and 1 < node < self._world:
                yield "row_wise", node
        if kind in (None, "table_wise"):
            yield "table_wise", 1
        if kind == "column_wise" or (kind is None and table.storage != "int8"):
            parts = 2
            while rule.parts is None and parts <= self._world and table.dim >= parts * _MIN_COLUMNS:
                yield "column_wise", parts
                parts *= 2
            if kind == "column_wise" and (rule.parts or table.dim < 2 * _MIN_COLUMNS):
                yield "column_wise", rule.parts or min(2, table.dim)
        small = min(_REPLICATED_SHARE * self._limit, _REPLICATED_BYTES)
        free = kind is None and rule.parts is None and table.cached == 1
        if kind == "data_parallel" or (free and self._work.bytes_of(table) <= small):
            yield "data_parallel", 1

    def _sums(self, table: Table, kind: ShardingKind) -> tuple[bool, ...]:
        """Whether owners sum bags: what is tried."""
        wanted = self._rule(table).pooled
        if (
            kind == "data_parallel"
            or self._world == 1
            or wanted is False
            or not can_pool(table.name, self._work.lookups)
        ):
            return (False,)
        if wanted:
            return (True,)
        # A sum of parts differs from a sum of rows by rounding: not where nobody asked for a choice.
        return (False,) if self._work.settings.kind == "row_wise" and self._rule(table).kind is None else (False, True)

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
        return _over(both, self._even), float(seconds.max()), float(seconds.sum())

    def _best(
        self, table: Table, ways: Sequence[ShardingOption]
    ) -> tuple[tuple[float, float, float], list[Block], Load] | None:
        best = None
        for kind, parts, pooled in ways:
            for first in self._starts(kind, min(parts, self._world)):
                blocks, load = self._load(table, kind, first, parts, pooled)
                score = self._score(load)
                if score is not None and (best is None or score < best[0]):
                    best = score, blocks, load
        return best

    def _place(self, table: Table, ways: Sequence[ShardingOption]) -> None:
        best = self._best(table, ways)
        if best is None:
            raise self._insufficient_memory(table)
        self._total.add(best[2])
        self._choose(table, best[1], best[2])

    def _choose(self, table: Table, blocks: list[Block], load: Load) -> None:
        self._chosen[table.name] = blocks, load, load.seconds(self._work.settings)

    def _improve(self) -> None:
        """Try the tables of the slowest rank (of the fullest, where it is too full) again, the most costly first."""
        moves = min(_MOVES, 4 * len(self._chosen))
        stuck: set[str] = set()
        for _ in range(moves):
            over, before = _over(self._total, self._even), self._total.seconds(self._work.settings)
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
            found = self._best(table, self._every_way(table))
            if found is not None and found[0] < (over, float(before.max()) * (1 - 1e-9), float(before.sum())):
                blocks, load = found[1], found[2]
                stuck.clear()
            stuck.add(name)
            self._choose(table, blocks, load)
            self._total.add(load)

    def _insufficient_memory(self, table: Table) -> InsufficientMemory:
        """Why the tables do not fit, and what would make them."""
        work, world = self._work, self._world
        limit = float(self._limit)
        rule = self._rule(table)
        total = work.table_bytes
        largest = max(work.tables, key=lambda t: (work.bytes_of(t), t.name))
        taken = f" (beside {work.other_memory.raw_ids / GIB:.3g} GiB for raw ids)" if work.other_memory.raw_ids else ""
        room = f"{world} rank(s) of {limit / GIB:.3g} GiB{taken}"
        head = (
            f"table '{table.name}' ({table.rows:,} rows of {table.dim}, {work.bytes_of(table) / GIB:.3g} GiB with its "
            f"optimizer's states) does not fit"
        )
        if rule.kind in ("table_wise", "column_wise", "data_parallel") and work.bytes_of(table) <= limit * world:
            return InsufficientMemory(
                f"{head} {room} as train.sharding.tables.{table.name}.kind={rule.kind} asks; leave the kind to the "
                f"planner, or set it to row_wise"
            )
        advice = []
        ranks = self._ranks_needed(total, limit)
        if ranks is not None and ranks > world:
            advice.append(f"{ranks} ranks")
        step = self._step_bytes(world)
        usable = max(0.0, limit - step) * world
        half = sum(t.rows * (t.dim * 2 + state_bytes_per_row(work.optimizer, t.dim)) for t in work.tables)
        if half <= usable and half < total:
            advice.append(f"rows stored as bf16 (train.sharding.storage=bf16: {half / GIB:.3g} GiB)")
        if work.optimizer != "rowwise_adagrad":
            by_row = sum(t.rows * (row_bytes(t.storage, t.dim) + 4) for t in work.tables)
            if by_row <= usable and by_row < total:
                advice.append(f"train.embeddings.kind=rowwise_adagrad ({by_row / GIB:.3g} GiB)")
        width = max(t.dim for t in work.tables)
        narrow = int(width * usable / total)
        if narrow >= 1:
            advice.append(f"model.embedding_dim={narrow}")
        per_row = work.bytes_of(largest) / largest.rows
        left = usable - (total - work.bytes_of(largest))
        if left > per_row:
            advice.append(f"'{largest.name}' hashed to {int(left / per_row):,} buckets (operator hash_bucket)")
        what = "; or ".join(advice) if advice else "more memory for each rank (train.sharding.memory_gib)"
        return InsufficientMemory(
            f"{head}: all tables need {total / GIB:.4g} GiB, and a step {step / GIB:.3g} GiB on each of {room}. It "
            f"would fit with {what}"
        )

    def _step_bytes(self, ranks: int) -> float:
        """What a step needs besides the tables where all are dealt by rows; and one row of each, for rows left over."""
        work = replace(self._work, world_size=ranks)
        loads = [load_of(work, blocks_for(t, "row_wise", ranks)) for t in work.tables]
        return sum(float(x.buffers.max()) for x in loads) + sum(work.bytes_of(t) / t.rows for t in work.tables)

    def _ranks_needed(self, total: float, limit: float) -> int | None:
        """The fewest ranks on which all tables by rows fit; None: more than 2^20."""
        ranks = self._world
        while ranks <= 2**20:
            step = self._step_bytes(ranks)
            if total / ranks + step <= limit:
                return ranks
            ranks = max(ranks + 1, min(2 * ranks, int(np.ceil(total / max(1.0, limit - step)))))
        return None
