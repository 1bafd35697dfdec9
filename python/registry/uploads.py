"""Uploaded models on a tracking server: list, download and replace the artifacts of runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.registry.artifact import FOLDER, log_model, staging
from headrace.registry.client import Client, pages, quoted
from headrace.registry.versions import KEY, is_ours, version_of
from headrace.storage import Location, local
from headrace.workspace import Workspace

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
