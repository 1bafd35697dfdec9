"""The pipeline's Delta tables: days that are removed, small files that are joined, files that no version needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from headrace.config import Spec
from headrace.housekeeping.step import Step, remove_all, size_of
from headrace.housekeeping.workspace_state import WorkspaceState, manifests_of
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.log_retention import unused_log_files
from headrace.lake.delta.retention import days_before, remove_days_before
from headrace.lake.delta.transaction import claim
from headrace.lake.delta.vacuum import unnamed_files, unused_files
from headrace.manifest import Input, Manifest, Output
from headrace.storage import Location
from headrace.workspace import Workspace

#: A version, or those of a change feed, the first and the last of which are kept.
_VERSIONS = re.compile(r"\d+|\d*\.\.\d+")


#: The table of users' hashes (headrace.score.incremental, which imports Spark).
SCORE_INPUTS = "score_inputs"


def tables_of(ws: Workspace, pipeline: str) -> list[Location]:
    """The folders of a pipeline's Delta tables in the lake."""
    folder = ws.table(pipeline, "x").parent
    return [table for table in folder.entries() if DeltaLog(table).version is not None]


def row_steps(state: WorkspaceState) -> Iterator[Step]:
    """Days of rows that tables do not keep."""
    for table in tables_of(state.ws, state.pipeline):
        first = state.first_day(state.keep.table_days(table.name))
        first = _first_kept(table, first)
        days = days_before(table, first)
        if days:
            yield _rows_step(state, table, first, days)


def vacuum_steps(state: WorkspaceState) -> Iterator[Step]:
    """Data files that neither the newest version nor one that a kept day names has."""
    by_table = pinned_versions(state)
    for table in tables_of(state.ws, state.pipeline):
        first = state.first_day(state.keep.table_days(table.name))
        pinned = by_table.get(state.ws.name_of(table), set())
        files = unused_files(table, pinned, first or None, state.before_ns(state.keep.vacuum_hours / 24))
        if files:
            name = state.ws.name_of(table)
            reason = f"no version that is still read names these {len(files)} files"
            yield Step("vacuum", name, reason, sum(map(size_of, files)), partial(_vacuum, state, table, files))


def history_steps(state: WorkspaceState) -> Iterator[Step]:
    """Files of tables' logs that nobody needs: of tables that keep some days, commits before all that is kept, too."""
    by_table = pinned_versions(state)
    for table in tables_of(state.ws, state.pipeline):
        first = _first_kept(table, state.first_day(state.keep.table_days(table.name)))
        name = state.ws.name_of(table)
        moment = state.before_ns(state.keep.vacuum_hours / 24)
        files = unused_log_files(table, by_table.get(name, set()), first or None, moment)
        if files:
            reason = f"no {f'day since {first}' if first else 'version'} needs these {len(files)} files of its log"
            yield Step("history", name, reason, sum(map(size_of, files)), partial(remove_all, files, state.lock))


def _vacuum(state: WorkspaceState, table: Location, files: Sequence[Location]) -> None:
    """Remove data files. Of a run that stands still since before they were too old, no later commit names them."""
    if state.lock is not None and unnamed_files(table, files):
        claim(table, state.lock.fence)
    remove_all(files, state.lock)


def pinned_versions(state: WorkspaceState) -> Mapping[str, set[int]]:
    """By the table's name: the versions that runs of kept days have read or made, also of other pipelines."""
    found: dict[str, set[int]] = {}
    # Lists are read at the versions of their days.
    served = state.spec.served_days_read if state.spec.outcomes else 0
    first = state.first_day(max(state.keep.versions, served))
    for pipeline in state.ws.pipelines():
        for _, manifest in manifests_of(state.ws, pipeline):
            if manifest.ds >= first:
                for name, version in _versions(manifest):
                    found.setdefault(name, set()).add(version)
    return found


def _versions(manifest: Manifest) -> Iterator[tuple[str, int]]:
    items: tuple[Input | Output, ...] = (*manifest.inputs, *manifest.outputs)
    for item in items:
        if item.name.startswith("lake/") and _VERSIONS.fullmatch(item.version):
            yield from ((item.name, int(text)) for text in item.version.split("..") if text)


def _first_kept(table: Location, first: str) -> str:
    """Of users' hashes, by which the next run tells who is to be scored anew, the newest day stays, however old."""
    if table.name != SCORE_INPUTS:
        return first
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else None
    return min(first, max((f.partition.get("ds") or "" for f in files or []), default=first))


def _rows_step(state: WorkspaceState, table: Location, first: str, days: list[str]) -> Step:
    name = state.ws.name_of(table)
    version = DeltaLog(table).version
    files = DeltaLog(table).files(version) if version is not None else None
    size = sum(size_of(f.path) for f in files or [] if (f.partition.get("ds") or first) < first)

    def act() -> None:
        for file, manifest in state.manifests():
            if _holds(state.spec, manifest, table.name, name, first):
                noted = manifest.without({name})
                if noted is not manifest:
                    state.save(noted, file)
        remove_days_before(table, first, state.fence)

    return Step("rows", f"{name} of {len(days)} days up to {days[-1]}", f"before {first}", size, act)


def _holds(spec: Spec, manifest: Manifest, table: str, name: str, first: str) -> bool:
    """Whether a run that has made the table's rows looks at some before a day."""
    if not any(o.name == name for o in manifest.outputs):
        return False
    if manifest.stage == "ingest":
        facts = manifest.facts if table == "events" else manifest.facts.get("sources", {}).get(table, {})
        return any(ds < first for ds in facts.get("days", []))
    # Its output is the dataset, which does without the statistics; and scores do without what they were made of.
    return manifest.stage != "features" and table != SCORE_INPUTS and manifest.ds < first
