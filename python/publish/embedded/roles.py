"""The embedded server's passwords, roles and databases, and the erasure of rows from its files.

The superuser's password is its own; all roles that publish share another, which `psql` reads, too.

A DELETE leaves rows in the table's files until they are overwritten. Statistics of columns hold values, and the
write-ahead log holds all rows. So the tables and the catalog of statistics are rewritten (VACUUM FULL), and a
checkpoint removes the log's older segments, which are not reused. A killed erasure leaves a mark, by which the next one
repeats it.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from headrace.config.workspace import Workspace
from headrace.errors import UserError

log = logging.getLogger("headrace.publish")

HOST = "127.0.0.1"
SUPERUSER = "postgres"


def password(ws: Workspace) -> str:
    """Return the password of the embedded server's roles, the superuser excepted.

    Raises:
        UserError: its file is gone.
    """
    return _read_password(ws.postgres, "password")


def make_passwords(folder: Path) -> str:
    """Write new passwords below the server's folder, each to a file of mode 0600; returns the superuser's."""
    secret, superuser = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    for name, text in (
        ("password", f"{secret}\n"),
        ("pgpass", f"{HOST}:*:*:*:{secret}\n"),
        ("superuser", f"{superuser}\n"),
    ):
        _write_secret(folder / name, text)
    return superuser


def ensure_database(folder: Path, port: int, database: str, user: str) -> None:
    """Make the role and the database that are missing."""
    secret = _read_password(folder, "password")
    with superuser_connection(folder, port) as conn:
        if conn.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [user]).fetchone() is None:
            conn.execute(
                sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(user), verifier(conn, user, secret))
            )
        if conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", [database]).fetchone() is None:
            conn.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(database), sql.Identifier(user)))


def superuser_connection(folder: Path, port: int, database: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
    """Return a connection as the superuser, by a password that no other role has.

    A cluster that was made with one password for all roles gets a second one here.

    Raises:
        UserError: the password is not the server's.
    """

    def connect(secret: str) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(
            host=HOST, port=port, user=SUPERUSER, password=secret, dbname=database, autocommit=True, connect_timeout=30
        )

    path = folder / "superuser"
    if not path.is_file():
        # Written before the server is told: whoever is killed in between leaves the next start to tell it.
        _write_secret(path, f"{secrets.token_urlsafe(24)}\n")
    secret = _read_password(folder, "superuser")
    try:
        return connect(secret)
    except psycopg.OperationalError as e:
        if "password authentication" not in str(e):
            raise
    try:
        conn = connect(_read_password(folder, "password"))
    except psycopg.OperationalError:
        raise UserError(
            f"{path} does not hold the password of the embedded PostgreSQL's superuser: put the right one back, or "
            f"move {folder / 'data'} away and publish again (the scores are in the lake)"
        ) from None
    conn.execute(
        sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(SUPERUSER), verifier(conn, SUPERUSER, secret))
    )
    log.info("gave the superuser of the embedded PostgreSQL a password of its own")
    return conn


def verifier(conn: psycopg.Connection[Any], role: str, secret: str) -> sql.Literal:
    """Return a password as the server keeps it: only this travels, so no log of statements can hold the password."""
    return sql.Literal(conn.pgconn.encrypt_password(secret.encode(), role.encode(), b"scram-sha-256").decode())


def _write_secret(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)


def _read_password(folder: Path, name: str) -> str:
    path = folder / name
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise UserError(
            f"{path}, a password of the embedded PostgreSQL, is gone: put it back, or move {folder / 'data'} away "
            f"and publish again (the scores are in the lake)"
        ) from None


#: Below the server's folder: rows were erased, and may be in its files.
_MARK = "erasing"
#: The catalog of statistics; values of columns are in no other one.
_STATISTICS = ("pg_catalog", "pg_statistic")


def is_unfinished(folder: Path) -> bool:
    """Return whether an erasure was killed before the server's files were without its rows."""
    return (folder / _MARK).exists()


@contextmanager
def erased_from_files(folder: Path, port: int, database: str, schema: str, name: str) -> Iterator[None]:
    """Take what the block deletes from a table, and drops, out of the server's files at its end.

    Args:
        folder: the server's (`Workspace.postgres`).
        port: of the running server.
        database: of the table.
        schema: of the table.
        name: of the table; its partitions and what is beside it in the schema are written anew, too.
    """
    (folder / _MARK).touch()
    yield
    with superuser_connection(folder, port, database) as conn:
        tables = conn.execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relkind = 'r' AND (c.relname = %s OR starts_with(c.relname, %s))",
            [schema, name, f"{name}_"],
        ).fetchall()
        for table in tables:
            conn.execute(sql.SQL("VACUUM (FULL, ANALYZE) {}").format(sql.Identifier(*table)))
        _analyze(conn, schema, name)
        conn.execute(sql.SQL("VACUUM (FULL) {}").format(sql.Identifier(*_STATISTICS)))
        # Else segments of the log are renamed for what is still to come, with all that is in them.
        conn.execute("ALTER SYSTEM SET wal_recycle = off")
        conn.execute("SELECT pg_reload_conf()")
        try:
            # The second one begins behind the first, in another segment: no crash needs what is before it.
            for _ in range(2):
                conn.execute("SELECT pg_switch_wal()")
                conn.execute("CHECKPOINT")
        finally:
            conn.execute("ALTER SYSTEM RESET wal_recycle")
            conn.execute("SELECT pg_reload_conf()")
    (folder / _MARK).unlink()


def _analyze(conn: psycopg.Connection[tuple[object, ...]], schema: str, name: str) -> None:
    """Statistics of the whole table, whose partitions have been looked at."""
    if conn.execute("SELECT to_regclass(%s)", [sql.Identifier(schema, name).as_string(conn)]).fetchone() != (None,):
        conn.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(schema, name)))
