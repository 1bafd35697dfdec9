"""Snowflake as a warehouse of headrace: files go to a stage by PUT, into the staging table by COPY INTO; a transaction
replaces the day.

The checks of a spec import this module: it imports the vendor's client library when the warehouse is opened.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.config.warehouse import Warehouse, WarehouseKind
from headrace.config.workspace import Workspace
from headrace.errors.databases import failures
from headrace.publish.opening import client_library, connecting, password_of
from headrace.publish.sql.client import ANSI_TYPES, PARAMETER, SqlClient, cleanup, literal, load_folder
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Target, table_name
from headrace.stage import RunLock


class Snowflake(WarehouseKind):
    """Snowflake."""

    opens = "headrace_snowflake:open_snowflake"
    own_arguments: ClassVar = {"user": "user", "database": "database", "schema": "schema", "autocommit": None}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        name = label if label.count(".") > 1 else f"{warehouse.database}.{label}"
        return f"snowflake://{warehouse.options.get('account', warehouse.host)}", name


#: `options.authenticator` -> the connector's name of the secret that it takes; of others it is `password`.
_SECRETS: Mapping[str, str] = {
    "oauth": "token",
    "programmatic_access_token": "token",
    "workload_identity": "token",
    "oauth_client_credentials": "oauth_client_secret",
    "oauth_authorization_code": "oauth_client_secret",
}


class SnowflakeClient(SqlClient):
    """A connection of snowflake-connector-python."""

    types: ClassVar[Mapping[str, str]] = {**ANSI_TYPES, "timestamp": "TIMESTAMP_TZ"}
    mark = PARAMETER
    key_type, text_type, moment_type = "VARCHAR", "VARCHAR", "TIMESTAMP_NTZ"
    has_keys = False

    def __init__(self, connection: Any, database: str, schema: str, stage: str | None) -> None:
        self._connection, self._database, self._schema, self._stage = connection, database, schema, stage

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._database, self._schema)

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(self.formatted(statement, params), tuple(params) or None)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        head, dot, name = table.rpartition('."')
        table_stage = f'@{head}.%"{name}' if dot else f"@%{table}"
        place = load_folder(self._stage or table_stage)
        # What COPY does not purge goes with the table's own stage, but not with another one.
        remove = cleanup(lambda: self.run(f"REMOVE {literal(place)}"), f"files may be left in {place}: remove them")
        with remove if self._stage else nullcontext():
            for file in files:
                # Quoted, the path stands as it is: nothing is decoded. Its connector takes it for a pattern of `glob`.
                path = literal(f"file://{glob.escape(str(file))}")
                self.run(f"PUT {path} {literal(place)} AUTO_COMPRESS = FALSE OVERWRITE = TRUE")
            self.run(
                f"COPY INTO {table} FROM {literal(place)} FILE_FORMAT = (TYPE = PARQUET) "
                f"MATCH_BY_COLUMN_NAME = CASE_SENSITIVE ON_ERROR = ABORT_STATEMENT PURGE = TRUE"
            )

    def columns(self, name: str) -> list[str]:
        rows = self.run(
            f"SELECT column_name FROM {self.quote(self._database)}.information_schema.columns "
            f"WHERE table_schema = {self.mark} AND table_name = {self.mark} ORDER BY ordinal_position",
            [self._schema, name],
        )
        return [str(n) for (n,) in rows]

    def tables(self, prefix: str) -> list[str]:
        rows = self.run(
            f"SELECT table_name FROM {self.quote(self._database)}.information_schema.tables "
            f"WHERE table_schema = {self.mark} AND startswith(table_name, {self.mark})",
            [self._schema, prefix],
        )
        return [str(n) for (n,) in rows]

    def create_staging(self, staging: str, table: str, columns: Sequence[str]) -> list[str]:
        # Before the transaction: in Snowflake each definition commits what is open.
        return [f"CREATE TRANSIENT TABLE {staging} AS SELECT {', '.join(columns)} FROM {table} WHERE 1 = 0"]

    def rights(self, privilege: str, table: str, view: str) -> list[str]:
        return [f"{privilege.upper()} ON TABLE {table}", f"{privilege.upper()} ON VIEW {view}"]

    def grantee(self, role: str) -> str:
        return f"ROLE {self.quote(role)}"


@contextmanager
def open_snowflake(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    with client_library("snowflake", package="headrace-snowflake"):
        import snowflake.connector as snowflake
    assert spec.publish is not None
    conf = spec.publish.warehouse

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        arguments: dict[str, Any] = {"user": conf.user, "database": conf.database, "schema": conf.schema_name}
        secret = password_of(conf)
        if secret is not None:
            arguments[_secret_argument(conf.options)] = secret
        with connecting(conf):
            opened = snowflake.connect(**arguments, **conf.options, autocommit=True)
        with opened as connection:
            yield SnowflakeClient(connection, conf.database, conf.schema_name, conf.stage)

    label = f"{conf.database}.{conf.schema_name}.{table_name(spec)}"
    address = f"{conf.user}@{conf.options.get('account', 'snowflake')}"
    with failures(snowflake.Error, f"Snowflake for {spec.pipeline}", label):
        yield SqlTarget(spec, ws, "snowflake", label, address, SnowflakeClient, connect, lock)


def _secret_argument(options: Mapping[str, str]) -> str:
    """Return the connector's argument for the secret of `password_env` or `password_file`.

    Of a user who comes with a key, it is that of the key's file.
    """
    if "private_key_file" in options:
        return "private_key_file_pwd"
    return _SECRETS.get(options.get("authenticator", "").lower(), "password")
