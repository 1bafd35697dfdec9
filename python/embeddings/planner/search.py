"""Search for a plan: the cheapest sharding of each table, by the cost model, within memory and constraints.

Several greedy searches (`Planner`), of whose plans the best is taken. The same input gives the same plan. A greedy
search assigns the largest (or longest) table first; then the tables of the slowest rank are tried again elsewhere while
that helps. A table and option take a few vector operations of the world's length, so that hundreds of tables on
thousands of ranks are planned in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from headrace.config.embeddings import Sharding, ShardingKind, TableSharding
from headrace.embeddings.planner.cost import (
    GIB,
    ExchangeTraffic,
    OtherMemory,
    RankLoad,
    Vector,
    Workload,
    choose_exchange,
    load_of,
)
from headrace.embeddings.planner.tables import Popularity
from headrace.embeddings.sharding_plan import Block, Lookup, Plan, Table, blocks_for, can_pool, row_bytes
from headrace.embeddings.update_rules import state_bytes_per_row
from headrace.errors import UserError

#: Bounds to try, as shares of the slowest rank's time by the first plan.
_BOUNDS = (1.0, 0.6, 0.35)
#: Shares of the allowed imbalance of memory.
_SHARES = (1.0, 0.7)
#: Factor of time within which plans count as equally fast.
_AS_GOOD = 1.02
#: Shares of the rows of cached tables that GPUs hold, tried from the first on.
_CACHED = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
_NO_OTHER_MEMORY = OtherMemory()


def plan_tables(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    world_size: int,
    *,
    batch_size: int,
    optimizer: str,
    settings: Sharding,
    popularity: Mapping[str, Popularity] | None = None,
    other_memory: OtherMemory = _NO_OTHER_MEMORY,
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
    table_settings = settings.tables
    for name, rule in table_settings.items():
        if rule.pooled and not can_pool(name, lookups):
            raise UserError(
                f"train.sharding.tables.{name}.pooled: owners can sum only where every feature of the table is a list "
                f"with pooling sum or mean"
            )
    rules = {t.name: table_settings.get(t.name, TableSharding()) for t in tables}
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
        if t.storage == "int8" and table_settings.get(t.name, TableSharding()).kind == "column_wise":
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
    """Return the workload with as few of the `free` tables cached as possible; None: it does not fit even with all."""
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
    number = bisect_left(_CACHED[:-1], True, key=lambda share: fits(count, share))
    return cached(count, _CACHED[number])


def _search(work: Workload) -> Planned:
    """Return the best plan of tables whose storage and memory are decided."""
    settings = work.settings
    planner = Planner(work)
    plans = [planner.plan()]
    pools = any(can_pool(t.name, work.lookups) for t in work.tables)
    if work.world_size == 1 or settings.kind == "row_wise" or not pools:
        return plans[0]
    # Table by table, each takes what is best for the slowest rank: mostly rows on all of them. Where tables are cut no
    # further than the slowest rank's time asks for, all ranks have less to do.
    slowest = float(plans[0].load.seconds(settings).max())
    for bound, share in product(_BOUNDS, _SHARES):
        try:
            plans.append(planner.plan(bound * slowest, share))
        except InsufficientMemory:
            continue
    limit = even_memory(work)
    balanced = [p for p in plans if memory_over(p.load, limit) == 0] or [
        min(plans, key=lambda p: memory_over(p.load, limit))
    ]
    best = min(float(p.load.seconds(settings).max()) for p in balanced)
    # Of those that are as good as the fastest, the most even.
    as_good = [p for p in balanced if float(p.load.seconds(settings).max()) <= _AS_GOOD * best]
    return min(
        as_good, key=lambda p: (round(p.load.memory.max() / p.load.memory.mean(), 2), p.load.seconds(settings).max())
    )


_MOVES = 400
#: Tables of a rank that take less than this need no balance.
_SMALL = 2**30


@dataclass(frozen=True)
class Planned:
    """A plan and what it is expected to cost."""

    plan: Plan
    work: Workload
    #: With direct messages.
    load: RankLoad
    #: Traffic of direct messages and of those by machines; None where these are not possible.
    traffic: ExchangeTraffic | None = None


def even_memory(work: Workload, share: float = 1.0) -> float:
    """Return the bytes of weights and states of a rank above which memory comes before time; `share`: of the allowed
    ones.
    """
    imbalance = work.settings.memory_imbalance
    return np.inf if imbalance is None else max(_SMALL, share * imbalance * work.table_bytes / work.world_size)


def memory_over(load: RankLoad, even: float) -> float:
    """Return the bytes by which the fullest rank is above `even`."""
    return max(0.0, float(load.memory.max()) - even)


class Planner:
    """Greedy search for one plan."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._world = work.world_size
        limit = work.settings.memory_gib
        self._limit = np.inf if limit is None else limit * GIB - work.other_memory.raw_ids
        self._even = even_memory(work)
        self._total = RankLoad.zero(self._world)
        #: By table: blocks, load, and seconds of each rank, [W].
        self._chosen: dict[str, tuple[list[Block], RankLoad, Vector]] = {}
        self._shared: dict[tuple[str, str, int, bool], RankLoad] = {}

    def plan(self, bound: float | None = None, share: float = 1.0) -> Planned:
        """Run one search.

        Args:
            bound: None: the largest table first, each cut as is best for the slowest rank. Else tables are cut first,
                each as costs all ranks together least, among the options that take no rank longer than so many seconds;
                then the longest are assigned first. (Turek, Wolf and Yu, "Approximate algorithms for scheduling
                parallelizable tasks", 1992, choose widths and then a schedule in this way.)
            share: of the imbalance of memory that the settings allow.

        Raises:
            UserError: nothing fits.
        """
        self._total, self._chosen, self._even = RankLoad.zero(self._world), {}, even_memory(self._work, share)
        options = {t.name: sharding_options(self._work, t, self._limit) for t in self._work.tables}
        cost = {t.name: float(self._work.bytes_of(t)) for t in self._work.tables}
        if bound is not None:
            for t in self._work.tables:
                candidates = [(self._alone(t, option, bound), option) for option in options[t.name]]
                (*_, cost[t.name]), option = min(candidates, key=lambda x: x[0][:3])
                options[t.name] = [option]
        order = sorted(self._work.tables, key=lambda t: (-cost[t.name], t.name))
        # Tables of a fixed kind are assigned first.
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
        """Return the bytes above the even share of memory, the time above the bound, the time of all ranks, and of the
        slowest.
        """
        kind, parts, pooled = option
        _, load = self._load(table, kind, 0, parts, pooled)
        seconds = load.seconds(self._work.settings)
        slowest = float(seconds.max())
        return memory_over(load, self._even), max(0.0, slowest - bound), float(seconds.sum()), slowest

    def _fixed(self, table: Table) -> bool:
        return rule_of(self._work, table).kind is not None

    def _load(
        self, table: Table, kind: ShardingKind, first: int, parts: int, pooled: bool
    ) -> tuple[list[Block], RankLoad]:
        """Return blocks and their load; with another first rank it is the same load, rotated."""
        blocks = blocks_for(table, kind, self._world, first, parts, pooled)
        key = (table.name, kind, parts, pooled)
        if key not in self._shared:
            self._shared[key] = load_of(self._work, blocks_for(table, kind, self._world, 0, parts, pooled))
        base = self._shared[key]
        return blocks, RankLoad(*(np.roll(v, first) for v in vars(base).values())) if first else base

    def _starts(self, kind: ShardingKind, parts: int) -> list[int]:
        """Return candidates for the first rank: where the next `parts` ranks have most room, and are fastest."""
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

    def _score(self, extra: RankLoad) -> tuple[float, float, float] | None:
        """Return (bytes of the fullest rank above the even share, time of the slowest, time of all); None: it does not
        fit.
        """
        memory = self._total.memory + self._total.buffers + extra.memory + extra.buffers
        if memory.max() > self._limit:
            return None
        both = RankLoad(*(a + b for a, b in zip(vars(self._total).values(), vars(extra).values(), strict=True)))
        seconds = both.seconds(self._work.settings)
        return memory_over(both, self._even), float(seconds.max()), float(seconds.sum())

    def _best(
        self, table: Table, options: Sequence[ShardingOption]
    ) -> tuple[tuple[float, float, float], list[Block], RankLoad] | None:
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

    def _choose(self, table: Table, blocks: list[Block], load: RankLoad) -> None:
        self._chosen[table.name] = blocks, load, load.seconds(self._work.settings)

    def _improve(self) -> None:
        """Try the tables of the slowest rank (of the fullest, where it is too full) again, the most costly first."""
        moves = min(_MOVES, 4 * len(self._chosen))
        stuck: set[str] = set()
        for _ in range(moves):
            over, previous_seconds = memory_over(self._total, self._even), self._total.seconds(self._work.settings)
            worst = int(np.argmax(self._total.memory if over else previous_seconds))
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
            best = self._best(table, sharding_options(self._work, table, self._limit))
            if best is not None and best[0] < (
                over,
                float(previous_seconds.max()) * (1 - 1e-9),
                float(previous_seconds.sum()),
            ):
                blocks, load = best[1], best[2]
                stuck.clear()
            stuck.add(name)
            self._choose(table, blocks, load)
            self._total.add(load)


