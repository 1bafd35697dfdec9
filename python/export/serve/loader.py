"""Served models: the catalogue of loaded models, the loader that follows the repository, and the service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace import __version__
from headrace.export.serve.infer_json import Plans
from headrace.export.serve.model import Batcher, LoadFailure, Model, models_of
from headrace.export.serve.options import Metrics, ModelMetrics, RequestError, ServeOptions
from headrace.export.serve.repository import RELEASE, Contents, Signature, VersionFolder, read_repository

logger = logging.getLogger(__name__)
_Key = tuple[str, int]
#: Seconds between checks whether a replaced version has answered its last request.
_RETIRE_SECONDS = 0.5
NAME = "headrace"
EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration")


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A loaded graph of a version, with its queue."""

    model: Model
    batcher: Batcher
    metrics: ModelMetrics
    plans: Plans = field(default_factory=Plans)


@dataclass(frozen=True, eq=False)
class Release:
    """A version of a model's folder with all its graphs, by their names in requests."""

    folder: VersionFolder
    graphs: Mapping[str, ServedModel]


@dataclass(frozen=True, eq=False)
class ModelCatalogue:
    """Catalogue of served models. One assignment replaces it; a request keeps the catalogue with which it began.

    Attributes:
        releases: loaded versions, by the model's folder and the version.
        current: version that answers if the request names none, by the model's folder.
        failures: reason why a version is not loaded, by folder and version.
        ready: whether everything that the repository releases is served, or an older release of it.
    """

    releases: Mapping[str, Mapping[int, Release]] = field(default_factory=dict)
    current: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[tuple[str, int], str] = field(default_factory=dict)
    ready: bool = False
    _served: Mapping[tuple[str, str], ServedModel] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        served: dict[tuple[str, str], ServedModel] = {}
        for folder, versions in self.releases.items():
            for version, release in versions.items():
                for name, graph in release.graphs.items():
                    served[name, str(version)] = graph
                    if self.current.get(folder) == version:
                        served[name, ""] = graph
        object.__setattr__(self, "_served", served)

    def find(self, name: str, version: str) -> ServedModel:
        """Return the graph that answers requests for a name; an empty `version` means the current one.

        Raises:
            RequestError: no loaded graph has that name and version (404).
        """
        served = self._served.get((name, version))
        if served is None:
            raise RequestError(404, self._missing(name, version))
        return served

    def names(self) -> list[str]:
        """Return the names of all graphs."""
        return sorted({name for name, _ in self._served})

    def versions(self, name: str) -> list[str]:
        """Return the loaded versions of a graph."""
        return sorted((v for n, v in self._served if n == name and v), key=int)

    def _missing(self, name: str, version: str) -> str:
        loaded = self.versions(name)
        if loaded:
            return f"model '{name}' has no version {version!r} here; loaded: {', '.join(loaded)}"[:500]
        reasons = [f"version {v}: {reason}" for (folder, v), reason in self.failures.items() if folder == name]
        if reasons:
            return f"model '{name}' is not loaded: " + "; ".join(reasons)[:500]
        return f"there is no model {name!r}; served: {', '.join(self.names()) or 'none'}"[:500]


_Loaded = dict[str, dict[int, Release]]


