"""The tables in PostgreSQL: columns, names, definitions, and the partitioning of tables of earlier versions.

Names go into SQL as quoted identifiers only.

Commits are fenced: a row for each lease has the token of its newest holder. The row is raised in the transaction that
it guards, which holds it until its end: whoever comes with a larger token waits, and whoever comes with a smaller one
afterwards is refused with all that its transaction has done.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from headrace.errors import BusyError, UserError
from headrace.publish.postgres.server import Connection
from headrace.publish.target import SCORES, Publication, lease_lost, published_columns
from headrace.storage import Fence

#: One row for each (table, lease).
FENCES = "headrace_fences"
#: Default wait for a locked row.
_WAIT_SECONDS = 60


def make_fences(conn: Connection, schema: str, fence: Fence | None) -> None:
    """Make the table of tokens where there is none; call it before the transaction locks anything else."""
    if fence is None:
        return
    existing = conn.execute("SELECT to_regclass(format('%%I.%%I', %s::text, %s::text))", [schema, FENCES]).fetchone()
    if existing != (None,):
        return
    with conn.transaction():
        # IF NOT EXISTS of two sessions can still collide in the catalog: one at a time.
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/tables', 0))")
        conn.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {} (table_name text, lease text, token bigint NOT NULL, "
                "claimed_at timestamp with time zone NOT NULL, PRIMARY KEY (table_name, lease))"
            ).format(sql.Identifier(schema, FENCES))
        )


def claim(conn: Connection, schema: str, name: str, fence: Fence | None) -> None:
    """Note a holder's token for a table; the first statement of the transaction that changes it.

    First, so that all take the row before they take the table: none waits for another that waits for it.

    Args:
        conn: the warehouse, in a transaction, after `make_fences`.
        schema: the table's schema.
        name: the table.
        fence: of the holder; None: there is no lease.

    Raises:
        LeaseLost: a later holder has been here.
    """
    if fence is None:
        return
    record = sql.Identifier(schema, FENCES)
    claimed = conn.execute(
        sql.SQL(
            "INSERT INTO {} AS f (table_name, lease, token, claimed_at) VALUES (%s, %s, %s, now()) "
            "ON CONFLICT (table_name, lease) DO UPDATE SET token = excluded.token, claimed_at = excluded.claimed_at "
            "WHERE f.token <= excluded.token RETURNING token"
        ).format(record),
        [name, fence.lease, fence.token],
    ).fetchone()
    if claimed is None:
        raise lease_lost(f"{schema}.{name}")


def claim_in_time(conn: Connection, schema: str, name: str, fence: Fence | None) -> None:
    """Claim in a transaction without a `lock_timeout` of its own: the wait for the row is limited.

    Call it before the transaction takes a lock that other pipelines want.

    Raises:
        BusyError: a transaction of another run holds the row for a minute: its client may stand still.
        LeaseLost: a later holder has been here.
    """
    if fence is None:
        return
    conn.execute(f"SET LOCAL lock_timeout = '{_WAIT_SECONDS} s'")
    try:
        claim(conn, schema, name, fence)
    except psycopg.errors.LockNotAvailable:
        raise BusyError(
            f"another run is changing {schema}.{name} and has held its row in {FENCES} for {_WAIT_SECONDS} s: wait for "
            f"it, or end its session (pg_stat_activity, application headrace)"
        ) from None
    conn.execute("SET LOCAL lock_timeout TO DEFAULT")


log = logging.getLogger("headrace.publish")

_LOCK = "hashtextextended('headrace/partition/' || %s, 0)"

#: Objects that depend on the table itself, not on its name: dropping the table would drop them.
_HANGING = """
SELECT 'view ' || r.ev_class::regclass FROM pg_rewrite r JOIN pg_depend d ON d.objid = r.oid
  AND d.classid = 'pg_rewrite'::regclass WHERE d.refobjid = %(oid)s AND r.ev_class <> %(oid)s
