"""Registered models in MLflow. MLflow takes seconds to import, so it is imported where it is used.

Names are `<pipeline>` for the neural model, `<pipeline>-baseline` and `<pipeline>-second_stage` for the others. A
version is one training run, identified by its key (a tag), so that a repeated registration finds its version.
Registering moves no alias: headrace.registry.promotion does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.registry.artifact import log_model
from headrace.registry.client import Client, alias_holder, quietly_import, quoted
from headrace.registry.store import is_there
from headrace.stage import Context
from headrace.storage import Location, location_of
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("headrace.registry")
CHAMPION = "champion"
KEY = "headrace.key"
DS = "headrace.ds"
#: Tag of a version's status: `registered`, or one of headrace.registry.promotion. Versions without it are older: they
#: got the alias when they were registered.
STATUS = "headrace.status"
REGISTERED = "registered"
#: Tag of the saved model's folder, as headrace opens it. Without it, the version's source is the folder.
SOURCE = "headrace.source"
#: Longest value of a parameter that MLflow accepts.
_PARAM_CHARS = 500
#: Most metrics that MLflow accepts in one call.
_BATCH = 1000


@dataclass(frozen=True)
class Version:
    """A registered model."""

    name: str
    version: str
    #: The saved model's folder.
    source: Location
    #: The training run's key.
    key: str
    ds: str | None
    metrics: Mapping[str, float]
    #: All of its tags, `headrace.*` among them.
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str | None:
        """Status of the version, see `STATUS`; None for a version that is older than statuses."""
        return self.tags.get(STATUS)


def registered_name(pipeline: str, stage: str) -> str:
    """Return the name of the model that a stage registers."""
    return pipeline if stage == "train" else f"{pipeline}-{stage}"


def register(
    ws: Workspace,
    name: str,
    model_dir: Location,
    metrics: Mapping[str, float | None],
    key: str,
    *,
    params: Mapping[str, Any] | None = None,
    ds: str | None = None,
    lineage: Mapping[str, str | None] | None = None,
    history: Sequence[Mapping[str, float | None]] = (),
) -> str:
    """Register `model_dir` as a version of the model `name`, and return the version's number.

    No alias moves. Idempotent by `key`: a killed or repeated registration ends with one version. On a tracking server
    the version has the model as its artifact (headrace.registry.artifact).

    Args:
        metrics: numbers; None and NaN (undefined for this data) are left out.
        params: a flat mapping of settings, shown beside the metrics.
        ds: the day it was trained for, YYYY-MM-DD; None: unknown.
        lineage: origins of the model, as tags `headrace.NAME`; None: no such origin. `warm_start` is the key of the
            model that training started from; where that is a version of the same name, the tag
            `headrace.warm_start_version` has its number.
        history: metrics during training; each entry has a `step`.

    Raises:
        UserError: the store cannot be opened or written.
    """
    with Client(ws) as client:
        _ensure_name(client, name)
        record = _by_key(client, name, key)
        if record is None:
            run_id = _finished_run(ws, client, name, key, metrics, params or {}, ds, history)
            tags = {KEY: key, STATUS: REGISTERED} | ({DS: ds} if ds else {})
            tags |= {f"headrace.{origin}": value for origin, value in (lineage or {}).items() if value is not None}
            start = (lineage or {}).get("warm_start")
            if start is not None and (start_record := _by_key(client, name, start)) is not None:
                tags["headrace.warm_start_version"] = str(start_record.version)
            source = str(model_dir)
            if ws.registry_server is not None:
                tags[SOURCE], source = source, log_model(ws, client, run_id, name, key, model_dir)
            record = client.create_model_version(name, source=source, run_id=run_id, tags=tags)
            log.info("registered %s version %s", name, record.version)
        return str(record.version)


def champion(ws: Workspace, name: str, alias: str = CHAMPION) -> Version | None:
    """Return the version that has the alias; None where the model or the store does not exist.

    Raises:
        UserError: the store cannot be opened or read, or somebody else has registered the version.
    """
    if not is_there(ws):
        return None
    with Client(ws) as client:
        record = alias_holder(client, name, alias)
        return None if record is None else version_of(client, name, record)


def numbered(ws: Workspace, name: str, version: str) -> Version | None:
    """Return the version of a number; None where the model, the version or the store does not exist.

    Raises:
        UserError: the store cannot be opened or read, or somebody else has registered the version.
    """
    if not is_there(ws):
        return None
    with Client(ws) as client:
        record = next(
            (v for v in client.search_model_versions(f"name = '{quoted(name)}'") if str(v.version) == version), None
        )
        return None if record is None else version_of(client, name, record)


def by_key(ws: Workspace, name: str, key: str) -> Version | None:
    """Return the version of a training run; None where the model, the version or the store does not exist."""
    if not is_there(ws):
        return None
    with Client(ws) as client:
        record = _by_key(client, name, key)
        return None if record is None else version_of(client, name, record)


def versions(ws: Workspace, name: str) -> list[Version]:
    """Return all versions of a model that headrace has registered, lowest number first; empty without a store."""
    if not is_there(ws):
        return []
    with Client(ws) as client:
        records = client.search_model_versions(f"name = '{quoted(name)}'")
        return sorted((version_of(client, name, v) for v in records if is_ours(v)), key=lambda v: int(v.version))


def aliases(ws: Workspace, name: str) -> dict[str, str]:
    """Return the version number of each alias of a model; empty where the model or the store does not exist."""
    if not is_there(ws):
        return {}
    with Client(ws) as client:
        models = client.search_registered_models(filter_string=f"name = '{quoted(name)}'")
        return {alias: str(version) for model in models for alias, version in sorted(model.aliases.items())}


def is_ours(record: Any) -> bool:
    """Return whether headrace has registered a version in MLflow."""
    return bool(record.tags.get(KEY))


def version_of(client: MlflowClient, name: str, record: Any) -> Version:
    """Convert MLflow's record of a version.

    Raises:
        UserError: the version was registered by other means, so that its source may be anything.
    """
    if not is_ours(record):
        raise UserError(
            f"version {record.version} of model '{name}' was not registered by headrace (it has no tag {KEY}; its "
            f"source is {record.source}): name another version, or give the alias to one that headrace models lists"
        )
    return Version(
        name=name,
        version=str(record.version),
        source=location_of(record.tags.get(SOURCE, record.source)),
        key=record.tags[KEY],
        ds=record.tags.get(DS),
        metrics=client.get_run(record.run_id).data.metrics if record.run_id else {},
        tags=dict(record.tags),
    )


def preload(ws: Workspace | None = None) -> None:
    """Import MLflow (3 s) while the caller waits for something else, and create the store's tables.

    `ws`: the workspace of the store; None: only import.
    """
    quietly_import()
    if ws is not None:
        with Client(ws):
            pass


def _ensure_name(client: MlflowClient, name: str) -> None:
    if not client.search_registered_models(filter_string=f"name = '{quoted(name)}'"):
        client.create_registered_model(name)


def _by_key(client: MlflowClient, name: str, key: str) -> Any:
    records = client.search_model_versions(f"name = '{quoted(name)}'")
    same = [v for v in records if v.tags.get(KEY) == key]
    # After a race created two, all processes use the first.
    return min(same, key=lambda v: int(v.version), default=None)


def _finished_run(
    ws: Workspace,
    client: MlflowClient,
    name: str,
    key: str,
    metrics: Mapping[str, float | None],
    params: Mapping[str, Any],
    ds: str | None,
    history: Sequence[Mapping[str, float | None]],
) -> str:
    """Return the id of the MLflow run with the metrics; complete one that a killed registration has left."""
    from mlflow.entities import Metric, Param, RunTag

    experiment = client.get_experiment_by_name(name)
    # A server knows where its artifacts are.
    place = None if ws.registry_server is not None else (ws.store / "mlflow").uri
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name, artifact_location=place)
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{KEY}` = '{quoted(key)}'", max_results=1)
    run = runs[0] if runs else client.create_run(experiment_id, tags={KEY: key}, run_name=ds or key)
    now = run.info.start_time
    numbers = {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(v)}
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(k, v, now, 0) for k, v in numbers.items()],
        params=[Param(k, str(v)[:_PARAM_CHARS]) for k, v in params.items()],
        tags=[RunTag(DS, ds)] if ds else [],
    )
    points = [
        Metric(f"step_{k}", float(v), now, int(entry["step"] or 0))
        for entry in history
        for k, v in entry.items()
        if k != "step" and v is not None and math.isfinite(v)
    ]
    for start in range(0, len(points), _BATCH):
        client.log_batch(run.info.run_id, metrics=points[start : start + _BATCH])
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)


def lineage_of(ctx: Context) -> dict[str, str | None]:
    """Return the dataset's key, its place, and the days that it trains on (first/last, UTC; None without days)."""
    features = ctx.upstream["features"]
    dataset = features.output("dataset")
    days = features.facts.get("train_range")
    return {"dataset": dataset.version, "dataset_name": dataset.name, "train_days": "/".join(days) if days else None}
