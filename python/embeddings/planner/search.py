"""Choose where tables live: the cheapest kind for each, by the cost model, within the memory and the constraints.

Several greedy searches (planner.greedy), of whose plans the best is taken. The same input gives the same plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from headrace.config import Sharding, TableSharding
from headrace.embeddings.planner.cost import GIB, OtherMemory, Workload
from headrace.embeddings.planner.greedy import Planned, Planner, even_memory, memory_over
from headrace.embeddings.planner.memory import InsufficientMemory
from headrace.embeddings.planner.popularity import Popularity
from headrace.embeddings.sharding.plan import Lookup, Table, can_pool
from headrace.errors import UserError

#: Bounds that are tried, as shares of the slowest rank's time by the first plan.
_BOUNDS = (1.0, 0.6, 0.35)
#: Shares of the imbalance that is allowed.
_SHARES = (1.0, 0.7)
#: A plan is as good as another that is no more than so much faster.
_AS_GOOD = 1.02
#: Shares of the rows of cached tables that GPUs hold, tried from the first on.
_CACHED = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
_NOTHING = OtherMemory()


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
    number = bisect_left(_CACHED[:-1], True, key=lambda share: fits(count, share))
    return cached(count, _CACHED[number])


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
    limit = even_memory(work)
    even = [p for p in found if memory_over(p.load, limit) == 0] or [
        min(found, key=lambda p: memory_over(p.load, limit))
    ]
    best = min(float(p.load.seconds(settings).max()) for p in even)
    # Of those that are as good as the fastest, the most even.
    as_good = [p for p in even if float(p.load.seconds(settings).max()) <= _AS_GOOD * best]
    return min(
        as_good, key=lambda p: (round(p.load.memory.max() / p.load.memory.mean(), 2), p.load.seconds(settings).max())
    )
