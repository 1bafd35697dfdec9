"""Files that the tasks of a stage exchange with each other and with the driver."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.stage import Context
from headrace.storage import Location

#: Folder of the rows that table operators return, which several stages read (`headrace.features.build.rows`).
PREPARED = "prepared"
#: Names of the exchange folders: the stages that have one, and `PREPARED`.
EXCHANGING_STAGES = ("ingest", "features", "score", PREPARED)
#: Folders below `Workspace.spark_local` in which the stage `features` has vocabularies and tables by key, by pipeline.
VOCABULARIES, KEYED_TABLES = "vocabulary", "tables"
#: All these folders; a run that is killed leaves files in them.
STAGE_FOLDERS = (*EXCHANGING_STAGES, VOCABULARIES, KEYED_TABLES)


@contextmanager
def task_folder(ctx: Context, stage: str, name: str | None = None) -> Iterator[Location]:
    """Give the empty exchange folder of a stage's tasks, and remove it at the end.

    The remains of a killed run are removed first. Where hosts share no scratch folder, the folder is in the lake, and
    each run has a new one: tasks of a run that was paused and lost its lease may still write, but not into the next
    run's folder. Tasks report the files that they have completed: a task that was lost and ran again elsewhere may
    have left other files.

    Args:
        ctx: the run.
        stage: the stage of the tasks; one of EXCHANGING_STAGES.
        name: subfolder of a later part of the stage; None: the first part.
    """
    is_own_scratch = ctx.spec.spark.own_scratch
    folder = ctx.ws.exchange_folder(ctx.spec.pipeline, stage, is_own_scratch)
    if name is not None:
        folder /= name
    folder.remove()
    if is_own_scratch:
        folder /= uuid.uuid4().hex[:8]
    try:
        yield folder
    finally:
        folder.remove_quietly()
