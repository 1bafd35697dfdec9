"""The embedded server's passwords, roles and databases.

The superuser's password is its own; all roles that publish share another, which `psql` reads, too.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from headrace.errors import UserError
from headrace.workspace import Workspace

log = logging.getLogger("headrace.publish")

HOST = "127.0.0.1"
SUPERUSER = "postgres"


def password(ws: Workspace) -> str:
    """The password of the embedded server's roles, the superuser excepted.

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
    """A connection as the superuser, by a password that no other role has.

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
    """A password as the server keeps it: only this travels, so no log of statements can hold the password."""
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
