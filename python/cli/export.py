"""`headrace export`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from headrace.cli.options import VAR, Home, Overlays, Pipeline, Sets, examples, overrides
from headrace.cli.root import app
from headrace.workspace import Workspace


class Tables(StrEnum):
    """How rows of embedding tables are written."""

    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


@app.command(
    epilog=examples(
        "headrace export clicks --to exports/clicks",
        "headrace export clicks --model 12 --to exports/clicks --tables int8",
    )
)
def export(
    pipeline: Pipeline,
    to: Annotated[str, typer.Option("--to", help="The folder; an export that is there is replaced.", metavar="DIR")],
    model: Annotated[
        str, typer.Option("--model", help="A registered version, or @ALIAS.", metavar="VERSION")
    ] = "@champion",
    tables: Annotated[Tables, typer.Option("--tables", help="Numbers of the embedding tables.")] = Tables.fp32,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write a registered model as an ONNX graph, its embedding tables as files beside it.

    What cannot be exported is said before anything is written.
    """
    from headrace.commands.export import export as command
    from headrace.storage import local, local_folder

    folder = local(local_folder(to, "--to"))
    command(Workspace(home), pipeline, model, folder, tables.value, overrides(overlays, sets, None))
