"""Delta tables and the warehouse: days that are removed, small files that are joined, files that no version needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from functools import partial

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.jobs.housekeeping.workspace_state import CleanupStep, WorkspaceState, manifests_of, remove_all, size_of
from headrace.lake.delta.compact import crowded, join_files
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.retention import days_before, remove_days_before, unnamed_files, unused_files, unused_log_files
from headrace.lake.delta.transaction import Transaction, UnsupportedTable, claim
from headrace.publish.opening import open_target
from headrace.publish.target import Target, beyond_retention
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import Location

log = logging.getLogger("headrace.housekeeping")

#: A version, or a range of a change feed, of which the first and the last are kept.
_VERSIONS = re.compile(r"\d+|\d*\.\.\d+")

#: The table of users' hashes (headrace.score.incremental, which imports Spark).
SCORE_INPUTS = "score_inputs"

_MIB = 1 << 20


def tables_of(ws: Workspace, pipeline: str) -> list[Location]:
    """Return the folders of a pipeline's Delta tables in the lake."""
    folder = ws.table(pipeline, "x").parent
    return [table for table in folder.entries() if DeltaLog(table).version is not None]


def row_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield days of rows that tables do not keep."""
    for table in tables_of(state.ws, state.pipeline):
        first = state.first_day(state.keep.table_days(table.name))
        first = _first_kept(table, first)
        days = days_before(table, first)
        if days:
            yield _rows_step(state, table, first, days)


def vacuum_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield data files that are neither in the newest version nor in one that a kept day names."""
    by_table = pinned_versions(state)
    for table in tables_of(state.ws, state.pipeline):
        first = state.first_day(state.keep.table_days(table.name))
        pinned = by_table.get(state.ws.name_of(table), set())
        files = unused_files(table, pinned, first or None, state.before_ns(state.keep.vacuum_hours / 24))
        if files:
            name = state.ws.name_of(table)
            reason = f"no version that is still read names these {len(files)} files"
            yield CleanupStep("vacuum", name, reason, sum(map(size_of, files)), partial(_vacuum, state, table, files))


def history_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield unneeded files of tables' logs; for tables that keep some days, also commits before all kept ones."""
    by_table = pinned_versions(state)
    for table in tables_of(state.ws, state.pipeline):
        first = _first_kept(table, state.first_day(state.keep.table_days(table.name)))
        name = state.ws.name_of(table)
        moment = state.before_ns(state.keep.vacuum_hours / 24)
        files = unused_log_files(table, by_table.get(name, set()), first or None, moment)
        if files:
            reason = f"no {f'day since {first}' if first else 'version'} needs these {len(files)} files of its log"
            yield CleanupStep("history", name, reason, sum(map(size_of, files)), partial(remove_all, files, state.lock))


def _vacuum(state: WorkspaceState, table: Location, files: Sequence[Location]) -> None:
    """Remove data files; a run that was paused before they were too old cannot commit them any more."""
    if state.lock is not None and unnamed_files(table, files):
        claim(table, state.lock.fence)
    remove_all(files, state.lock)


def pinned_versions(state: WorkspaceState) -> Mapping[str, set[int]]:
    """Return by the table's name the versions that runs of kept days have read or made, also of other pipelines."""
    versions: dict[str, set[int]] = {}
    # Lists are read at the versions of their days.
    served = state.spec.served_days_read if state.spec.outcomes else 0
    first = state.first_day(max(state.keep.versions, served))
    for pipeline in state.ws.pipelines():
        for _, manifest in manifests_of(state.ws, pipeline):
            if manifest.ds >= first:
                for name, version in _versions(manifest):
                    versions.setdefault(name, set()).add(version)
    return versions


def _versions(manifest: Manifest) -> Iterator[tuple[str, int]]:
    items: tuple[Input | Output, ...] = (*manifest.inputs, *manifest.outputs)
    for item in items:
        if item.name.startswith("lake/") and _VERSIONS.fullmatch(item.version):
            yield from ((item.name, int(text)) for text in item.version.split("..") if text)


