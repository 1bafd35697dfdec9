"""Commands that remove: `gc`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import VAR, Home, Json, Pipeline, Sets, examples
from headrace.cli.root import app
from headrace.workspace import Workspace


@app.command(
    epilog=examples(
        "headrace gc clicks", "headrace gc clicks --delete", "headrace gc clicks --set housekeeping.datasets=2"
    )
)
def gc(
    pipeline: Pipeline,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it; without, only list it.")] = False,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """List what the section `housekeeping` of a pipeline does not keep; with --delete, remove it.

    Datasets, models, checkpoints, searches, logs, reports, what killed runs left, old days of tables, data files
    that no kept version names, days beyond the warehouse's retention. Models with an alias stay. The manifests stay,
    and say what was removed when: `status` and `lineage` show it, and `run` makes the day again.
    """
    from headrace.commands.gc import gc as command

    command(Workspace(home), pipeline, delete, sets or [], as_json)
