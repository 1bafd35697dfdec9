"""MLflow's store of a workspace: a tracking server, or an SQLite file that is there with all its tables, or not at all.

MLflow makes its tables by some fifty migrations, none of them in a transaction that SQLite could undo: a store whose
making was killed cannot be opened ever after. So a new one is made under another name, and renamed when it is whole.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.storage import Location, local
from headrace.storage.lease import Held
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("headrace.registry")
#: Another process makes the store: how often to look, and for how long. It takes some three seconds.
_LOOK_SECONDS = 0.1
_WAIT_SECONDS = 300
#: That a question waits for a writer of the file.
_LOCKED_SECONDS = 10
#: What is registered has rows in one of these.
_TABLES = ("runs", "registered_models")


def store_file(ws: Workspace) -> Location:
    """Where the workspace's store is."""
    return local(ws.registry_uri.removeprefix("sqlite:///"))


def is_there(ws: Workspace) -> bool:
    """Whether anything can have been registered: a server may hold it, a file that is not there does not."""
    return ws.registry_server is not None or store_file(ws).is_file()


def missing_version(ws: Workspace, registered: Mapping[str, Any] | None) -> str | None:
    """Return why the registry does not have the version that a manifest names, or None. MLflow is not imported.

    A tracking server is not asked: it answers for what it keeps.

    Args:
        ws: the workspace.
        registered: `name` and `version`, as manifests have them; None: nothing was registered.

    Raises:
        UserError: the file is damaged, so that nobody can know what was registered.
    """
    if not is_there(ws):
        return "the model registry is gone"
    if ws.registry_server is not None:
        return None
    file = store_file(ws)
    if file.size() == 0:
        return f"the model registry {file} has 0 bytes"
    try:
        # Not read-only: what a power cut left of a transaction is rolled back by whoever opens the file first.
        with closing(sqlite3.connect(f"{Path(file.path).as_uri()}?mode=rw", uri=True, timeout=_LOCKED_SECONDS)) as db:
            found = [str(said) for (said,) in db.execute("PRAGMA integrity_check(1)")]
            if found != ["ok"]:
                raise sqlite3.DatabaseError(found[0].splitlines()[-1])
            if registered is None:
                return None
            of = (registered["name"], int(registered["version"]))
            row = db.execute("SELECT 1 FROM model_versions WHERE name = ? AND version = ?", of).fetchone()
    except sqlite3.OperationalError as e:
        if "locked" in str(e):  # others are writing
            return None
        if "no such table" not in str(e):
            raise
        row = None
    except sqlite3.DatabaseError as e:
        raise UserError(
            f"the model registry {file} is damaged ({file.size():,} bytes: {e}). Put it back from a backup, or move it "
            f"away: models stay where they are, and the next run registers its own anew, from version 1"
        ) from None
    return None if row is not None else f"version {of[1]} of model '{of[0]}' is not in {file}"


def open_store(ws: Workspace) -> MlflowClient:
    """A client of the workspace's store; a file is made where there is none.

    Raises:
        mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError: it cannot be opened.
        TimeoutError: another process has been making it for too long.
    """
    if ws.registry_server is not None:
        return _client_of(ws.registry_server)
    file = store_file(ws)
    if file.is_file() and file.size() == 0 and not (file.parent / f"{file.name}-journal").is_file():
        log.warning("the model registry %s has 0 bytes: it is made anew", file)
        file.remove()
    if not file.is_file():
        _make(file)
    try:
        return _client(file)
    except Exception:
        if not _is_unfinished(file):
            raise
    log.warning("the model registry %s was left without all its tables, and holds no model: it is made anew", file)
    whole = file.parent / f"{file.name}.new"
    _make(whole)
    # MLflow keeps its connections to the file: a copy within the file, by a transaction, is what they see too.
    with closing(sqlite3.connect(whole)) as source, closing(sqlite3.connect(file)) as target:
        source.backup(target)
    whole.remove()
    return _client(file)


def _client(file: Location) -> MlflowClient:
    return _client_of(f"sqlite:///{file}")


def _client_of(uri: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _make(file: Location) -> None:
    """Make the store, unless another process has done so first."""
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            with (file.parent / f"{file.name}.lock").lease():
                if not file.is_file():
                    with file.new_file() as path:
                        _client(local(path))
                return
        except Held as e:
            if time.monotonic() > until:
                raise TimeoutError(f"{e.holder} has been making it for {_WAIT_SECONDS} s") from None
            time.sleep(_LOOK_SECONDS)


def _is_unfinished(file: Location) -> bool:
    """Whether it is a store that no model was ever registered in."""
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=rw", uri=True)) as db:
            there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            rows = [db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in _TABLES if table in there]
    except sqlite3.Error:
        return False
    return "experiments" in there and not any(rows)
