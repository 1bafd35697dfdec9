"""Any database with transactions that SQLAlchemy has a dialect for; tested: SQLite, PostgreSQL, MySQL's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.errors import UserError
from headrace.publish.passwords import password_of
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Target, table_name
from headrace.workspace import Workspace

#: Rows sent by one call of the driver.
_BATCH_ROWS = 20_000
#: How long SQLite waits for other connections to the file, in seconds.
_PATIENCE_SECONDS = 60
#: Style of a driver's parameters -> a parameter.
_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class SqlAlchemyClient(SqlClient):
    """A connection of SQLAlchemy."""

    types: ClassVar[Mapping[str, str]] = {
        "bigint": "BIGINT",
        "int": "INTEGER",
        "smallint": "SMALLINT",
        "tinyint": "SMALLINT",
        "string": "TEXT",
        "float": "FLOAT",
        "double": "DOUBLE PRECISION",
        "boolean": "BOOLEAN",
        "date": "DATE",
        "timestamp": "TIMESTAMP",
    }

    def __init__(self, connection: Any, schema: str | None) -> None:
        self._connection, self._schema = connection, schema
        self._dialect = connection.dialect
        self._is_sqlite = self._dialect.name == "sqlite"
        # SQLite otherwise finds out at the first write that another writer was first, and does not wait for it then.
        self.begin = "BEGIN IMMEDIATE" if self._is_sqlite else "BEGIN"
        mark = _MARKS.get(self._dialect.paramstyle)
        if mark is None:
            raise UserError(
                f"publish.warehouse.url: the driver {self._dialect.driver} numbers its parameters: use another"
            )
        self.mark = mark

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._schema,) if self._schema else ()

    def quote(self, *parts: str) -> str:
        return ".".join(self._dialect.identifier_preparer.quote_identifier(p) for p in parts)

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        done = self._connection.exec_driver_sql(statement, tuple(params) or None)
        return [tuple(row) for row in done] if done.returns_rows else []

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        import pyarrow.parquet as pq

        marks = ", ".join([self.mark] * len(columns))
        statement = f"INSERT INTO {table} ({', '.join(map(self.quote, columns))}) VALUES ({marks})"
        with self.transaction():
            for file in files:
                for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=list(columns)):
                    rows = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
                    self._connection.exec_driver_sql(statement, rows)

    def columns(self, name: str) -> list[str]:
        from sqlalchemy import inspect
        from sqlalchemy.exc import NoSuchTableError

        try:
            return [str(c["name"]) for c in inspect(self._connection).get_columns(name, schema=self._schema)]
        except NoSuchTableError:
            return []

    def tables(self, prefix: str) -> list[str]:
        from sqlalchemy import inspect

        return [n for n in inspect(self._connection).get_table_names(schema=self._schema) if n.startswith(prefix)]

    def day(self, ds: str) -> str:
        return f"'{ds}'" if self._is_sqlite else super().day(ds)

    def create_view(self, view: str, select: str) -> list[str]:
        if self._is_sqlite:
            return [f"DROP VIEW IF EXISTS {view}", f"CREATE VIEW {view} AS {select}"]
        return super().create_view(view, select)

    def grantee(self, role: str) -> str:
        if self._is_sqlite:
            raise UserError("publish.grants: a SQLite file has no roles; who may read the file may read its tables")
        return super().grantee(role)

    def has_role(self, role: str) -> bool | None:
        if self._dialect.name != "postgresql":
            return None
        return bool(self.run(f"SELECT 1 FROM pg_roles WHERE rolname = {self.mark}", [role]))


@contextmanager
def open_sqlalchemy(spec: Spec, ws: Workspace) -> Iterator[Target]:
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
        password = password_of(conf)
        waits: dict[str, Any] = {"timeout": _PATIENCE_SECONDS} if url.get_backend_name() == "sqlite" else {}
        engine = create_engine(
            url.set(password=password) if password else url,
            isolation_level="AUTOCOMMIT",
            connect_args=waits | dict(conf.options),
        )
    except (ArgumentError, NoSuchModuleError, ImportError) as e:
        raise UserError(f"publish.warehouse.url: {e}; name a dialect and driver that are installed") from None

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        with engine.connect() as connection:
            yield SqlAlchemyClient(connection, schema)

    label = f"{schema}.{table_name(spec)}" if schema else table_name(spec)
    try:
        yield SqlTarget(spec, ws, "sqlalchemy", label, url.render_as_string(), SqlAlchemyClient, connect)
    except SQLAlchemyError as e:
        raise UserError(
            f"the warehouse {url.render_as_string()} of {spec.pipeline} failed: {reason_of(e)}; {label} holds what it "
            f"held before. Run the same command again once that is mended"
        ) from None
    finally:
        engine.dispose()


def reason_of(error: Exception) -> str:
    """The telling line of an error: the driver's own, without statement and parameters."""
    return str(getattr(error, "orig", None) or error).splitlines()[0]
