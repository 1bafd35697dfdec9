"""Where everything is. One function a place, so that no path is spelled twice."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import headrace
from headrace.errors import UserError
from headrace.stages import LEASES
from headrace.storage import Location, is_uri, local, local_folder, location_of, sync_all
from headrace.storage.host_scratch import OF_WORKSPACE, HostScratch
from headrace.storage.objects import copies
from headrace.storage.objects.copies import SCRATCH
from headrace.storage.uri import server_fault

#: First parts of the names of what is in the lake; all else that manifests name is in the store.
_LAKE = ("lake", "landing")


class Roots(Protocol):
    """What a pipeline says of where its things are: see Workspace."""

    @property
    def lake(self) -> str | None: ...

    @property
    def store(self) -> str | None: ...

    @property
    def scratch(self) -> str | None: ...

    @property
    def registry(self) -> str | None: ...

    @property
    def reads(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Workspace:
    """The places of one installation (made on demand by those who write).

    Three roots, all of them `home` unless they are given: `lake` (landing files, Delta tables), `store` (datasets,
    models, manifests, reports, leases) and `scratch` (of one host; may vanish between two runs).

    `home` may be given relative; it is kept absolute so that Spark's executors see the same place.
    """

    home: Path
    #: A path, or a URI of `headrace.storage.location`; None: `home`. Of `scratch` a path.
    lake_uri: str | None = None
    store_uri: str | None = None
    scratch_folder: str | None = None
    #: A tracking server of MLflow, http://HOST:PORT; None: an SQLite file below `home`.
    registry_server: str | None = None
    #: URIs of what is read besides lake and store: of tables and files of others, which may be patterns.
    reads: tuple[str, ...] = ()
    #: `scratch` of this host alone, by its environment (HEADRACE_SCRATCH), where the pipeline names no folder
    #: (`scratch_folder`, which is that of every host); None: `home`.
    host_scratch: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Path(os.path.abspath(self.home)))
        if self.registry_server is not None and (fault := server_fault(self.registry_server)):
            raise UserError(f"registry: {fault}")
        if not self.is_local:
            copies.use_folder((self._scratch_root / "cache").local_path())

    @staticmethod
    def at(home: Path, environ: Mapping[str, str]) -> Workspace:
        """That of a process, by its environment: HEADRACE_LAKE, HEADRACE_STORE, HEADRACE_SCRATCH, HEADRACE_REGISTRY.

        Raises:
            UserError: `home`, or what it should be in, is a file.
        """
        existing = next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise UserError(f"--home {home}: {existing} is a file. Name a folder, or move the file away")
        lake, store, registry = (environ.get(f"HEADRACE_{name}") or None for name in ("LAKE", "STORE", "REGISTRY"))
        return Workspace(home, lake, store, None, registry, host_scratch=environ.get(SCRATCH) or None)

    def of(self, spec: Roots) -> Workspace:
        """The same with a pipeline's own roots, where it has some."""
        return Workspace(
            self.home,
            spec.lake or self.lake_uri,
            spec.store or self.store_uri,
            spec.scratch or self.scratch_folder,
            spec.registry or self.registry_server,
            spec.reads,
            self.host_scratch,
        )

    @property
    def lake(self) -> Location:
        return location_of(self.lake_uri, "lake") if self.lake_uri else local(self.home)

    @property
    def store(self) -> Location:
        return location_of(self.store_uri, "store") if self.store_uri else local(self.home)

    @property
    def scratch(self) -> Location:
        """Nothing here is waited for: after a power cut, files may be short."""
        return self._scratch_root.transient()

    @property
    def _scratch_root(self) -> Location:
        if self.scratch_folder:
            return local(local_folder(self.scratch_folder, "scratch"))
        return local(local_folder(self.host_scratch, SCRATCH)) if self.host_scratch else local(self.home)

    def make_scratch(self) -> None:
        """Make the folder of scratch, and see that this process can write files there.

        Raises:
            UserError: it cannot be made, or not be written to, for another reason than a full disk.
        """
        folder = self._scratch_root.local_path()
        try:
            self._scratch_root.make_dir()
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            key = "scratch" if self.scratch_folder else SCRATCH if self.host_scratch else "--home"
            raise UserError(
                f"{key} {folder}: no file can be written there ({e.strerror}). Choose another folder, or let the user "
                f"of this process write to it"
            ) from e

    @property
    def written(self) -> tuple[Path, ...]:
        """Folders of this host that runs write to, the folder of temporary files among them."""
        places = (local(self.home), self.lake, self.store, self._scratch_root)
        folders = (Path(place.path) for place in places if place.scheme == "file")
        return tuple(dict.fromkeys((*folders, Path(tempfile.gettempdir()))))

    def sync(self) -> None:
        """Return when all that was written below home, lake and store survives a power cut, by whichever program.

        Scratch may be lost. In a store of objects what is there survives.
        """
        sync_all([local(self.home), self.lake, self.store])

    @property
    def is_local(self) -> bool:
        """Whether lake, store and all that is read besides are on file systems."""
        return self.schemes == {"file"}

    @property
    def schemes(self) -> frozenset[str]:
        """Of the stores in which lake, store and what is read besides are."""
        return frozenset({place.scheme for place in (self.lake, self.store, *self.others)})

    @property
    def others(self) -> tuple[Location, ...]:
        """What is read besides lake and store."""
        return tuple(location_of(uri, glob=True).as_plain() for uri in self.reads)

    def read_places(self, path: str) -> tuple[Location, ...]:
        """Where what a pipeline's path names may lie; the first that is there counts.

        An absolute path and a URI name one place. A relative path is meant below the lake, or, of a shipped pipeline,
        below the installation.
        """
        if is_uri(path) or path.startswith("/"):
            return (location_of(path).as_plain(),)
        return ((self.lake / path).as_plain(), local(installation()) / path)

    def locate(self, name: str) -> Location:
        """What a manifest names: a path below `lake` or `store`; an absolute path or a URI stays as it is."""
        if is_uri(name):
            found = location_of(name)
            # What others wrote has no lists of headrace's own, and who may read it may not ask for them.
            return found if any(found.is_below(root) for root in (self.lake, self.store)) else found.as_plain()
        if name.startswith("/"):
            return local(name)
        return (self.lake if name.split("/", 1)[0] in _LAKE else self.store) / name

    def name_of(self, location: Location) -> str:
        """The name under which `locate` finds it; its whole path where it is not in the workspace."""
        for root in (self.lake, self.store):
            if location.is_below(root):
                return location.below(root)
        return str(location)

    def landing(self, pipeline: str) -> Location:
        return self.lake / "landing" / pipeline

    def table(self, pipeline: str, name: str) -> Location:
        """A Delta table's folder: `events`, `quarantine`, `vocabulary`, `scores`, ..."""
        return self.lake / "lake" / pipeline / name

    def events(self, pipeline: str, source: str | None = None) -> Location:
        """The Delta table of a source's good rows; of the main source without a name."""
        return self.table(pipeline, source or "events")

    def quarantine(self, pipeline: str, source: str | None = None) -> Location:
        """The Delta table of a source's bad rows."""
        return self.table(pipeline, f"{source}_quarantine" if source else "quarantine")

    def encoded(self, pipeline: str) -> Location:
        """The lake's files as the Arrow engine decoded them: kept for the next day, made again where missing."""
        return self.scratch / "encoded" / pipeline

    def mapped(self, pipeline: str) -> Location:
        """What processes of this host map of the models that score: tables and vocabularies, made where missing."""
        return self._scratch_root / "mapped" / pipeline

    def on_hosts(self, folder: Location) -> HostScratch:
        """Of a folder below scratch: the one of that name on each host, in it a folder of this workspace's alone."""
        # Workspaces may name one folder of a host, and each removes what its runs do not need.
        mine = hashlib.sha256(self.store.uri.encode()).hexdigest()[:12]
        named = self._scratch_root if self.scratch_folder else None
        return HostScratch(f"{folder.below(self._scratch_root)}/{OF_WORKSPACE}{mine}", named, folder.durable)

    def staging(self, pipeline: str) -> Location:
        """Rows on their way, in the lake, where all hosts see them; what is there belongs to runs that are at work."""
        return self.lake / "staging" / pipeline

    def handed_on(self, pipeline: str, stage: str, own: bool) -> Location:
        """Files that tasks of a stage hand to each other: in scratch; in the lake where hosts share none (`own`)."""
        return self.staging(pipeline).transient() / stage if own else self.spark_local / stage / pipeline

    def runs(self, pipeline: str) -> Location:
        """The manifests of a pipeline: a folder for each day."""
        return self.store / "runs" / pipeline

    def pipelines(self) -> list[str]:
        """The pipelines of which a stage has run."""
        return [p.name for p in (self.store / "runs").entries() if p.is_dir()]

    def days(self, pipeline: str) -> list[str]:
        """The days of a pipeline of which a stage has run, oldest first."""
        return [p.name for p in self.runs(pipeline).entries() if p.is_dir()]

    def days_of_stages(self, pipeline: str) -> dict[str, list[str]]:
        """Return by stage the days that have its manifest, oldest first. No manifest is opened."""
        days: dict[str, list[str]] = {}
        for path in sorted(self.runs(pipeline).infos()):
            ds, _, name = path.partition("/")
            if name.endswith(".json") and "/" not in name:
                days.setdefault(name.removesuffix(".json"), []).append(ds)
        return days

    def manifest(self, pipeline: str, ds: str, stage: str) -> Location:
        return self.runs(pipeline) / ds / f"{stage}.json"

    def log(self, pipeline: str, ds: str, stage: str) -> Location:
        return self.scratch / "logs" / pipeline / ds / f"{stage}.log"

    def running(self, pipeline: str) -> Location:
        """What stages at work say of themselves: a file each, for the time being (headrace.observe.running)."""
        return self.scratch / "running" / pipeline

    def dataset(self, pipeline: str, ds: str, key: str) -> Location:
        return self.store / "datasets" / pipeline / ds / key

    def model(self, pipeline: str, ds: str, key: str) -> Location:
        return self.store / "models" / pipeline / ds / key

    def search(self, pipeline: str, ds: str, key: str) -> Location:
        """A search of hyper-parameters: its study, its sample of the dataset, its best settings."""
        return self.store / "search" / pipeline / ds / key

    def report(self, pipeline: str, ds: str) -> Location:
        return self.store / "reports" / pipeline / f"{ds}.html"

    def promotions(self, model: str) -> Location:
        """When a registered model's alias `champion` moved, by whom and why: lines of JSON, oldest first."""
        return self.store / "promotions" / f"{model}.jsonl"

    def stopped_arm(self, pipeline: str, experiment: str, arm: str) -> Location:
        """That an arm of an experiment was stopped, by whom and why: JSON."""
        return self.store / "experiments" / pipeline / experiment / f"{arm}.json"

    def forgotten(self, pipeline: str) -> Location:
        """What `headrace forget` keeps: `values.json` (headrace.lake.forgotten), and a folder for each request."""
        return self.store / "forgotten" / pipeline

    def forgotten_values(self, pipeline: str) -> Location:
        """The list of the values whose rows must not come back."""
        return self.forgotten(pipeline) / "values.json"

    def locks(self, pipeline: str, own: str | None = None) -> list[Location]:
        """Whose leases say who is at work on a pipeline.

        `own`: that one of `headrace.stages.LEASES` alone; None: the pipeline's and all of those.
        """
        folder = self.store / "locks"
        if own is not None:
            return [folder / f"{pipeline}.{own}.lock"]
        return [folder / f"{pipeline}.lock", *(folder / f"{pipeline}.{lease}.lock" for lease in LEASES)]

    @property
    def registry_uri(self) -> str:
        """MLflow's store: a tracking server, or an SQLite file."""
        return self.registry_server or f"sqlite:///{self.home / 'mlflow.db'}"

    @property
    def postgres(self) -> Path:
        """The embedded PostgreSQL's folder (data, password file, socket, log): of this host."""
        return self.home / "postgres"

    @property
    def spark_local(self) -> Location:
        """Spark's and the stages' temporary files."""
        return self.scratch / "spark"