class Loader:
    """Loader that keeps the catalogue in line with the repository.

    Attributes:
        catalogue: the models that are served now.
    """

    def __init__(self, options: ServeOptions, runs: Executor, metrics: Metrics) -> None:
        self.catalogue = ModelCatalogue()
        self._options, self._runs, self._metrics = options, runs, metrics
        self._failed: dict[_Key, tuple[Signature, str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._lock = asyncio.Lock()
        self._requested_models: set[str] | None = None if options.control == "poll" else set(options.models)
        self._all_at_start = options.control == "explicit" and not options.models
        # Folders of a Triton repository that are not served here: ensembles and Python models.
        self._foreign: set[str] = set()
        self._retired: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the models that are served from the start. Raises OSError if the repository cannot be read."""
        async with self._lock:
            contents = await self._look()
            if self._all_at_start:
                self._requested_models = set(_chosen(contents))
            await self._update(contents)
        for name in sorted((self._requested_models or set()) - self._foreign - self.catalogue.current.keys()):
            logger.error("model '%s' is not served: %s", name, self._reason(contents, name)[1])

    async def poll(self) -> None:
        """Follow the repository until cancelled."""
        while True:
            await asyncio.sleep(self._options.poll_seconds)
            try:
                async with self._lock:
                    await self._update(await self._look())
            except OSError as e:
                logger.warning("the repository cannot be read, what is loaded stays: %s", e)
            except Exception:
                logger.exception("the repository could not be followed, what is loaded stays")

    async def load(self, name: str) -> None:
        """Load a model's newest (or released) version now.

        A model that could not be loaded, and was not requested before, is not requested afterwards.

        Raises:
            RequestError: the model cannot be loaded.
        """
        async with self._lock:
            contents = await self._look_or_refuse()
            if not contents.versions.get(name):
                raise RequestError(404, f"the repository has no version of a model {name!r}"[:300])
            is_new = self._requested_models is not None and name not in self._requested_models
            if self._requested_models is not None:
                self._requested_models.add(name)
            for version in contents.versions[name]:
                self._failed.pop((name, version), None)
            await self._update(contents)
            current = self.catalogue.current.get(name)
            if contents.fault is None and current is not None and current == _chosen(contents).get(name):
                return
            status, reason = self._reason(contents, name)
            if is_new and current is None and self._requested_models is not None:
                self._requested_models.discard(name)
                await self._update(contents)
            raise RequestError(status, reason, retry_after=5 if status == 503 else None)

    def _reason(self, contents: Contents, name: str) -> tuple[int, str]:
        """Return why the repository's version of a model is not served, with the HTTP status for that."""
        failures = self.catalogue.failures
        version = _chosen(contents).get(name)
        if contents.fault is not None:
            return 503, contents.fault
        if version is None:
            problem = (
                "the repository has no version of it" if contents.release is None else f"{RELEASE} does not name it"
            )
            return 400, f"model '{name}': {problem}"
        if (name, version) in failures:
            return 400, f"version {version} of model '{name}' cannot be loaded: {failures[name, version]}"
        failed = [f"version {v} of model '{n}' cannot be loaded: {failure}" for (n, v), failure in failures.items()]
        return 400, f"version {version} of model '{name}' is of a release of which {'; '.join(failed)}"[:1000]

    async def unload(self, name: str) -> None:
        """Stop serving a model. Raises RequestError if the repository controls loading, or it is not served."""
        if self._requested_models is None:
            raise RequestError(400, "models are unloaded by requests where the server has --control explicit")
        async with self._lock:
            if name not in self._requested_models:
                raise RequestError(404, f"model {name!r} is not loaded"[:300])
            self._requested_models.discard(name)
            releases = {n: r for n, r in self.catalogue.releases.items() if n != name}
            failures = {k: v for k, v in self.catalogue.failures.items() if k[0] != name}
            current = {n: v for n, v in self.catalogue.current.items() if n != name}
            self._switch(
                ModelCatalogue(releases, current, failures, self._requested_models - self._foreign <= current.keys())
            )

    async def index(self) -> list[dict[str, str]]:
        """Return all versions in the repository, with their states.

        Raises:
            RequestError: the repository cannot be read (503).
        """
        contents, catalogue, records = await self._look_or_refuse(), self.catalogue, []
        for name, versions in contents.versions.items():
            releases = catalogue.releases.get(name, {})
            for version in versions:
                ready = version in releases
                reason = catalogue.failures.get((name, version), "" if ready else "unloaded")
                state = {"version": str(version), "state": "READY" if ready else "UNAVAILABLE", "reason": reason}
                records += [{"name": graph, **state} for graph in (releases[version].graphs if ready else [name])]
        return records

    def close(self) -> None:
        """End the loading thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _look(self) -> Contents:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, read_repository, self._options.repository)

    async def _look_or_refuse(self) -> Contents:
        try:
            return await self._look()
        except OSError as e:
            raise RequestError(503, f"the repository cannot be read: {e}", retry_after=5) from None

    async def _update(self, contents: Contents) -> None:
        if contents.fault is not None:
            self._say_fault(contents.fault)
            return
        target = {
            n: v for n, v in _chosen(contents).items() if self._requested_models is None or n in self._requested_models
        }
        loaded: _Loaded = {n: dict(r) for n, r in self.catalogue.releases.items()}
        failures: dict[_Key, str] = {}
        self._foreign = {n for n, v in contents.versions.items() if not any(x.is_onnx for x in v.values())}
        required = (set(target) if self._requested_models is None else self._requested_models) - self._foreign
        if contents.release is not None and self.catalogue.current:
            # Do not load versions of a failed release again.
            known = {key: self._known_failure(contents, *key, loaded) for key in target.items()}
            failures = {key: reason for key, reason in known.items() if reason is not None}
        for name, version in target.items() if not failures else ():
            await self._load_one(contents, name, version, loaded, failures)
        if contents.release is not None:
            # Serve all of a release, or continue with the previous one.
            if failures and self.catalogue.current:
                target = dict(self.catalogue.current)
                required = set(target) if self._requested_models is None else required
        else:
            target = await self._older_where_failed(contents, target, loaded, failures)
        target = {n: v for n, v in target.items() if v in loaded.get(n, {})}
        retained: _Loaded = {}
        for name, version in target.items():
            older = sorted((v for v in contents.versions.get(name, {}) if v < version), reverse=True)
            for older_version in older[: self._options.versions - 1]:
                await self._load_one(contents, name, older_version, loaded, failures)
            stay = (version, *older[: self._options.versions - 1])
            retained[name] = {v: loaded[name][v] for v in stay if v in loaded[name]}
        ready = required <= set(target)
        unchanged = target == self.catalogue.current and failures == self.catalogue.failures
        if unchanged and ready == self.catalogue.ready and _keys(retained) == _keys(self.catalogue.releases):
            return
        self._switch(ModelCatalogue(retained, target, failures, ready))

    async def _older_where_failed(
        self, contents: Contents, target: dict[str, int], loaded: _Loaded, failures: dict[_Key, str]
    ) -> dict[str, int]:
        """Return the newest version that can be loaded of each model; without a release they are independent."""
        chosen = {}
        for name, version in target.items():
            for older in sorted((v for v in contents.versions.get(name, {}) if v <= version), reverse=True):
                if older not in loaded.get(name, {}):
                    await self._load_one(contents, name, older, loaded, failures)
                if older in loaded.get(name, {}):
                    chosen[name] = older
                    break
        return chosen

    async def _load_one(
        self, contents: Contents, name: str, version: int, loaded: _Loaded, failures: dict[_Key, str]
    ) -> None:
        folder = contents.versions.get(name, {}).get(version)
        known = self._known_failure(contents, name, version, loaded)
        if known is not None:
            failures[name, version] = known
        if known is not None or folder is None or _has(loaded, folder):
            return
        try:
            models = await asyncio.get_running_loop().run_in_executor(self._thread, self._models, folder)
        except Exception as e:
            expected = isinstance(e, LoadFailure | ValueError | OSError)
            reason = str(e) if expected else f"{type(e).__name__}: {e}"
            failures[name, version] = reason
            self._failed[name, version] = (folder.signature, reason)
            logger.error("version %s of model '%s' cannot be loaded: %s", version, name, reason, exc_info=not expected)
            return
        self._failed.pop((name, version), None)
        loaded.setdefault(name, {})[version] = Release(folder, {n: self._served(m) for n, m in models.items()})

    def _known_failure(self, contents: Contents, name: str, version: int, loaded: _Loaded) -> str | None:
        """Return why a version cannot be loaded, if that is known without another attempt, else None."""
        folder = contents.versions.get(name, {}).get(version)
        if folder is None:
            return None if version in loaded.get(name, {}) else "the repository does not have it"
        failed = self._failed.get((name, version))
        return failed[1] if failed is not None and failed[0] == folder.signature and not _has(loaded, folder) else None

    def _models(self, folder: VersionFolder) -> dict[str, Model]:
        return models_of(folder, self._options.threads, self._options.allow_nan)

    def _served(self, model: Model) -> ServedModel:
        metrics = self._metrics.of_model(model.name, model.version)
        return ServedModel(model, Batcher(model, self._options.limits, self._runs, metrics), metrics)

    def _switch(self, new: ModelCatalogue) -> None:
        """Serve the catalogue `new` from now on; requests that have begun keep their version."""
        old, self.catalogue = self.catalogue, new
        for name, version in new.current.items():
            if old.current.get(name) != version:
                logger.info("model '%s' is served as version %s", name, version)
            self._metrics.current.labels(name).set(version)
        for name in old.current.keys() - new.current.keys():
            logger.info("model '%s' is no longer served", name)
            self._metrics.current.remove(name)
        self._metrics.failures.set(len(new.failures))
        staying = set(map(id, _graphs(new)))
        removed = [g for g in _graphs(old) if id(g) not in staying]
        if removed:
            task = asyncio.get_running_loop().create_task(self._retire(removed))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    async def _retire(self, removed: list[ServedModel]) -> None:
        """Free replaced models in the loading thread, after they have answered their last request."""
        await asyncio.sleep(_RETIRE_SECONDS)
        while not all(g.batcher.idle for g in removed):
            await asyncio.sleep(_RETIRE_SECONDS)
        current = {(g.model.name, g.model.version) for g in _graphs(self.catalogue)}
        for metrics in [g.metrics for g in removed if (g.model.name, g.model.version) not in current]:
            metrics.remove()
        await asyncio.get_running_loop().run_in_executor(self._thread, removed.clear)

    def _say_fault(self, fault: str) -> None:
        if self._failed.get(("", 0), ((), ""))[1] != fault:
            self._failed["", 0] = ((), fault)
            logger.error("%s; what is loaded stays", fault)


def _chosen(contents: Contents) -> dict[str, int]:
    """Return the version to serve of each model: the released one, or the newest."""
    if contents.release is not None:
        return contents.release
    return {name: max(versions) for name, versions in contents.versions.items() if versions}


def _has(loaded: _Loaded, folder: VersionFolder) -> bool:
    existing = loaded.get(folder.model, {}).get(folder.version)
    return existing is not None and existing.folder.signature == folder.signature


def _graphs(catalogue: ModelCatalogue) -> Iterable[ServedModel]:
    return (g for rs in catalogue.releases.values() for r in rs.values() for g in r.graphs.values())


def _keys(releases: Mapping[str, Mapping[int, Release]]) -> dict[str, dict[int, int]]:
    return {n: {v: id(r) for v, r in rs.items()} for n, rs in releases.items()}


class Service:
    """Service of one server, for both protocols.

    Attributes:
        options: options of the server.
        loader: loader of the served models.
        metrics: metrics of the server.
    """

    def __init__(self, options: ServeOptions, loader: Loader, metrics: Metrics) -> None:
        self.options, self.loader, self.metrics = options, loader, metrics
        self.pending_bytes = 0

    def find(self, name: str, version: str) -> ServedModel:
        """See `ModelCatalogue.find`."""
        return self.loader.catalogue.find(name, version)

    def check_size(self, count: int) -> None:
        """Raise RequestError (413) if a body has too many bytes."""
        most = self.options.limits.body_bytes
        if count > most:
            raise RequestError(413, f"a body of {count:,} bytes or more; a request may have {most:,}")

    def take_bytes(self, count: int) -> None:
        """Count bytes of a body that have arrived. Raises RequestError (503) if all bodies have too many."""
        if self.pending_bytes + count > self.options.limits.pending_bytes:
            raise RequestError(503, f"{self.pending_bytes:,} bytes of other requests are in memory", retry_after=1)
        self.pending_bytes += count

    def give_back(self, count: int) -> None:
        """Uncount bytes of bodies whose requests are answered."""
        self.pending_bytes -= count

    @property
    def ready(self) -> bool:
        """Return whether all required models are served."""
        return self.loader.catalogue.ready

    def has(self, name: str, version: str) -> bool:
        """Return whether a model is loaded."""
        try:
            self.find(name, version)
        except RequestError:
            return False
        return True

    @staticmethod
    def server() -> dict[str, Any]:
        """Return the server's metadata."""
        return {
            "name": NAME,
            "version": __version__,
            "extensions": ["binary_tensor_data", "model_repository", "model_configuration"],
        }

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's metadata. Raises RequestError if it is not loaded."""
        model = self.find(name, version).model
        return {
            "name": model.name,
            "versions": [version] if version else self.loader.catalogue.versions(name),
            "platform": "onnxruntime_onnx",
            "inputs": [x.json() for x in model.inputs],
            "outputs": [x.json() for x in model.outputs],
        }

    def config(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's configuration in Triton's fields; `dims` leave out rows if requests are merged.

        Raises:
            RequestError: the model is not loaded.
        """
        model = self.find(name, version).model
        of_rows = 1 if model.by_row else 0

        def tensors(specs: Sequence[Any]) -> list[dict[str, Any]]:
            kinds = {"BYTES": "TYPE_STRING"}
            return [
                {
                    "name": x.name,
                    "data_type": kinds.get(x.datatype, f"TYPE_{x.datatype}"),
                    "dims": list(x.shape[of_rows:]),
                }
                for x in specs
            ]

        return {
            "name": model.name,
            "platform": "onnxruntime_onnx",
            "max_batch_size": self.options.limits.rows if model.by_row else 0,
            "input": tensors(model.inputs),
            "output": tensors(model.outputs),
        }