def _first_kept(table: Location, first: str) -> str:
    """Return the first kept day; of users' hashes the newest day always stays, as the next run compares with it."""
    if table.name != SCORE_INPUTS:
        return first
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else None
    return min(first, max((f.partition.get("ds") or "" for f in files or []), default=first))


def _rows_step(state: WorkspaceState, table: Location, first: str, days: list[str]) -> CleanupStep:
    name = state.ws.name_of(table)
    version = DeltaLog(table).version
    files = DeltaLog(table).files(version) if version is not None else None
    size = sum(size_of(f.path) for f in files or [] if (f.partition.get("ds") or first) < first)

    def act() -> None:
        for file, manifest in state.manifests():
            if _holds(state.spec, manifest, table.name, name, first):
                noted = manifest.with_removed({name})
                if noted is not manifest:
                    state.save(noted, file)
        remove_days_before(table, first, state.fence)

    return CleanupStep("rows", f"{name} of {len(days)} days up to {days[-1]}", f"before {first}", size, act)


def _holds(spec: Spec, manifest: Manifest, table: str, name: str, first: str) -> bool:
    """Return whether a run that has made the table's rows looks at some before a day."""
    if not any(o.name == name for o in manifest.outputs):
        return False
    if manifest.stage == "ingest":
        facts = manifest.facts if table == "events" else manifest.facts.get("sources", {}).get(table, {})
        return any(ds < first for ds in facts.get("days", []))
    # The dataset does not need the statistics, nor do scores need the hashes of their inputs.
    return manifest.stage != "features" and table != SCORE_INPUTS and manifest.ds < first


def compaction_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield one step for each table that has such partitions, and can be written; the others are named."""
    keep = state.keep
    if keep.compact_files is None:
        return
    for table in tables_of(state.ws, state.pipeline):
        days, size = crowded(table, keep.compact_files, keep.compact_mib * _MIB)
        if days and _can_be_written(table):
            days_text = "" if days == [None] else f" of {len(days)} days"
            reason = f"{keep.compact_files} or more files below {keep.compact_mib:g} MiB"
            name = f"{state.ws.name_of(table)}{days_text}"
            yield CleanupStep(
                "compaction", name, reason, size, partial(join_files, table, days, keep.compact_mib * _MIB, state.fence)
            )


def _can_be_written(table: Location) -> bool:
    try:
        Transaction(table)
    except UnsupportedTable as e:
        log.warning("the small files of a table stay as they are: %s", e)
        return False
    return True


def warehouse_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield the warehouse's old days and failed audits, if the pipeline has published.

    Raises:
        UserError: the warehouse cannot be reached.
    """
    ws, publish = state.ws, state.spec.publish
    if publish is None or not any(m.stage in ("score", "publish") for _, m in state.manifests()):
        return
    with open_target(state.spec, ws, state.lock) as target:
        old = beyond_retention(target.days(), publish.retain_days)
        if old:
            name = f"{target.label}: {len(old)} days up to {old[-1]}"
            reason = f"publish.retain_days is {publish.retain_days}"
            yield CleanupStep("published", name, reason, act=partial(target.drop_days, old))
        days = _days_before(state)
        staged = target.kept_labels(days)
        if staged:
            yield CleanupStep("staged", ", ".join(staged), "their audits failed", act=partial(_drop_kept, target, days))


def _days_before(state: WorkspaceState) -> list[str]:
    """Return days that have run and are older than `unfinished_days`, by the pipeline's days."""
    if state.newest_day is None:
        return []
    first = (date.fromisoformat(state.newest_day) - timedelta(days=state.keep.unfinished_days)).isoformat()
    return [day for day in state.ws.days(state.pipeline) if day < first]


def _drop_kept(target: Target, days: list[str]) -> None:
    target.drop_kept(days)
