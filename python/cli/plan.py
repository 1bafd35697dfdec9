"""`headrace plan`: which features run on a GPU (`--gpu`), where embedding tables would live (`--sharding`)."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as Screen

from headrace.cli.root import VAR, Ds, Home, Json, MaybePipeline, Panel, Sets, app, examples, workspace
from headrace.cli.screen import out, plain, print_json, table
from headrace.config.installation import installation
from headrace.errors import EXIT_DONE, EXIT_FAILURE, UserError

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.schema import DatasetSchema
    from headrace.config.workspace import Workspace
    from headrace.embeddings.dynamic.spec import DynamicSpec
    from headrace.embeddings.planner.search import Planned
    from headrace.embeddings.planner.tables import Popularity
    from headrace.embeddings.sharding_plan import Table
    from headrace.jobs.gpu_plan.explain import Explainer
    from headrace.jobs.gpu_plan.gate import StepPlans
    from headrace.storage import Location


@app.command(
    rich_help_panel=Panel.OPERATE,
    epilog=examples(
        "headrace plan --gpu clicks",
        "headrace plan --gpu clicks --set features.row_group_rows=1000000",
        "headrace plan --gpu --operator target_encoding --operator history",
        "headrace plan --gpu",
        "headrace plan --sharding clicks --world 8",
        "headrace plan --sharding --tables mlperf --world 64 --memory 80",
    ),
)
def plan(
    pipeline: MaybePipeline = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Show which features run on a GPU, and why others do not.")
    ] = False,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", help="This operator alone; may be repeated.", metavar="NAME")
    ] = None,
    sharding: Annotated[
        bool, typer.Option("--sharding", help="Where embedding tables would live, and what that costs.")
    ] = False,
    world: Annotated[int, typer.Option("--world", min=1, help="Ranks to plan for.", metavar="N")] = 8,
    memory: Annotated[
        float | None, typer.Option("--memory", help="GiB of each rank for the tables.", metavar="GIB")
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option("--tables", help="Declared tables (conf/tables or a .yaml file) instead of a dataset's."),
    ] = None,
    ds: Ds = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show what a pipeline would do, without doing it.

    --gpu asks the RAPIDS plugin, which needs no GPU for it but its jar (make rapids): each step of the features of a
    small table with the pipeline's schema, on the GPU or not, and the reason. Without a pipeline: every operator and
    every shipped pipeline. Exit code 1 when anything leaves the GPU.

    --sharding spreads the tables of a pipeline's newest dataset, or declared ones, over any number of ranks: memory by
    rank, bytes by step, expected time, imbalance; or why it cannot fit and what would make it.
    """
    if sharding:
        plan_sharding(workspace(home), pipeline, tables, ds, world, memory, sets or [], as_json)
        return

    if not gpu:
        raise UserError("say what to plan: --gpu or --sharding")
    if pipeline and operators:
        raise UserError("name a pipeline or operators, not both")
    raise typer.Exit(plan_gpu(pipeline, sets or [], operators or [], as_json))


#: Of the engines, the one that may run on GPUs: in place of `auto`.
_ENGINE = "features.engine=spark"


