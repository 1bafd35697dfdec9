"""All steps of `headrace gc`, in order: outputs that manifests name, then what they no longer pin, then manifests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date, datetime, timedelta
from functools import cache, partial
from itertools import groupby

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.jobs.housekeeping.folders import (
    dataset_steps,
    decoded_steps,
    log_steps,
    mapped_steps,
    model_steps,
    registry_steps,
    report_steps,
    scratch_steps,
    search_steps,
    unfinished_steps,
)
from headrace.jobs.housekeeping.packages import package_steps
from headrace.jobs.housekeeping.tables import compaction_steps, history_steps, row_steps, vacuum_steps, warehouse_steps
from headrace.jobs.housekeeping.workspace_state import CleanupStep, WorkspaceState, remove_all, size_of
from headrace.lake.delta.log import DeltaLog
from headrace.stage import RunLock, run_lock
from headrace.stage.manifest import Manifest, Output
from headrace.storage import Location


def manifest_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield the manifests of old days whose outputs are all removed: later runs then see no such day.

    All manifests of a day stay, or none: they are each other's lineage, and that of a model which is kept.
    """
    first, days_of = state.first_day(state.keep.manifests), cache(_days_of)
    for day, day_manifests in groupby(state.manifests(), key=lambda pair: pair[1].ds):
        old_manifests = list(day_manifests) if day < first else []
        outputs = ((manifest, output) for _, manifest in old_manifests for output in manifest.outputs)
        if not old_manifests or any(_is_readable(state, m, o, days_of(state.ws.locate(o.name))) for m, o in outputs):
            continue
        files = [file for file, _ in old_manifests]
        name = f"{state.ws.name_of(files[0].parent)} ({len(files)} manifests)"
        reason = f"before {first}, and nothing else of the day is left"
        yield CleanupStep(
            "manifests", name, reason, sum(map(size_of, files)), partial(_remove_manifests, files, state.lock)
        )


def _remove_manifests(files: list[Location], lock: RunLock | None) -> None:
    remove_all(files, lock)
    folder = files[0].parent
    if not folder.entries():
        folder.remove()


def _is_readable(state: WorkspaceState, manifest: Manifest, output: Output, days: frozenset[str]) -> bool:
    """Return whether an output may still be read: its files, rows of the run's days, or a published day."""
    if any(removed.name == output.name for removed in manifest.removed):
        return False
    if output.name.startswith("lake/"):
        sources = (manifest.facts, *manifest.facts.get("sources", {}).values()) if manifest.stage == "ingest" else ()
        return not days.isdisjoint(
            {manifest.ds, *(ds for source_facts in sources for ds in source_facts.get("days", ()))}
        )
    if output.kind in ("dataset", "model", "file"):
        return state.ws.locate(output.name).exists()
    publish, newest = state.spec.publish, state.newest_day
    if publish is None or publish.retain_days is None or newest is None:
        return True
    return manifest.ds > (date.fromisoformat(newest) - timedelta(days=publish.retain_days)).isoformat()


def _days_of(table: Location) -> frozenset[str]:
    """Return the days (partitions `ds`) of which a table has files; none of what is no table."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else None
    return frozenset(ds for f in files or () if (ds := f.partition.get("ds")) is not None)


#: In order: each sees the workspace after the ones before it.
_KINDS: tuple[Callable[[WorkspaceState], Iterator[CleanupStep]], ...] = (
    unfinished_steps,
    dataset_steps,
    model_steps,
    mapped_steps,
    search_steps,
    report_steps,
    package_steps,
    log_steps,
    scratch_steps,
    decoded_steps,
    row_steps,
    compaction_steps,
    vacuum_steps,
    history_steps,
    warehouse_steps,
    manifest_steps,
    registry_steps,
)


def collect(spec: Spec, ws: Workspace, now: datetime, delete: bool) -> Iterator[CleanupStep]:
    """Yield the steps, each after it is done if `delete` is set.

    May be killed anywhere: finished steps stay done, and the next call does the rest.

    Args:
        spec: the pipeline.
        ws: the workspace.
        now: the clock, with its time zone.
        delete: remove; else nothing is changed, and nothing is locked.

    Raises:
        BusyError: a stage of the pipeline is at work (`delete` alone).
        UserError: a manifest cannot be read, a table has features that are not known, a warehouse cannot be reached.
    """
    with run_lock(ws, spec.pipeline) if delete else nullcontext() as lease:
        for kind in _KINDS:
            for step in kind(WorkspaceState(spec, ws, now, lease)):
                if lease is not None:
                    lease.check()
                    step.act()
                yield step
