"""Sizes of a run's outputs: bytes and files of what it wrote."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.stage.manifest import Output

#: Kinds of outputs that are Delta tables; the version is that of the run's commit.
DELTA = ("delta", "quarantine")


@dataclass(frozen=True)
class Size:
    """Size of what a run added to an output."""

    bytes: int
    files: int


def size_of(ws: Workspace, output: Output) -> Size | None:
    """Return what the run's commit added to a table, or all files of anything else; None where that is unknown."""
    place = ws.locate(output.name)
    if output.kind in DELTA:
        if not output.version.isdecimal():
            return None
        try:
            actions = list(DeltaLog(place).actions(int(output.version)))
        except FileNotFoundError:
            return None
        sizes = [int(a["add"].get("size", 0)) for a in actions if "add" in a]
        return Size(sum(sizes), len(sizes))
    if place.is_file():
        return Size(place.size(), 1)
    if output.kind not in ("dataset", "model") or not place.is_dir():
        return None
    sizes = [file.size() for file in place.files()]
    return Size(sum(sizes), len(sizes))
