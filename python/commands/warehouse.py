"""`headrace warehouse`: the embedded PostgreSQL, and a look at what is published."""

from __future__ import annotations

from headrace.commands.screen import out
from headrace.config import Spec, Warehouse, load_spec, parse_ds
from headrace.errors import UserError
from headrace.workspace import Workspace


def _warehouse_of(pipeline: str | None) -> Warehouse:
    spec = load_spec(pipeline) if pipeline else None
    return spec.publish.warehouse if spec and spec.publish else Warehouse()


def start(ws: Workspace, pipeline: str | None) -> None:
    """Start the embedded server and let it run.

    Raises:
        UserError: the pipeline publishes to a server of the user's, or it cannot start.
    """
    from headrace.publish.embedded import server
    from headrace.publish.postgres.server import psql_info

    conf = _embedded(pipeline)
    found = server.start(ws, conf.port, conf.database, conf.user)
    out.print(f"PostgreSQL runs on 127.0.0.1:{found.port} (process {found.pid}); data: {found.data}", soft_wrap=True)
    out.print(f"open it:  {psql_info(conf, ws)}", markup=False, soft_wrap=True)
    out.print("stop it:  headrace warehouse stop")


def stop(ws: Workspace) -> None:
    """Stop the embedded server, or leave it to its last user."""
    from headrace.publish.embedded import server

    found = server.stop(ws)
    out.print("PostgreSQL is in use and stops with its last user" if found.running else "PostgreSQL is stopped")


def status(ws: Workspace, pipeline: str | None) -> None:
    """Say what the embedded server does and how to open it."""
    from headrace.publish.embedded import server
    from headrace.publish.postgres.server import psql_info

    conf = _embedded(pipeline)
    found = server.status(ws)
    if not found.running:
        out.print(f"PostgreSQL does not run (data: {found.data}). Start it: headrace warehouse start", soft_wrap=True)
        return
    until = "until `headrace warehouse stop`" if found.keeps_running else "until its last user is done"
    out.print(f"PostgreSQL runs on 127.0.0.1:{found.port} (process {found.pid}) {until}")
    out.print(f"open it:  {psql_info(conf, ws)}", markup=False, soft_wrap=True)


def sample(ws: Workspace, pipeline: str, ds: str | None, rows: int) -> None:
    """Print the first published scores of a day (default: the newest that was published).

    Raises:
        UserError: the pipeline publishes nothing, nothing is published, or the warehouse cannot be reached.
    """
    from headrace.commands.psql_text import psql_table
    from headrace.publish.opening import open_target

    spec = load_spec(pipeline)
    ws = ws.of(spec)
    if spec.publish is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'publish' section, so it publishes nothing")
    day = parse_ds(ds) if ds else _newest(ws, spec)
    again = f"Run: headrace run {spec.argument} --ds {day}"
    with open_target(spec, ws) as target:
        try:
            found = target.sample(day, rows)
        except UserError as e:
            raise UserError(f"{e}. {again}") from None
    if not found:
        raise UserError(f"{target.label} has no scores of {day}. {again}")
    out.print(f"SELECT * FROM {target.label} WHERE ds = '{day}' LIMIT {rows};", markup=False)
    out.print(psql_table(found), markup=False, soft_wrap=True)


def drop_kept(ws: Workspace, pipeline: str) -> None:
    """Drop the staged scores that failed their audit and were kept.

    Raises:
        UserError: the pipeline publishes nothing, or the warehouse cannot be reached.
    """
    from headrace.publish.opening import open_target

    spec = load_spec(pipeline)
    ws = ws.of(spec)
    if spec.publish is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'publish' section, so it publishes nothing")
    with open_target(spec, ws) as target:
        dropped = target.drop_kept()
    for label in dropped:
        out.print(f"dropped {label}", markup=False, soft_wrap=True)
    if not dropped:
        out.print("nothing was kept")


def _newest(ws: Workspace, spec: Spec) -> str:
    days = [d for d in ws.days(spec.pipeline) if ws.manifest(spec.pipeline, d, "publish").is_file()]
    if not days:
        raise UserError(f"'{spec.pipeline}' has published nothing yet. Run: headrace run {spec.argument} --ds DATE")
    return days[-1]


def _embedded(pipeline: str | None) -> Warehouse:
    conf = _warehouse_of(pipeline)
    if conf.kind != "embedded":
        kind = f"the PostgreSQL at {conf.host}" if conf.kind == "postgres" else f"a warehouse of kind {conf.kind}"
        raise UserError(f"pipeline '{pipeline}' publishes to {kind}, which is yours to start and stop")
    return conf