UNION SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid = %(oid)s AND NOT tgisinternal
UNION SELECT 'policy ' || polname FROM pg_policy WHERE polrelid = %(oid)s
UNION SELECT 'foreign key ' || conname FROM pg_constraint WHERE contype = 'f' AND %(oid)s IN (conrelid, confrelid)
ORDER BY 1
"""


def partition_by_day(conn: Connection, schema: str, name: str, fence: Fence | None = None) -> None:
    """Copy each day into a table of its own beside the old one, and put a partitioned table of these in its place.

    One transaction: readers use the old table until it ends, and if it does not, the old table is as it was. It needs
    room for the rows twice. Columns, defaults, constraints, indexes and rights are kept.

    Raises:
        UserError: views, triggers, policies or foreign keys hang on the old table.
        LeaseLost: a later holder of the lease (`fence`: of this one) has been at work on the table.
    """
    old, token = sql.Identifier(schema, name), uuid.uuid4().hex[:8]
    new_name = f"{name[:50]}_new_{token}"
    new = sql.Identifier(schema, new_name)
    make_fences(conn, schema, fence)
    with conn.transaction():
        claim_in_time(conn, schema, name, fence)
        conn.execute(f"SELECT pg_advisory_xact_lock({_LOCK})", [f"{schema}.{name}"])
        # This lock blocks writers, not readers.
        conn.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(old))
        relation = conn.execute(
            "SELECT c.oid, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            [schema, name],
        ).fetchone()
        assert relation is not None, "locked just now"
        oid, kind = relation
        if kind == "p":  # another process was first
            return
        hanging = [str(description) for (description,) in conn.execute(_HANGING, {"oid": oid}).fetchall()]
        if hanging:
            raise UserError(
                f"{schema}.{name} was made by an earlier version as one table of all days, and is to be partitioned by "
                f"day now, but these hang on it: {', '.join(hanging)}. Drop them and make them again afterwards, or "
                f"publish to another table (publish.table)"
            )
        days = [d for (d,) in conn.execute(sql.SQL("SELECT DISTINCT ds FROM {} ORDER BY ds").format(old)).fetchall()]
        log.info("partitioning %s.%s by day: %d days", schema, name, len(days))
        parts = [(day, sql.Identifier(schema, f"{name[:39]}_{day:%Y%m%d}_{token}")) for day in days]
        for day, part in parts:
            conn.execute(sql.SQL("CREATE TABLE {} (LIKE {} INCLUDING ALL)").format(part, old))
            conn.execute(sql.SQL("ALTER TABLE {} ADD CHECK (ds = {})").format(part, sql.Literal(day)))
            conn.execute(sql.SQL("INSERT INTO {} SELECT * FROM {} WHERE ds = {}").format(part, old, sql.Literal(day)))
        conn.execute(sql.SQL("CREATE TABLE {} (LIKE {} INCLUDING ALL) PARTITION BY LIST (ds)").format(new, old))
        rights = conn.execute(
            "SELECT CASE a.grantee WHEN 0 THEN NULL ELSE pg_get_userbyid(a.grantee) END, a.privilege_type, "
            "a.is_grantable FROM pg_class c, aclexplode(c.relacl) a WHERE c.oid = %s AND a.grantee <> c.relowner",
            [oid],
        ).fetchall()
        for role, privilege, grantable in rights:
            conn.execute(
                sql.SQL("GRANT {} ON {} TO {}{}").format(
                    sql.SQL(privilege),
                    new,
                    sql.SQL("PUBLIC") if role is None else sql.Identifier(role),
                    sql.SQL(" WITH GRANT OPTION" if grantable else ""),
                )
            )
        conn.execute(sql.SQL("DROP TABLE {}").format(old))
        conn.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(new, sql.Identifier(name)))
        for day, part in parts:
            conn.execute(
                sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES IN ({})").format(old, part, sql.Literal(day))
            )


#: One row for each (table, ds): which run made the day's rows, from what.
PUBLICATIONS = "headrace_publications"
STAGING_PREFIX = "headrace_staging_"

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
    nullable: bool = False


@dataclass(frozen=True)
class ScoresTable:
    """A table of published scores: (ds, user, item, rank, score, model_version, ...), keyed by (ds, user, rank).

    It is partitioned by day: PARTITION BY LIST (ds), one partition a day.
    """

    schema: str
    name: str
    user: str
    item: str
    #: Those of the scores; the table may have more, that may be null.
    columns: tuple[Column, ...]

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def id(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def current_id(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.current)

    @property
    def current(self) -> str:
        """The name of the view of the newest published day."""
        return f"{self.name}_current"

    @property
    def column_ids(self) -> sql.Composed:
        return sql.SQL(", ").join(sql.Identifier(c.name) for c in self.columns)

    @property
    def key(self) -> sql.Composed:
        return sql.SQL(", ").join(sql.Identifier(n) for n in ("ds", self.user, "rank"))

    def staging(self, ds: str) -> str:
        """Return the prefix of a day's staging tables, which is also the name of the live one's lock."""
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
    columns = published_columns(user, item, spark_types, _TYPES)
    return ScoresTable(
        schema,
        name,
        user,
        item,
        tuple(Column(n, "date" if n == "ds" else _TYPES[t], nullable=i >= SCORES) for i, (n, t) in enumerate(columns)),
    )


def make_schema(conn: Connection, schema: str) -> None:
    """Make a schema where there is none; to look costs no right, to make it that of creating one."""
    if conn.execute("SELECT to_regnamespace(quote_ident(%s))", [schema]).fetchone() != (None,):
        return
    with conn.transaction():
        # IF NOT EXISTS of two sessions can still collide in the catalog: one at a time.
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/tables', 0))")
        conn.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))


def create_tables(conn: Connection, table: ScoresTable, fence: Fence | None = None) -> None:
    """Make what is missing: schema, scores table, new columns of it, publications table, the current view.

    A scores table that is not partitioned, as earlier versions made it, is copied into one that is.

    Raises:
        UserError: the table is there with other columns or types, or what depends on it hinders its partitioning.
        BusyError: a transaction of another run holds the table's row of `headrace_fences`.
        LeaseLost: a later holder of the lease (`fence`: of this one) has been at work on the table.
    """
    if relation_kind(conn, table.schema, table.name) == "r":
        fault = _misfit(conn, table)
        if fault:
            raise UserError(fault)
        partition_by_day(conn, table.schema, table.name, fence)
    make_schema(conn, table.schema)
    make_fences(conn, table.schema, fence)
    with conn.transaction():
        claim_in_time(conn, table.schema, table.name, fence)
        # IF NOT EXISTS of two sessions can still collide in the catalog: one at a time. Taken after the row's lock,
        # so that a run that waits for its row blocks no other pipeline.
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/tables', 0))")
        if relation_kind(conn, table.schema, table.name) is None:
            defined = sql.SQL(", ").join(_definition(c) for c in table.columns)
            conn.execute(
                sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({})) PARTITION BY LIST (ds)").format(
                    table.id, defined, table.key
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
        fault = _misfit(conn, table)
        if fault is None:
            existing = columns_of(conn, table.schema, table.name)
            for column in table.columns:
                if column.name not in existing:
                    conn.execute(sql.SQL("ALTER TABLE {} ADD COLUMN {}").format(table.id, _definition(column)))
            _create_current_view(conn, table)
    if fault:
        raise UserError(fault)


def _definition(column: Column) -> sql.Composed:
    return sql.SQL("{} {}{}").format(
        sql.Identifier(column.name), sql.SQL(column.type), sql.SQL("" if column.nullable else " NOT NULL")
    )


def _misfit(conn: Connection, table: ScoresTable) -> str | None:
    """Return why the existing table cannot take the scores, or None."""
    existing, required_types = columns_of(conn, table.schema, table.name), {c.name: c.type for c in table.columns}
    required = required_columns(conn, table.schema, table.name)
    faults = [
        f"'{c.name}' is {existing.get(c.name, 'missing')}, not {c.type}"
        for c in table.columns
        if (c.name in existing or not c.nullable) and existing.get(c.name) != c.type
    ]
    faults += [f"'{n}' is unknown and must not be null" for n in existing if n not in required_types and n in required]
    if not faults:
        return None
    return (
        f"table {table.label} does not fit the scores: {'; '.join(faults)}. Publish to another table "
        f"(publish.table) or change this one"
    )


def _create_current_view(conn: Connection, table: ScoresTable) -> None:
    """`<table>_current`: the newest day of the publications. It needs no change when a day is published."""
    kind = relation_kind(conn, table.schema, table.current)
    if kind not in (None, "v"):
        raise UserError(
            f"{table.schema}.{table.current} is to be the view of the newest day of {table.label}, and there is "
            f"something else of that name: rename it, or publish to another table (publish.table)"
        )
    columns = columns_of(conn, table.schema, table.name)
    # Replacing a view waits for its readers: only where a column is new.
    if kind is None or columns_of(conn, table.schema, table.current) != columns:
        conn.execute(
            sql.SQL(
                "CREATE OR REPLACE VIEW {} AS SELECT {} FROM {} "
                "WHERE ds = (SELECT max(p.ds) FROM {} AS p WHERE p.table_name = {})"
            ).format(
                table.current_id,
                sql.SQL(", ").join(sql.Identifier(n) for n in columns),
                table.id,
                sql.Identifier(table.schema, PUBLICATIONS),
                sql.Literal(table.name),
            )
        )


def relation_kind(conn: Connection, schema: str, name: str) -> str | None:
    """`pg_class.relkind`: r is a table, p a partitioned one, v a view; None where there is nothing of that name."""
    row = conn.execute(
        "SELECT c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s",
        [schema, name],
    ).fetchone()
    return None if row is None else str(row[0])


def columns_of(conn: Connection, schema: str, name: str) -> dict[str, str]:
    """Column -> type of a table or view, in order; empty where there is no such one."""
    return {str(n): str(t) for n, t, _ in _attributes(conn, schema, name)}


def required_columns(conn: Connection, schema: str, name: str) -> list[str]:
    """Return the columns of a table that must not be null."""
    return [str(n) for n, _, required in _attributes(conn, schema, name) if required]


def _attributes(conn: Connection, schema: str, name: str) -> list[tuple[Any, ...]]:
    return conn.execute(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull FROM pg_attribute a "
        "JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p', 'v') AND a.attnum > 0 "
        "AND NOT a.attisdropped ORDER BY a.attnum",
        [schema, name],
    ).fetchall()


def published(conn: Connection, schema: str, name: str, ds: str) -> Publication | None:
    """Return the day's publication; None where there is none."""
    if not columns_of(conn, schema, PUBLICATIONS) or not columns_of(conn, schema, name):
        return None
    row = conn.execute(
        sql.SQL("SELECT key, rows, audit FROM {} WHERE table_name = %s AND ds = %s").format(
            sql.Identifier(schema, PUBLICATIONS)
        ),
        [name, ds],
    ).fetchone()
    return None if row is None else Publication(str(row[0]), int(row[1]), list(row[2]))


