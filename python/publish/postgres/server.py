"""Connections to the user's PostgreSQL, or to the one that comes as a wheel.

    with connect(spec.publish.warehouse, ws) as conn:
        conn.execute("SELECT ...")

The password is read from a variable or a file just before it is used, is handed to libpq as a parameter, and is in no
command line, no log and no `repr`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from headrace.config import Warehouse
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.databases import postgres_advice, reason_of_postgres
from headrace.publish.opening import password_of
from headrace.publish.postgres import embedded
from headrace.publish.postgres.embedded import HOST, password
from headrace.publish.postgres.processes import program

Connection = psycopg.Connection[tuple[Any, ...]]

_CONNECT_SECONDS = 10


@dataclass(frozen=True)
class Server:
    """A reachable PostgreSQL and the account on it."""

    host: str
    port: int
    database: str
    user: str
    password: str | None = field(repr=False)
    #: `Warehouse.ssl`.
    ssl: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.database}"

    def connect(self) -> Connection:
        """Return a new connection in autocommit mode: transactions are written out where they are meant.

        Raises:
            psycopg.OperationalError: it cannot be reached, or refuses.
        """
        return psycopg.connect(
            host=self.host,
            port=self.port,
            dbname=self.database,
            user=self.user,
            password=self.password,
            sslmode=self.ssl["sslmode"],
            sslrootcert=self.ssl.get("sslrootcert"),
            sslcert=self.ssl.get("sslcert"),
            sslkey=self.ssl.get("sslkey"),
            connect_timeout=_CONNECT_SECONDS,
            autocommit=True,
            application_name="headrace",
        )


@contextmanager
def serve(warehouse: Warehouse, ws: Workspace) -> Iterator[Server]:
    """Give the warehouse's server; an embedded one runs at least until the block ends.

    Raises:
        UserError: the password is not where the spec says, or the embedded server cannot start.
    """
    if warehouse.kind == "embedded":
        with embedded.lease(ws, warehouse.port, warehouse.database, warehouse.user) as port:
            yield Server(HOST, port, warehouse.database, warehouse.user, password(ws), warehouse.ssl)
    else:
        yield Server(
            warehouse.host,
            warehouse.port or 5432,
            warehouse.database,
            warehouse.user,
            password_of(warehouse),
            warehouse.ssl,
        )


@contextmanager
def connect(warehouse: Warehouse, ws: Workspace) -> Iterator[Connection]:
    """Give a connection (autocommit) to the warehouse, closed at the end.

    Raises:
        UserError: as for `serve`, or it cannot be reached: says where, as whom, why and what to do.
    """
    with serve(warehouse, ws) as server, connect_to(server, warehouse) as conn:
        yield conn


@contextmanager
def connect_to(server: Server, warehouse: Warehouse) -> Iterator[Connection]:
    """Give a connection to a server of `serve`, closed at the end. Raises UserError where it cannot be reached."""
    try:
        conn = server.connect()
    except psycopg.OperationalError as e:
        reason = reason_of_postgres(e)
        source = warehouse.password_env or warehouse.password_file or "publish.warehouse.password_env or password_file"
        advice = postgres_advice(reason, warehouse.ssl["sslmode"], source)
        raise UserError(f"cannot reach {server} as user '{server.user}': {reason}; {advice}") from None
    with conn:
        yield conn


def psql_info(warehouse: Warehouse, ws: Workspace) -> str:
    """Return a shell command that opens the warehouse in psql; the password stays in its file or variable."""
    if warehouse.kind == "embedded":
        port = embedded.status(ws).port or warehouse.port
        if not port:
            raise UserError("the embedded PostgreSQL is not running: headrace warehouse start")
        host, secret = HOST, f"PGPASSFILE={shlex.quote(str(ws.postgres / 'pgpass'))} "
        psql = str(program("psql"))
    else:
        host, port, psql = warehouse.host, warehouse.port or 5432, "psql"
        secret = ""
        if warehouse.password_env:
            secret = f'PGPASSWORD="${warehouse.password_env}" '
        elif warehouse.password_file:
            secret = f'PGPASSWORD="$(cat {shlex.quote(warehouse.password_file)})" '
        secret += "".join(f"PG{name.upper()}={shlex.quote(value)} " for name, value in warehouse.ssl.items())
    arguments = ["-h", host, "-p", str(port), "-U", warehouse.user, "-d", warehouse.database]
    return secret + shlex.join([psql, *arguments])
