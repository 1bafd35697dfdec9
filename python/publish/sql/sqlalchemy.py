"""Any database with transactions that SQLAlchemy has a dialect for; the dialect writes types, quotes and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.databases import failures, reason_of_driver
from headrace.publish.opening import connecting, password_of
from headrace.publish.sql.client import PARAMETER, SqlClient, cleanup
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import KeyLimits, Target, table_name
from headrace.stage import RunLock

#: Longest text that can be a key, in characters.
KEY_CHARACTERS = 255
#: Rows per call of the driver.
_BATCH_ROWS = 20_000
#: Style of a driver's parameters (PEP 249, and PostgreSQL's own) -> the parameter number `n`, from 1.
_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric": ":{n}", "numeric_dollar": "${n}", "named": ":p{n}"}


class SqlAlchemyClient(SqlClient):
    """A connection of SQLAlchemy. A statement outside of a `transaction` is one by itself."""

    #: Spark's `simpleString` -> a generic type of SQLAlchemy, which its dialects write in their own words.
    types: ClassVar[Mapping[str, str]] = {
        "bigint": "BigInteger",
        "int": "Integer",
        "smallint": "SmallInteger",
        "tinyint": "SmallInteger",
        "string": "UnicodeText",
        "float": "Float",
        "double": "Double",
        "boolean": "Boolean",
        "date": "Date",
        "timestamp": "DateTime",
    }
    mark = PARAMETER

    def __init__(self, connection: Any, schema: str | None) -> None:
        self._connection, self._schema = connection, schema
        self._dialect = connection.dialect
        if self._dialect.paramstyle not in _MARKS:
            raise UserError(
                f"publish.warehouse.url: the driver {self._dialect.driver} has parameters of the style "
                f"{self._dialect.paramstyle}, which is none of: {', '.join(_MARKS)}"
            )
        self.key_type, self.text_type = self._type("Unicode", KEY_CHARACTERS), self._type("UnicodeText")
        self.moment_type, self.count_type = self.type_of("timestamp"), self.type_of("bigint")
        self._in_transaction = False

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._schema,) if self._schema else ()

    def type_of(self, spark: str) -> str:
        return self._type(self.types[spark])

    def key_limits(self, is_user_key: bool) -> KeyLimits:
        return KeyLimits(max_characters=KEY_CHARACTERS if is_user_key else None)

    def _type(self, generic: str, *args: int) -> str:
        from sqlalchemy import types

        return str(getattr(types, generic)(*args).compile(dialect=self._dialect))

    def quote(self, *parts: str) -> str:
        return ".".join(self._dialect.identifier_preparer.quote_identifier(p) for p in parts)

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        done = self._connection.exec_driver_sql(self._marked(statement), self._bound(params) if params else None)
        rows = [tuple(row) for row in done] if done.returns_rows else []
        self._finish()
        return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        # The driver begins a transaction with the first statement.
        self._in_transaction = True
        try:
            yield
            self._connection.commit()
        except BaseException:
            with cleanup(self._connection.rollback, "ROLLBACK failed: it is done when the connection is closed"):
                raise
        finally:
            self._in_transaction = False

    def _finish(self) -> None:
        """End the transaction that the driver began with a statement, unless it is one of several."""
        if not self._in_transaction:
            self._connection.commit()

    def _marked(self, statement: str) -> str:
        """Return a statement with its parameters as the driver writes them."""
        first, *rest = statement.split(PARAMETER)
        written = _MARKS[self._dialect.paramstyle]
        return first + "".join(written.format(n=n) + text for n, text in enumerate(rest, 1))

    def _bound(self, values: Sequence[Any]) -> Any:
        """Return the values of a statement's parameters as the driver takes them."""
        if self._dialect.paramstyle == "named":
            return {f"p{n}": value for n, value in enumerate(values, 1)}
        return tuple(values)

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        import pyarrow.parquet as pq

        marks = ", ".join([self.mark] * len(columns))
        statement = self._marked(f"INSERT INTO {table} ({', '.join(map(self.quote, columns))}) VALUES ({marks})")
        with self.transaction():
            for file in files:
                for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=list(columns)):
                    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
                    self._connection.exec_driver_sql(statement, list(map(self._bound, rows)))

    def columns(self, name: str) -> list[str]:
        from sqlalchemy import inspect, quoted_name
        from sqlalchemy.exc import NoSuchTableError

        # Quoted, since some databases change unquoted names to capitals.
        quoted = quoted_name(name, quote=True)
        try:
            return [str(c["name"]) for c in inspect(self._connection).get_columns(quoted, schema=self._schema)]
        except NoSuchTableError:
            return []
        finally:
            self._finish()

    def tables(self, prefix: str) -> list[str]:
        from sqlalchemy import inspect

        names = inspect(self._connection).get_table_names(schema=self._schema)
        self._finish()
        return [str(n) for n in names if n.startswith(prefix)]


