"""A day's push: new versions of models in a repository that flip together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.errors import UserError
from headrace.serve.delta import apply_delta, digest_of
from headrace.serve.release import read_releases, write_release, writing
from headrace.serve.repository import GRAPH, RECORD, RELEASE
from headrace.storage import Location

#: Versions of a model that a push leaves.
KEEP = 7


def push(repository: Location, folders: Mapping[str, Location], keep: int = KEEP) -> int:
    """Add a folder to each model as its next version, all of one number, and release them.

    The versions appear one after the other and whole; servers take them when the release, which comes last, names them.
    Files that the model's released version has alike are shared with it. Other models stay as they are: the first
    release names the newest version of each.

    Args:
        repository: is made where it is not.
        folders: by model, of an export (`headrace export`) or of any ONNX graph `model.onnx`.
        keep: of each model's versions, the newest ones; older ones are removed; a server that has one loaded goes on.

    Returns:
        the version.

    Raises:
        UserError: a folder has no graph.
        BusyError: another push is at work.
    """
    for model, folder in folders.items():
        if not (folder / "model.onnx").is_file():
            raise UserError(f"{folder}, for model '{model}', has no model.onnx")
    return _push(repository, {m: _copier(folder) for m, folder in folders.items()}, keep)


def push_deltas(repository: Location, deltas: Mapping[str, Location], keep: int = KEEP) -> int:
    """The same by what has changed since the released versions; see `headrace.serve.delta`."""
    if new := [m for m in deltas if m not in read_releases(repository).now]:
        raise UserError(f"{repository} has no release of {', '.join(new)}: push it whole first")

    def fill(delta: Location) -> _Fill:
        return lambda base, folder: apply_delta(base, delta, folder)

    return _push(repository, {m: fill(delta) for m, delta in deltas.items()}, keep)


_Fill = Callable[[Location, Location], None]


def _push(repository: Location, fills: Mapping[str, _Fill], keep: int) -> int:
    for model in fills:
        if not model or model.startswith(".") or "/" in model:
            raise UserError(f"'{model}' cannot be a model's name: it is a folder's")
    repository.make_dir()
    with writing(repository):
        released = read_releases(repository).now if (repository / RELEASE).is_file() else _newest(repository)
        version = 1 + max((v for model in fills for v in _versions(repository / model)), default=0)
        for model, fill in fills.items():
            base = repository / model / str(released.get(model, 0))
            with (repository / model / str(version)).new_folder() as folder:
                fill(base, folder)
        write_release(repository, {**released, **dict.fromkeys(fills, version)})
        for model in fills:
            for old in _versions(repository / model)[:-keep]:
                if old not in (version, released.get(model)):
                    (repository / model / str(old)).remove()
    return version


def _versions(model: Location) -> list[int]:
    names = [v.name for v in model.entries()]
    return sorted(int(n) for n in names if n.isdecimal() and n.isascii() and not n.startswith("0"))


def _newest(repository: Location) -> dict[str, int]:
    """What servers take while nothing is released: of each model with a graph the newest version."""
    found = {}
    for model in repository.entries():
        if model.name.startswith(".") or not model.is_dir():
            continue
        folders = {v: model / str(v) for v in _versions(model)}
        graphs = [v for v, folder in folders.items() if (folder / GRAPH).is_file() or (folder / RECORD).is_file()]
        if graphs:
            found[model.name] = max(graphs)
    return found


def _copier(source: Location) -> _Fill:
    def fill(base: Location, folder: Location) -> None:
        for file in source.files():
            name = file.below(source)
            old = base / name
            same = old.is_file() and old.size() == file.size() and digest_of(old) == digest_of(file)
            (folder / name).copy_from(old if same else file, share=same)

    return fill
