"""What is in a model repository, by names, sizes and times of its files: nothing is loaded.

MODEL/VERSION/model.onnx    a graph and its tables' files, as Triton wants them; VERSION is a number
MODEL/VERSION/export.json   of `headrace export`: further graphs are beside it, see headrace.serve.assemble
release.json                {"models": {MODEL: VERSION}}: which versions agree; without it, the newest of each model
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

GRAPH, RECORD, RELEASE = "model.onnx", "export.json", "release.json"
#: A file's name, size and time, for each file: what a failed version must differ in to be tried again.
Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Parts:
    """What a version is made of.

    Attributes:
        graphs: of an export, by their names there; empty where the folder is none.
        items: vectors of items, and the first code that is one.
        graph: of a folder without a record.
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
        """What is to be loaded. Raises ValueError: the folder is torn; says how."""
        record = self.folder / RECORD
        if not record.is_file():
            return Parts({}, None, self.folder / GRAPH)
        try:
            said = json.loads(record.read_bytes())
            sizes = {str(name): int(size) for name, size in said.get("files", {}).items()}
            graphs = {str(name): self.folder / graph["file"] for name, graph in said.get("graphs", {}).items()}
            items = said.get("items")
            found = None if items is None else (self.folder / items["file"], int(items["first_code"]))
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as e:
            raise ValueError(f"{record}: no record of an export: {e}") from None
        if said.get("format", "onnx") != "onnx":
            raise ValueError(f"{record}: an export of the format {said['format']}; ONNX is served")
        for name, size in sizes.items():
            there = (self.folder / name).stat().st_size if (self.folder / name).is_file() else None
            if there != size:
                what = "is missing" if there is None else f"has {there:,} bytes"
                raise ValueError(f"{self.folder / name} {what}; {RECORD} says {size:,} bytes")
        return Parts(graphs, found, self.folder / GRAPH)

    @property
    def is_onnx(self) -> bool:
        """Whether it has a graph at all: a repository of Triton's has models of other kinds beside them."""
        return any(name in (GRAPH, RECORD) for name, _, _ in self.signature)


@dataclass(frozen=True)
class Contents:
    """What a repository has.

    Attributes:
        versions: by model, by number.
        release: by model, the version that is to be served; None: nobody has said it.
        fault: why the release's file cannot be read.
    """

    versions: dict[str, dict[int, VersionFolder]]
    release: dict[str, int] | None
    fault: str | None = None


def read_repository(folder: Path) -> Contents:
    """Look at a repository. Raises OSError: it is not there, cannot be read, or was moved meanwhile."""
    before = folder.stat()
    versions: dict[str, dict[int, VersionFolder]] = {}
    for model in sorted(folder.iterdir()):
        if model.name.startswith(".") or not model.is_dir():
            continue
        numbers = [v for v in model.iterdir() if v.name.isdecimal() and v.name.isascii() and not v.name.startswith("0")]
        found = {int(v.name): _version(model.name, v) for v in numbers if v.is_dir()}
        versions[model.name] = dict(sorted(found.items()))
    release, fault = _release(folder / RELEASE)
    # Of a folder that is moved away, what has not been looked at yet seems to be removed.
    if not os.path.samestat(before, folder.stat()):
        raise OSError(f"{folder} was replaced while it was read")
    return Contents(versions, release, fault)


def _version(model: str, folder: Path) -> VersionFolder:
    files = []
    for file in sorted(folder.rglob("*")):
        try:
            info = file.stat()
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # a link to itself, say: a matter of this version, and of no other
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