#: Narrower blocks of columns cost more in ids than they win.
_MIN_COLUMNS = 16
#: A table is replicated only if that takes less than this share of a rank's memory (without a limit: this many bytes).
_REPLICATED_SHARE, _REPLICATED_BYTES = 0.02, 256 * 2**20

#: How a table is cut: kind, number of parts, whether owners sum bags.
ShardingOption = tuple[ShardingKind, int, bool]


def rule_of(work: Workload, table: Table) -> TableSharding:
    """Return the settings of one table."""
    return work.settings.tables.get(table.name, TableSharding())


def sharding_options(work: Workload, table: Table, limit: float) -> list[ShardingOption]:
    """Return the sharding options of a table, within the constraints on it.

    Args:
        work: all tables and the ranks.
        table: one of them.
        limit: bytes of a rank; infinite: there is none.
    """
    return [
        (kind, parts, pooled) for kind, parts in _kinds(work, table, limit) for pooled in _pooled(work, table, kind)
    ]


def _kinds(work: Workload, table: Table, limit: float) -> Iterator[tuple[ShardingKind, int]]:
    """Yield kinds, and numbers of parts, to try."""
    rule = rule_of(work, table)
    if work.world_size == 1:
        yield ("data_parallel" if rule.kind == "data_parallel" else "table_wise"), 1
        return
    default: ShardingKind | None = "row_wise" if work.settings.kind == "row_wise" else None
    kind = rule.kind or default
    if kind in (None, "row_wise"):
        node = work.settings.ranks_per_node
        yield "row_wise", rule.parts or work.world_size
        if kind is None and rule.parts is None and 1 < node < work.world_size:
            yield "row_wise", node
    if kind in (None, "table_wise"):
        yield "table_wise", 1
    if kind == "column_wise" or (kind is None and table.storage != "int8"):
        parts = 2
        while rule.parts is None and parts <= work.world_size and table.dim >= parts * _MIN_COLUMNS:
            yield "column_wise", parts
            parts *= 2
        if kind == "column_wise" and (rule.parts or table.dim < 2 * _MIN_COLUMNS):
            yield "column_wise", rule.parts or min(2, table.dim)
    small = min(_REPLICATED_SHARE * limit, _REPLICATED_BYTES)
    free = kind is None and rule.parts is None and table.cached == 1
    if kind == "data_parallel" or (free and work.bytes_of(table) <= small):
        yield "data_parallel", 1


