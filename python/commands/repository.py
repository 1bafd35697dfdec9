"""`headrace repository ...`: what servers of models read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.commands.screen import out
from headrace.errors import UserError
from headrace.serve.delta import write_delta
from headrace.serve.repository import push, push_deltas, read_releases, read_repository, roll_back
from headrace.storage import Location, local


def pairs(given: Sequence[str]) -> dict[str, Location]:
    """Folders by model, of `MODEL=DIR`. Raises UserError: something else, or no folder."""
    found: dict[str, Location] = {}
    for pair in given:
        model, is_pair, folder = pair.partition("=")
        if not is_pair or not model or model in found:
            raise UserError(f"'{pair}': expected MODEL=DIR, each model once")
        if not (place := local(folder)).is_dir():
            raise UserError(f"{folder}, for model '{model}', is no folder")
        found[model] = place
    return found


def push_folders(repository: Path, given: Sequence[str], deltas: bool, keep: int) -> None:
    """Push folders or deltas, and say their version."""
    version = (push_deltas if deltas else push)(local(repository), pairs(given), keep)
    out.print(f"version {version} of {', '.join(pairs(given))} is released in {repository}")


def make_delta(base: Path, new: Path, delta: Path) -> None:
    """Write a delta, and say its size beside the new version's."""
    if delta.exists() and not (delta / "delta.json").is_file():
        raise UserError(f"{delta} is there and is no delta: choose another folder")
    size = write_delta(local(base), local(new), local(delta))
    whole = sum(f.size() for f in local(new).files())
    out.print(f"{delta}: {size / 2**20:,.2f} MiB, for {whole / 2**20:,.2f} MiB in {new}")


def rollback(repository: Path) -> None:
    """Have the release before served, and say which it is."""
    models = roll_back(local(repository))
    out.print(f"released in {repository}: {_said(models)}")


def show(repository: Path) -> None:
    """Say what is there."""
    try:
        contents = read_repository(repository)
    except OSError as e:
        raise UserError(f"{repository} cannot be read: {e}") from None
    for model, versions in contents.versions.items():
        out.print(f"{model}: versions {', '.join(map(str, versions)) or 'none'}")
    releases = read_releases(local(repository))
    out.print(f"released: {_said(releases.now)}" if releases.now else "nothing is released: the newest are served")
    if releases.earlier:
        out.print(f"before: {_said(releases.earlier[0])}")


def _said(models: object) -> str:
    assert isinstance(models, dict)
    return ", ".join(f"{model} {version}" for model, version in models.items())
