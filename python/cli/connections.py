"""Connections that a dry run tries before it plans, and packages that its stages need.

Connections are those to the warehouse, the stores, and MLflow's server. All are tried at once, for a second at most.
Nothing is written: of a warehouse that is a file or a folder, and of the embedded server, the folder is looked at.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from headrace.config import Spec, Warehouse
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage import stage_entry
from headrace.storage import Location, local

#: What all connections together may take.
SECONDS = 1.0
#: Stages that ask the registry for models, or add some.
_WITH_REGISTRY = frozenset(("train", "challenger", "baseline", "second_stage", "evaluate", "gate", "promote", "score"))
#: Stage -> modules that it imports, of extras of the wheel.
_MODULES = {
    "train": ("torch", "horovod", "mlflow"),
    "challenger": ("torch", "horovod", "mlflow"),
    "baseline": ("xgboost", "mlflow"),
}


def missing_packages(spec: Spec, stages: Iterable[str]) -> list[str]:
    """Return a line for each extra of the wheel that stages need and that is not installed; nothing is imported.

    A line names the first of the stages that needs it, and what to install.
    """
    lines: dict[str, str] = {}
    for stage in stages:
        modules = (*(("pyspark",) if stage_entry(spec, stage).spark else ()), *_MODULES.get(stage, ()))
        for module in modules:
            if find_spec(module) is not None:
                continue
            from headrace.errors.translate import extra_of, missing_package  # late: as a rule nothing is missing

            extra = str(extra_of(module))
            if extra not in lines:
                remedy = missing_package(ModuleNotFoundError(name=module))
                lines[extra] = f"the stage {stage} will not run: {remedy}"
        if stage == "publish" and spec.publish is not None and spec.publish.warehouse.kind == "embedded":
            from headrace.publish.postgres.processes import program  # late: other stages start no server

            try:
                program("psql")
            except UserError as e:
                lines["embedded"] = f"the stage publish will not run: {e}"
    return list(lines.values())


@dataclass
class ConnectionAttempt:
    """One attempt to connect, in a thread of its own, which ends with the process where nobody answers."""

    #: For messages, such as `the warehouse (postgres at db:5432)`.
    description: str
    #: Connects; raises what the stage would.
    connect: Callable[[], object]
    error: Exception | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._try, name="headrace-connection", daemon=True).start()

    def _try(self) -> None:
        try:
            self.connect()
        except Exception as e:  # raised again by `answered`, in the thread of the command
            self.error = e
        self._is_over.set()

    def answered(self, seconds: float) -> bool:
        """Wait for the end; False: there is no answer yet. Raises the attempt's error."""
        if not self._is_over.wait(max(0.0, seconds)) or isinstance(self.error, TimeoutError):
            return False
        if self.error is not None:
            raise self.error
        return True


def check_connections(spec: Spec, ws: Workspace, stages: Collection[str]) -> list[str]:
    """Try all connections that some stages of a pipeline need.

    Returns:
        a warning for each that has not answered in time.

    Raises:
        UserError: one was refused, or a folder cannot be written to; StoreAway: a store says that it is away.
    """
    attempts = list(connections(spec, ws, stages))
    deadline = time.monotonic() + SECONDS
    for attempt in attempts:
        attempt.start()
    return [
        f"{attempt.description} has not answered within {SECONDS:g} s; a run waits longer (--offline: do not ask)"
        for attempt in attempts
        if not attempt.answered(deadline - time.monotonic())
    ]


def connections(spec: Spec, ws: Workspace, stages: Collection[str]) -> Iterator[ConnectionAttempt]:
    """Yield the connections that some stages of a pipeline need; none is opened yet."""
    places = {ws.lake: "lake", ws.store: "store"}
    if "ingest" in stages:
        places = {**dict.fromkeys(map(_folder, ws.external_places), "source"), **places}
    for place, key in places.items():
        if place.scheme != "file":
            yield ConnectionAttempt(f"{key} {place}", place.exists)
    if ws.registry_server is not None and not _WITH_REGISTRY.isdisjoint(stages):
        yield ConnectionAttempt(f"registry {ws.registry_server}", _server(ws.registry_server, "registry"))
    if "publish" in stages and spec.publish is not None:
        yield _warehouse(spec, spec.publish.warehouse, ws)
        online = spec.publish.online
        if online is not None and online.kind == "redis":
            yield ConnectionAttempt(f"publish.online {online.url}", _server(str(online.url), "publish.online.url"))


def _folder(pattern: Location) -> Location:
    """Return the folder that a pattern of paths begins with."""
    while set("*?[{") & set(str(pattern.path)):
        pattern = pattern.parent
    return pattern


def _server(url: str, key: str) -> Callable[[], None]:
    """Return a function that opens a connection to the server of a URL and closes it."""
    parts = urlsplit(url)
    port = parts.port or {"https": 443, "redis": 6379, "rediss": 6379}.get(parts.scheme, 80)

    def connect() -> None:
        try:
            socket.create_connection((str(parts.hostname), port), timeout=SECONDS).close()
        except TimeoutError:
            raise
        except OSError as e:
            raise UserError(f"{key}: cannot reach {parts.hostname}:{port} ({e.strerror or e})") from None

    return connect


def _warehouse(spec: Spec, conf: Warehouse, ws: Workspace) -> ConnectionAttempt:
    folder = _warehouse_folder(conf, ws)
    if folder is not None:
        return ConnectionAttempt(f"publish.warehouse {folder}", lambda: _check_folder(folder))

    def connect() -> None:
        from headrace.publish.opening import open_target

        with open_target(spec, ws) as target:
            # Tables of Spark's are not asked for: their lake is tried, and the spec names their catalog.
            if conf.kind not in ("delta", "parquet", "iceberg"):
                target.days()

    address = conf.url or (f"at {conf.host}" if conf.kind in ("postgres", "clickhouse") else "")
    return ConnectionAttempt(f"publish.warehouse {conf.kind} {address}".rstrip(), connect)


def _warehouse_folder(conf: Warehouse, ws: Workspace) -> Path | None:
    """Return the folder of a warehouse that is files of this host; None: it is a server, or in a store."""
    if conf.kind == "embedded":
        return ws.postgres
    if conf.kind == "duckdb":
        return Path(conf.path).expanduser().absolute().parent if conf.path else ws.home / "warehouse"
    if conf.kind in ("delta", "parquet"):
        place = local(conf.path) if conf.path else ws.lake / "warehouse"
        return Path(place.path) if place.scheme == "file" else None
    if conf.kind == "sqlalchemy" and str(conf.url).startswith("sqlite:///"):
        return Path(str(conf.url).removeprefix("sqlite:///")).absolute().parent
    return None


def _check_folder(folder: Path) -> None:
    """See that a folder, or the nearest one above it that exists, can be written to. Raises UserError."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"publish.warehouse: {existing} is a file. Name a folder, or move the file away")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"publish.warehouse: {existing} cannot be written to. Choose another folder, or let the user of this "
            f"process write to it"
        )
