"""The warehouses by `publish.warehouse.kind`. One that is added is a `Target` of its own, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from headrace.config import Spec
from headrace.publish.postgres.target import open_postgres
from headrace.publish.target import Target
from headrace.workspace import Workspace

_OPEN: dict[str, Callable[[Spec, Workspace], AbstractContextManager[Target]]] = {
    "embedded": open_postgres,
    "postgres": open_postgres,
}


def open_target(spec: Spec, ws: Workspace) -> AbstractContextManager[Target]:
    """The warehouse of a pipeline that publishes, for a `with` block.

    Raises:
        UserError: it cannot be reached, or fails in the block: the day's rows are as they were.
    """
    assert spec.publish is not None, "asked for pipelines that publish"
    return _OPEN[spec.publish.warehouse.kind](spec, ws)
