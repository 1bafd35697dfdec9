"""Paths of a workspace: one method for each folder or file, so that no other module spells a path."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.config.installation import installation
from headrace.config.stages import LEASES
from headrace.errors import UserError
from headrace.storage import Location, is_uri, local, local_folder, location_of, sync_all
from headrace.storage.uri import SCRATCH, server_fault

if TYPE_CHECKING:
    from headrace.storage.host_scratch import HostScratch


#: First folder of the names in manifests that are below the lake; all other names are below the store.
_LAKE = ("lake", "landing")


class Roots(Protocol):
    """Roots and external tables that a pipeline may set; see Workspace."""

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
    """Folders and stores of one installation; each folder is created by its writer.

    There are three roots, each of them `home` unless set: `lake` (landing files, Delta tables), `store` (datasets,
    models, manifests, reports, leases) and `scratch` (of one host; may vanish between two runs).

    A relative `home` is made absolute, so that Spark's executors see the same folder.
    """

    home: Path
    #: A path, or a URI that `headrace.storage.location` opens; None: `home`. `scratch_folder` is a path.
    lake_uri: str | None = None
    store_uri: str | None = None
    scratch_folder: str | None = None
    #: A tracking server of MLflow, http://HOST:PORT; None: an SQLite file below `home`.
    registry_server: str | None = None
    #: URIs of tables and files outside lake and store that the pipeline reads; they may be patterns.
    reads: tuple[str, ...] = ()
    #: `scratch` of this host alone (HEADRACE_SCRATCH); used where the pipeline sets no `scratch_folder` for all hosts.
    #: None: `home`.
    host_scratch: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Path(os.path.abspath(self.home)))
        if self.registry_server is not None and (fault := server_fault(self.registry_server)):
            raise UserError(f"registry: {fault}")
        if not self.is_local:
            from headrace.storage.objects import copies  # late: most workspaces are on file systems

            copies.use_folder((self._scratch_root / "cache").local_path())

    @staticmethod
    def from_environment(home: Path, environ: Mapping[str, str]) -> Workspace:
        """Return the workspace that HEADRACE_LAKE, HEADRACE_STORE, HEADRACE_SCRATCH and HEADRACE_REGISTRY describe.

        Raises:
            UserError: `home`, or a folder above it, is a file.
        """
        existing = next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise UserError(f"--home {home}: {existing} is a file. Name a folder, or move the file away")
        lake, store, registry = (environ.get(f"HEADRACE_{name}") or None for name in ("LAKE", "STORE", "REGISTRY"))
        return Workspace(home, lake, store, None, registry, host_scratch=environ.get(SCRATCH) or None)

    def of(self, spec: Roots) -> Workspace:
        """Return the workspace with the roots that a pipeline sets in place of its own."""
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
        """Files of this host that are never synced: after a power cut they may be short."""
        return self._scratch_root.transient()

    @property
    def _scratch_root(self) -> Location:
        if self.scratch_folder:
            return local(local_folder(self.scratch_folder, "scratch"))
        return local(local_folder(self.host_scratch, SCRATCH)) if self.host_scratch else local(self.home)

    def make_scratch(self) -> None:
        """Create the folder of scratch, and check that this process can write files there.

        Raises:
            UserError: it cannot be created or written to, for another reason than a full disk.
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
    def written_folders(self) -> tuple[Path, ...]:
        """Folders of this host that runs write to, including the folder of temporary files."""
        places = (local(self.home), self.lake, self.store, self._scratch_root)
        folders = (Path(place.path) for place in places if place.scheme == "file")
        return tuple(dict.fromkeys((*folders, Path(tempfile.gettempdir()))))

    def sync(self) -> None:
        """Sync files below home, lake and store to disk, whichever program wrote them: they then survive a power cut.

        Scratch may be lost. Objects in an object store survive without a sync.
        """
        sync_all([local(self.home), self.lake, self.store])

    @property
    def is_local(self) -> bool:
        """True where lake, store and all external places are on file systems."""
        return self.schemes == {"file"}

    @property
    def schemes(self) -> frozenset[str]:
        """URI schemes of lake, store and external places."""
        return frozenset({place.scheme for place in (self.lake, self.store, *self.external_places)})

    @property
    def external_places(self) -> tuple[Location, ...]:
        """Places outside lake and store that the pipeline reads."""
        return tuple(location_of(uri, glob=True).as_plain() for uri in self.reads)

    def read_places(self, path: str) -> tuple[Location, ...]:
        """Return the places that a pipeline's path may mean; the first that exists counts.

        An absolute path and a URI name one place. A relative path is below the lake or, for shipped pipelines, below
        the installation.
        """
        if is_uri(path) or path.startswith("/"):
            return (location_of(path).as_plain(),)
        return ((self.lake / path).as_plain(), local(installation()) / path)

    def locate(self, name: str) -> Location:
        """Return the location of a manifest's name: below `lake` or `store`; an absolute path or a URI is kept."""
        if is_uri(name):
            location = location_of(name)
            # Files of other writers have no lists of headrace's, and a reader may lack the right to look for them.
            return location if any(location.is_below(root) for root in (self.lake, self.store)) else location.as_plain()
        if name.startswith("/"):
            return local(name)
        return (self.lake if name.split("/", 1)[0] in _LAKE else self.store) / name

    def name_of(self, location: Location) -> str:
        """Return the name from which `locate` gives a location; its full path where it is outside the workspace."""
        for root in (self.lake, self.store):
            if location.is_below(root):
                return location.below(root)
        return str(location)

    def landing(self, pipeline: str) -> Location:
        return self.lake / "landing" / pipeline

    def table(self, pipeline: str, name: str) -> Location:
        """Return a Delta table's folder: `events`, `quarantine`, `vocabulary`, `scores`, ..."""
        return self.lake / "lake" / pipeline / name

    def events(self, pipeline: str, source: str | None = None) -> Location:
        """Return the Delta table of a source's good rows; without a name, of the main source."""
        return self.table(pipeline, source or "events")

    def quarantine(self, pipeline: str, source: str | None = None) -> Location:
        """Return the Delta table of a source's bad rows."""
        return self.table(pipeline, f"{source}_quarantine" if source else "quarantine")

    def encoded(self, pipeline: str) -> Location:
        """Return the cache of lake files as the Arrow engine decoded them, for the next day; rebuilt where missing."""
        return self.scratch / "encoded" / pipeline

    def mapped(self, pipeline: str) -> Location:
        """Return the memory-mapped tables and vocabularies of scoring models on this host; rebuilt where missing."""
        return self._scratch_root / "mapped" / pipeline

    def on_hosts(self, folder: Location) -> HostScratch:
        """Return the folders on all hosts that correspond to a folder below scratch, private to this workspace."""
        from headrace.storage.host_scratch import OF_WORKSPACE, HostScratch

        # Workspaces may share a folder of a host, and each removes files that its runs do not need.
        workspace_id = hashlib.sha256(self.store.uri.encode()).hexdigest()[:12]
        named = self._scratch_root if self.scratch_folder else None
        return HostScratch(f"{folder.below(self._scratch_root)}/{OF_WORKSPACE}{workspace_id}", named, folder.durable)

    def staging(self, pipeline: str) -> Location:
        """Return the folder in the lake for rows in transit, seen by all hosts; its files belong to running stages."""
        return self.lake / "staging" / pipeline

    def exchange_folder(self, pipeline: str, stage: str, local_scratch: bool) -> Location:
        """Return the folder of files that tasks of a stage exchange.

        It is in scratch, or in the lake where each host has its own scratch (`local_scratch`).
        """
        return self.staging(pipeline).transient() / stage if local_scratch else self.spark_local / stage / pipeline

    def runs(self, pipeline: str) -> Location:
        """Return the folder of a pipeline's manifests: a folder for each day."""
        return self.store / "runs" / pipeline

    def pipelines(self) -> list[str]:
        """List the pipelines of which a stage has run."""
        return [p.name for p in (self.store / "runs").entries() if p.is_dir()]

    def days(self, pipeline: str) -> list[str]:
        """List the days of a pipeline for which a stage has run, oldest first."""
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
        """Return the folder of status files of running stages, one each (headrace.jobs.observe.application)."""
        return self.scratch / "running" / pipeline

    def dataset(self, pipeline: str, ds: str, key: str) -> Location:
        return self.store / "datasets" / pipeline / ds / key

    def model(self, pipeline: str, ds: str, key: str) -> Location:
        return self.store / "models" / pipeline / ds / key

    def search(self, pipeline: str, ds: str, key: str) -> Location:
        """Return the folder of a hyper-parameter search: its study, its sample of the dataset, its best settings."""
        return self.store / "search" / pipeline / ds / key

    def report(self, pipeline: str, ds: str) -> Location:
        return self.store / "reports" / pipeline / f"{ds}.html"

    def promotions(self, model: str) -> Location:
        """Return the log of a model's promotions: JSON lines with time, user and reason, oldest first."""
        return self.store / "promotions" / f"{model}.jsonl"

    def stopped_arm(self, pipeline: str, experiment: str, arm: str) -> Location:
        """Return the record that an arm of an experiment was stopped: JSON with user and reason."""
        return self.store / "experiments" / pipeline / experiment / f"{arm}.json"

    def forgotten(self, pipeline: str) -> Location:
        """Return the folder of `headrace forget`: `values.json` (headrace.lake.forgotten), a folder per request."""
        return self.store / "forgotten" / pipeline

    def forgotten_values(self, pipeline: str) -> Location:
        """Return the list of values whose rows must not be loaded again."""
        return self.forgotten(pipeline) / "values.json"

    def locks(self, pipeline: str, lease: str | None = None) -> list[Location]:
        """Return the lock files of a pipeline, whose leases name the process at work.

        `lease`: one of `LEASES` (headrace.config.stages), for its file alone; None: the pipeline's file and those of
        all leases.
        """
        folder = self.store / "locks"
        if lease is not None:
            return [folder / f"{pipeline}.{lease}.lock"]
        return [folder / f"{pipeline}.lock", *(folder / f"{pipeline}.{name}.lock" for name in LEASES)]

    @property
    def registry_uri(self) -> str:
        """URI of MLflow's store: a tracking server, or an SQLite file."""
        return self.registry_server or f"sqlite:///{self.home / 'mlflow.db'}"

    @property
    def postgres(self) -> Path:
        """Folder of the embedded PostgreSQL on this host: data, password file, socket, log."""
        return self.home / "postgres"

    @property
    def spark_local(self) -> Location:
        """Folder of temporary files of Spark and the stages."""
        return self.scratch / "spark"
