"""Where everything is on disk. One function a place, so that no path is spelled twice."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import headrace


@dataclass(frozen=True)
class Workspace:
    """The folders of one installation, all below `home` (made on demand by those who write).

    `home` may be given relative; it is kept absolute so that Spark's executors see the same place.
    """

    home: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Path(os.path.abspath(self.home)))

    def landing(self, pipeline: str) -> Path:
        return self.home / "landing" / pipeline

    def table(self, pipeline: str, name: str) -> Path:
        """A Delta table's folder: `events`, `quarantine`, `vocabulary`, `scores`, ..."""
        return self.home / "lake" / pipeline / name

    def encoded(self, pipeline: str) -> Path:
        """The lake's files as the Arrow engine decoded them: kept for the next day, made again where missing."""
        return self.home / "encoded" / pipeline

    def manifest(self, pipeline: str, ds: str, stage: str) -> Path:
        return self.home / "runs" / pipeline / ds / f"{stage}.json"

    def log(self, pipeline: str, ds: str, stage: str) -> Path:
        return self.home / "logs" / pipeline / ds / f"{stage}.log"

    def dataset(self, pipeline: str, ds: str, key: str) -> Path:
        return self.home / "datasets" / pipeline / ds / key

    def model(self, pipeline: str, ds: str, key: str) -> Path:
        return self.home / "models" / pipeline / ds / key

    def search(self, pipeline: str, ds: str, key: str) -> Path:
        """A search of hyper-parameters: its study, its sample of the dataset, its best settings."""
        return self.home / "search" / pipeline / ds / key

    def report(self, pipeline: str, ds: str) -> Path:
        return self.home / "reports" / pipeline / f"{ds}.html"

    def lock(self, pipeline: str) -> Path:
        return self.home / "locks" / f"{pipeline}.lock"

    @property
    def registry_uri(self) -> str:
        """MLflow's store: an SQLite file."""
        return f"sqlite:///{self.home / 'mlflow.db'}"

    @property
    def postgres(self) -> Path:
        """The embedded PostgreSQL's folder (data, password file, socket, log)."""
        return self.home / "postgres"

    @property
    def spark_local(self) -> Path:
        return self.home / "spark"


def checkout() -> Path:
    """The folder that holds `conf/`, `build/` and `python/`."""
    return Path(headrace.__file__).resolve().parent.parent


def jars_dir() -> Path:
    """Where `build.gradle` puts the jars."""
    return checkout() / "build" / "jars"


def class_archive() -> Path:
    """The classes of Spark as the JVM maps them, made by `make env`; there need not be one."""
    return checkout() / "build" / "spark" / "classes.jsa"


def rapids_dir() -> Path:
    """Where `gradle rapids` puts the RAPIDS plugin."""
    return checkout() / "build" / "rapids"


def pipeline_file(name: str) -> Path:
    """The YAML of a shipped pipeline."""
    return checkout() / "conf" / "pipelines" / f"{name}.yaml"
