"""The pipelines of the folder, as far as their DAGs need to know them: the plain mapping of each YAML file.

A file that cannot be read, or whose spec headrace refuses (spec_faults.py), gives a pipeline with a fault: its DAG of
the daily retraining stays, and says so. An import error of Airflow would take the DAGs of all other pipelines with it,
as they are of the same DAG file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from headrace_airflow.settings import SETTINGS, STAGES, YAML_TEXT
from headrace_airflow.spec_faults import spec_faults

#: As headrace wants a pipeline's own name.
_NAME = "[a-z][a-z0-9_]*"

GPU_POOL = "headrace_gpu"
POOL = "headrace"


@dataclass(frozen=True)
class Pipeline:
    """One file."""

    name: str
    path: Path
    spec: dict[str, Any] = field(default_factory=dict)
    #: Why its jobs cannot be known.
    fault: str | None = None

    def dag_id(self, kind: str) -> str:
        """Return the id of its DAG of a kind: retrain, score, backfill, maintain."""
        return f"headrace_{self.name}_{kind}"

    def stages(self, kind: str) -> list[Any]:
        """Return its stages of a kind of DAG, in order: entries of `headrace.stages`."""
        entries = [entry for entry in STAGES.values() if entry.dag == kind]
        return [e for e in entries if e.section is None or self.spec.get(e.section) is not None]

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value at a key path of the file."""
        node: Any = self.spec
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return default if node is None else node

    @property
    def daily(self) -> bool:
        """Return whether its source has new data every day: its files' path has the day, or its table has days."""
        return "{ds}" in str(self.value("source.path", "")) or self.value("source.day") is not None

    def pool(self, stage: Any) -> str:
        """Return the pool of a stage's job: one job at a time has the GPU."""
        on_gpu = stage.spark and self.value("spark.profile") == "gpu"
        trains = stage.lease == "train" and self.value("train.device") == "cuda"
        return GPU_POOL if on_gpu or trains else POOL


def pipelines(with_specs: bool = True) -> Iterator[Pipeline]:
    """Return the pipelines of the folder, each name once.

    Args:
        with_specs: tell specs that headrace refuses; the process of a task need not, its job does.
    """
    contents = {path: _content(path) for path in sorted(SETTINGS.pipelines.glob("*.yaml"))}
    parsed = [_read(path, content) for path, content in contents.items()]
    valid_contents = {
        p.path: content for p in parsed if p.fault is None and isinstance(content := contents[p.path], bytes)
    }
    faults = spec_faults(valid_contents) if with_specs else {}
    seen: dict[str, Path] = {}
    for pipeline in parsed:
        path = pipeline.path
        entry = replace(pipeline, fault=faults[path]) if path in faults else pipeline
        if entry.name in seen:
            entry = Pipeline(path.stem, path, fault=f"{path} and {seen[entry.name]} are both named '{entry.name}'")
            if entry.name in seen:
                continue
        seen[entry.name] = path
        yield entry


def _content(path: Path) -> bytes | OSError:
    try:
        return path.read_bytes()
    except OSError as e:
        return e


def _read(path: Path, content: bytes | OSError) -> Pipeline:
    stem = re.sub("[^a-z0-9_]", "_", path.stem.lower())
    try:
        if isinstance(content, OSError):
            raise content
        data = YAML_TEXT.parse_yaml(content.decode("utf-8"))
    except YAML_TEXT.YamlFault as e:
        return Pipeline(stem, path, fault=f"{path}: {'; '.join(str(e).splitlines())}")
    except (OSError, yaml.YAMLError, ValueError) as e:
        return Pipeline(stem, path, fault=f"{path} is not YAML: {' '.join(str(e).split())}")
    name = data.get("pipeline") if isinstance(data, dict) else None
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        return Pipeline(stem, path, fault=f"{path}: 'pipeline' must be a name of small letters, digits and _")
    return Pipeline(name, path, data)