def plan_gpu(pipeline: str | None, sets: Sequence[str], operators: Sequence[str] = (), as_json: bool = False) -> int:
    """Print what stays on the GPU and what does not; 1 when anything leaves it.

    Args:
        pipeline: one pipeline; None: every operator and every shipped pipeline, unless `operators` are named.

    Raises:
        UserError: the plugin's jar is missing, the pipeline has faults, or there is no such operator.
    """
    from headrace.config.workspace import Workspace
    from headrace.features.ops import OPERATORS
    from headrace.features.table_ops import TABLE_OPERATORS
    from headrace.jobs.gpu_plan.explain import Explainer, explain_session

    if unknown := sorted({*operators} - {*OPERATORS.builtin, *TABLE_OPERATORS.builtin}):
        raise UserError(
            f"no operator '{unknown[0]}' (known: {', '.join(sorted({*OPERATORS.builtin, *TABLE_OPERATORS.builtin}))})"
        )
    if pipeline is None and sets:
        raise UserError("--set changes a pipeline: name one")
    specs = [_by_spark(pipeline, sets)] if pipeline else [] if operators else shipped_pipelines()
    logging.getLogger("headrace.features").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as folder:
        ws = Workspace(Path(folder))
        with explain_session(ws) as spark:
            seen = check_plans(Explainer(spark), ws, specs, None if pipeline else operators)
    green = all(s.green for s in seen)
    if as_json:
        print_json({"on_gpu": green, "steps": [step_record(s) for s in seen]})
    else:
        _print(seen)
    return EXIT_DONE if green else EXIT_FAILURE


def check_plans(
    explainer: Explainer, ws: Workspace, specs: Sequence[Spec], operators: Sequence[str] | None
) -> list[StepPlans]:
    """Explain each step of operators (none of them named: of all; None: of none) and of pipelines, in a workspace that
    nothing else uses.
    """
    from headrace.config.workspace import Workspace
    from headrace.jobs.gpu_plan.gate import check_operators, check_pipeline

    seen = [] if operators is None else [*check_operators(explainer, Workspace(ws.home / "operators"), operators)]
    for spec in specs:
        seen += check_pipeline(explainer, ws, spec)
    return seen


def step_record(seen: StepPlans) -> dict[str, Any]:
    """Return a step for programs.

    What is on the CPU by design, reads of the table's log among it, has `on_gpu` null.
    """
    from headrace.jobs.gpu_plan.gate import LOG, ON_CPUS

    return {
        "subject": seen.subject,
        "step": seen.step,
        "plans": len(seen.plans),
        "on_gpu": None if seen.step in (LOG, ON_CPUS) else seen.green,
        "operators": _operator_names(seen),
        "faults": seen.faults(),
    }


def shipped_pipelines() -> list[Spec]:
    """Return the pipelines of conf/pipelines, by Spark's engine but for those that ask for Arrow's."""
    names = sorted(p.stem for p in (installation() / "conf" / "pipelines").glob("*.yaml"))
    return [_by_spark(name, ()) for name in names]


def _by_spark(pipeline: str, sets: Sequence[str]) -> Spec:
    from headrace.config import load_spec

    spec = load_spec(pipeline, sets)
    return spec if spec.features.engine == "arrow" else load_spec(pipeline, [*sets, _ENGINE])


def _print(seen: Sequence[StepPlans]) -> None:
    from headrace.jobs.gpu_plan.gate import LOG, ON_CPUS

    rows_table = table("what", "step", ">plans", "on the GPU", "operators", "what leaves, and why")
    for s in seen:
        state = plain("yes", style="green") if s.green else plain("NO", style="bold red")
        if s.step in (LOG, ON_CPUS):
            state = plain("-", style="dim")
        rows_table.add_row(
            plain(s.subject),
            plain(s.step),
            str(len(s.plans)),
            state,
            plain(_operators(s)),
            plain("\n".join(s.faults())),
        )
    out.print(rows_table)
    out.print()
    red = list(dict.fromkeys(s.subject for s in seen if not s.green))
    subjects = len({s.subject for s in seen})
    plans = sum(len(s.plans) for s in seen if s.step != LOG)
    if red:
        out.print(f"leaves the GPU: {', '.join(red)} ({len(red)} of {subjects})", markup=False)
    else:
        out.print(
            f"all of {plans} plans of {subjects} stay on the GPU; `_delta_log` is read on the CPU by design",
            markup=False,
        )


def _operators(seen: StepPlans) -> str:
    """Return the physical operators of the step, each once, as the plan has them from the top."""
    from headrace.jobs.gpu_plan.gate import LOG

    if seen.step == LOG:
        return "the table's log"
    return ", ".join(_operator_names(seen))


