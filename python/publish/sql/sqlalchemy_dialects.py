"""What some databases that SQLAlchemy reaches say otherwise than the standard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from headrace.errors import UserError
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.sqlalchemy_client import KEY_CHARACTERS, SqlAlchemyClient
from headrace.publish.unfit_keys import KeyLimits


class SqliteClient(SqlAlchemyClient):
    """SQLite: a file. Its driver begins no transaction by itself here (isolation level AUTOCOMMIT)."""

    # SQLite otherwise finds out at the first write that another writer was first, and does not wait for it then.
    begin = "BEGIN IMMEDIATE"

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with SqlClient.transaction(self):
            yield

    def _finish(self) -> None:
        """Nothing: the driver would end the transaction that a statement began."""

    def day(self, ds: str) -> str:
        return f"'{ds}'"

    def create_view(self, view: str, select: str) -> list[str]:
        return [f"DROP VIEW IF EXISTS {view}", f"CREATE VIEW {view} AS {select}"]

    def grantee(self, role: str) -> str:
        raise UserError("publish.grants: a SQLite file has no roles; who may read the file may read its tables")


class PostgresqlClient(SqlAlchemyClient):
    """PostgreSQL, and databases that speak as it does."""

    def key_limits(self, of_user: bool) -> KeyLimits:
        return replace(super().key_limits(of_user), nul=False)

    def has_role(self, role: str) -> bool | None:
        return bool(self.run(f"SELECT 1 FROM pg_roles WHERE rolname = {self.mark}", [role]))


class MySqlClient(SqlAlchemyClient):
    """MySQL and MariaDB."""

    def key_limits(self, of_user: bool) -> KeyLimits:
        # TEXT.
        return super().key_limits(of_user) if of_user else KeyLimits(max_bytes=65_535)

    def type_of(self, spark: str) -> str:
        return "DATETIME(6)" if spark == "timestamp" else super().type_of(spark)


class SqlServerClient(SqlAlchemyClient):
    """SQL Server.

    Readers see one whole version where the database has READ_COMMITTED_SNAPSHOT on: otherwise a reader that waits for a
    publisher's locks goes on with the rows that are there then.
    """

    def type_of(self, spark: str) -> str:
        # TIMESTAMP is no moment there, and DATETIME counts in steps of 3 ms.
        return "DATETIME2" if spark == "timestamp" else super().type_of(spark)

    def day(self, ds: str) -> str:
        return f"CAST('{ds}' AS DATE)"

    def create_view(self, view: str, select: str) -> list[str]:
        return [f"CREATE OR ALTER VIEW {view} AS {select}"]

    def create_staging(self, staging: str, table: str, columns: Sequence[str]) -> list[str]:
        return [f"SELECT {', '.join(columns)} INTO {staging} FROM {table} WHERE 1 = 0"]

    def add_column(self, table: str, definition: str) -> str:
        return f"ALTER TABLE {table} ADD {definition}"

    def first_rows(self, select: str, rows: int) -> str:
        return f"{select} OFFSET 0 ROWS FETCH FIRST {rows} ROWS ONLY"


class OracleClient(SqlAlchemyClient):
    """Oracle, 12.2 and later. It reads an empty text as null."""

    def key_limits(self, of_user: bool) -> KeyLimits:
        return KeyLimits(max_characters=KEY_CHARACTERS, empty=False) if of_user else KeyLimits(4_000, empty=False)

    def type_of(self, spark: str) -> str:
        # A CLOB cannot be compared; DATE has no fractions of a second.
        return {"string": "VARCHAR2(4000 CHAR)", "timestamp": "TIMESTAMP"}.get(spark) or super().type_of(spark)

    def drop_table(self, table: str) -> str:
        # IF EXISTS came with 23ai. ORA-00942: there is no such table.
        dropped = f"DROP TABLE {table}".replace("'", "''")
        return (
            f"BEGIN EXECUTE IMMEDIATE '{dropped}'; "
            f"EXCEPTION WHEN OTHERS THEN IF SQLCODE != -942 THEN RAISE; END IF; END;"
        )

    def add_column(self, table: str, definition: str) -> str:
        return f"ALTER TABLE {table} ADD {definition}"

    def first_rows(self, select: str, rows: int) -> str:
        return f"{select} FETCH FIRST {rows} ROWS ONLY"


_CLIENTS: Mapping[str, type[SqlAlchemyClient]] = {
    "sqlite": SqliteClient,
    "postgresql": PostgresqlClient,
    "mysql": MySqlClient,
    "mariadb": MySqlClient,
    "mssql": SqlServerClient,
    "oracle": OracleClient,
}


def client_of(connection: Any, schema: str | None) -> SqlAlchemyClient:
    """The client of a connection of SQLAlchemy, by its dialect.

    Raises:
        UserError: the driver's parameters are of no known style.
    """
    return _CLIENTS.get(connection.dialect.name, SqlAlchemyClient)(connection, schema)
