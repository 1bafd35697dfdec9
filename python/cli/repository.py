"""`headrace repository ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.groups import Group
from headrace.cli.options import examples
from headrace.cli.root import app

_group = typer.Typer(cls=Group, no_args_is_help=True, help="Versions of models for `headrace serve`.")
app.add_typer(_group, name="repository", rich_help_panel=None)

_Repository = Annotated[Path, typer.Argument(metavar="REPOSITORY", help="A folder of MODEL/VERSION/model.onnx.")]
_Folders = Annotated[list[str], typer.Argument(metavar="MODEL=DIR...", help="A folder for each model.")]


@_group.command(
    epilog=examples(
        "headrace repository push models clicks=exports/clicks",
        "headrace repository push models clicks=exports/clicks shop=exports/shop",
        "headrace repository push models clicks=deltas/clicks --delta",
    )
)
def push(
    repository: _Repository,
    folders: _Folders,
    delta: Annotated[bool, typer.Option("--delta", help="The folders are of `headrace repository delta`.")] = False,
    keep: Annotated[int, typer.Option("--keep", min=2, help="Versions of a model that stay.", metavar="N")] = 7,
) -> None:
    """Add exports as the next version of their models, and release them together."""
    from headrace.commands.repository import push_folders

    push_folders(repository, folders, delta, keep)


@_group.command(epilog=examples("headrace repository delta models/clicks/12 exports/clicks --to deltas/clicks"))
def delta(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The released version's folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The folder of the export that is to be pushed.")],
    to: Annotated[Path, typer.Option("--to", help="The folder to make.", metavar="DIR")],
) -> None:
    """Write what has changed between two versions: what a day's push has to carry to a server."""
    from headrace.commands.repository import make_delta

    make_delta(base, new, to)


@_group.command(epilog=examples("headrace repository rollback models"))
def rollback(repository: _Repository) -> None:
    """Release again what was released before, all models of it together."""
    from headrace.commands.repository import rollback as command

    command(repository)


@_group.command(epilog=examples("headrace repository show models"))
def show(repository: _Repository) -> None:
    """List the versions that are there, and those that are released."""
    from headrace.commands.repository import show as command

    command(repository)
