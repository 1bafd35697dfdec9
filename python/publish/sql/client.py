"""The contract of a database's client library, and the SQL that is written for it."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from headrace.config.schema import quoted
from headrace.logs import redact
from headrace.publish.target import KeyLimits

log = logging.getLogger("headrace.publish")


@contextmanager
def cleaned_up(clean: Callable[[], object], left: str) -> Iterator[None]:
    """Call `clean` when the block ends, well or not.

    Where that fails the log says so, and the block ends as it would have: an error in it is the one that is seen, and
    what was done in it is done.

    Args:
        clean: it raises an error of its client library where it fails.
        left: what there is then, and who removes it, for people.
    """
    try:
        yield
    finally:
        try:
            clean()
        except Exception as e:  # each client library has errors of its own
            log.warning("%s (%s)", left, redact((str(e).splitlines() or [type(e).__name__])[0]))


#: Spark's `simpleString` -> the type in standard SQL.
ANSI_TYPES: Mapping[str, str] = {
    "bigint": "BIGINT",
    "int": "INTEGER",
    "smallint": "SMALLINT",
    "tinyint": "TINYINT",
    "string": "VARCHAR",
    "float": "FLOAT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "timestamp": "TIMESTAMP WITH TIME ZONE",
}


#: Placeholder of a parameter until the driver's own style replaces it: no identifier has this character.
PARAMETER = "\0"


class TokenOvertaken(Exception):
    """A later holder of the pipeline's lease has been at work on the table."""


