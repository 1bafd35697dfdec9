"""MLflow's store of a workspace, a tracking server or an SQLite file, and its clients.

MLflow takes seconds to import, so it is imported where it is used. It creates its tables by some fifty migrations, none
of them in a transaction that SQLite could roll back: a store whose creation was killed cannot be opened. So a new file
is created under another name, and renamed when complete.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.databases import RegistryAway, registry_is_away
from headrace.logs import redact
from headrace.storage import Location, local
from headrace.storage.lease import Held

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


log = logging.getLogger("headrace.registry")
#: Polling interval and limit while another process creates the store, which takes about three seconds.
_POLL_SECONDS = 0.1
_WAIT_SECONDS = 300
#: Time that a query waits for a writer of the file.
_LOCKED_SECONDS = 10
#: A registration adds rows to these tables.
_TABLES = ("runs", "registered_models")


def store_file(ws: Workspace) -> Location:
    """Return the SQLite file of the workspace's store."""
    return local(ws.registry_uri.removeprefix("sqlite:///"))


def is_there(ws: Workspace) -> bool:
    """Return whether models can have been registered: always with a server, else where the file exists."""
    return ws.registry_server is not None or store_file(ws).is_file()


def missing_version(ws: Workspace, registered: Mapping[str, Any] | None) -> str | None:
    """Return why the registry does not have the version that a manifest names, or None. MLflow is not imported.

    A tracking server is not queried: its owner is responsible for its data.

    Args:
        ws: the workspace.
        registered: `name` and `version` of a manifest; None: nothing was registered.

    Raises:
        UserError: the file is damaged, so that its versions are unknown.
    """
    if not is_there(ws):
        return "the model registry is gone"
    if ws.registry_server is not None:
        return None
    file = store_file(ws)
    if file.size() == 0:
        return f"the model registry {file} has 0 bytes"
    try:
        # Not read-only: the first process that opens the file rolls back a transaction that a power cut interrupted.
        with closing(sqlite3.connect(f"{Path(file.path).as_uri()}?mode=rw", uri=True, timeout=_LOCKED_SECONDS)) as db:
            faults = [str(fault) for (fault,) in db.execute("PRAGMA integrity_check(1)")]
            if faults != ["ok"]:
                raise sqlite3.DatabaseError(faults[0].splitlines()[-1])
            if registered is None:
                return None
            key = (registered["name"], int(registered["version"]))
            row = db.execute("SELECT 1 FROM model_versions WHERE name = ? AND version = ?", key).fetchone()
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
    return None if row is not None else f"version {key[1]} of model '{key[0]}' is not in {file}"


def open_store(ws: Workspace) -> MlflowClient:
    """Open a client of the workspace's store; the file is created where there is none.

    Raises:
        mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError: it cannot be opened.
        TimeoutError: another process takes too long to create it.
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
    complete = file.parent / f"{file.name}.new"
    _make(complete)
    # MLflow keeps its connections to the file, which see a copy into the same file by a transaction.
    with closing(sqlite3.connect(complete)) as source, closing(sqlite3.connect(file)) as target:
        source.backup(target)
    complete.remove()
    return _client(file)


def _client(file: Location) -> MlflowClient:
    return _client_of(f"sqlite:///{file}")


def _client_of(uri: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _make(file: Location) -> None:
    """Create the store, unless another process has done so first."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            with (file.parent / f"{file.name}.lock").lease():
                if not file.is_file():
                    with file.new_file() as path:
                        _client(local(path))
                return
        except Held as e:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{e.holder} has been making it for {_WAIT_SECONDS} s") from None
            time.sleep(_POLL_SECONDS)


def _is_unfinished(file: Location) -> bool:
    """Return whether a file is a store in which no model was ever registered."""
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=rw", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            rows = [db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in _TABLES if table in tables]
    except sqlite3.Error:
        return False
    return "experiments" in tables and not any(rows)


_OPENING = threading.Lock()


class Client:
    """Context manager of a client; errors within its block become UserErrors that name the store."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    def __enter__(self) -> MlflowClient:
        quietly_import()
        self._ws.store.make_dir()
        try:
            # MLflow expects one thread at a time here.
            with _OPENING:
                return open_store(self._ws)
        except Exception as e:
            raise self._explained(e) from e

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: object) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if isinstance(e, (MlflowException, SQLAlchemyError)):
            raise self._explained(e) from e

    def _explained(self, e: BaseException) -> UserError:
        if self._ws.registry_server is not None:
            if registry_is_away(e):
                return RegistryAway(f"the model registry {self._ws.registry_uri} does not answer ({first_line(e)})")
            return UserError(
                f"the model registry {self._ws.registry_uri} cannot be used ({first_line(e)}). See whether the server "
                f"answers, and whether MLflow's own variables (MLFLOW_TRACKING_TOKEN, ...) let you in"
            )
        return UserError(
            f"the model registry {self._ws.registry_uri} cannot be used ({first_line(e)}). Free its disk or file "
            f"permissions; if the file is damaged, move it away: finished models stay where they are"
        )


def first_line(e: BaseException) -> str:
    """Return the first line of an error's message without secrets, or the name of its class."""
    message = redact(str(e)).strip()
    return message.splitlines()[0] if message else type(e).__name__


def quietly_import() -> None:
    """Import MLflow without telemetry, and without log lines about the store's tables."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow.tracking  # noqa: F401

    # The import resets logging, so the levels are set after it.
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def alias_holder(client: MlflowClient, name: str, alias: str) -> Any:
    """Return MLflow's version with an alias; None where the model or the alias does not exist."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, ErrorCode

    absent = (ErrorCode.Name(RESOURCE_DOES_NOT_EXIST), ErrorCode.Name(INVALID_PARAMETER_VALUE))
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as e:
        if e.error_code in absent:
            return None
        raise


def quoted(text: str) -> str:
    """Check a name or key for use between quotes in MLflow's filters. Raises ValueError where it has a quote."""
    if "'" in text or "\\" in text:
        raise ValueError(f"a name with a quote: {text!r}")
    return text


def pages(search: Callable[..., Any], **arguments: Any) -> Iterator[Any]:
    """Yield the results of a search in MLflow, page after page."""
    token = None
    while True:
        page = search(**arguments, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
