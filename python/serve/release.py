"""Which versions of a repository's models agree: `release.json`, put in one step, with those that it was before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.errors import BusyError, UserError
from headrace.serve.repository import RELEASE
from headrace.storage import Location
from headrace.storage.lease import Held

#: Earlier releases that the file names, newest first.
_EARLIER = 30


@dataclass(frozen=True)
class Releases:
    """What `release.json` says: versions by model, now and before, newest first."""

    now: Mapping[str, int]
    earlier: tuple[Mapping[str, int], ...] = ()


def read_releases(repository: Location) -> Releases:
    """Those of a repository, none at first. Raises UserError: the file is something else."""
    file = repository / RELEASE
    if not file.is_file():
        return Releases({})
    try:
        said = json.loads(file.read_bytes())
        return Releases(_models(said["models"]), tuple(_models(m) for m in said.get("earlier", [])))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file} is no release of `headrace repository`: {e}") from None


def _models(said: Any) -> dict[str, int]:
    return {str(name): int(version) for name, version in said.items()}


def write_release(repository: Location, models: Mapping[str, int]) -> None:
    """Have these versions served together from now on, by one step."""
    before = read_releases(repository)
    earlier = [before.now, *before.earlier][:_EARLIER] if before.now else []
    _put(repository, models, earlier)


@contextmanager
def writing(repository: Location) -> Iterator[None]:
    """Be the only one that changes a repository. Raises BusyError: another process does; says which."""
    try:
        with (repository / ".push").lease():
            yield
    except Held as e:
        raise BusyError(f"another process changes {repository} ({e}): wait for it or stop it") from None


def roll_back(repository: Location) -> Mapping[str, int]:
    """Have the versions before these served again; which they are.

    Raises:
        UserError: there are none.
        BusyError: a push is at work.
    """
    if not repository.is_dir():
        raise UserError(f"{repository} is no folder")
    with writing(repository):
        before = read_releases(repository)
        if not before.earlier:
            raise UserError(f"{repository} has no earlier release")
        target, *earlier = before.earlier
        for model, version in target.items():
            if not (repository / model / str(version)).is_dir():
                raise UserError(f"{repository / model / str(version)}, of the release before, is gone")
        _put(repository, target, earlier)
    return target


def _put(repository: Location, models: Mapping[str, int], earlier: list[Mapping[str, int]]) -> None:
    said = {"models": dict(models), "earlier": [dict(m) for m in earlier]}
    (repository / RELEASE).put_text(json.dumps(said, indent=1) + "\n")
