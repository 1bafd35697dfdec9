"""The tables in the warehouse: their columns, names and definitions. Names go into SQL as quoted identifiers only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from headrace.errors import UserError
from headrace.publish.postgres.server import Connection
from headrace.publish.target import Publication

#: One row for each (table, ds): which run made the day's rows, from what.
PUBLICATIONS = "headrace_publications"
STAGING_PREFIX = "headrace_staging_"
#: Column of a staging table that says which Spark partition wrote the row.
PARTITION = "_partition"

#: Spark's `simpleString` -> PostgreSQL's name of the type (as `format_type` prints it).
_TYPES = {
    "bigint": "bigint",
    "int": "integer",
    "smallint": "smallint",
    "tinyint": "smallint",
    "string": "text",
    "float": "real",
    "double": "double precision",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp with time zone",
}


@dataclass(frozen=True)
class Column:
    """A column of a scores table: its name and PostgreSQL type."""

    name: str
    type: str


@dataclass(frozen=True)
class ScoresTable:
    """A table of published scores: (ds, user, item, rank, score, model_version), keyed by (ds, user, rank)."""

    schema: str
    name: str
    user: str
    item: str
    columns: tuple[Column, ...]

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def id(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def column_ids(self) -> sql.Composed:
        return sql.SQL(", ").join(sql.Identifier(c.name) for c in self.columns)

    def staging(self, ds: str) -> str:
        """The name of the staging table of a day: the same for each attempt, and short enough for any table's name."""
        return STAGING_PREFIX + hashlib.sha256(f"{self.label}/{ds}".encode()).hexdigest()[:24]


def scores_table(schema: str, name: str, user: str, item: str, spark_types: Sequence[tuple[str, str]]) -> ScoresTable:
    """Describe the table for scores of these Spark types.

    Args:
        schema: the warehouse's schema.
        name: the table.
        user: name of the user key.
        item: name of the item key.
        spark_types: (column, `simpleString`) of the lake's scores.

    Raises:
        UserError: a column is missing or has a type that the warehouse's table cannot hold.
    """
    types = dict(spark_types)
    columns = []
    for column in ("ds", user, item, "rank", "score", "model_version"):
        found = types.get(column)
        if found is None:
            raise UserError(
                f"the scores to publish have no column '{column}' (they have {', '.join(types)}): "
                f"run stage 'score' again"
            )
        if found not in _TYPES:
            raise UserError(
                f"the scores' column '{column}' has type {found}, which the warehouse does not take; "
                f"it takes {', '.join(_TYPES)}"
            )
        columns.append(Column(column, "date" if column == "ds" else _TYPES[found]))
    return ScoresTable(schema, name, user, item, tuple(columns))


def create_tables(conn: Connection, table: ScoresTable) -> None:
    """Make what is missing: the schema, the scores table, the publications table.

    Raises:
        UserError: the table is there with other columns or types.
    """
    # IF NOT EXISTS of two sessions at once can still collide in the catalog: one at a time.
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/tables', 0))")
        if conn.execute("SELECT to_regnamespace(quote_ident(%s))", [table.schema]).fetchone() == (None,):
            conn.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(table.schema)))
        if not columns_of(conn, table.schema, table.name):
            defined = sql.SQL(", ").join(
                sql.SQL("{} {} NOT NULL").format(sql.Identifier(c.name), sql.SQL(c.type)) for c in table.columns
            )
            conn.execute(
                sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, PRIMARY KEY ({}, {}, {}))").format(
                    table.id, defined, *(sql.Identifier(n) for n in ("ds", table.user, "rank"))
                )
            )
        conn.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {} (table_name text, ds date, key text NOT NULL, rows bigint NOT NULL, "
                "model text NOT NULL, source text NOT NULL, audit jsonb NOT NULL, "
                "published_at timestamp with time zone NOT NULL, "
                "PRIMARY KEY (table_name, ds))"
            ).format(sql.Identifier(table.schema, PUBLICATIONS))
        )
    wanted = {c.name: c.type for c in table.columns}
    found = columns_of(conn, table.schema, table.name)
    if found != wanted:
        faults = [f"'{n}' is {found.get(n, 'missing')}, not {t}" for n, t in wanted.items() if found.get(n) != t]
        faults += [f"'{n}' is unknown" for n in found if n not in wanted]
        raise UserError(
            f"table {table.label} does not fit the scores: {'; '.join(faults)}. Publish to another table "
            f"(publish.table) or change this one"
        )


def columns_of(conn: Connection, schema: str, name: str) -> dict[str, str]:
    """Column -> type of a table, in order; empty where there is no such table."""
    rows: list[tuple[Any, ...]] = conn.execute(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a "
        "JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped "
        "ORDER BY a.attnum",
        [schema, name],
    ).fetchall()
    return {str(n): str(t) for n, t in rows}


def published(conn: Connection, schema: str, name: str, ds: str) -> Publication | None:
    """The day's publication; None where there is none."""
    if not columns_of(conn, schema, PUBLICATIONS) or not columns_of(conn, schema, name):
        return None
    found = conn.execute(
        sql.SQL("SELECT key, rows, audit FROM {} WHERE table_name = %s AND ds = %s").format(
            sql.Identifier(schema, PUBLICATIONS)
        ),
        [name, ds],
    ).fetchone()
    return None if found is None else Publication(str(found[0]), int(found[1]), list(found[2]))


def count_day(conn: Connection, schema: str, name: str, ds: str) -> int:
    """Rows of the day in a scores table."""
    found = conn.execute(
        sql.SQL("SELECT count(*) FROM {} WHERE ds = %s").format(sql.Identifier(schema, name)), [ds]
    ).fetchone()
    assert found is not None
    return int(found[0])
