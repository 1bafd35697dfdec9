"""Column stores by their client libraries: ClickHouse and DuckDB.

In ClickHouse a day is a partition, and `REPLACE PARTITION` puts another one in its place in one step. One process at a
time may write to a DuckDB file, so it is open for as long as a day is loaded and no longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.databases import failures
from headrace.publish.opening import client_library, connecting, password_of
from headrace.publish.sql.client import ANSI_TYPES, PARAMETER, SqlClient
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Target, table_name
from headrace.stage import RunLock
from headrace.storage import local

#: Longest wait for readers and other writers of the file, in seconds.
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


class ClickHouseClient(SqlClient):
    """A client of clickhouse-connect (HTTP).

    There are no transactions: the partition first, in one step, then its record. A run that is killed between them
    left new rows with the record before, and the same command publishes them again.
    """

    types: ClassVar[Mapping[str, str]] = {
        "bigint": "Int64",
        "int": "Int32",
        "smallint": "Int16",
        "tinyint": "Int8",
        "string": "String",
        "float": "Float32",
        "double": "Float64",
        "boolean": "Bool",
        "date": "Date",
        "timestamp": "DateTime64(6, 'UTC')",
    }
    quotes, escape = "`", "\\"
    mark = PARAMETER
    key_type, text_type, moment_type, count_type = "String", "String", "DateTime64(6)", "Int64"
    # ClickHouse keeps the newest record of a key when it merges parts.
    publications_options = " ENGINE = ReplacingMergeTree(`published_at`) ORDER BY (`table_name`, `ds`)"
    grants_options = " ENGINE = MergeTree ORDER BY (`table_name`, `privilege`, `role`)"
    fences_options = " ENGINE = MergeTree ORDER BY (`table_name`, `lease`)"
    has_keys = False
    transactions = False

    def __init__(self, client: Any, database: str) -> None:
        self._client, self._database = client, database

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._database,)

    def optional(self, kind: str) -> str:
        return f"Nullable({kind})"

    def table_options(self, user: str) -> str:
        return f" ENGINE = MergeTree PARTITION BY `ds` ORDER BY ({self.quote(user)}, `rank`)"

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        statement = self.formatted(statement, params)
        if statement.startswith("SELECT"):
            return [tuple(row) for row in self._client.query(statement, parameters=list(params) or None).result_rows]
        self._client.command(statement, parameters=list(params) or None)
        return []

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for file in files:
            parquet = pq.ParquetFile(file)
            for i in range(parquet.num_row_groups):
                rows: pa.Table = parquet.read_row_group(i, columns=list(columns))
                self._client.insert_arrow(table, rows)

    def columns(self, name: str) -> list[str]:
        rows = self.run(
            f"SELECT name FROM system.columns WHERE database = {self.mark} AND table = {self.mark} ORDER BY position",
            [self._database, name],
        )
        return [str(n) for (n,) in rows]

    def tables(self, prefix: str) -> list[str]:
        rows = self.run(
            f"SELECT name FROM system.tables WHERE database = {self.mark} AND startsWith(name, {self.mark})",
            [self._database, prefix],
        )
        return [str(n) for (n,) in rows]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield

    def create_staging(self, staging: str, table: str, columns: Sequence[str]) -> list[str]:
        return [f"CREATE TABLE {staging} AS {table}"]

    def replace_day(self, table: str, staging: str, columns: Sequence[str], ds: str) -> list[str]:
        return [f"ALTER TABLE {table} REPLACE PARTITION '{ds}' FROM {staging}"]

    def delete_day(self, table: str, ds: str) -> str:
        return f"ALTER TABLE {table} DROP PARTITION '{ds}'"

    def day(self, ds: str) -> str:
        return f"toDate('{ds}')"

    def delete_rows(self, table: str, condition: str) -> str:
        # mutations_sync: the statement returns after the rows are rewritten.
        return f"ALTER TABLE {table} DELETE WHERE {condition} SETTINGS mutations_sync = 2"

    def update_rows(self, table: str, change: str, condition: str) -> str:
        return f"ALTER TABLE {table} UPDATE {change} WHERE {condition} SETTINGS mutations_sync = 2"

    def replace_record(self, publications: str, names: str, values: str, condition: str) -> list[str]:
        return [f"INSERT INTO {publications} ({names}) VALUES ({values})"]


@contextmanager
def open_clickhouse(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    with client_library("clickhouse"):
        import clickhouse_connect
        from clickhouse_connect.driver.exceptions import Error
    assert spec.publish is not None
    conf = spec.publish.warehouse

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        with connecting(conf):
            client = clickhouse_connect.get_client(
                host=conf.host,
                port=conf.port,
                username=conf.user,
                password=password_of(conf) or "",
                database=conf.database,
                **conf.options,
            )
        try:
            yield ClickHouseClient(client, conf.database)
        finally:
            client.close()

    label, address = f"{conf.database}.{table_name(spec)}", f"{conf.user}@{conf.host}"
    with failures(Error, f"ClickHouse at {conf.host} for {spec.pipeline}", label, transactions=False):
        yield SqlTarget(spec, ws, "clickhouse", label, address, ClickHouseClient, connect, lock)