def checkout() -> Path:
    """The folder that holds `python/`, with `conf/`, `build/`, `docs/`, `bench/` beside it."""
    return Path(headrace.__file__).resolve().parent.parent


def installation() -> Path:
    """The folder that holds `conf/`, `build/` and `requirements/`: the checkout, or what a wheel has of it."""
    of_wheel = Path(headrace.__file__).resolve().parent / "share"
    return of_wheel if of_wheel.is_dir() else checkout()


def jars_dir() -> Path:
    """Where `build.gradle` puts the jars."""
    return installation() / "build" / "jars"


def class_archive() -> Path:
    """The classes of Spark as the JVM maps them, made by `make env`; there need not be one."""
    return installation() / "build" / "spark" / "classes.jsa"


def rapids_dir() -> Path:
    """Where `gradle rapids` puts the RAPIDS plugin."""
    return installation() / "build" / "rapids"


def iceberg_dir() -> Path:
    """Where `gradle iceberg` puts Iceberg's jar for Spark."""
    return installation() / "build" / "iceberg"


def s3_dir() -> Path:
    """Where `gradle s3` puts Spark's file system for S3."""
    return installation() / "build" / "s3"


def pipeline_file(name: str) -> Path:
    """The YAML of a shipped pipeline."""
    return installation() / "conf" / "pipelines" / f"{name}.yaml"
