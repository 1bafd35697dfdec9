"""Model repository on disk: versions, their releases together, and deltas from one version to the next.

Contents are read from names, sizes and times of files; nothing is loaded.

MODEL/VERSION/model.onnx    a graph and its tables' files, in Triton's layout; VERSION is a number
MODEL/VERSION/export.json   record of `headrace export`, with further graphs beside it (headrace.export.serve.model)
release.json                {"models": {MODEL: VERSION}}: versions that belong together; without it, the newest ones

A delta is a folder with the changed blocks of files, such as a table's changed rows:

delta.json           for each file of the new version: bytes, digest and origin; digests of the base's files
blocks-N.bin         changed blocks of a file, in order
blocks-N.index.bin   numbers of these blocks, int64
whole-N.bin          a file that the base lacks, or that has little in common with the base's

Unchanged files are shared with the base if the store can do that, so a version takes space only for its changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import BusyError, UserError
from headrace.storage import Location
from headrace.storage.lease import Held

GRAPH, RECORD, RELEASE = "model.onnx", "export.json", "release.json"
#: Name, size and time of each file of a version. A version that failed is tried again only if these change.
Signature = tuple[tuple[str, int, int], ...]

#: Most earlier releases in `release.json`.
_EARLIER = 30
#: Newest versions of a model that a push keeps.
KEEP = 7
_Fill = Callable[[Location, Location], None]


@dataclass(frozen=True)
class Parts:
    """Files of a version.

    Attributes:
        graphs: graphs of an export, by their names in it; empty for another folder.
        items: file of the items' vectors, and the code of the first item.
        graph: the graph of a folder without a record.
    """

    graphs: dict[str, Path]
    items: tuple[Path, int] | None
    graph: Path


@dataclass(frozen=True)
class VersionFolder:
    """A version of a model in the repository."""

    model: str
    version: int
    folder: Path
    signature: Signature

    def parts(self) -> Parts:
        """Return the files to load. Raises ValueError if the folder is damaged."""
        record = self.folder / RECORD
        if not record.is_file():
            return Parts({}, None, self.folder / GRAPH)
        try:
            export = json.loads(record.read_bytes())
            sizes = {str(name): int(size) for name, size in export.get("files", {}).items()}
            graphs = {str(name): self.folder / graph["file"] for name, graph in export.get("graphs", {}).items()}
            items = export.get("items")
            items_file = None if items is None else (self.folder / items["file"], int(items["first_code"]))
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as e:
            raise ValueError(f"{record}: no record of an export: {e}") from None
        if export.get("format", "onnx") != "onnx":
            raise ValueError(f"{record}: an export of the format {export['format']}; ONNX is served")
        for name, size in sizes.items():
            file_size = (self.folder / name).stat().st_size if (self.folder / name).is_file() else None
            if file_size != size:
                problem = "is missing" if file_size is None else f"has {file_size:,} bytes"
                raise ValueError(f"{self.folder / name} {problem}; {RECORD} says {size:,} bytes")
        return Parts(graphs, items_file, self.folder / GRAPH)

    @property
    def is_onnx(self) -> bool:
        """Return whether the version has a graph: a Triton repository also has models of other kinds."""
        return any(name in (GRAPH, RECORD) for name, _, _ in self.signature)


@dataclass(frozen=True)
class Contents:
    """Contents of a repository.

    Attributes:
        versions: versions by model and number.
        release: released version of each model; None: there is no release.
        fault: reason why `release.json` cannot be read.
    """

    versions: dict[str, dict[int, VersionFolder]]
    release: dict[str, int] | None
    fault: str | None = None


def read_repository(folder: Path) -> Contents:
    """Read the contents of a repository. Raises OSError if it does not exist, is unreadable, or was moved meanwhile."""
    stat = folder.stat()
    versions: dict[str, dict[int, VersionFolder]] = {}
    for model in sorted(folder.iterdir()):
        if model.name.startswith(".") or not model.is_dir():
            continue
        numbers = [v for v in model.iterdir() if v.name.isdecimal() and v.name.isascii() and not v.name.startswith("0")]
        folders = {int(v.name): _version(model.name, v) for v in numbers if v.is_dir()}
        versions[model.name] = dict(sorted(folders.items()))
    release, fault = _release(folder / RELEASE)
    # If the folder was moved away meanwhile, the rest of it looks removed.
    if not os.path.samestat(stat, folder.stat()):
        raise OSError(f"{folder} was replaced while it was read")
    return Contents(versions, release, fault)


def _version(model: str, folder: Path) -> VersionFolder:
    files = []
    for file in sorted(folder.rglob("*")):
        try:
            info = file.stat()
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # only this version is at fault, for example a link to itself
            files.append((str(file.relative_to(folder)), -1, 0))
            continue
        files.append((str(file.relative_to(folder)), info.st_size, info.st_mtime_ns))
    return VersionFolder(model, int(folder.name), folder, tuple(files))


def _release(file: Path) -> tuple[dict[str, int] | None, str | None]:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None, None
    try:
        models = json.loads(text)["models"]
        if not isinstance(models, dict) or not all(type(v) is int and v > 0 for v in models.values()):
            raise ValueError('"models" must be versions by name')
    except (ValueError, KeyError, TypeError) as e:
        return None, f"{file} is no release: {e}"
    return {str(name): int(version) for name, version in models.items()}, None


@dataclass(frozen=True)
class Releases:
    """Content of `release.json`: released versions by model, and earlier releases, newest first."""

    current: Mapping[str, int]
    earlier: tuple[Mapping[str, int], ...] = ()


def read_releases(repository: Location) -> Releases:
    """Read the releases of a repository; empty before the first. Raises UserError if the file is not valid."""
    file = repository / RELEASE
    if not file.is_file():
        return Releases({})
    try:
        content = json.loads(file.read_bytes())
        return Releases(_models(content["models"]), tuple(_models(m) for m in content.get("earlier", [])))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file} is no release of `headrace repository`: {e}") from None


def _models(versions: Any) -> dict[str, int]:
    return {str(name): int(version) for name, version in versions.items()}


def write_release(repository: Location, models: Mapping[str, int]) -> None:
    """Release these versions together, in one step."""
    releases = read_releases(repository)
    earlier = [releases.current, *releases.earlier][:_EARLIER] if releases.current else []
    _put(repository, models, earlier)


@contextmanager
def writing(repository: Location) -> Iterator[None]:
    """Lock a repository for changes. Raises BusyError, which names the other process, if it is locked."""
    try:
        with (repository / ".push").lease():
            yield
    except Held as e:
        raise BusyError(f"another process changes {repository} ({e}): wait for it or stop it") from None


def roll_back(repository: Location) -> Mapping[str, int]:
    """Restore the previous release, and return its versions.

    Raises:
        UserError: there is no previous release.
        BusyError: another push is at work.
    """
    if not repository.is_dir():
        raise UserError(f"{repository} is no folder")
    with writing(repository):
        releases = read_releases(repository)
        if not releases.earlier:
            raise UserError(f"{repository} has no earlier release")
        target, *earlier = releases.earlier
        for model, version in target.items():
            if not (repository / model / str(version)).is_dir():
                raise UserError(f"{repository / model / str(version)}, of the release before, is gone")
        _put(repository, target, earlier)
    return target


def _put(repository: Location, models: Mapping[str, int], earlier: list[Mapping[str, int]]) -> None:
    content = {"models": dict(models), "earlier": [dict(m) for m in earlier]}
    (repository / RELEASE).put_text(json.dumps(content, indent=1) + "\n")


def push(repository: Location, folders: Mapping[str, Location], keep: int = KEEP) -> int:
    """Add a folder to each model as its next version, all of one number, and release them.

    Each version appears by one rename. Servers load them when the release, which is written last, names them. Files
    that are equal in the model's released version are shared with it. Other models keep their versions; the first
    release names the newest version of each.

    Args:
        repository: the folder; created where it is missing.
        folders: folders by model: exports (`headrace export`), or any folder with an ONNX graph `model.onnx`.
        keep: number of newest versions of each model to keep. A server that has loaded a removed one keeps serving it.

    Returns:
        number of the version.

    Raises:
        UserError: a folder has no graph.
        BusyError: another push is at work.
    """
    for model, folder in folders.items():
        if not (folder / "model.onnx").is_file():
            raise UserError(f"{folder}, for model '{model}', has no model.onnx")
    return _push(repository, {m: _copier(folder) for m, folder in folders.items()}, keep)


def push_deltas(repository: Location, deltas: Mapping[str, Location], keep: int = KEEP) -> int:
    """Push deltas since the released versions; otherwise like `push`."""
    if new := [m for m in deltas if m not in read_releases(repository).current]:
        raise UserError(f"{repository} has no release of {', '.join(new)}: push it whole first")

    def fill(delta: Location) -> _Fill:
        return lambda base, folder: apply_delta(base, delta, folder)

    return _push(repository, {m: fill(delta) for m, delta in deltas.items()}, keep)


def _push(repository: Location, fills: Mapping[str, _Fill], keep: int) -> int:
    for model in fills:
        if not model or model.startswith(".") or "/" in model:
            raise UserError(f"'{model}' cannot be a model's name: it is a folder's")
    repository.make_dir()
    with writing(repository):
        released = read_releases(repository).current if (repository / RELEASE).is_file() else _newest(repository)
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
    """Return the versions that servers load without a release: the newest version with a graph of each model."""
    newest = {}
    for model in repository.entries():
        if model.name.startswith(".") or not model.is_dir():
            continue
        folders = {v: model / str(v) for v in _versions(model)}
        graphs = [v for v, folder in folders.items() if (folder / GRAPH).is_file() or (folder / RECORD).is_file()]
        if graphs:
            newest[model.name] = max(graphs)
    return newest


def _copier(source: Location) -> _Fill:
    def fill(base: Location, folder: Location) -> None:
        for file in source.files():
            name = file.below(source)
            old = base / name
            same = old.is_file() and old.size() == file.size() and digest_of(old) == digest_of(file)
            (folder / name).copy_from(old if same else file, share=same)

    return fill


DELTA_RECORD = "delta.json"
#: Bytes of a block: 16 float32. Its number takes 8 bytes.
BLOCK = 64
#: Bytes that are compared, read or written at once.
_CHUNK = 1 << 26
#: Share of changed blocks above which a delta has the complete file.
_WHOLE_FILE_SHARE = 0.6

_How = Literal["same", "blocks", "whole"]


@dataclass(frozen=True)
class _DeltaFile:
    name: str
    size: int
    digest: str
    how: _How
    number: int


def write_delta(base: Location, new: Location, delta: Location) -> int:
    """Write the delta from `base` to `new` to a folder, which appears by one rename.

    Args:
        base: folder of a version that the repository of the delta also has.
        new: folder of the new version.
        delta: folder of the delta.

    Returns:
        bytes of the delta's files.

    Raises:
        UserError: a folder has no files.
    """
    base_names, after = _file_names(base), _file_names(new)
    with delta.new_folder() as folder:
        files = [_compare(number, name, base, new, name in base_names, folder) for number, name in enumerate(after)]
        record = {
            "base": {f.name: digest_of(base / f.name) for f in files if f.how != "whole"},
            "files": {f.name: {"size": f.size, "digest": f.digest, "how": f.how, "number": f.number} for f in files},
        }
        (folder / DELTA_RECORD).put_text(json.dumps(record, indent=1) + "\n")
    return sum(f.size() for f in delta.files())


def apply_delta(base: Location, delta: Location, folder: Location) -> None:
    """Write the new version's files to an empty folder, and compare their digests.

    Raises:
        UserError: the delta was made for another base, or is damaged.
    """
    record = _delta_record(delta)
    for name, digest in record["base"].items():
        if not (base / name).is_file() or digest_of(base / name) != digest:
            raise UserError(f"{delta} was made for another base than {base}: '{name}' is not the same")
    for name, file in record["files"].items():
        target, number = folder / name, file["number"]
        try:
            if file["how"] == "same":
                target.copy_from(base / name, share=True)
                continue
            if file["how"] == "whole":
                target.copy_from(delta / f"whole-{number}.bin")
            else:
                _patch(base / name, delta, number, target, file["size"])
        except FileNotFoundError as e:
            raise UserError(f"{delta} is torn: {e.filename} is missing") from None
        if digest_of(target) != file["digest"]:
            raise UserError(f"{delta} is torn: '{name}' does not become what it was")


def digest_of(file: Location) -> str:
    """Return the digest of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open() as f:
        while data := f.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _delta_record(delta: Location) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((delta / DELTA_RECORD).read_bytes())
        _ = record["base"].items(), [(f["size"], f["digest"], f["how"], f["number"]) for f in record["files"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{delta} is no delta: {e}") from None
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in (*record["files"], *record["base"])):
        raise UserError(f"{delta} is no delta: a file's name leads out of the folder")
    return record


def _file_names(folder: Location) -> list[str]:
    if not (names := [f.below(folder) for f in folder.files()]):
        raise UserError(f"{folder} has no files: name a version's folder")
    return names


def _compare(number: int, name: str, base: Location, new: Location, known: bool, folder: Location) -> _DeltaFile:
    size, digest = (new / name).size(), digest_of(new / name)
    changed = _changed_blocks(base / name, new / name) if known else None
    if changed is None or len(changed) * BLOCK > _WHOLE_FILE_SHARE * size:
        (folder / f"whole-{number}.bin").copy_from(new / name)
        return _DeltaFile(name, size, digest, "whole", number)
    if not len(changed) and (base / name).size() == size:
        return _DeltaFile(name, size, digest, "same", number)
    with (folder / f"blocks-{number}.index.bin").new_file() as path:
        changed.tofile(path)
    with (folder / f"blocks-{number}.bin").new_file() as path, open(path, "wb") as out, (new / name).open() as f:
        for block in changed.tolist():
            f.seek(block * BLOCK)
            out.write(f.read(BLOCK))
    return _DeltaFile(name, size, digest, "blocks", number)


def _changed_blocks(base: Location, new: Location) -> npt.NDArray[np.int64]:
    """Return the numbers of the new file's blocks that differ from the base's blocks."""
    changed = []
    with base.open() as base_file, new.open() as after:
        start = 0
        while data := after.read(_CHUNK):
            old = base_file.read(_CHUNK)
            size = -(-len(data) // BLOCK) * BLOCK
            pair = [np.frombuffer(x.ljust(size, b"\0"), np.uint64) for x in (data, old[:size])]
            differs = (pair[0] != pair[1]).reshape(-1, BLOCK // 8).any(axis=1)
            differs[min(len(old), len(data)) // BLOCK :] |= len(old) < len(data)  # beyond the base's end, even zeros
            changed.append(np.flatnonzero(differs) + start)
            start += size // BLOCK
    return np.concatenate(changed).astype("<i8") if changed else np.empty(0, "<i8")


def _patch(base: Location, delta: Location, number: int, target: Location, size: int) -> None:
    index = delta / f"blocks-{number}.index.bin"
    index_bytes = index.read_bytes()
    blocks = np.frombuffer(index_bytes[: len(index_bytes) // 8 * 8], "<i8")
    if len(index_bytes) % 8 or ((blocks < 0) | (blocks > max(0, size - 1) // BLOCK)).any():
        raise UserError(f"{delta} is torn: {index.name} has no numbers of blocks of a file of {size:,} bytes")
    target.copy_from(base)
    with (delta / f"blocks-{number}.bin").open() as data, open(target.local_path(), "r+b") as out:
        out.truncate(size)
        for block in blocks.tolist():
            out.seek(block * BLOCK)
            out.write(data.read(BLOCK))
        out.truncate(size)
