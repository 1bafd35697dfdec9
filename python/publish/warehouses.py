"""The warehouse of a pipeline, opened."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from headrace.config import Spec
from headrace.plugins import resolve
from headrace.publish.target import Target
from headrace.stage import RunLock
from headrace.workspace import Workspace


def open_target(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> AbstractContextManager[Target]:
    """Open the warehouse of a pipeline that publishes, for a `with` block.

    Args:
        spec: the pipeline.
        ws: the workspace.
        lock: that this process is at work on the pipeline; None: the block changes nothing.

    Raises:
        UserError: it cannot be reached, or fails in the block: the day's rows are as they were.
    """
    assert spec.publish is not None, "asked for pipelines that publish"
    opens = resolve(spec.publish.warehouse.known.opens, "publish.warehouse.kind", "warehouse")
    return cast(AbstractContextManager[Target], opens(spec, ws, lock))
