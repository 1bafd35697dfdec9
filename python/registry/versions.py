"""Registered models in MLflow. MLflow takes seconds to import, so it is imported where it is used.

Names: `<pipeline>` for the neural model, `<pipeline>-baseline` and `<pipeline>-second_stage` for the others. A version
is one training run, known by its key (a tag), so that registering a run again finds its version. The alias `champion`
is the version of the newest day that was trained: a backfill of older days registers versions beside it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.registry.store import open_store, store_file
from headrace.storage import Location, local
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("headrace.registry")
CHAMPION = "champion"
_KEY = "headrace.key"
_DS = "headrace.ds"
#: MLflow refuses longer values of parameters.
_PARAM_CHARS = 500
#: Metrics that MLflow takes at once.
_BATCH = 1000
_OPENING = threading.Lock()


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


def register(
    ws: Workspace,
    name: str,
    model_dir: Location,
    metrics: Mapping[str, float | None],
    key: str,
    *,
    params: Mapping[str, Any] | None = None,
    ds: str | None = None,
    alias: str = CHAMPION,
    history: Sequence[Mapping[str, float | None]] = (),
) -> str:
    """Make `model_dir` a version of the registered model `name`, return the version's number.

    It gets the alias unless that is at a version of a later day. Idempotent by `key`: a killed or repeated registration
    ends with one version.

    Args:
        metrics: numbers; None and NaN (undefined for this data) are left out.
        params: a flat mapping of settings, shown beside the metrics.
        ds: the day it was trained for, YYYY-MM-DD; None: unknown, and the alias moves.
        history: what was measured on the way; each entry has a `step`.

    Raises:
        UserError: the store cannot be opened or written.
    """
    with _Client(ws) as client:
        _ensure_name(client, name)
        found = _by_key(client, name, key)
        if found is None:
            run_id = _finished_run(ws, client, name, key, metrics, params or {}, ds, history)
            tags = {_KEY: key} | ({_DS: ds} if ds else {})
            found = client.create_model_version(name, source=str(model_dir), run_id=run_id, tags=tags)
            log.info("registered %s version %s", name, found.version)
        holder = _alias_holder(client, name, alias)
        latest = holder.tags.get(_DS) if holder is not None else None
        if ds is None or latest is None or ds >= latest:
            client.set_registered_model_alias(name, alias, found.version)
        else:
            log.info("the alias %s of %s stays at version %s, of %s", alias, name, holder.version, latest)
        return str(found.version)


def champion(ws: Workspace, name: str, alias: str = CHAMPION) -> Version | None:
    """The version that has the alias; None where the model or the store is not there."""
    if not store_file(ws).is_file():
        return None
    with _Client(ws) as client:
        found = _alias_holder(client, name, alias)
        return None if found is None else _version(client, name, found)


def numbered(ws: Workspace, name: str, version: str) -> Version | None:
    """The version of that number; None where the model, the version or the store is not there."""
    if not store_file(ws).is_file():
        return None
    with _Client(ws) as client:
        found = next(
            (v for v in client.search_model_versions(f"name = '{_quoted(name)}'") if str(v.version) == version), None
        )
        return None if found is None else _version(client, name, found)


def _version(client: MlflowClient, name: str, found: Any) -> Version:
    metrics = client.get_run(found.run_id).data.metrics if found.run_id else {}
    return Version(
        name=name,
        version=str(found.version),
        source=local(found.source),
        key=found.tags.get(_KEY, ""),
        ds=found.tags.get(_DS),
        metrics=metrics,
    )


def preload(ws: Workspace | None = None) -> None:
    """Import MLflow now (3 s), for callers that have something to wait for meanwhile; and make the store's tables.

    `ws`: whose store; None: the import alone.
    """
    _quietly_import()
    if ws is not None:
        with _Client(ws):
            pass


class _Client:
    """A client of the workspace's store; what goes wrong inside becomes a UserError that names the store."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    def __enter__(self) -> MlflowClient:
        _quietly_import()
        self._ws.store.make_dir()
        try:
            # MLflow counts on one thread at a time here.
            with _OPENING:
                return open_store(self._ws)
        except Exception as e:
            raise self._explained(e) from e

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: object) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if isinstance(e, (MlflowException, SQLAlchemyError)):
            raise self._explained(e) from e

    def _explained(self, e: BaseException) -> UserError:
        first_line = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        return UserError(
            f"the model registry {self._ws.registry_uri} cannot be used ({first_line}). Free its disk or file "
            f"permissions; if the file is damaged, move it away: finished models stay where they are"
        )


def _quietly_import() -> None:
    """Import it: without telemetry, and without log lines about the store's own tables."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow.tracking  # noqa: F401

    # The import sets up logging anew, so the levels come after it.
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _ensure_name(client: MlflowClient, name: str) -> None:
    if not client.search_registered_models(filter_string=f"name = '{_quoted(name)}'"):
        client.create_registered_model(name)


def _alias_holder(client: MlflowClient, name: str, alias: str) -> Any:
    """MLflow's version that has the alias; None where the model or the alias is not there."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, ErrorCode

    absent = (ErrorCode.Name(RESOURCE_DOES_NOT_EXIST), ErrorCode.Name(INVALID_PARAMETER_VALUE))
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as e:
        if e.error_code in absent:
            return None
        raise


def _by_key(client: MlflowClient, name: str, key: str) -> Any:
    found = client.search_model_versions(f"name = '{_quoted(name)}'")
    same = [v for v in found if v.tags.get(_KEY) == key]
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
    experiment_id = (
        experiment.experiment_id
        if experiment
        else client.create_experiment(name, artifact_location=(ws.store / "mlflow").uri)
    )
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{_KEY}` = '{_quoted(key)}'", max_results=1)
    run = runs[0] if runs else client.create_run(experiment_id, tags={_KEY: key}, run_name=ds or key)
    now = run.info.start_time
    numbers = {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(v)}
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(k, v, now, 0) for k, v in numbers.items()],
        params=[Param(k, str(v)[:_PARAM_CHARS]) for k, v in params.items()],
        tags=[RunTag(_DS, ds)] if ds else [],
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


def _quoted(text: str) -> str:
    if "'" in text or "\\" in text:
        raise ValueError(f"a name with a quote: {text!r}")
    return text