def _operator_names(seen: StepPlans) -> list[str]:
    return list(dict.fromkeys(n.name.removesuffix("Exec") for p in seen.plans for n in p.execs))


#: Ranks and tables that are shown one by one.
_RANKS, _TABLES = 16, 60


def plan_sharding(
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
    from headrace.comm.shared_memory import MOST_RANKS
    from headrace.config import load_sharding, load_spec
    from headrace.embeddings.dynamic.rows import dynamic_table_bytes
    from headrace.embeddings.planner.cost import OtherMemory
    from headrace.embeddings.planner.search import plan_tables
    from headrace.embeddings.planner.tables import load_tables
    from headrace.models.classes import make_network
    from headrace.models.inputs import InputFeatures
    from headrace.train.setup.state import sampled_popularity, trained_tables

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
        declaration = load_tables(declared)
        tables, lookups = declaration.planned()
        source, batch, optimizer = declaration.source, declaration.batch_size, declaration.optimizer
        if spec is not None:
            batch, optimizer = spec.train.batch_size, spec.train.embeddings.kind
    elif spec is not None:
        source, dataset, schema = _dataset(ws, spec.pipeline, ds)
        features = InputFeatures.from_schema(schema, spec.model.embedding_dim, spec.train.tasks)
        network = make_network(spec.model, features, spec.train.seed)
        trained = trained_tables(schema, spec.model, network, spec.train, world)
        tables, lookups, raw = trained.tables, trained.lookups, trained.dynamic
        popularity = sampled_popularity(dataset, schema, tables, trained.counted)
        batch, optimizer = spec.train.batch_size, spec.train.embeddings.kind
        saves_copies = spec.train.background_checkpoints
        other_memory = OtherMemory(
            dynamic_table_bytes(raw, trained.raw_ids, batch, world, optimizer, 1 + saves_copies),
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
        print_json(sharding_record(planned, source))
        return planned
    show_sharding(planned, source)
    for r in raw:
        out.print(f"beside these, raw ids of {r.name}, dealt by their hash: {_limit(r, optimizer, world)}")
    return planned


def _limit(raw: DynamicSpec, optimizer: str, world: int) -> str:
    from headrace.embeddings.dynamic.rows import most_bytes

    most = most_bytes(raw, world, optimizer)
    return "no limit (max_rows, memory_mib)" if most is None else f"at most {most / 2**20:,.1f} MiB a rank"


def _dataset(ws: Workspace, pipeline: str, ds: str | None) -> tuple[str, Location, DatasetSchema]:
    from headrace.stage.manifest import Manifest

    days = [d for d in reversed(ws.days(pipeline)) if ws.manifest(pipeline, d, "features").is_file()]
    day = ds or (days[0] if days else "")
    manifest = Manifest.load(ws.manifest(pipeline, day, "features")) if day else None
    if manifest is None or manifest.dataset_schema is None:
        raise UserError(
            f"pipeline '{pipeline}' has no dataset{f' of {ds}' if ds else ''} in {ws.home}, so its tables' sizes are "
            f"not known: run it up to features, or declare tables (--tables mlperf, --tables FILE.yaml)"
        )
    return f"{pipeline}, dataset of {day}", ws.locate(manifest.output("dataset").name), manifest.dataset_schema


def sharding_record(planned: Planned, source: str) -> dict[str, Any]:
    """Return a plan for programs; memory in GiB, messages of a step in MB, times in milliseconds."""
    from headrace.embeddings.planner.cost import GIB, load_of

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


def show_sharding(planned: Planned, source: str) -> None:
    """Print a plan: its assumptions, its tables, its ranks."""
    from headrace.embeddings.planner.cost import GIB

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
    from headrace.embeddings.planner.cost import GIB, load_of

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
    import numpy as np

    from headrace.embeddings.planner.cost import GIB

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