class SqliteClient(SqlAlchemyClient):
    """SQLite: a file. Its driver begins no transaction by itself here (isolation level AUTOCOMMIT)."""

    # A plain BEGIN would fail at the first write, without waiting, where another writer was first.
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

    def key_limits(self, is_user_key: bool) -> KeyLimits:
        return replace(super().key_limits(is_user_key), nul=False)

    def has_role(self, role: str) -> bool | None:
        return bool(self.run(f"SELECT 1 FROM pg_roles WHERE rolname = {self.mark}", [role]))


class MySqlClient(SqlAlchemyClient):
    """MySQL and MariaDB."""

    def key_limits(self, is_user_key: bool) -> KeyLimits:
        # A TEXT column.
        return super().key_limits(is_user_key) if is_user_key else KeyLimits(max_bytes=65_535)

    def type_of(self, spark: str) -> str:
        return "DATETIME(6)" if spark == "timestamp" else super().type_of(spark)


class SqlServerClient(SqlAlchemyClient):
    """SQL Server.

    Readers see one whole version where the database has READ_COMMITTED_SNAPSHOT on: otherwise a reader that waits for a
    publisher's locks goes on with the rows that are there then.
    """

    def type_of(self, spark: str) -> str:
        # SQL Server's TIMESTAMP is a row version, and DATETIME has steps of 3 ms.
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

    def key_limits(self, is_user_key: bool) -> KeyLimits:
        return KeyLimits(max_characters=KEY_CHARACTERS, empty=False) if is_user_key else KeyLimits(4_000, empty=False)

    def type_of(self, spark: str) -> str:
        # A CLOB cannot be compared; DATE has no fractions of a second.
        return {"string": "VARCHAR2(4000 CHAR)", "timestamp": "TIMESTAMP"}.get(spark) or super().type_of(spark)

    def drop_table(self, table: str) -> str:
        # Oracle has IF EXISTS since 23ai. ORA-00942: no such table.
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
    """Return the client of a connection of SQLAlchemy, by its dialect.

    Raises:
        UserError: the driver's parameters are of no known style.
    """
    return _CLIENTS.get(connection.dialect.name, SqlAlchemyClient)(connection, schema)


#: How long SQLite waits for other connections to the file, in seconds.
_PATIENCE_SECONDS = 60


@contextmanager
def open_sqlalchemy(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    assert spec.publish is not None
    conf = spec.publish.warehouse
    assert conf.url is not None, "config refuses the kind without it"
    schema = None if conf.schema_name == "public" else conf.schema_name
    try:
        url = make_url(conf.url)
        address = url.set(query={}).render_as_string()
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
    description = f"the warehouse {address} of {spec.pipeline}"
    try:
        with failures(SQLAlchemyError, description, label, reason_of=reason_of_driver):
            yield SqlTarget(spec, ws, "sqlalchemy", label, address, SqlAlchemyClient, connect, lock)
    finally:
        engine.dispose()
