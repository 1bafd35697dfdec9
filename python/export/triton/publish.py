"""Models put into a repository that a server may be polling: whole, or not there.

Triton takes each folder of a repository for a model, and each folder with a number in a model's for a version. So what
is new is filled in a folder beside the repository, on its file system, and renamed into it:

- a version appears by one rename, after all of its files are on the disk; no file of a version that an ensemble names
  changes afterwards;
- a new model's folder appears by one rename, with its configuration and its first version;
- an ensemble's configuration names the versions of its steps, and is replaced after these have appeared: it is the one
  step by which requests get the new version of everything, and by which they get the old one back.

A process that is killed leaves versions that no ensemble names yet; the rerun goes on with them. `.NAME.staging` beside
the repository is removed by the next run. One process at a time changes a repository: the file `.push` in it, which
Triton does not look at, is its lease, and that of `headrace repository push`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import BusyError, UserError
from headrace.export.triton.config import ModelConfig, step_text
from headrace.storage import Location
from headrace.storage.lease import Held

CONFIG = "config.pbtxt"
#: An ensemble has one version; its steps name theirs.
ENSEMBLE_VERSION = "1"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Model:
    """A model of the repository. `fill`: puts the files of a version into a folder."""

    config: ModelConfig
    fill: Callable[[Location], None]


def publish(
    repository: Location, models: Sequence[Model], ensembles: Sequence[ModelConfig], version: int, keep: int = 2
) -> None:
    """Add a version of models, then let ensembles take it.

    Args:
        repository: made where it is not.
        models: those that ensembles are made of.
        ensembles: whose steps name the version.
        version: of all of them, at least 1.
        keep: versions of the models that stay, the newest; this one, the one before, and those that an ensemble names
            are always among them.

    Raises:
        UserError: a model in the repository has another configuration, or the version is there with other files and is
            named by an ensemble.
        BusyError: another process changes the repository.
    """
    repository.make_dir()
    try:
        with (repository / ".push").lease():
            _publish(repository, models, ensembles, version, keep)
    except Held as e:
        raise BusyError(f"another process changes {repository} ({e}): wait for it or stop it") from None


def _publish(
    repository: Location, models: Sequence[Model], ensembles: Sequence[ModelConfig], version: int, keep: int
) -> None:
    for model in models:
        _check_config(repository, model.config)
    staging = repository.parent / f".{repository.name}.staging"
    staging.remove()
    try:
        for model in models:
            _put(repository, staging, model, version)
        for ensemble in ensembles:
            _put_ensemble(repository, staging, ensemble)
    finally:
        staging.remove_quietly()
    for model in models:
        _remove_old(repository, model.config.name, staging, version, keep)


def versions(model: Location) -> list[int]:
    """Return the versions of a model's folder that Triton sees, ascending."""
    names = [entry.name for entry in model.entries() if entry.is_dir()]
    return sorted(int(name) for name in names if name.isdigit() and not name.startswith("0"))


def _check_config(repository: Location, config: ModelConfig) -> None:
    """Check that a configuration fits all versions of a model: a different one would break those being served."""
    path = repository / config.name / CONFIG
    if path.is_file() and path.read_text() != config.text():
        raise UserError(
            f"{path} is another one than this export's: its inputs, its outputs or how it is batched have changed. "
            f"Export to another folder, which a server can have as a second repository, or remove {repository}"
        )


def _put(repository: Location, staging: Location, model: Model, version: int) -> None:
    target = repository / model.config.name
    if not target.is_dir():
        with (staging / model.config.name).new_folder() as folder:
            (folder / CONFIG).put_text(model.config.text())
            model.fill(folder / str(version))
        (staging / model.config.name).move_to(target)
        return
    with (staging / model.config.name).new_folder() as folder:
        model.fill(folder / str(version))
    staged, existing = staging / model.config.name / str(version), target / str(version)
    if not existing.is_dir():
        staged.move_to(existing)
    elif not _same(staged, existing):
        if _is_in_ensemble(repository, model.config.name, version):
            raise UserError(
                f"{existing} is there with other files, and an ensemble names it: such a version is never changed. "
                f"Give this export another version (--as-version)"
            )
        # A killed run left it, or the ensembles were rolled back from it: no request uses it.
        existing.move_to(staging / f"{model.config.name}-{version}")
        staged.move_to(existing)


def _put_ensemble(repository: Location, staging: Location, config: ModelConfig) -> None:
    target = repository / config.name
    if target.is_dir():
        (target / CONFIG).put_text(config.text())
        return
    with (staging / config.name).new_folder() as folder:
        (folder / CONFIG).put_text(config.text())
        # Triton needs a folder for the version; object stores have no folder without a file.
        (folder / ENSEMBLE_VERSION / ".keep").put_text("")
    (staging / config.name).move_to(target)


def _is_in_ensemble(repository: Location, model: str, version: int) -> bool:
    """Return whether a step of an ensemble names a version of a model."""
    step = step_text(model, version) + "\n"
    configs = (entry / CONFIG for entry in repository.entries())
    return any(step in config.read_text() for config in configs if config.is_file())


def _remove_old(repository: Location, name: str, staging: Location, version: int, keep: int) -> None:
    """Take old versions away that no ensemble names: out of the repository in one step, then removed."""
    older = [v for v in versions(repository / name) if v < version]
    for old in older[: max(0, len(older) - max(1, keep - 1))]:
        if _is_in_ensemble(repository, name, old):
            continue
        staging.make_dir()
        (repository / name / str(old)).move_to(staging / f"{name}-{old}")
    staging.remove_quietly()


def _same(a: Location, b: Location) -> bool:
    """Return whether two folders have the same files."""
    names = [file.below(a) for file in a.files()]
    return names == [file.below(b) for file in b.files()] and all(_same_file(a / n, b / n) for n in names)


def _same_file(a: Location, b: Location) -> bool:
    if a.size() != b.size():
        return False
    with a.open() as left, b.open() as right:
        while chunk := left.read(_CHUNK):
            if chunk != right.read(_CHUNK):
                return False
    return True