def published_days(conn: Connection, schema: str, name: str) -> dict[str, int]:
    """Return the number of rows by published day, oldest first."""
    if not columns_of(conn, schema, PUBLICATIONS):
        return {}
    rows = conn.execute(
        sql.SQL("SELECT ds, rows FROM {} WHERE table_name = %s ORDER BY ds").format(
            sql.Identifier(schema, PUBLICATIONS)
        ),
        [name],
    ).fetchall()
    return {ds.isoformat(): int(count) for ds, count in rows}


def count_day(conn: Connection, schema: str, name: str, ds: str) -> int:
    """Rows of the day in a scores table."""
    row = conn.execute(
        sql.SQL("SELECT count(*) FROM {} WHERE ds = %s").format(sql.Identifier(schema, name)), [ds]
    ).fetchone()
    assert row is not None
    return int(row[0])


def sample(conn: Connection, schema: str, name: str, ds: str, n: int = 10) -> list[dict[str, Any]]:
    """Return the first rows of a day, by primary key: column -> value, in the table's order of columns.

    Args:
        conn: the warehouse.
        schema: the table's schema; any text, dots included.
        name: the table.
        ds: the day.
        n: rows.
    """
    table = sql.Identifier(schema, name)
    cursor = conn.execute(sql.SQL("SELECT * FROM {} WHERE ds = %s ORDER BY 1, 2, 4 LIMIT %s").format(table), [ds, n])
    columns = [c.name for c in cursor.description or ()]
    return [dict(zip(columns, row, strict=True)) for row in cursor]
