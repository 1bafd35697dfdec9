"""`headrace metrics`: a pipeline's metrics as Prometheus' text."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.commands.screen import out
from headrace.config import load_spec
from headrace.jobs.observe.prometheus import exposition, metrics_of
from headrace.workspace import Workspace


def metrics(ws: Workspace, pipeline: str, overrides: Sequence[str] = ()) -> None:
    """Print the metrics of a pipeline.

    Raises:
        UserError: the pipeline is unknown, a manifest is damaged.
    """
    spec = load_spec(pipeline, overrides)
    out.print(exposition(metrics_of(ws.of(spec), spec.pipeline)), markup=False, soft_wrap=True, end="")
