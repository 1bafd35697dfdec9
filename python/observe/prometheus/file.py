"""The file of a pipeline in the folder of node_exporter's textfile collector."""

from __future__ import annotations

from headrace.config import Spec
from headrace.observe.prometheus.metrics import metrics_of
from headrace.observe.prometheus.text import render
from headrace.storage import Location, local, local_folder
from headrace.workspace import Workspace


def metrics_file(spec: Spec, folder: str) -> Location:
    """Where a pipeline's metrics are."""
    return local(local_folder(folder, "observe.prometheus")) / f"headrace_{spec.pipeline}.prom"


def write_metrics(ws: Workspace, spec: Spec, folder: str) -> None:
    """Write a pipeline's metrics anew, in one step: the collector never sees half a file.

    Raises:
        OSError: the folder cannot be written to.
        UserError: a manifest is damaged.
    """
    file = metrics_file(spec, folder)
    file.parent.make_dir()
    file.put_text(render(metrics_of(ws, spec.pipeline)))
