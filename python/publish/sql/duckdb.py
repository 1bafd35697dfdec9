"""A DuckDB file. One process at a time may write to it, so it is open for as long as a day is loaded and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.errors import UserError
from headrace.publish.opening import client_library, failures
from headrace.publish.sql.client import ANSI_TYPES, SqlClient
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Target, table_name
from headrace.stage import RunLock
from headrace.storage import local
from headrace.workspace import Workspace

#: How long to wait for readers and other writers of the file, in seconds.
_PATIENCE_SECONDS = 60.0


class DuckDbClient(SqlClient):
    """A connection to a file."""

    types: ClassVar[Mapping[str, str]] = ANSI_TYPES
    # An index would refuse the insertion of keys that the same transaction has deleted.
    has_keys = False

    def __init__(self, connection: Any, schema: str) -> None:
        self._connection, self._schema = connection, schema

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._schema,)

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        rows = self._connection.execute(statement, list(params)).fetchall()
        return [tuple(row) for row in rows]

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        listed = ", ".join(map(self.quote, columns))
        order = ", ".join([self.quote(columns[1]), self.quote("rank")])
        if files:
            self.run(
                f"INSERT INTO {table} ({listed}) SELECT {listed} FROM read_parquet(?) ORDER BY {order}",
                [[str(f) for f in files]],
            )

    def columns(self, name: str) -> list[str]:
        rows = self.run(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = ? AND table_name = ? "
            "AND table_catalog = current_database() ORDER BY ordinal_position",
            [self._schema, name],
        )
        return [str(n) for (n,) in rows]

    def tables(self, prefix: str) -> list[str]:
        rows = self.run(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = ? AND starts_with(table_name, ?)",
            [self._schema, prefix],
        )
        return [str(n) for (n,) in rows]

    def grantee(self, role: str) -> str:
        raise UserError("publish.grants: a DuckDB file has no roles; who may read the file may read its tables")


@contextmanager
def open_duckdb(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    with client_library("duckdb"):
        import duckdb
    assert spec.publish is not None
    conf = spec.publish.warehouse
    path = Path(conf.path).expanduser() if conf.path else ws.home / "warehouse" / "scores.duckdb"
    schema = "main" if conf.schema_name == "public" else conf.schema_name

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        local(path.parent).make_dir()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                connection = duckdb.connect(str(path), config=dict(conf.options))
                break
            except duckdb.IOException as e:
                if time.monotonic() > deadline or "lock" not in str(e).lower():
                    raise UserError(f"cannot open the DuckDB file {path}: {str(e).splitlines()[0]}") from None
                time.sleep(0.1)
        with connection:
            client = DuckDbClient(connection, schema)
            client.run(f"CREATE SCHEMA IF NOT EXISTS {client.quote(schema)}")
            yield client

    label = f"{schema}.{table_name(spec)}"
    with failures(duckdb.Error, f"the DuckDB file {path} of {spec.pipeline}", label):
        yield SqlTarget(spec, ws, "duckdb", label, str(path), DuckDbClient, connect, lock)
