"""Commands that remove: `gc`, `forget`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import VAR, Home, Json, Pipeline, Sets, examples, workspace
from headrace.cli.root import app


@app.command(
    epilog=examples(
        "headrace gc clicks", "headrace gc clicks --delete", "headrace gc clicks --set housekeeping.datasets=2"
    )
)
def gc(
    pipeline: Pipeline,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is listed; without, only list it.")] = False,
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

    command(workspace(home), pipeline, delete, sets or [], as_json)


@app.command(
    epilog=examples(
        "headrace forget clicks --column user_id --values persons.txt",
        "headrace forget clicks --column user_id --values persons.txt --delete",
    )
)
def forget(
    pipeline: Pipeline,
    column: Annotated[str, typer.Option("--column", help="The column that tells persons apart.", metavar="NAME")],
    values: Annotated[Path, typer.Option("--values", help="A text file: one value a line.", metavar="FILE")],
    delete: Annotated[bool, typer.Option("--delete", help="Erase them; without, only list what there is.")] = False,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Erase persons from all that a pipeline has written, and write a proof; with --delete.

    Their rows go from the lake's tables (older versions, too), the warehouse and the store of keys and values, their
    values from vocabularies (codes stay given), their rows of embeddings become zero in all saved models; datasets,
    caches and checkpoints go, and are made again. Ingest never loads their rows again. Landing files and tables that
    are yours are named, not touched. The same command ends what was interrupted. Exit code 75: what is left goes with
    the same command later, as it says; 2: something is left to be done by hand.
    """
    from headrace.commands.forget import forget as command

    command(workspace(home), pipeline, column, values, delete, sets or [], as_json)
