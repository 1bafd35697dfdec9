"""A folder for what tasks of a stage hand to each other as files, and to the driver."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.stage import Context
from headrace.storage import Location

#: The folder of the rows that table operators made, which several stages read (`headrace.features.build.rows`).
PREPARED = "prepared"
#: The stages that have such folders, and that of prepared rows.
HANDING = ("ingest", "features", "score", PREPARED)
#: Below `Workspace.spark_local`, and there by pipeline: what the stage `features` has of vocabularies and of tables by
#: key.
VOCABULARIES, KEYED_TABLES = "vocabulary", "tables"
#: All folders of stages there; a run that is killed leaves files in them.
STAGE_FOLDERS = (*HANDING, VOCABULARIES, KEYED_TABLES)


@contextmanager
def task_folder(ctx: Context, stage: str, name: str | None = None) -> Iterator[Location]:
    """Give the folder, where there is nothing; it is removed at the end.

    What a killed run left goes before. Where hosts share no scratch folder, it is in the lake, and a new one for each
    run: one that was paused until another took its lease has tasks that may go on writing, and not into the other's.
    Tasks put whole files there, and say which: one that was lost, and ran again elsewhere, may have left others.

    Args:
        ctx: the run.
        stage: whose tasks; one of HANDING.
        name: of a part of the stage that comes after others.
    """
    is_own_scratch = ctx.spec.spark.own_scratch
    folder = ctx.ws.handed_on(ctx.spec.pipeline, stage, is_own_scratch)
    if name is not None:
        folder /= name
    folder.remove()
    if is_own_scratch:
        folder /= uuid.uuid4().hex[:8]
    try:
        yield folder
    finally:
        folder.remove_quietly()
