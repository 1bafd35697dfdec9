"""Retention in MLflow's store: permanent removal of versions and runs of days outside the retention period.

MLflow itself only marks versions as deleted, and keeps their rows and tags.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.registry.client import Client, pages, quoted
from headrace.registry.store import store_file
from headrace.registry.versions import DS
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


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
    """Remove records: each version in one transaction, then its run. Records that are removed already are passed over.

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
