"""Registered models in MLflow. MLflow takes seconds to import, so it is imported where it is used.

Names: `<pipeline>` for the neural model, `<pipeline>-baseline` and `<pipeline>-second_stage` for the others. A version
is one training run, known by its key (a tag), so that registering a run again finds its version. Registering moves no
alias: headrace.registry.promotion does.
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
from headrace.storage import Location, location_of
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("headrace.registry")
CHAMPION = "champion"
KEY = "headrace.key"
DS = "headrace.ds"
#: What became of a version: `registered`, and what headrace.registry.promotion makes of it. Versions from before there
#: was this tag were given the alias when they were registered.
STATUS = "headrace.status"
REGISTERED = "registered"
#: Where the saved model is, as headrace opens it. Versions without it have it as their source.
SOURCE = "headrace.source"
#: MLflow refuses longer values of parameters.
_PARAM_CHARS = 500
#: Metrics that MLflow takes at once.
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
        """See `STATUS`; None of a version from before there was one."""
        return self.tags.get(STATUS)


def registered_name(pipeline: str, stage: str) -> str:
    """The name of the model that a stage registers."""
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
    """Make `model_dir` a version of the registered model `name`, return the version's number.

    No alias moves. Idempotent by `key`: a killed or repeated registration ends with one version. On a tracking server
    the version has the model as its artifact (headrace.registry.artifact).

    Args:
        metrics: numbers; None and NaN (undefined for this data) are left out.
        params: a flat mapping of settings, shown beside the metrics.
        ds: the day it was trained for, YYYY-MM-DD; None: unknown.
        lineage: what it was made of: tags `headrace.NAME`; None: has none. `warm_start` is the key of the model that it
            started from; where that is a version of the same name, the tag `headrace.warm_start_version` says which.
        history: what was measured on the way; each entry has a `step`.

    Raises:
        UserError: the store cannot be opened or written.
    """
    with Client(ws) as client:
        _ensure_name(client, name)
        found = _by_key(client, name, key)
        if found is None:
            run_id = _finished_run(ws, client, name, key, metrics, params or {}, ds, history)
            tags = {KEY: key, STATUS: REGISTERED} | ({DS: ds} if ds else {})
            tags |= {f"headrace.{of}": value for of, value in (lineage or {}).items() if value is not None}
            start = (lineage or {}).get("warm_start")
            if start is not None and (before := _by_key(client, name, start)) is not None:
                tags["headrace.warm_start_version"] = str(before.version)
            source = str(model_dir)
            if ws.registry_server is not None:
                tags[SOURCE], source = source, log_model(ws, client, run_id, name, key, model_dir)
            found = client.create_model_version(name, source=source, run_id=run_id, tags=tags)
            log.info("registered %s version %s", name, found.version)
        return str(found.version)


def champion(ws: Workspace, name: str, alias: str = CHAMPION) -> Version | None:
    """The version that has the alias; None where the model or the store is not there.

    Raises:
        UserError: the store cannot be opened or read, or somebody else has registered the version.
    """
    if not is_there(ws):
        return None
    with Client(ws) as client:
        found = alias_holder(client, name, alias)
        return None if found is None else version_of(client, name, found)


def numbered(ws: Workspace, name: str, version: str) -> Version | None:
    """The version of that number; None where the model, the version or the store is not there.

    Raises:
        UserError: the store cannot be opened or read, or somebody else has registered the version.
    """
    if not is_there(ws):
        return None
    with Client(ws) as client:
        found = next(
            (v for v in client.search_model_versions(f"name = '{quoted(name)}'") if str(v.version) == version), None
        )
        return None if found is None else version_of(client, name, found)


def by_key(ws: Workspace, name: str, key: str) -> Version | None:
    """The version of that training run; None where the model, the version or the store is not there."""
    if not is_there(ws):
        return None
    with Client(ws) as client:
        found = _by_key(client, name, key)
        return None if found is None else version_of(client, name, found)


def versions(ws: Workspace, name: str) -> list[Version]:
    """All versions of a model that headrace has registered, oldest number first; none where the model or the store is
    not there.
    """
    if not is_there(ws):
        return []
    with Client(ws) as client:
        found = client.search_model_versions(f"name = '{quoted(name)}'")
        return sorted((version_of(client, name, v) for v in found if is_ours(v)), key=lambda v: int(v.version))


def aliases(ws: Workspace, name: str) -> dict[str, str]:
    """The number of the version that each alias of a model has; none where the model or the store is not there."""
    if not is_there(ws):
        return {}
    with Client(ws) as client:
        found = client.search_registered_models(filter_string=f"name = '{quoted(name)}'")
        return {alias: str(version) for of in found for alias, version in sorted(of.aliases.items())}


def is_ours(found: Any) -> bool:
    """Whether headrace has registered what MLflow has a record of."""
    return bool(found.tags.get(KEY))


def version_of(client: MlflowClient, name: str, found: Any) -> Version:
    """MLflow's record of a version, as ours.

    Raises:
        UserError: it is not: somebody has registered it by other means, so that its source may be anything.
    """
    if not is_ours(found):
        raise UserError(
            f"version {found.version} of model '{name}' was not registered by headrace (it has no tag {KEY}; its "
            f"source is {found.source}): name another version, or give the alias to one that headrace models lists"
        )
    return Version(
        name=name,
        version=str(found.version),
        source=location_of(found.tags.get(SOURCE, found.source)),
        key=found.tags[KEY],
        ds=found.tags.get(DS),
        metrics=client.get_run(found.run_id).data.metrics if found.run_id else {},
        tags=dict(found.tags),
    )


def preload(ws: Workspace | None = None) -> None:
    """Import MLflow now (3 s), for callers that have something to wait for meanwhile; and make the store's tables.

    `ws`: whose store; None: the import alone.
    """
    quietly_import()
    if ws is not None:
        with Client(ws):
            pass


def _ensure_name(client: MlflowClient, name: str) -> None:
    if not client.search_registered_models(filter_string=f"name = '{quoted(name)}'"):
        client.create_registered_model(name)


def _by_key(client: MlflowClient, name: str, key: str) -> Any:
    found = client.search_model_versions(f"name = '{quoted(name)}'")
    same = [v for v in found if v.tags.get(KEY) == key]
    # Where a race made two, the first is everybody's.
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
    """The MLflow run that holds the metrics; one that a killed registration left is completed."""
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
        Metric(f"step_{k}", float(v), now, int(at["step"] or 0))
        for at in history
        for k, v in at.items()
        if k != "step" and v is not None and math.isfinite(v)
    ]
    for start in range(0, len(points), _BATCH):
        client.log_batch(run.info.run_id, metrics=points[start : start + _BATCH])
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)
