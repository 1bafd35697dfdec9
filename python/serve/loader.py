"""From what the repository has to what is served: loads, warms up, switches, unloads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor

from headrace.serve.assemble import models_of
from headrace.serve.batching import Batcher
from headrace.serve.catalogue import Catalogue, Release, Served
from headrace.serve.errors import RequestError
from headrace.serve.metrics import Metrics
from headrace.serve.model import LoadFailure, Model
from headrace.serve.options import ServeOptions
from headrace.serve.repository import RELEASE, Contents, Signature, VersionFolder, read_repository

logger = logging.getLogger(__name__)

_Key = tuple[str, int]
_Loaded = dict[str, dict[int, Release]]
#: Seconds between two looks at whether a version that was replaced has answered its last request.
_RETIRE_SECONDS = 0.5


class Loader:
    """Keeps `catalogue` at what the repository says.

    Attributes:
        catalogue: what is served now.
    """

    def __init__(self, options: ServeOptions, runs: Executor, metrics: Metrics) -> None:
        self.catalogue = Catalogue()
        self._options, self._runs, self._metrics = options, runs, metrics
        self._failed: dict[_Key, tuple[Signature, str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._turn = asyncio.Lock()
        self._wanted: set[str] | None = None if options.control == "poll" else set(options.models)
        self._all_at_start = options.control == "explicit" and not options.models
        # What a repository of Triton's has beside graphs: ensembles, Python models, which are not served here.
        self._foreign: set[str] = set()
        self._retired: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load what is to be served at the start. Raises OSError: the repository cannot be read."""
        async with self._turn:
            contents = await self._look()
            if self._all_at_start:
                self._wanted = set(_chosen(contents))
            await self._update(contents)
        for name in sorted((self._wanted or set()) - self._foreign - self.catalogue.current.keys()):
            logger.error("model '%s' is not served: %s", name, self._reason(contents, name)[1])

    async def poll(self) -> None:
        """Follow the repository until cancelled."""
        while True:
            await asyncio.sleep(self._options.poll_seconds)
            try:
                async with self._turn:
                    await self._update(await self._look())
            except OSError as e:
                logger.warning("the repository cannot be read, what is loaded stays: %s", e)
            except Exception:
                logger.exception("the repository could not be followed, what is loaded stays")

    async def load(self, name: str) -> None:
        """Load a model's newest (or released) version now. Raises RequestError: it cannot be.

        What is refused and was not wanted before is not wanted afterwards.
        """
        async with self._turn:
            contents = await self._look_or_refuse()
            if not contents.versions.get(name):
                raise RequestError(404, f"the repository has no version of a model {name!r}"[:300])
            is_new = self._wanted is not None and name not in self._wanted
            if self._wanted is not None:
                self._wanted.add(name)
            for version in contents.versions[name]:
                self._failed.pop((name, version), None)
            await self._update(contents)
            current = self.catalogue.current.get(name)
            if contents.fault is None and current is not None and current == _chosen(contents).get(name):
                return
            status, why = self._reason(contents, name)
            if is_new and current is None and self._wanted is not None:
                self._wanted.discard(name)
                await self._update(contents)
            raise RequestError(status, why, retry_after=5 if status == 503 else None)

    def _reason(self, contents: Contents, name: str) -> tuple[int, str]:
        """Why a model is not served as the repository says, and the status of HTTP for it."""
        failures = self.catalogue.failures
        version = _chosen(contents).get(name)
        if contents.fault is not None:
            return 503, contents.fault
        if version is None:
            where = "the repository has no version of it" if contents.release is None else f"{RELEASE} does not name it"
            return 400, f"model '{name}': {where}"
        if (name, version) in failures:
            return 400, f"version {version} of model '{name}' cannot be loaded: {failures[name, version]}"
        others = [f"version {v} of model '{n}' cannot be loaded: {why}" for (n, v), why in failures.items()]
        return 400, f"version {version} of model '{name}' is of a release of which {'; '.join(others)}"[:1000]

    async def unload(self, name: str) -> None:
        """Serve a model no more. Raises RequestError: the repository decides that, or it is not served."""
        if self._wanted is None:
            raise RequestError(400, "models are unloaded by requests where the server has --control explicit")
        async with self._turn:
            if name not in self._wanted:
                raise RequestError(404, f"model {name!r} is not loaded"[:300])
            self._wanted.discard(name)
            releases = {n: r for n, r in self.catalogue.releases.items() if n != name}
            failures = {k: v for k, v in self.catalogue.failures.items() if k[0] != name}
            current = {n: v for n, v in self.catalogue.current.items() if n != name}
            self._switch(Catalogue(releases, current, failures, self._wanted - self._foreign <= current.keys()))

    async def index(self) -> list[dict[str, str]]:
        """All versions that the repository has, and their states. Raises RequestError: it cannot be read (503)."""
        contents, catalogue, found = await self._look_or_refuse(), self.catalogue, []
        for name, versions in contents.versions.items():
            releases = catalogue.releases.get(name, {})
            for version in versions:
                ready = version in releases
                why = catalogue.failures.get((name, version), "" if ready else "unloaded")
                state = {"version": str(version), "state": "READY" if ready else "UNAVAILABLE", "reason": why}
                found += [{"name": graph, **state} for graph in (releases[version].graphs if ready else [name])]
        return found

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
        target = {n: v for n, v in _chosen(contents).items() if self._wanted is None or n in self._wanted}
        loaded: _Loaded = {n: dict(r) for n, r in self.catalogue.releases.items()}
        failures: dict[_Key, str] = {}
        self._foreign = {n for n, v in contents.versions.items() if not any(x.is_onnx for x in v.values())}
        asked = (set(target) if self._wanted is None else self._wanted) - self._foreign
        if contents.release is not None and self.catalogue.current:
            # Of a release that has failed nothing is loaded again.
            known = {key: self._known_failure(contents, *key, loaded) for key in target.items()}
            failures = {key: why for key, why in known.items() if why is not None}
        for name, version in target.items() if not failures else ():
            await self._load_one(contents, name, version, loaded, failures)
        if contents.release is not None:
            # All of a release, or what was served before.
            if failures and self.catalogue.current:
                target = dict(self.catalogue.current)
                asked = set(target) if self._wanted is None else asked
        else:
            target = await self._older_where_failed(contents, target, loaded, failures)
        target = {n: v for n, v in target.items() if v in loaded.get(n, {})}
        kept: _Loaded = {}
        for name, version in target.items():
            older = sorted((v for v in contents.versions.get(name, {}) if v < version), reverse=True)
            for other in older[: self._options.versions - 1]:
                await self._load_one(contents, name, other, loaded, failures)
            stay = (version, *older[: self._options.versions - 1])
            kept[name] = {v: loaded[name][v] for v in stay if v in loaded[name]}
        ready = asked <= set(target)
        unchanged = target == self.catalogue.current and failures == self.catalogue.failures
        if unchanged and ready == self.catalogue.ready and _keys(kept) == _keys(self.catalogue.releases):
            return
        self._switch(Catalogue(kept, target, failures, ready))

    async def _older_where_failed(
        self, contents: Contents, target: dict[str, int], loaded: _Loaded, failures: dict[_Key, str]
    ) -> dict[str, int]:
        """Without a release each model stands alone: where its newest version fails, the newest one that does not."""
        found = {}
        for name, version in target.items():
            for older in sorted((v for v in contents.versions.get(name, {}) if v <= version), reverse=True):
                if older not in loaded.get(name, {}):
                    await self._load_one(contents, name, older, loaded, failures)
                if older in loaded.get(name, {}):
                    found[name] = older
                    break
        return found

    async def _load_one(
        self, contents: Contents, name: str, version: int, loaded: _Loaded, failures: dict[_Key, str]
    ) -> None:
        found = contents.versions.get(name, {}).get(version)
        known = self._known_failure(contents, name, version, loaded)
        if known is not None:
            failures[name, version] = known
        if known is not None or found is None or _has(loaded, found):
            return
        try:
            models = await asyncio.get_running_loop().run_in_executor(self._thread, self._models, found)
        except Exception as e:
            expected = isinstance(e, LoadFailure | ValueError | OSError)
            why = str(e) if expected else f"{type(e).__name__}: {e}"
            failures[name, version] = why
            self._failed[name, version] = (found.signature, why)
            logger.error("version %s of model '%s' cannot be loaded: %s", version, name, why, exc_info=not expected)
            return
        self._failed.pop((name, version), None)
        loaded.setdefault(name, {})[version] = Release(found, {n: self._served(m) for n, m in models.items()})

    def _known_failure(self, contents: Contents, name: str, version: int, loaded: _Loaded) -> str | None:
        """Why a version cannot be loaded, as far as that is known without another attempt."""
        found = contents.versions.get(name, {}).get(version)
        if found is None:
            return None if version in loaded.get(name, {}) else "the repository does not have it"
        before = self._failed.get((name, version))
        return before[1] if before is not None and before[0] == found.signature and not _has(loaded, found) else None

    def _models(self, found: VersionFolder) -> dict[str, Model]:
        return models_of(found, self._options.threads, self._options.allow_nan)

    def _served(self, model: Model) -> Served:
        metrics = self._metrics.of(model.name, model.version)
        return Served(model, Batcher(model, self._options.limits, self._runs, metrics), metrics)

    def _switch(self, new: Catalogue) -> None:
        """Requests from now on are answered by `new`; those that have begun end with what they began with."""
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
        gone = [g for g in _graphs(old) if id(g) not in staying]
        if gone:
            task = asyncio.get_running_loop().create_task(self._retire(gone))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    async def _retire(self, gone: list[Served]) -> None:
        """Free what is served no more when it has answered its last request, in the loading thread."""
        await asyncio.sleep(_RETIRE_SECONDS)
        while not all(g.batcher.idle for g in gone):
            await asyncio.sleep(_RETIRE_SECONDS)
        current = {(g.model.name, g.model.version) for g in _graphs(self.catalogue)}
        for metrics in [g.metrics for g in gone if (g.model.name, g.model.version) not in current]:
            metrics.remove()
        await asyncio.get_running_loop().run_in_executor(self._thread, gone.clear)

    def _say_fault(self, fault: str) -> None:
        if self._failed.get(("", 0), ((), ""))[1] != fault:
            self._failed["", 0] = ((), fault)
            logger.error("%s; what is loaded stays", fault)


def _chosen(contents: Contents) -> dict[str, int]:
    """By model, the version that the repository wants served: of the release, or the newest."""
    if contents.release is not None:
        return contents.release
    return {name: max(versions) for name, versions in contents.versions.items() if versions}


def _has(loaded: _Loaded, found: VersionFolder) -> bool:
    had = loaded.get(found.model, {}).get(found.version)
    return had is not None and had.found.signature == found.signature


def _graphs(catalogue: Catalogue) -> Iterable[Served]:
    return (g for rs in catalogue.releases.values() for r in rs.values() for g in r.graphs.values())


def _keys(releases: Mapping[str, Mapping[int, Release]]) -> dict[str, dict[int, int]]:
    return {n: {v: id(r) for v, r in rs.items()} for n, rs in releases.items()}
