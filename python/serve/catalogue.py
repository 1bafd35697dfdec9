"""Which versions of which models are served, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.serve.batching import Batcher
from headrace.serve.errors import RequestError
from headrace.serve.infer_json import Plans
from headrace.serve.metrics import ModelMetrics
from headrace.serve.model import Model
from headrace.serve.repository import VersionFolder


@dataclass(frozen=True, eq=False)
class Served:
    """A graph of a version that answers."""

    model: Model
    batcher: Batcher
    metrics: ModelMetrics
    plans: Plans = field(default_factory=Plans)


@dataclass(frozen=True, eq=False)
class Release:
    """A version of a model's folder with all its graphs, by the names under which they are asked."""

    found: VersionFolder
    graphs: Mapping[str, Served]


@dataclass(frozen=True, eq=False)
class Catalogue:
    """What is served. A new one takes the place of the old one by one assignment; requests keep theirs to the end.

    Attributes:
        releases: by the model's folder, by version, what is loaded.
        current: by the same names, the version that answers where none is named.
        failures: by folder and version, why it is not loaded.
        ready: whether all that the repository wants served is, or an older release of it.
    """

    releases: Mapping[str, Mapping[int, Release]] = field(default_factory=dict)
    current: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[tuple[str, int], str] = field(default_factory=dict)
    ready: bool = False
    _served: Mapping[tuple[str, str], Served] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        served: dict[tuple[str, str], Served] = {}
        for folder, versions in self.releases.items():
            for version, release in versions.items():
                for name, graph in release.graphs.items():
                    served[name, str(version)] = graph
                    if self.current.get(folder) == version:
                        served[name, ""] = graph
        object.__setattr__(self, "_served", served)

    def find(self, name: str, version: str) -> Served:
        """What answers; `version` is empty where the current one is meant. Raises RequestError: nothing does (404)."""
        found = self._served.get((name, version))
        if found is None:
            raise RequestError(404, self._missing(name, version))
        return found

    def names(self) -> list[str]:
        """Of all graphs."""
        return sorted({name for name, _ in self._served})

    def versions(self, name: str) -> list[str]:
        """Of one of them, the loaded ones."""
        return sorted((v for n, v in self._served if n == name and v), key=int)

    def _missing(self, name: str, version: str) -> str:
        loaded = self.versions(name)
        if loaded:
            return f"model '{name}' has no version {version!r} here; loaded: {', '.join(loaded)}"[:500]
        reasons = [f"version {v}: {why}" for (folder, v), why in self.failures.items() if folder == name]
        if reasons:
            return f"model '{name}' is not loaded: " + "; ".join(reasons)[:500]
        return f"there is no model {name!r}; served: {', '.join(self.names()) or 'none'}"[:500]
