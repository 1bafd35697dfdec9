"""Where the tasks of a run map saved models."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from headrace.config import Spec
from headrace.models.predictor import maps_of
from headrace.storage import Location
from headrace.storage.host_scratch import OF_WORKSPACE, HostPlace, RunFolder
from headrace.workspace import Workspace


def maps_of_tasks(ws: Workspace, spec: Spec, folders: Sequence[Location]) -> HostPlace:
    """The folder for `maps_of`, on whichever host; what was mapped there of other models goes.

    Here at once, on hosts of their own disks before the run's first task. Who maps them now keeps what is open.

    Args:
        ws: the workspace.
        spec: says whether executors share this host's folder.
        folders: of the run's models.
    """
    maps = ws.mapped(spec.pipeline)
    mine = tuple(maps_of(folder, maps).name for folder in folders)
    for other in maps.entries():
        if other.name not in mine and not other.name.startswith(OF_WORKSPACE):
            other.remove_quietly()
    return RunFolder(ws.on_hosts(maps), uuid.uuid4().hex[:8], mine) if spec.spark.own_scratch else maps
