"""Who may read a scores table: rights are given as a spec names them, and taken back where it no longer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psycopg import sql

from headrace.publish.postgres.fencing import claim_in_time, make_fences
from headrace.publish.postgres.server import Connection
from headrace.publish.postgres.tables import ScoresTable, columns_of
from headrace.storage import Fence

#: One row for each (table, privilege, role) that was given; of the use of the schema, the table is ''.
GRANTS = "headrace_grants"

_USAGE = ("", "usage")


def set_grants(
    conn: Connection, table: ScoresTable, grants: Mapping[str, Sequence[str]], fence: Fence | None = None
) -> None:
    """Make these the rights that we have given on the table and its view, and to use the schema; all, or none of it.

    Rights that others have given, or that were given before they were recorded, stay. A role's use of the schema is
    taken back with the last of its rights there, if it did not have it before the first.

    Args:
        conn: the warehouse.
        table: which; it is there, and its view.
        grants: privilege -> roles, as `publish.grants`.
        fence: of the holder of the lease under which the table is written.

    Raises:
        BusyError: a transaction of another run holds the table's row of `headrace_fences`.
        LeaseLost: a later holder has been at work on the table; nothing was changed.
    """
    wanted = {(privilege, role) for privilege, roles in grants.items() for role in roles}
    record, schema = sql.Identifier(table.schema, GRANTS), sql.Identifier(table.schema)
    make_fences(conn, table.schema, fence)
    with conn.transaction():
        claim_in_time(conn, table.schema, table.name, fence)
        # One at a time: pipelines share the record and the schema. After the row: who waits for that hinders no other.
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/tables', 0))")
        if not columns_of(conn, table.schema, GRANTS):
            if not wanted:
                return
            conn.execute(
                sql.SQL(
                    "CREATE TABLE {} (table_name text, privilege text, role text, "
                    "PRIMARY KEY (table_name, privilege, role))"
                ).format(record)
            )
        given = conn.execute(
            sql.SQL("SELECT privilege, role FROM {} WHERE table_name = %s").format(record), [table.name]
        )
        ours = {(str(privilege), str(role)) for privilege, role in given.fetchall()}

        def note(statement: str, name: str, privilege: str, role: str) -> None:
            conn.execute(sql.SQL(statement).format(record), [name, privilege, role])

        add = "INSERT INTO {} VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
        remove = "DELETE FROM {} WHERE table_name = %s AND privilege = %s AND role = %s"
        for privilege, role in sorted(ours - wanted):
            note(remove, table.name, privilege, role)
            if conn.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
                continue
            conn.execute(
                sql.SQL("REVOKE {} ON {}, {} FROM {}").format(
                    sql.SQL(privilege.upper()), table.id, table.current_id, sql.Identifier(role)
                )
            )
            left = conn.execute(
                sql.SQL("SELECT array_agg(table_name) FROM {} WHERE role = %s").format(record), [role]
            ).fetchone()
            # The last one, and not wanted for another privilege.
            if left == ([""],) and role not in {r for _, r in wanted}:
                note(remove, *_USAGE, role)
                conn.execute(sql.SQL("REVOKE USAGE ON SCHEMA {} FROM {}").format(schema, sql.Identifier(role)))
        for privilege, role in sorted(wanted):
            note(add, table.name, privilege, role)
            uses = conn.execute("SELECT has_schema_privilege(%s, %s, 'USAGE')", [role, table.schema]).fetchone()
            if uses != (True,):
                note(add, *_USAGE, role)
                conn.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schema, sql.Identifier(role)))
            conn.execute(
                sql.SQL("GRANT {} ON {}, {} TO {}").format(
                    sql.SQL(privilege.upper()), table.id, table.current_id, sql.Identifier(role)
                )
            )
