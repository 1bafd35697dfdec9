"""Atomic publication of models in a repository that a server may be polling.

Triton takes each folder of a repository for a model, and each numbered folder in a model's folder for a version. So new
files are written to a folder beside the repository, on the same file system, and renamed into it:

- A version appears by one rename, after all of its files are on disk. Files of a version that an ensemble names never
  change afterwards.
- A new model's folder appears by one rename, with its configuration and its first version.
- An ensemble's configuration names the versions of its steps. It is replaced after they have appeared. This one step
  switches requests to the new version of every model, or back to the old one.

A process that is killed leaves versions that no ensemble names yet; the rerun uses them. The next run removes
`.NAME.staging` beside the repository. One process at a time changes a repository: the file `.push` in it is the lease,
also for `headrace repository push`. Triton ignores that file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import BusyError, UserError
from headrace.export.triton.config import ModelConfig, step_text
from headrace.storage import Location
from headrace.storage.lease import Held

CONFIG = "config.pbtxt"
#: The only version of an ensemble; its steps name the versions of the models.
ENSEMBLE_VERSION = "1"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class RepositoryModel:
    """A model of the repository: its configuration, and a function that writes a version's files to a folder."""

    config: ModelConfig
    fill: Callable[[Location], None]


def publish(
    repository: Location,
    models: Sequence[RepositoryModel],
    ensembles: Sequence[ModelConfig],
    version: int,
    keep: int = 2,
) -> None:
    """Add a version of models, then switch the ensembles to it.

    Args:
        repository: the folder; created where it is missing.
        models: the models of the ensembles' steps.
        ensembles: configurations whose steps name the version.
        version: number of the version of all models, at least 1.
        keep: number of newest versions of each model to keep. This version, the one before it, and versions that an
            ensemble names are always kept.

    Raises:
        UserError: a model in the repository has another configuration, or an ensemble names the version and its files
            differ.
        BusyError: another process changes the repository.
    """
    repository.make_dir()
    try:
        with (repository / ".push").lease():
            _publish(repository, models, ensembles, version, keep)
    except Held as e:
        raise BusyError(f"another process changes {repository} ({e}): wait for it or stop it") from None


def _publish(
    repository: Location, models: Sequence[RepositoryModel], ensembles: Sequence[ModelConfig], version: int, keep: int
) -> None:
    for model in models:
        _check_config(repository, model.config)
    staging = repository.parent / f".{repository.name}.staging"
    staging.remove()
    try:
        for model in models:
            _publish_version(repository, staging, model, version)
        for ensemble in ensembles:
            _publish_ensemble(repository, staging, ensemble)
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


def _publish_version(repository: Location, staging: Location, model: RepositoryModel, version: int) -> None:
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
    elif not _have_same_files(staged, existing):
        if _is_in_ensemble(repository, model.config.name, version):
            raise UserError(
                f"{existing} is there with other files, and an ensemble names it: such a version is never changed. "
                f"Give this export another version (--as-version)"
            )
        # A killed run left it, or the ensembles were rolled back from it: no request uses it.
        existing.move_to(staging / f"{model.config.name}-{version}")
        staged.move_to(existing)


def _publish_ensemble(repository: Location, staging: Location, config: ModelConfig) -> None:
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
    """Remove old versions that no ensemble names: each leaves the repository by one rename, then its files go."""
    older = [v for v in versions(repository / name) if v < version]
    for old in older[: max(0, len(older) - max(1, keep - 1))]:
        if _is_in_ensemble(repository, name, old):
            continue
        staging.make_dir()
        (repository / name / str(old)).move_to(staging / f"{name}-{old}")
    staging.remove_quietly()


def _have_same_files(a: Location, b: Location) -> bool:
    """Return whether two folders have the same files."""
    names = [file.below(a) for file in a.files()]
    return names == [file.below(b) for file in b.files()] and all(_is_same_file(a / n, b / n) for n in names)


def _is_same_file(a: Location, b: Location) -> bool:
    if a.size() != b.size():
        return False
    with a.open() as left, b.open() as right:
        while chunk := left.read(_CHUNK):
            if chunk != right.read(_CHUNK):
                return False
    return True