class SqlClient(ABC):
    """A connection to a database. Names go into its SQL as quoted identifiers only, values as parameters."""

    #: Spark's `simpleString` -> the database's type.
    types: ClassVar[Mapping[str, str]]
    #: The character around identifiers; doubled within a name.
    quotes = '"'
    #: The character that escapes others in a quoted identifier; empty: there is none.
    escape = ""
    #: Placeholder of a parameter in statements.
    mark = "?"
    #: The statement that begins a transaction.
    begin = "BEGIN"
    #: Types of the publications' columns: text that can be a key, text of any length, a timestamp, a count.
    key_type, text_type, moment_type, count_type = "VARCHAR(255)", "TEXT", "TIMESTAMP", "BIGINT"
    #: Suffixes of the CREATE statements of the publications, the grants and the tokens.
    publications_options = grants_options = fences_options = ""
    #: Whether one transaction covers a day, its record and the check of the token.
    transactions = True
    #: Whether to declare a primary key: databases that do not check it gain nothing.
    has_keys = True

    def type_of(self, spark: str) -> str:
        """Return the database's type of one of the `types`."""
        return self.types[spark]

    def key_limits(self, of_user: bool) -> KeyLimits:
        """Return what a column of keys holds: the user's is of `key_type`, the item's of the type of texts."""
        return KeyLimits()

    def optional(self, kind: str) -> str:
        """Return the type of a column that may be null."""
        return kind

    def table_options(self, user: str) -> str:
        """Return the end of a scores table's definition; `user` is the column of the user key."""
        return ""

    def quote(self, *parts: str) -> str:
        """Return an identifier, its parts joined by dots."""
        return ".".join(quoted(part, self.quotes, self.escape) for part in parts)

    def formatted(self, statement: str, params: Sequence[Any]) -> str:
        """Return a statement for a library that puts its parameters in by Python's `%`, and does not without any."""
        return statement.replace("%", "%%").replace(PARAMETER, "%s") if params else statement

    @abstractmethod
    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute one statement. Its rows, if it has any."""

    @abstractmethod
    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        """Append the rows of Parquet files.

        Args:
            table: quoted.
            columns: of the files and the table, not quoted.
            files: where Spark wrote them.
        """

    @abstractmethod
    def columns(self, name: str) -> list[str]:
        """Return the columns of a table or view of the schema, in order; none where there is no such one."""

    @abstractmethod
    def tables(self, prefix: str) -> list[str]:
        """Return the names of the schema's tables that begin so."""

    @property
    def schema(self) -> tuple[str, ...]:
        """The parts of a name before the table's."""
        return ()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements of the block, or none of them."""
        self.run(self.begin)
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            with cleaned_up(lambda: self.run("ROLLBACK"), "ROLLBACK failed: it is done when the connection is closed"):
                raise

    def highest_token(self, fences: str, condition: str, lease: str) -> int:
        """Return the highest token of a table's holders of a lease; 0 without any. See `check_token` for arguments."""
        # max() of no rows is null, or 0 in some databases.
        return int(self.run(f"SELECT max({self.quote('token')}) FROM {fences} WHERE {condition}", [lease])[0][0] or 0)

    def check_token(self, fences: str, condition: str, lease: str, token: int) -> None:
        """Check that a holder may go on; where there are transactions it is one of their statements.

        Args:
            fences: the table of tokens, quoted.
            condition: the condition of a table's rows of a lease, with one mark: the lease.
            lease: which.
            token: of the holder.

        Raises:
            TokenOvertaken: a later holder has been here.
        """
        if self.highest_token(fences, condition, lease) > token:
            raise TokenOvertaken

    def create_view(self, view: str, select: str) -> list[str]:
        """Return the statements that make or replace a view (quoted)."""
        return [f"CREATE OR REPLACE VIEW {view} AS {select}"]

    def create_staging(self, staging: str, table: str, columns: Sequence[str]) -> list[str]:
        """Return the statements that make an empty table (both quoted) with the columns of another."""
        return [f"CREATE TABLE {staging} AS SELECT {', '.join(columns)} FROM {table} WHERE 1 = 0"]

    def drop_table(self, table: str) -> str:
        """Return the statement that removes a table (quoted), if it is there."""
        return f"DROP TABLE IF EXISTS {table}"

    def add_column(self, table: str, definition: str) -> str:
        """Return the statement that adds a column to a table (quoted)."""
        return f"ALTER TABLE {table} ADD COLUMN {definition}"

    def first_rows(self, select: str, rows: int) -> str:
        """Return a query, which has an order, of at most so many rows."""
        return f"{select} LIMIT {rows}"

    def replace_day(self, table: str, staging: str, columns: Sequence[str], ds: str) -> list[str]:
        """Return the statements, one transaction's, that make the staged rows the day's; names are quoted."""
        listed = ", ".join(columns)
        return [
            f"DELETE FROM {table} WHERE {self.quote('ds')} = {self.day(ds)}",
            f"INSERT INTO {table} ({listed}) SELECT {listed} FROM {staging}",
        ]

    def delete_day(self, table: str, ds: str) -> str:
        """Return the statement that removes a day's rows; `table` is quoted."""
        return f"DELETE FROM {table} WHERE {self.quote('ds')} = {self.day(ds)}"

    def delete_rows(self, table: str, condition: str) -> str:
        """Return the statement that removes rows for good; `table` is quoted."""
        return f"DELETE FROM {table} WHERE {condition}"

    def update_rows(self, table: str, change: str, condition: str) -> str:
        """Return the statement that changes columns of rows; `table` is quoted."""
        return f"UPDATE {table} SET {change} WHERE {condition}"

    def replace_record(self, publications: str, names: str, values: str, condition: str) -> list[str]:
        """Return the statements that replace a record; the last of them has the values' marks.

        Args:
            publications: the table, quoted.
            names: the columns, quoted.
            values: marks and literals.
            condition: the condition of the record before, without marks.
        """
        return [
            f"DELETE FROM {publications} WHERE {condition}",
            f"INSERT INTO {publications} ({names}) VALUES ({values})",
        ]

    def day(self, ds: str) -> str:
        """Return a day as a literal; it was parsed as a date."""
        return f"DATE '{ds}'"

    def rights(self, privilege: str, table: str, view: str) -> list[str]:
        """Return the text between GRANT and TO: a privilege on a table and on a view, both quoted."""
        return [f"{privilege.upper()} ON {name}" for name in (table, view)]

    def grantee(self, role: str) -> str:
        """Return the text after TO and FROM. Raises UserError where the database has no roles."""
        return self.quote(role)

    def has_role(self, role: str) -> bool | None:
        """Return whether the database has the role; None where its catalog is not open to everybody."""
        return None


def load_folder(stage: str) -> str:
    """Return a new folder below the place that a spec names, for one load."""
    return f"{stage.rstrip('/')}/headrace_{uuid.uuid4().hex[:12]}"


def literal(text: str) -> str:
    """Return a text as a literal of the SQL of Snowflake, BigQuery, Databricks and Redshift.

    A quotation mark has a backslash before it, as all of them read it: two of them end one literal and begin another in
    Databricks, and are none in BigQuery.
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
