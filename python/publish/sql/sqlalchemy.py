"""Any database with transactions that SQLAlchemy has a dialect for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.publish.opening import connecting
from headrace.publish.passwords import password_of
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.sqlalchemy_client import SqlAlchemyClient
from headrace.publish.sql.sqlalchemy_dialects import client_of
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Target, table_name
from headrace.stage import RunLock
from headrace.workspace import Workspace

#: How long SQLite waits for other connections to the file, in seconds.
_PATIENCE_SECONDS = 60


@contextmanager
def open_sqlalchemy(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.warehouses.open_target`."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    assert spec.publish is not None
    conf = spec.publish.warehouse
    assert conf.url is not None, "config refuses the kind without it"
    schema = None if conf.schema_name == "public" else conf.schema_name
    try:
        url = make_url(conf.url)
        shown = url.set(query={}).render_as_string()
        password = password_of(conf)
        is_sqlite = url.get_backend_name() == "sqlite"
        waits: dict[str, Any] = {"timeout": _PATIENCE_SECONDS} if is_sqlite else {}
        engine = create_engine(
            url.set(password=password) if password else url,
            connect_args=waits | dict(conf.options),
            **({"isolation_level": "AUTOCOMMIT"} if is_sqlite else {}),
        )
        by_url = engine.dialect.create_connect_args(engine.url)[1]
    except (ArgumentError, NoSuchModuleError, ImportError) as e:
        raise UserError(f"publish.warehouse.url: {e}; name a dialect and driver that are installed") from None

    for name in conf.options:
        if name in by_url:
            raise UserError(
                f"publish.warehouse.options.{name}: the driver is given this by publish.warehouse.url: say it there, "
                f"and leave it out of options"
            )

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        with connecting(conf):
            opened = engine.connect()
        with opened as connection:
            yield client_of(connection, schema)

    label = f"{schema}.{table_name(spec)}" if schema else table_name(spec)
    try:
        yield SqlTarget(spec, ws, "sqlalchemy", label, shown, SqlAlchemyClient, connect, lock)
    except SQLAlchemyError as e:
        raise UserError(
            f"the warehouse {shown} of {spec.pipeline} failed: {reason_of(e)}; {label} holds what it "
            f"held before. Run the same command again once that is mended"
        ) from None
    finally:
        engine.dispose()


def reason_of(error: Exception) -> str:
    """The telling line of an error: the driver's own, without statement and parameters."""
    return str(getattr(error, "orig", None) or error).splitlines()[0]
