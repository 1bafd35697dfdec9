"""`headrace warehouse`: the embedded PostgreSQL, and a look at what is published."""

from __future__ import annotations

from headrace.commands.screen import out
from headrace.config import Spec, Warehouse, load_spec, parse_ds
from headrace.errors import UserError
from headrace.workspace import Workspace


def _place(pipeline: str | None) -> Warehouse:
    spec = load_spec(pipeline) if pipeline else None
    return spec.publish.warehouse if spec and spec.publish else Warehouse()


def start(ws: Workspace, pipeline: str | None) -> None:
    """Start the embedded server and let it run.

    Raises:
        UserError: the pipeline publishes to a server of the user's, or it cannot start.
    """
    from headrace.publish import warehouse

    place = _embedded(pipeline)
    found = warehouse.start(ws, place)
    out.print(f"PostgreSQL runs on 127.0.0.1:{found.port} (process {found.pid}); data: {found.data}", soft_wrap=True)
    out.print(f"open it:  {warehouse.psql_info(place, ws)}", markup=False, soft_wrap=True)
    out.print("stop it:  headrace warehouse stop")


def stop(ws: Workspace) -> None:
    """Stop the embedded server, or leave it to its last user."""
    from headrace.publish import warehouse

    found = warehouse.stop(ws)
    out.print("PostgreSQL is in use and stops with its last user" if found.running else "PostgreSQL is stopped")


def status(ws: Workspace, pipeline: str | None) -> None:
    """Say what the embedded server does and how to open it."""
    from headrace.publish import warehouse

    place = _embedded(pipeline)
    found = warehouse.status(ws)
    if not found.running:
        out.print(f"PostgreSQL does not run (data: {found.data}). Start it: headrace warehouse start", soft_wrap=True)
        return
    until = "until `headrace warehouse stop`" if found.kept else "until its last user is done"
    out.print(f"PostgreSQL runs on 127.0.0.1:{found.port} (process {found.pid}) {until}")
    out.print(f"open it:  {warehouse.psql_info(place, ws)}", markup=False, soft_wrap=True)


def sample(ws: Workspace, pipeline: str, ds: str | None, rows: int) -> None:
    """Print the first published scores of a day (default: the newest that was published).

    Raises:
        UserError: the pipeline publishes nothing, nothing is published, or the warehouse cannot be reached.
    """
    import psycopg

    from headrace.publish import sample as look
    from headrace.publish import warehouse
    from headrace.publish.stage import table_name

    spec = load_spec(pipeline)
    if spec.publish is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'publish' section, so it publishes nothing")
    day = parse_ds(ds) if ds else _newest(ws, spec)
    place = spec.publish.warehouse
    table = f"{place.schema_name}.{table_name(spec)}"
    with warehouse.connect(place, ws) as conn:
        try:
            found = look.sample(conn, place.schema_name, table_name(spec), day, rows)
        except psycopg.errors.UndefinedTable:
            raise UserError(f"there is no table {table} yet. Run: headrace run {pipeline} --ds {day}") from None
    if not found:
        raise UserError(f"{table} has no scores of {day}. Run: headrace run {pipeline} --ds {day}")
    out.print(f"SELECT * FROM {table} WHERE ds = '{day}' LIMIT {rows};", markup=False)
    out.print(look.psql_table(found), markup=False, soft_wrap=True)


def _newest(ws: Workspace, spec: Spec) -> str:
    days = [d for d in ws.days(spec.pipeline) if ws.manifest(spec.pipeline, d, "publish").is_file()]
    if not days:
        raise UserError(f"'{spec.pipeline}' has published nothing yet. Run: headrace run {spec.pipeline} --ds DATE")
    return days[-1]


def _embedded(pipeline: str | None) -> Warehouse:
    place = _place(pipeline)
    if place.kind != "embedded":
        raise UserError(
            f"pipeline '{pipeline}' publishes to the PostgreSQL at {place.host}, which is yours to start and stop"
        )
    return place