def _pooled(work: Workload, table: Table, kind: ShardingKind) -> tuple[bool, ...]:
    """Return the choices to try of whether owners sum bags."""
    setting = rule_of(work, table).pooled
    if kind == "data_parallel" or work.world_size == 1 or setting is False or not can_pool(table.name, work.lookups):
        return (False,)
    if setting:
        return (True,)
    # A sum of parts differs from a sum of rows by rounding: not where nobody asked for a choice.
    return (False,) if work.settings.kind == "row_wise" and rule_of(work, table).kind is None else (False, True)


class InsufficientMemory(UserError):
    """The tables do not fit the ranks' memory."""


def insufficient_memory(work: Workload, table: Table, limit: float) -> InsufficientMemory:
    """Create the error that says why the tables do not fit and which changes would help."""
    world, rule = work.world_size, rule_of(work, table)
    total = work.table_bytes
    largest = max(work.tables, key=lambda t: (work.bytes_of(t), t.name))
    raw_id_note = (
        f" (beside {work.other_memory.raw_ids / GIB:.3g} GiB for raw ids)" if work.other_memory.raw_ids else ""
    )
    room = f"{world} rank(s) of {limit / GIB:.3g} GiB{raw_id_note}"
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
    ranks = _ranks_needed(work, total, limit)
    if ranks is not None and ranks > world:
        advice.append(f"{ranks} ranks")
    step = _step_bytes(work, world)
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
    remaining = usable - (total - work.bytes_of(largest))
    if remaining > per_row:
        advice.append(f"'{largest.name}' hashed to {int(remaining / per_row):,} buckets (operator hash_bucket)")
    remedy = "; or ".join(advice) if advice else "more memory for each rank (train.sharding.memory_gib)"
    return InsufficientMemory(
        f"{head}: all tables need {total / GIB:.4g} GiB, and a step {step / GIB:.3g} GiB on each of {room}. It "
        f"would fit with {remedy}"
    )


def _step_bytes(work: Workload, ranks: int) -> float:
    """Return the bytes of a step besides the tables, all sharded by rows; and one row of each, for uneven rows."""
    work = replace(work, world_size=ranks)
    loads = [load_of(work, blocks_for(t, "row_wise", ranks)) for t in work.tables]
    return sum(float(x.buffers.max()) for x in loads) + sum(work.bytes_of(t) / t.rows for t in work.tables)


def _ranks_needed(work: Workload, total: float, limit: float) -> int | None:
    """Return the smallest number of ranks on which all tables by rows fit; None: more than 2^20."""
    ranks = work.world_size
    while ranks <= 2**20:
        step = _step_bytes(work, ranks)
        if total / ranks + step <= limit:
            return ranks
        ranks = max(ranks + 1, min(2 * ranks, int(np.ceil(total / max(1.0, limit - step)))))
    return None
