"""Models that a tracking server has as artifacts of runs: which there are, what is in them, a change of them."""

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

#: Tag of a run whose artifact is being written again: it may be a mixture.
_BEGUN = "headrace.upload"


@dataclass(frozen=True)
class Upload:
    """A model that a run has as its artifact."""

    #: Of the registered model.
    name: str
    run_id: str
    #: The version; None: the registration was killed, or the version is gone.
    version: str | None
    #: The training run's.
    key: str
    #: The saved model's folder; None where there is no version.
    source: Location | None
    #: Whether the run is marked as deleted; MLflow keeps its artifacts.
    is_deleted: bool
    #: Whether writing it again was begun, and has not ended.
    is_begun: bool


def uploads(ws: Workspace, name: str) -> list[Upload]:
    """Those of a registered model, oldest first; none without a server.

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
        found = []
        asked = {"experiment_ids": [experiment.experiment_id], "filter_string": f"tags.`{KEY}` != ''"}
        for run in pages(client.search_runs, **asked, run_view_type=ViewType.ALL, order_by=["attributes.start_time"]):
            if not client.list_artifacts(run.info.run_id, FOLDER):
                continue
            version = versions.get(run.info.run_id)
            known = version_of(client, name, version) if version is not None and is_ours(version) else None
            found.append(
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
        return found


@contextmanager
def fetched(ws: Workspace, upload: Upload) -> Iterator[Location]:
    """A copy of an artifact, for as long as the block runs.

    Raises:
        UserError: the server cannot be used.
    """
    place = staging(ws, upload.name)
    place.make_dir()
    with tempfile.TemporaryDirectory(dir=place.local_path()) as folder:
        with Client(ws) as client:
            found = client.download_artifacts(upload.run_id, FOLDER, folder)
        yield local(found)


def upload_again(ws: Workspace, upload: Upload) -> None:
    """Upload the saved model, with those that it needs, as they are in the store now. May be killed, and done again.

    Raises:
        UserError: the model is not whole, or the server cannot be used.
    """
    assert upload.source is not None
    with Client(ws) as client:
        client.set_tag(upload.run_id, _BEGUN, "begun")
        log_model(ws, client, upload.run_id, upload.name, upload.key, upload.source)
        client.delete_tag(upload.run_id, _BEGUN)
