"""What any database is asked by SQLAlchemy: its dialect says types, quotes and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from headrace.errors import UserError
from headrace.publish.sql.cleanup import cleaned_up
from headrace.publish.sql.client import PARAMETER, SqlClient
from headrace.publish.unfit_keys import KeyLimits

#: Characters of a text that can be a key.
KEY_CHARACTERS = 255
#: Rows sent by one call of the driver.
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

    def key_limits(self, of_user: bool) -> KeyLimits:
        return KeyLimits(max_characters=KEY_CHARACTERS if of_user else None)

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
        # The driver begins one with the first statement.
        self._in_transaction = True
        try:
            yield
            self._connection.commit()
        except BaseException:
            with cleaned_up(self._connection.rollback, "ROLLBACK failed: it is done when the connection is closed"):
                raise
        finally:
            self._in_transaction = False

    def _finish(self) -> None:
        """End the transaction that the driver began with a statement, unless it is one of several."""
        if not self._in_transaction:
            self._connection.commit()

    def _marked(self, statement: str) -> str:
        """A statement with its parameters as the driver writes them."""
        first, *rest = statement.split(PARAMETER)
        written = _MARKS[self._dialect.paramstyle]
        return first + "".join(written.format(n=n) + text for n, text in enumerate(rest, 1))

    def _bound(self, values: Sequence[Any]) -> Any:
        """The values of a statement's parameters as the driver takes them."""
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

        # Databases that write names in capitals have ours as they stand, since they are quoted.
        asked = quoted_name(name, quote=True)
        try:
            return [str(c["name"]) for c in inspect(self._connection).get_columns(asked, schema=self._schema)]
        except NoSuchTableError:
            return []
        finally:
            self._finish()

    def tables(self, prefix: str) -> list[str]:
        from sqlalchemy import inspect

        found = inspect(self._connection).get_table_names(schema=self._schema)
        self._finish()
        return [str(n) for n in found if n.startswith(prefix)]
