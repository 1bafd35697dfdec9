"""Commands that look and change nothing: `status`, `metrics`, `lineage`, `plan`, `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import VAR, Ds, Home, Json, MaybePipeline, Pipeline, Sets, examples, workspace
from headrace.cli.root import app
from headrace.errors import UserError


@app.command(
    epilog=examples(
        "headrace status",
        "headrace status clicks --last 7",
        "headrace status clicks --verify",
        "headrace status clicks --last 1 --watch",
        "headrace status --watch --every 30",
    )
)
def status(
    pipeline: MaybePipeline = None,
    ds: Ds = None,
    last: Annotated[int, typer.Option(help="The newest N days; 0: all.", metavar="N", min=0)] = 3,
    verify: Annotated[bool, typer.Option("--verify", help="Check the outputs, too, not only manifests.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until Ctrl-C, with the progress of running stages.")
    ] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between two looks.", metavar="SECONDS", min=0.1)] = 2,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show what is done, stale or missing, with rows and times."""
    if watch:
        from headrace.commands.watch import watch as watch_command

        if as_json or verify:
            raise UserError("--watch goes with neither --json nor --verify")
        watch_command(workspace(home), pipeline, ds, last, every, sets or [])
        return
    from headrace.commands.status import status as command

    command(workspace(home), pipeline, ds, last, verify, sets or [], as_json)


@app.command(epilog=examples("headrace metrics clicks", "headrace metrics clicks > headrace_clicks.prom"))
def metrics(pipeline: Pipeline, sets: Sets = None, home: Home = VAR) -> None:
    """Print a pipeline's metrics in Prometheus' text format (docs/observe.md)."""
    from headrace.commands.metrics import metrics as command

    command(workspace(home), pipeline, sets or [])


@app.command(
    epilog=examples(
        "headrace lineage clicks_scores --ds 2026-01-08",
        "headrace lineage lake/clicks/scores",
        "headrace lineage clicks",
    )
)
def lineage(
    name: Annotated[str, typer.Argument(metavar="TABLE_OR_MODEL", help="A table, a registered model, or a key.")],
    ds: Ds = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Walk from a table or a model back to the landing files that it came from."""
    from headrace.commands.lineage import lineage as command

    command(workspace(home), name, ds, as_json)


@app.command(
    epilog=examples(
        "headrace plan --gpu clicks",
        "headrace plan --gpu clicks --set features.row_group_rows=1000000",
        "headrace plan --gpu --operator target_encoding --operator history",
        "headrace plan --gpu",
        "headrace plan --sharding clicks --world 8",
        "headrace plan --sharding --tables mlperf --world 64 --memory 80",
    )
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
        from headrace.commands.plan_sharding import sharding as sharding_command

        sharding_command(workspace(home), pipeline, tables, ds, world, memory, sets or [], as_json)
        return
    from headrace.commands.plan import gpu as command

    if not gpu:
        raise UserError("say what to plan: --gpu or --sharding")
    if pipeline and operators:
        raise UserError("name a pipeline or operators, not both")
    raise typer.Exit(command(pipeline, sets or [], operators or [], as_json))


@app.command(epilog=examples("headrace doctor", "headrace doctor clicks"))
def doctor(pipeline: MaybePipeline = None, as_json: Json = False, home: Home = VAR) -> None:
    """Look for everything that headrace needs; exit code 1 when something needed is missing.

    With a pipeline its warehouse is tried, too.
    """
    from headrace.commands.doctor import doctor as command

    raise typer.Exit(command(workspace(home), pipeline, as_json))
