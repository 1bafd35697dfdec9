"""The contract of a database's client library, and the SQL statements that headrace runs by it."""

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
def cleanup(clean: Callable[[], object], warning: str) -> Iterator[None]:
    """Call `clean` when the block ends, with or without an error.

    If `clean` fails, log a warning and end the block as it would have ended: its result and its own error stay.

    Args:
        clean: the cleanup; it may raise any error of its client library.
        warning: sentence for the log that tells what remains, and who removes it.
    """
    try:
        yield
    finally:
        try:
            clean()
        except Exception as e:  # each client library has errors of its own
            log.warning("%s (%s)", warning, redact((str(e).splitlines() or [type(e).__name__])[0]))


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


#: Placeholder of a parameter until the driver's own style replaces it; no identifier contains this character.
PARAMETER = "\0"


class TokenOvertaken(Exception):
    """A later holder of the pipeline's lease has changed the table."""


class SqlClient(ABC):
    """A connection to a database. Names are in its SQL only as quoted identifiers, values only as parameters."""

    #: Spark's `simpleString` -> the database's type.
    types: ClassVar[Mapping[str, str]]
    #: The character around identifiers; doubled within a name.
    quotes = '"'
    #: The escape character within quoted identifiers; empty: there is none.
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
    #: Whether to declare a primary key; False for databases that do not check it.
    has_keys = True

    def type_of(self, spark: str) -> str:
        """Return the database's type of one of the `types`."""
        return self.types[spark]

    def key_limits(self, is_user_key: bool) -> KeyLimits:
        """Return the limits of a column of keys, the user's (type `key_type`) or the item's (the type of texts)."""
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
        """Return a statement for a library that formats it by Python's `%`, but only if it has parameters."""
        return statement.replace("%", "%%").replace(PARAMETER, "%s") if params else statement

    @abstractmethod
    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute one statement, and return its rows."""

    @abstractmethod
    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        """Append the rows of Parquet files.

        Args:
            table: quoted.
            columns: of the files and the table, not quoted.
            files: paths of the files, which Spark wrote.
        """

    @abstractmethod
    def columns(self, name: str) -> list[str]:
        """Return the columns of a table or view of the schema, in order; empty where it does not exist."""

    @abstractmethod
    def tables(self, prefix: str) -> list[str]:
        """Return the names of the schema's tables that begin with `prefix`."""

    @property
    def schema(self) -> tuple[str, ...]:
        """The parts of a name before the table's."""
        return ()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in a transaction: all of its statements take effect, or none."""
        self.run(self.begin)
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            with cleanup(lambda: self.run("ROLLBACK"), "ROLLBACK failed: it is done when the connection is closed"):
                raise

    def highest_token(self, fences: str, condition: str, lease: str) -> int:
        """Return the highest token of a table's holders of a lease; 0 without any. See `check_token` for arguments."""
        # max() of no rows is null, or 0 in some databases.
        return int(self.run(f"SELECT max({self.quote('token')}) FROM {fences} WHERE {condition}", [lease])[0][0] or 0)

    def check_token(self, fences: str, condition: str, lease: str, token: int) -> None:
        """Check that no later holder of the lease has changed the table; part of the transaction, if there is one.

        Args:
            fences: the table of tokens, quoted.
            condition: SQL that selects the table's rows of one lease, with one mark for the lease.
            lease: name of the lease.
            token: token of the current holder.

        Raises:
            TokenOvertaken: a later holder has changed the table.
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
        """Return the ordered query `select` limited to its first rows."""
        return f"{select} LIMIT {rows}"

    def replace_day(self, table: str, staging: str, columns: Sequence[str], ds: str) -> list[str]:
        """Return the statements, one transaction's, that make the staged rows the day's; names are quoted."""
        column_list = ", ".join(columns)
        return [
            f"DELETE FROM {table} WHERE {self.quote('ds')} = {self.day(ds)}",
            f"INSERT INTO {table} ({column_list}) SELECT {column_list} FROM {staging}",
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
            condition: SQL that selects the previous record, without marks.
        """
        return [
            f"DELETE FROM {publications} WHERE {condition}",
            f"INSERT INTO {publications} ({names}) VALUES ({values})",
        ]

    def day(self, ds: str) -> str:
        """Return a day as a literal; `ds` must be a valid date."""
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
    """Return a path for the files of one load, below the folder that a spec names."""
    return f"{stage.rstrip('/')}/headrace_{uuid.uuid4().hex[:12]}"


def literal(text: str) -> str:
    """Return a text as a literal of the SQL of Snowflake, BigQuery, Databricks and Redshift.

    A quotation mark is escaped by a backslash, which all of them understand. A doubled mark would end one literal and
    begin another in Databricks, and is not valid in BigQuery.
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
