"""`headrace plan --sharding`: where embedding tables would live on any number of ranks, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table as Screen

from headrace.comm.shared_memory import MOST_RANKS
from headrace.commands.screen import out, print_json, table
from headrace.config import load_sharding, load_spec
from headrace.embeddings.dynamic.rows import dynamic_table_bytes, most_bytes
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.planner.cost import GIB, OtherMemory, load_of
from headrace.embeddings.planner.declared import load_tables
from headrace.embeddings.planner.popularity import Popularity
from headrace.embeddings.planner.search import Planned, plan_tables
from headrace.embeddings.sharding_plan import Table
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.models.classes import make_network
from headrace.models.inputs import InputFeatures
from headrace.schema import DatasetSchema
from headrace.storage import Location
from headrace.train.setup.state import sampled_popularity, trained_tables
from headrace.workspace import Workspace

#: Ranks and tables that are shown one by one.
_RANKS, _TABLES = 16, 60


def sharding(
    ws: Workspace,
    pipeline: str | None,
    declared: str | None,
    ds: str | None,
    world: int,
    memory_gib: float | None,
    sets: Sequence[str],
    as_json: bool = False,
) -> Planned:
    """Plan and print. Without `declared`, the tables are those of the pipeline's newest dataset (or that of `ds`).

    Raises:
        UserError: neither a pipeline nor tables, no dataset yet, or a plan that cannot fit.
    """
    spec = load_spec(pipeline, sets) if pipeline is not None else None
    ws = ws if spec is None else ws.of(spec)
    settings = spec.train.sharding if spec else load_sharding(sets)
    if not any(s.startswith("train.sharding.kind") for s in sets):
        settings = settings.model_copy(update={"kind": "auto"})
    if memory_gib is not None:
        settings = settings.model_copy(update={"memory_gib": memory_gib})
    popularity: dict[str, Popularity] = {}
    other_memory = OtherMemory()
    raw: tuple[DynamicSpec, ...] = ()
    if declared is not None:
        given = load_tables(declared)
        tables, lookups = given.planned()
        source, batch, optimizer = given.source, given.batch_size, given.optimizer
        if spec is not None:
            batch, optimizer = spec.train.batch_size, spec.train.embeddings.kind
    elif spec is not None:
        source, dataset, schema = _dataset(ws, spec.pipeline, ds)
        features = InputFeatures.from_schema(schema, spec.model.embedding_dim, spec.train.tasks)
        network = make_network(spec.model, features, spec.train.seed)
        wanted = trained_tables(schema, spec.model, network, spec.train, world)
        tables, lookups, raw = wanted.tables, wanted.lookups, wanted.dynamic
        popularity = sampled_popularity(dataset, schema, tables, wanted.counted)
        batch, optimizer = spec.train.batch_size, spec.train.embeddings.kind
        saves_copies = spec.train.background_checkpoints
        other_memory = OtherMemory(
            dynamic_table_bytes(raw, wanted.raw_ids, batch, world, optimizer, 1 + saves_copies),
            spec.train.device == "cpu" and 1 < min(world, settings.ranks_per_node) <= MOST_RANKS,
            saves_copies,
        )
    else:
        raise UserError("say which tables: a pipeline that has a dataset, or --tables mlperf, or --tables FILE.yaml")
    planned = plan_tables(
        tables,
        lookups,
        world,
        batch_size=batch,
        optimizer=optimizer,
        settings=settings,
        popularity=popularity,
        other_memory=other_memory,
        card=spec is not None and spec.train.device == "cuda",
    )
    if as_json:
        print_json(as_record(planned, source))
        return planned
    show(planned, source)
    for r in raw:
        out.print(f"beside these, raw ids of {r.name}, dealt by their hash: {_limit(r, optimizer, world)}")
    return planned


def _limit(raw: DynamicSpec, optimizer: str, world: int) -> str:
    most = most_bytes(raw, world, optimizer)
    return "no limit (max_rows, memory_mib)" if most is None else f"at most {most / 2**20:,.1f} MiB a rank"


def _dataset(ws: Workspace, pipeline: str, ds: str | None) -> tuple[str, Location, DatasetSchema]:
    days = [d for d in reversed(ws.days(pipeline)) if ws.manifest(pipeline, d, "features").is_file()]
    day = ds or (days[0] if days else "")
    manifest = Manifest.load(ws.manifest(pipeline, day, "features")) if day else None
    if manifest is None or manifest.dataset_schema is None:
        raise UserError(
            f"pipeline '{pipeline}' has no dataset{f' of {ds}' if ds else ''} in {ws.home}, so its tables' sizes are "
            f"not known: run it up to features, or declare tables (--tables mlperf, --tables FILE.yaml)"
        )
    return f"{pipeline}, dataset of {day}", ws.locate(manifest.output("dataset").name), manifest.dataset_schema


def as_record(planned: Planned, source: str) -> dict[str, Any]:
    """Return a plan for programs; memory in GiB, messages of a step in MB, times in milliseconds."""
    work, load = planned.work, planned.load
    ms = load.seconds(work.settings) * 1e3
    blocks = {t.name: planned.plan.blocks_of(t.name) for t in work.tables}
    return {
        "source": source,
        "ranks": work.world_size,
        "batch_size": work.batch_size,
        "optimizer": work.optimizer,
        "step_ms": float(ms.max()),
        "tables": [
            {
                "table": t.name,
                "rows": t.rows,
                "width": t.dim,
                "storage": t.storage,
                "kind": planned.plan.kind_of(t.name),
                "cached": t.cached,
                "first_ranks": [b.first_rank for b in blocks[t.name]],
                "memory_gib": float(load_of(work, blocks[t.name]).memory.max()) / GIB,
            }
            for t in work.tables
        ],
        "by_rank": [
            {
                "rank": rank,
                "tables_gib": float(load.memory[rank]) / GIB,
                "step_gib": float(load.buffers[rank]) / GIB,
                "sent_mb": float(load.sent[rank] + load.reduced[rank]) / 1e6,
                "received_mb": float(load.received[rank]) / 1e6,
                "ms": float(ms[rank]),
            }
            for rank in range(work.world_size)
        ],
    }


def show(planned: Planned, source: str) -> None:
    """Print a plan: its assumptions, its tables, its ranks."""
    work, load, s = planned.work, planned.load, planned.work.settings
    seconds = load.seconds(s)
    rows = sum(t.rows for t in work.tables)
    weights = float(load.memory.sum())
    popularity = "as in a sample of the dataset" if work.popularity else f"Zipf({s.zipf:g})"
    out.print(
        f"[bold]{source}[/]: {len(work.tables)} tables, {rows:,} rows, {weights / GIB:,.1f} GiB on all ranks with the "
        f"states of {work.optimizer}; {work.world_size:,} ranks, {work.batch_size:,} rows a step"
    )
    out.print(
        f"assumed: ids {popularity}; a rank's memory {s.memory_gbps:g} GB/s, {s.node_gbps:g} GB/s to the "
        f"{s.ranks_per_node} ranks of its machine, {s.network_gbps:g} GB/s to others, {s.latency_us:g} µs a message\n"
    )
    out.print(_tables(planned))
    out.print()
    out.print(_ranks(planned))
    means = [
        f"{name} {v.max() / max(v.mean(), 1e-30):.2f}"
        for name, v in (("memory", load.memory + load.buffers), ("sent", load.sent), ("time", seconds))
        if v.any()
    ]
    out.print(
        f"\nexpected time of a step's embeddings: {seconds.max() * 1e3:.3f} ms on the slowest rank; "
        f"imbalance, largest / mean: {', '.join(means)}"
    )
    if work.other_memory.shares_memory:
        out.print("messages go through memory that the ranks share; a step's GiB include those that a rank sends")
    if work.other_memory.saves_copies:
        out.print("tables are copied to be saved while training goes on; a step's GiB include the copy")
    if planned.traffic is not None:
        ways = {"directly": planned.traffic.direct, "by machines": planned.traffic.by_machine}
        chosen = "by machines" if planned.plan.ranks_per_node > 1 else "directly"
        out.print(
            f"messages go {chosen}; a rank sends, and the wires take: "
            + "; ".join(
                f"{name} {w.inside / 1e6:,.1f} MB inside and {w.across / 1e6:,.1f} MB between machines, "
                f"{w.seconds * 1e3:.3f} ms"
                for name, w in ways.items()
            )
        )


def _tables(planned: Planned) -> Screen:
    rows_table = table(
        "table", ">rows", ">width", "storage", "kind", "ranks", ">GiB a rank", ">MB sent by all", title="tables"
    )
    order = sorted(planned.work.tables, key=lambda t: -t.rows * t.dim)
    for t in order[:_TABLES]:
        blocks = planned.plan.blocks_of(t.name)
        load = load_of(planned.work, blocks)
        kind = planned.plan.kind_of(t.name).replace("_", "-") + (", sums" if blocks[0].pooled else "")
        sent = float((load.sent + load.reduced).sum()) / 1e6
        rows_table.add_row(
            t.name,
            f"{t.rows:,}",
            str(t.dim),
            t.storage + (f", {t.cached:.1%} on GPU" if t.cached < 1 else ""),
            kind,
            _ranks_of(planned, t),
            f"{load.memory.max() / GIB:.4f}",
            f"{sent:,.2f}",
        )
    if len(order) > _TABLES:
        rows_table.add_row(f"and {len(order) - _TABLES} smaller", *[""] * 7)
    return rows_table


def _ranks_of(planned: Planned, t: Table) -> str:
    blocks, world = planned.plan.blocks_of(t.name), planned.work.world_size
    if blocks[0].replicated or blocks[0].ranks == world:
        return "all"
    if len(blocks) == 1:
        first, last = blocks[0].first_rank, (blocks[0].first_rank + blocks[0].ranks - 1) % world
        return str(first) if blocks[0].ranks == 1 else f"{first}-{last}"
    return ",".join(str(b.first_rank) for b in blocks)


def _ranks(planned: Planned) -> Screen:
    load = planned.load
    seconds = load.seconds(planned.work.settings)
    memory = {"tables": load.memory, "step": load.buffers}
    if planned.work.other_memory.raw_ids:
        memory["raw ids"] = np.full_like(load.memory, planned.work.other_memory.raw_ids)
    memory["all"] = sum(memory.values(), np.zeros_like(load.memory))
    # Of tables that GPUs hold in part: all of them in host memory, and what comes from there and goes back in a step.
    cached = [(">in host GiB", load.host / GIB), (">from host MB", load.carried / 1e6)] if load.host.any() else []
    rows_table = table(
        "rank",
        *(f">{n} GiB" for n in memory),
        ">sent MB",
        ">received MB",
        *(n for n, _ in cached),
        ">ms",
        title="ranks",
    )
    columns = [
        *(m / GIB for m in memory.values()),
        (load.sent + load.reduced) / 1e6,
        (load.received + load.reduced) / 1e6,
        *(c for _, c in cached),
        seconds * 1e3,
    ]
    if planned.work.world_size <= _RANKS:
        for rank in range(planned.work.world_size):
            rows_table.add_row(str(rank), *(f"{c[rank]:,.3f}" for c in columns))
    else:
        for name, pick in (("least", np.min), ("mean", np.mean), ("most", np.max)):
            rows_table.add_row(name, *(f"{pick(c):,.3f}" for c in columns))
    return rows_table
