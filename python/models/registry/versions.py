"""Registered models in MLflow. MLflow takes seconds to import, so it is imported where it is used.

Names are `<pipeline>` for the neural model, `<pipeline>-baseline` and `<pipeline>-second_stage` for the others. A
version is one training run, identified by its key (a tag), so that a repeated registration finds its version.
Registering moves no alias: headrace.models.registry.promotion does.

MLflow itself only marks versions as deleted, and keeps their rows and tags. Versions and runs of days outside the
retention period are removed permanently here. Uploaded models are listed, downloaded and replaced as artifacts of runs.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.registry.artifact import FOLDER, log_model, staging
from headrace.models.registry.client import Client, alias_holder, is_there, pages, quietly_import, quoted, store_file
from headrace.stage import Context
from headrace.storage import Location, local, location_of

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


log = logging.getLogger("headrace.registry")
CHAMPION = "champion"
KEY = "headrace.key"
DS = "headrace.ds"
#: Tag of a version's status: `registered`, or one of headrace.models.registry.promotion. Versions without it are
#: older: they got the alias when they were registered.
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
    #: All tags, including `headrace.*`.
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
    the version has the model as its artifact (headrace.models.registry.artifact).

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
    """Return the dataset's key and name, and the days that it trains on (first/last, UTC; None without days)."""
    features = ctx.upstream["features"]
    dataset = features.output("dataset")
    days = features.facts.get("train_range")
    return {"dataset": dataset.version, "dataset_name": dataset.name, "train_days": "/".join(days) if days else None}


@dataclass(frozen=True)
class OldRecord:
    """A training run in MLflow, and its version."""

    ds: str
    #: None: a killed registration, or the removal of its version, has left a run without a version.
    version: str | None
    #: None for a version without a run.
    run_id: str | None


def old_records(ws: Workspace, name: str, first_day: str, retained_days: Collection[str]) -> list[OldRecord]:
    """Return the records of a model of days before `first_day`, oldest first; empty without the model or the store.

    Left out are records of `retained_days`, those with an alias, those without a day, and the newest version, from
    which MLflow derives the next number.

    Raises:
        UserError: the store cannot be opened or read.
    """
    if not store_file(ws).is_file():
        return []
    with Client(ws) as client:
        models = client.search_registered_models(filter_string=f"name = '{quoted(name)}'")
        aliased = {str(version) for model in models for version in model.aliases.values()}
        versions = list(pages(client.search_model_versions, filter_string=f"name = '{quoted(name)}'"))
        newest = max((int(v.version) for v in versions), default=0)
        records, with_version = [], {v.run_id for v in versions if v.run_id}
        for v in versions:
            stays = str(v.version) in aliased or int(v.version) == newest
            if not stays and (ds := v.tags.get(DS, first_day)) < first_day and ds not in retained_days:
                records.append(OldRecord(ds, str(v.version), v.run_id or None))
        for run_id, ds in _runs(client, name):
            if run_id not in with_version and ds < first_day and ds not in retained_days:
                records.append(OldRecord(ds, None, run_id))
        return sorted(records, key=lambda r: (r.ds, int(r.version or 0)))


def remove_records(ws: Workspace, name: str, records: Sequence[OldRecord]) -> None:
    """Remove records: each version in one transaction, then its run. Records that do not exist any more are ignored.

    Raises:
        UserError: the store cannot be opened or written.
    """
    with Client(ws) as client:
        for record in records:
            if record.version is not None:
                _remove_version(client, name, int(record.version))
            if record.run_id is not None:
                _remove_run(client, record.run_id)


def _remove_version(client: MlflowClient, name: str, version: int) -> None:
    """Delete a version's row by MLflow's table classes: its API has no call for that."""
    from mlflow.store.model_registry.dbmodels.models import SqlModelVersion

    with client._get_registry_client().store.ManagedSessionMaker(read_only=False) as session:
        query = session.query(SqlModelVersion).filter_by(name=name, version=version)
        for row in query.all():
            session.delete(row)  # and, by MLflow's cascade, its tags


def _remove_run(client: MlflowClient, run_id: str) -> None:
    """Delete a run with its metrics, parameters and tags, by the call of `mlflow gc`."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

    try:
        client._tracking_client.store._hard_delete_run(run_id)
    except MlflowException as e:
        if e.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise


def _runs(client: MlflowClient, name: str) -> list[tuple[str, str]]:
    """Return (run id, day) of a model's runs that have a day."""
    from mlflow.entities import ViewType

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return []
    ids, filters = [experiment.experiment_id], f"tags.`{DS}` != ''"
    runs = pages(client.search_runs, experiment_ids=ids, filter_string=filters, run_view_type=ViewType.ALL)
    return [(str(r.info.run_id), str(r.data.tags[DS])) for r in runs]


#: Tag of a run whose artifact is being replaced: it may be a mixture of old and new files.
_BEGUN = "headrace.upload"


@dataclass(frozen=True)
class Upload:
    """A model that a run has as its artifact."""

    #: Name of the registered model.
    name: str
    run_id: str
    #: The version; None: the registration was killed, or the version was removed.
    version: str | None
    #: Key of the training run.
    key: str
    #: The saved model's folder; None where there is no version.
    source: Location | None
    #: True: the run is marked as deleted; MLflow keeps its artifacts.
    is_deleted: bool
    #: True: a replacement of the artifact was begun and has not ended.
    is_begun: bool


def uploads(ws: Workspace, name: str) -> list[Upload]:
    """List the uploads of a registered model, oldest first; empty without a server.

    Raises:
        UserError: the server cannot be used.
    """
    if ws.registry_server is None:
        return []
    from mlflow.entities import ViewType

    with Client(ws) as client:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return []
        versions = {v.run_id: v for v in pages(client.search_model_versions, filter_string=f"name = '{quoted(name)}'")}
        models = []
        query = {"experiment_ids": [experiment.experiment_id], "filter_string": f"tags.`{KEY}` != ''"}
        for run in pages(client.search_runs, **query, run_view_type=ViewType.ALL, order_by=["attributes.start_time"]):
            if not client.list_artifacts(run.info.run_id, FOLDER):
                continue
            version = versions.get(run.info.run_id)
            known = version_of(client, name, version) if version is not None and is_ours(version) else None
            models.append(
                Upload(
                    name,
                    str(run.info.run_id),
                    None if version is None else str(version.version),
                    str(run.data.tags[KEY]),
                    None if known is None else known.source,
                    run.info.lifecycle_stage != "active",
                    _BEGUN in run.data.tags,
                )
            )
        return models


@contextmanager
def fetched(ws: Workspace, upload: Upload) -> Iterator[Location]:
    """Download an artifact to a temporary folder, which is removed after the block.

    Raises:
        UserError: the server cannot be used.
    """
    place = staging(ws, upload.name)
    place.make_dir()
    with tempfile.TemporaryDirectory(dir=place.local_path()) as folder:
        with Client(ws) as client:
            path = client.download_artifacts(upload.run_id, FOLDER, folder)
        yield local(path)


def upload_again(ws: Workspace, upload: Upload) -> None:
    """Upload the saved model and its dependencies again, as they are in the store now. Safe to kill and repeat.

    Raises:
        UserError: the model is incomplete, or the server cannot be used.
    """
    assert upload.source is not None
    with Client(ws) as client:
        client.set_tag(upload.run_id, _BEGUN, "begun")
        log_model(ws, client, upload.run_id, upload.name, upload.key, upload.source)
        client.delete_tag(upload.run_id, _BEGUN)
