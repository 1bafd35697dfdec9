"""`headrace warehouse`: the embedded PostgreSQL, and samples of published scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.root import VAR, Ds, Group, Home, MaybePipeline, Panel, Pipeline, app, examples, workspace
from headrace.cli.screen import out, print_rows
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.config import Spec, Warehouse
    from headrace.config.workspace import Workspace


warehouse_app = typer.Typer(cls=Group, no_args_is_help=True, help="The embedded PostgreSQL, and what is published.")
app.add_typer(warehouse_app, name="warehouse", rich_help_panel=Panel.A_DAY)


@warehouse_app.command("start", epilog=examples("headrace warehouse start"))
def warehouse_start(pipeline: MaybePipeline = None, home: Home = VAR) -> None:
    """Start the embedded PostgreSQL, leave it running, and show how to open it."""
    from headrace.publish.postgres import embedded
    from headrace.publish.postgres.server import psql_info

    ws, conf = workspace(home), _embedded_warehouse(pipeline)
    state = embedded.start(ws, conf.port, conf.database, conf.user)
    out.print(f"PostgreSQL runs on 127.0.0.1:{state.port} (process {state.pid}); data: {state.data}", soft_wrap=True)
    out.print(f"open it:  {psql_info(conf, ws)}", markup=False, soft_wrap=True)
    out.print("stop it:  headrace warehouse stop")


@warehouse_app.command("stop", epilog=examples("headrace warehouse stop"))
def warehouse_stop(home: Home = VAR) -> None:
    """Stop the embedded PostgreSQL."""
    from headrace.publish.postgres import embedded

    state = embedded.stop(workspace(home))
    out.print("PostgreSQL is in use and stops with its last user" if state.running else "PostgreSQL is stopped")


@warehouse_app.command("status", epilog=examples("headrace warehouse status"))
def warehouse_status(pipeline: MaybePipeline = None, home: Home = VAR) -> None:
    """Show whether the embedded PostgreSQL runs, and how to open it."""
    from headrace.publish.postgres import embedded
    from headrace.publish.postgres.server import psql_info

    ws, conf = workspace(home), _embedded_warehouse(pipeline)
    state = embedded.status(ws)
    if not state.running:
        out.print(f"PostgreSQL does not run (data: {state.data}). Start it: headrace warehouse start", soft_wrap=True)
        return
    until = "until `headrace warehouse stop`" if state.keeps_running else "until its last user is done"
    out.print(f"PostgreSQL runs on 127.0.0.1:{state.port} (process {state.pid}) {until}")
    out.print(f"open it:  {psql_info(conf, ws)}", markup=False, soft_wrap=True)


@warehouse_app.command("sample", epilog=examples("headrace warehouse sample clicks --ds 2026-01-08 --rows 20"))
def warehouse_sample(
    pipeline: Pipeline,
    ds: Ds = None,
    rows: Annotated[int, typer.Option(help="Number of rows.", metavar="N", min=1)] = 10,
    home: Home = VAR,
) -> None:
    """Show the first published scores of a day as psql would; default: of the newest day."""
    from headrace.config import load_spec, parse_ds
    from headrace.publish.opening import open_target

    spec = load_spec(pipeline)
    ws = workspace(home).of(spec)
    if spec.publish is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'publish' section, so it publishes nothing")
    day = parse_ds(ds) if ds else _newest_published_day(ws, spec)
    advice = f"Run: headrace run {spec.argument} --ds {day}"
    with open_target(spec, ws) as target:
        try:
            sampled_rows = target.sample(day, rows)
        except UserError as e:
            raise UserError(f"{e}. {advice}") from None
    if not sampled_rows:
        raise UserError(f"{target.label} has no scores of {day}. {advice}")
    out.print(f"SELECT * FROM {target.label} WHERE ds = '{day}' LIMIT {rows};", markup=False)
    print_rows(sampled_rows)


@warehouse_app.command("drop-kept", epilog=examples("headrace warehouse drop-kept clicks"))
def warehouse_drop_kept(pipeline: Pipeline, home: Home = VAR) -> None:
    """Drop staged scores that failed their audit and were retained for inspection."""
    from headrace.config import load_spec
    from headrace.publish.opening import open_target

    spec = load_spec(pipeline)
    ws = workspace(home).of(spec)
    if spec.publish is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'publish' section, so it publishes nothing")
    with open_target(spec, ws) as target:
        dropped = target.drop_kept()
    for label in dropped:
        out.print(f"dropped {label}", markup=False, soft_wrap=True)
    if not dropped:
        out.print("nothing was kept")


def _warehouse_of(pipeline: str | None) -> Warehouse:
    from headrace.config import Warehouse, load_spec

    spec = load_spec(pipeline) if pipeline else None
    return spec.publish.warehouse if spec and spec.publish else Warehouse()


def _newest_published_day(ws: Workspace, spec: Spec) -> str:
    days = [d for d in ws.days(spec.pipeline) if ws.manifest(spec.pipeline, d, "publish").is_file()]
    if not days:
        raise UserError(f"'{spec.pipeline}' has published nothing yet. Run: headrace run {spec.argument} --ds DATE")
    return days[-1]


def _embedded_warehouse(pipeline: str | None) -> Warehouse:
    conf = _warehouse_of(pipeline)
    if conf.kind != "embedded":
        kind = f"the PostgreSQL at {conf.host}" if conf.kind == "postgres" else f"a warehouse of kind {conf.kind}"
        raise UserError(f"pipeline '{pipeline}' publishes to {kind}, which is yours to start and stop")
    return conf
