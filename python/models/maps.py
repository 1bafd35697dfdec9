"""Host folder in which the tasks of a run map saved models."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from headrace.config import Spec
from headrace.models.predictor import maps_of
from headrace.storage import Location
from headrace.storage.host_scratch import OF_WORKSPACE, HostPlace, RunFolder
from headrace.workspace import Workspace


def maps_of_tasks(ws: Workspace, spec: Spec, folders: Sequence[Location]) -> HostPlace:
    """Return the host folder for `maps_of`, on any host; maps of other models there are removed.

    Here at once, on hosts of their own disks before the run's first task. Who maps them now keeps what is open.

    Args:
        ws: the workspace.
        spec: says whether executors share this host's folder.
        folders: of the run's models.
    """
    maps = ws.mapped(spec.pipeline)
    own_names = tuple(maps_of(folder, maps).name for folder in folders)
    for mapped_folder in maps.entries():
        if mapped_folder.name not in own_names and not mapped_folder.name.startswith(OF_WORKSPACE):
            mapped_folder.remove_quietly()
    return RunFolder(ws.on_hosts(maps), uuid.uuid4().hex[:8], own_names) if spec.spark.own_scratch else maps
