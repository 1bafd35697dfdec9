"""OpenLineage's names of runs, of jobs, and of what stages read and write: namespace and name, as its naming page says.

https://openlineage.io/docs/spec/naming

Ids of runs are UUIDs of version 7 (RFC 9562), which sort by time, as OpenLineage advises.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from uuid import UUID

from headrace.config import Spec, Warehouse
from headrace.config.workspace import Workspace
from headrace.stage.manifest import Manifest
from headrace.storage import Location, is_uri, location_of, names_store


def new_run_id() -> str:
    """Return an id that no other run has."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | secrets.randbits(12) << 64
    return str(UUID(int=value | 0b10 << 62 | secrets.randbits(62)))


@dataclass(frozen=True)
class ParentRun:
    """A run that has started others: of the command line, of Airflow."""

    namespace: str
    job: str
    run_id: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}/{self.run_id}"

    @staticmethod
    def parse(text: str | None) -> ParentRun | None:
        """Parse `namespace/job/run id`, as variables of the environment have it; None where it is no such text.

        A namespace may have slashes in it.
        """
        parts = (text or "").rsplit("/", 2)
        if len(parts) != 3 or not all(parts):
            return None
        try:
            UUID(parts[2])
        except ValueError:
            return None
        return ParentRun(*parts)


@dataclass(frozen=True)
class Run:
    """One attempt of a stage, or a whole `headrace run`."""

    pipeline: str
    ds: str
    #: Empty: the whole run.
    stage: str
    run_id: str
    parent: ParentRun | None = None
    #: The outermost one; None: the parent.
    root: ParentRun | None = None


#: Suffix of a source table's inputs: one a day, and one for all earlier days.
_OF_DAY = re.compile(r"/(before|\d{4}-\d{2}-\d{2})$")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
#: Stores whose objects have keys, which begin with no slash.
_OBJECT_STORES = ("s3", "gs", "wasb", "wasbs")
#: Stores whose authority is CONTAINER@HOST; in others, the part before the @ is a user.
_CONTAINERS = ("abfss", "wasb", "wasbs")
#: Schemes of Hadoop's connectors -> the store's.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfs": "abfss"}
_PORTS = {"postgres": 5432, "clickhouse": 8443}


@dataclass(frozen=True)
class DatasetName:
    """A dataset: unique within its namespace."""

    namespace: str
    name: str


def job_name(pipeline: str, stage: str) -> str:
    """Return the job name of a stage, or of the whole run without one."""
    return f"{pipeline}.{stage}" if stage else pipeline


def name_of(ws: Workspace, kind: str, name: str) -> DatasetName:
    """Return the name of a file, a folder or a table in a workspace or elsewhere, from its name in a manifest."""
    if kind == "table":
        name = _OF_DAY.sub("", name)
    if is_uri(name):
        # Names of landing files are patterns, and joined tables are spelled as in the spec.
        return _of_place(location_of(name, glob=True)) if names_store(name) else of_location(name)
    return _of_place(ws.locate(name))


def _of_place(place: Location) -> DatasetName:
    if place.scheme == "file":
        return DatasetName("file", str(place.path))
    _, authority, *parts = place.path.parts
    slash = "" if place.scheme in _OBJECT_STORES else "/"
    return DatasetName(f"{place.scheme}://{authority}", slash + "/".join(parts))


def of_location(uri: str) -> DatasetName:
    """Return the name of a URI: `file` and an absolute path, else the store and the object's path in it."""
    parts = urlsplit(uri)
    scheme = _SCHEMES.get(parts.scheme, parts.scheme)
    if scheme in ("", "file"):
        return DatasetName("file", unquote(parts.path) if scheme else uri)
    path = parts.path.lstrip("/") if scheme in _OBJECT_STORES else parts.path
    host = parts.netloc if scheme in _CONTAINERS else parts.netloc.rpartition("@")[2]
    return DatasetName(f"{scheme}://{host}", path)


def of_warehouse(spec: Spec, ws: Workspace, manifest: Manifest) -> DatasetName:
    """Return the name of the table that the stage `publish` wrote."""
    assert spec.publish is not None
    conf, label = spec.publish.warehouse, str(manifest.facts.get("table"))
    naming = _WAREHOUSES.get(conf.kind)
    if naming is not None:
        return naming(conf, label)
    if (name := conf.known.dataset_name(conf, label)) is not None:
        return DatasetName(*name)
    if conf.kind == "embedded":
        return _postgres(conf.model_copy(update={"host": "localhost", "port": _embedded_port(ws)}), label)
    place = str(manifest.facts.get("warehouse"))
    # Files: the label is the table's folder, or its name in a file.
    if _URI.match(label) or label.startswith("/"):
        return of_location(label)
    return DatasetName(place if _URI.match(place) else f"{conf.kind}://{place}", label)


def _embedded_port(ws: Workspace) -> int:
    try:
        return int((ws.postgres / "port").read_text())
    except (OSError, ValueError):
        return 0


def _address(scheme: str, conf: Warehouse) -> str:
    port = conf.port or _PORTS.get(scheme, 0)
    return f"{scheme}://{conf.host}:{port}" if port else f"{scheme}://{conf.host}"


def _postgres(conf: Warehouse, label: str) -> DatasetName:
    return DatasetName(_address("postgres", conf), f"{conf.database}.{label}")


def _sqlalchemy(conf: Warehouse, label: str) -> DatasetName:
    parts = urlsplit(conf.url or "")
    dialect = {"postgresql": "postgres", "mariadb": "mysql"}.get(d := parts.scheme.partition("+")[0], d)
    if dialect == "sqlite":
        return DatasetName("file", f"{parts.path[1:] or parts.path}/{label}")
    host = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    return DatasetName(f"{dialect}://{host}", ".".join(p for p in (parts.path.strip("/"), label) if p))


_WAREHOUSES: Mapping[str, Callable[[Warehouse, str], DatasetName]] = {
    "postgres": _postgres,
    "sqlalchemy": _sqlalchemy,
    "clickhouse": lambda conf, label: DatasetName(_address("clickhouse", conf), label),
}
