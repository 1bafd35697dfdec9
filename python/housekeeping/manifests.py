"""The records of days of which nothing else is left."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from functools import cache, partial
from itertools import groupby

from headrace.housekeeping.step import Step, remove_all, size_of
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Manifest, Output
from headrace.stage import RunLock
from headrace.storage import Location


def manifest_steps(state: WorkspaceState) -> Iterator[Step]:
    """Old days whose manifests name nothing that is there: to later runs they are as if they had never been.

    Of a day all stay, or none: they are each other's lineage, and that of a model which is kept.
    """
    first, days_of = state.first_day(state.keep.manifests), cache(_days_of)
    for day, found in groupby(state.manifests(), key=lambda pair: pair[1].ds):
        mine = list(found) if day < first else []
        made = ((manifest, output) for _, manifest in mine for output in manifest.outputs)
        if not mine or any(_is_there(state, m, o, days_of(state.ws.locate(o.name))) for m, o in made):
            continue
        files = [file for file, _ in mine]
        name = f"{state.ws.name_of(files[0].parent)} ({len(files)} manifests)"
        reason = f"before {first}, and nothing else of the day is left"
        yield Step("manifests", name, reason, sum(map(size_of, files)), partial(_remove, files, state.lock))


def _remove(files: list[Location], lock: RunLock | None) -> None:
    remove_all(files, lock)
    folder = files[0].parent
    if not folder.entries():
        folder.remove()


def _is_there(state: WorkspaceState, manifest: Manifest, output: Output, days: frozenset[str]) -> bool:
    """Whether an output may still be read: files of it, rows of the days that the run has written, a published day."""
    if any(removed.name == output.name for removed in manifest.removed):
        return False
    if output.name.startswith("lake/"):
        sources = (manifest.facts, *manifest.facts.get("sources", {}).values()) if manifest.stage == "ingest" else ()
        return not days.isdisjoint({manifest.ds, *(ds for of in sources for ds in of.get("days", ()))})
    if output.kind in ("dataset", "model", "file"):
        return state.ws.locate(output.name).exists()
    publish, newest = state.spec.publish, state.newest_day
    if publish is None or publish.retain_days is None or newest is None:
        return True
    return manifest.ds > (date.fromisoformat(newest) - timedelta(days=publish.retain_days)).isoformat()


def _days_of(table: Location) -> frozenset[str]:
    """The days (partitions `ds`) of which a table has files; none of what is no table."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else None
    return frozenset(ds for f in files or () if (ds := f.partition.get("ds")) is not None)
