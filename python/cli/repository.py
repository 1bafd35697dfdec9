"""`headrace repository ...`: versions of models that `headrace serve` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.root import Group, Panel, app, examples
from headrace.cli.screen import out
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.storage import Location

_group = typer.Typer(cls=Group, no_args_is_help=True, help="Versions of models for `headrace serve`.")
app.add_typer(_group, name="repository", rich_help_panel=Panel.SERVE)

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
    push_folders(repository, folders, delta, keep)


@_group.command(epilog=examples("headrace repository delta models/clicks/12 exports/clicks --to deltas/clicks"))
def delta(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The released version's folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The folder of the export that is to be pushed.")],
    to: Annotated[Path, typer.Option("--to", help="The folder to make.", metavar="DIR")],
) -> None:
    """Write the changes between two versions as a delta, which a day's push carries to a server."""
    make_delta(base, new, to)


@_group.command(epilog=examples("headrace repository rollback models"))
def rollback(repository: _Repository) -> None:
    """Restore the previous release, with all of its models."""
    roll_back_release(repository)


@_group.command(epilog=examples("headrace repository show models"))
def show(repository: _Repository) -> None:
    """List the versions of the repository, and those that are released."""
    show_repository(repository)


def folders_by_model(pairs: Sequence[str]) -> dict[str, Location]:
    """Return the folders by model from texts `MODEL=DIR`.

    Raises:
        UserError: a text has another form, a model is named twice, or a folder does not exist.
    """
    from headrace.storage import local

    folders: dict[str, Location] = {}
    for pair in pairs:
        model, separator, folder = pair.partition("=")
        if not separator or not model or model in folders:
            raise UserError(f"'{pair}': expected MODEL=DIR, each model once")
        if not (location := local(folder)).is_dir():
            raise UserError(f"{folder}, for model '{model}', is no folder")
        folders[model] = location
    return folders


def push_folders(repository: Path, pairs: Sequence[str], deltas: bool, keep: int) -> None:
    """Push folders or deltas, and print their version."""
    from headrace.export.serve.repository import push, push_deltas
    from headrace.storage import local

    folders = folders_by_model(pairs)
    version = (push_deltas if deltas else push)(local(repository), folders, keep)
    out.print(f"version {version} of {', '.join(folders)} is released in {repository}")


def make_delta(base: Path, new: Path, delta: Path) -> None:
    """Write a delta, and print its size beside the new version's."""
    from headrace.export.serve.repository import write_delta
    from headrace.storage import local

    if delta.exists() and not (delta / "delta.json").is_file():
        raise UserError(f"{delta} exists and is not a delta: choose another folder")
    size = write_delta(local(base), local(new), local(delta))
    full_size = sum(f.size() for f in local(new).files())
    out.print(f"{delta}: {size / 2**20:,.2f} MiB, for {full_size / 2**20:,.2f} MiB in {new}")


def roll_back_release(repository: Path) -> None:
    """Restore the previous release, and print it."""
    from headrace.export.serve.repository import roll_back
    from headrace.storage import local

    models = roll_back(local(repository))
    out.print(f"released in {repository}: {_release_text(models)}")


def show_repository(repository: Path) -> None:
    """Print the versions of the repository."""
    from headrace.export.serve.repository import read_releases, read_repository
    from headrace.storage import local

    try:
        contents = read_repository(repository)
    except OSError as e:
        raise UserError(f"{repository} cannot be read: {e}") from None
    for model, versions in contents.versions.items():
        out.print(f"{model}: versions {', '.join(map(str, versions)) or 'none'}")
    releases = read_releases(local(repository))
    out.print(
        f"released: {_release_text(releases.current)}"
        if releases.current
        else "nothing is released: the newest are served"
    )
    if releases.earlier:
        out.print(f"before: {_release_text(releases.earlier[0])}")


def _release_text(models: object) -> str:
    assert isinstance(models, dict)
    return ", ".join(f"{model} {version}" for model, version in models.items())
