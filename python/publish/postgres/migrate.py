"""A scores table of an earlier version, one heap of all days, becomes one that is partitioned by day."""

from __future__ import annotations

import logging
import uuid

from psycopg import sql

from headrace.errors import UserError
from headrace.publish.postgres.fencing import claim_in_time, make_fences
from headrace.publish.postgres.server import Connection
from headrace.storage import Fence

log = logging.getLogger("headrace.publish")

_LOCK = "hashtextextended('headrace/partition/' || %s, 0)"

#: What hangs on a table by its identity, not its name, and would go with it.
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
        # Writers wait, readers read on.
        conn.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(old))
        found = conn.execute(
            "SELECT c.oid, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            [schema, name],
        ).fetchone()
        assert found is not None, "locked just now"
        oid, kind = found
        if kind == "p":  # another process was first
            return
        hanging = [str(what) for (what,) in conn.execute(_HANGING, {"oid": oid}).fetchall()]
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
