"""Places that have persons' values: folders, texts, tables, the warehouse, hosts' copies.

Datasets, searches and caches go as a whole, because they are made again; logs, reports and manifests lose the values.
In tables rows go, and placeholders replace values of vocabularies and statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.config import Spec
from headrace.features.workflow.workflow import Workflow
from headrace.jobs.housekeeping.folders import OF_TRAINING, REGISTERED_SUFFIXES
from headrace.jobs.housekeeping.forget.persons import Persons, Place, vocabularies_of, with_placeholders
from headrace.jobs.housekeeping.tables import tables_of
from headrace.jobs.housekeeping.workspace_state import WorkspaceState, is_at_work, remove_all, size_of
from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.redact import Values, exactly, redact_log
from headrace.lake.delta.transaction import claim
from headrace.lake.scratch import STAGE_FOLDERS
from headrace.models.registry.artifact import staging
from headrace.publish.online import open_store
from headrace.publish.opening import open_target
from headrace.publish.target import Key, Target
from headrace.stage.manifest import Manifest
from headrace.storage import Location
from headrace.storage.objects import copies

_FORGET = "forget"

_QUARANTINE = "quarantine"


def dataset_places(state: WorkspaceState) -> Iterator[Place]:
    """Yield all datasets: their rows have codes, which still identify persons. Manifests note what was removed."""
    for day in state.ws.dataset(state.pipeline, "x", "x").parent.parent.entries():
        for folder in day.entries():
            note = f"made again by: headrace run {state.spec.argument} --ds {day.name} --to features"
            yield _removal(state, "dataset", day.name, folder, note)


def search_places(state: WorkspaceState) -> Iterator[Place]:
    """Yield samples of datasets for searches of hyper-parameters."""
    at_work = is_at_work(state.ws, f"{state.pipeline}-search")
    for day in state.ws.search(state.pipeline, "x", "x").parent.parent.entries():
        left = "a search is at work: run the command again when it has ended" if at_work else ""
        act = None if at_work else partial(remove_all, [day], state.lock)
        name, files = state.ws.name_of(day), _files(day)
        yield Place("search", name, removed=files, size=size_of(day), left=left, later=at_work, act=act)


def cache_places(state: WorkspaceState) -> Iterator[Place]:
    """Yield files of this host that are made again, and files of killed stages."""
    ws, pipeline = state.ws, state.pipeline
    temporary = ws.spark_local
    places = [
        ws.encoded(pipeline),
        ws.mapped(pipeline),
        *(staging(ws, pipeline + suffix) for suffix in REGISTERED_SUFFIXES),
        *(temporary / kind / pipeline for kind in STAGE_FOLDERS),
    ]
    places += [ws.staging(pipeline)]
    for place in places:
        if place.exists():
            act = partial(remove_all, [place], state.lock)
            yield Place("cache", ws.name_of(place), removed=_files(place), size=size_of(place), act=act)


def training_places(state: WorkspaceState) -> Iterator[Place]:
    """Yield files that trainings left beside their models; an unfinished training starts again."""
    for day in state.ws.model(state.pipeline, "x", "x").parent.parent.entries():
        for folder in day.entries():
            left = [e for e in folder.entries() if e.name.startswith(OF_TRAINING)]
            if left:
                size, files = sum(map(size_of, left)), sum(map(_files, left))
                name = state.ws.name_of(folder)
                yield Place("training", name, removed=files, size=size, act=partial(remove_all, left, state.lock))


def text_places(state: WorkspaceState, persons: Persons) -> Iterator[Place]:
    """Yield logs and reports that have a value, which are removed, and manifests, which lose it.

    Samples of scores in manifests name their column; elsewhere short values cannot be told from other numbers.
    """
    ws = state.ws
    with_values = [(f, m) for f, m in state.manifests() if m.facts != _redacted(m.facts, persons)]
    sampled = {manifest.ds for _, manifest in with_values}
    for page in ws.report(state.pipeline, "x").parent.entries():
        if page.stem in sampled or _has(page, persons):
            yield _removal(state, "report", page.stem, page, f"made again by: headrace run {state.spec.argument}")
    for file in ws.log(state.pipeline, "x", "x").parent.parent.files() if persons.searchable else ():
        if _has(file, persons):
            yield Place(
                "log", ws.name_of(file), removed=1, size=file.size(), act=partial(remove_all, [file], state.lock)
            )
    # Manifests last: a rerun finds the reports by them.
    for file, _ in with_values:
        yield Place("manifest", ws.name_of(file), rewritten=1, act=partial(_redact, state, file, persons))


def _redact(state: WorkspaceState, file: Location, persons: Persons) -> None:
    manifest = Manifest.load(file)
    assert manifest is not None, "under the pipeline's lock"
    state.save(manifest.model_copy(update={"facts": _redacted(manifest.facts, persons)}), file)


def _redacted(value: Any, persons: Persons) -> Any:
    """Return JSON without values; records with a value in the column are dropped from lists."""
    if isinstance(value, str):
        return persons.redact(value)
    if isinstance(value, dict):
        return {persons.redact(k): _redacted(v, persons) for k, v in value.items()}
    if isinstance(value, list):
        records = (v for v in value if not (isinstance(v, dict) and str(v.get(persons.column)) in persons.texts))
        return [_redacted(v, persons) for v in records]
    return value


def _has(file: Location, persons: Persons) -> bool:
    return persons.in_bytes(file.read_bytes())


def _removal(state: WorkspaceState, kind: str, day: str, place: Location, note: str) -> Place:
    name = state.ws.name_of(place)

    def act() -> None:
        state.note_removed(day, {name}, _FORGET)
        remove_all([place], state.lock)

    return Place(kind, name, removed=_files(place), size=size_of(place), note=note, act=act)


def _files(place: Location) -> int:
    return 1 if place.is_file() else sum(1 for _ in place.files())


def host_places(state: WorkspaceState) -> Iterator[Place]:
    """Yield copies of its files, and files on their way to it; none where lake and store are on file systems.

    Copies are fetched again by whoever reads the files. So they go last: whoever looks for persons fetches some.
    """
    if state.ws.is_local:
        return
    if copied_files := copies.cached_files():
        note = "of all pipelines; fetched again where they are read. Other hosts have their own"
        name = f"copies in {copies.folder()}"
        yield Place(
            "cache", name, removed=len(copied_files), size=sum(copied_files.values()), note=note, act=_remove_copies
        )
    for place, (size, until) in copies.recent_uploads().items():
        left = (
            f"files on their way to the store, written to less than a day ago by a stage that is at work or killed: "
            f"the same command removes them from {datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M:%S} UTC on; or "
            f"remove them now, if no stage is at work on this host, and run it again"
        )
        yield Place("cache", str(place), size=size, left=left, later=True)


def other_hosts(state: WorkspaceState) -> Iterator[Place]:
    """Yield files of tasks on hosts that share no scratch folder, which only those hosts can remove."""
    if state.spec.spark.own_scratch:
        scratch = state.ws.scratch_folder or "their scratch folder (HEADRACE_SCRATCH, or the one that Spark gives them)"
        note = (
            f"not reached: remove the first two below {scratch} on every host that has ever had tasks, and there "
            f"HEADRACE_CACHE, or {scratch}/cache"
        )
        name = f"encoded/{state.pipeline}, mapped/{state.pipeline} and copies of the store's files on other hosts"
        yield Place("cache", name, note=note)


def _remove_copies() -> str:
    try:
        copies.remove_cached_files()
    except OSError as e:
        return f"they cannot be removed ({e.strerror}: {e.filename}): remove the folder"
    return ""


def table_places(state: WorkspaceState, persons: Persons, request: str) -> Iterator[Place]:
    """Yield tables that have values: in the newest version, in older ones, in the log.

    Raises:
        UserError: a table that headrace does not read or write, or that another writer changes.
    """
    for table in tables_of(state.ws, state.pipeline):
        kind, change, values = change_of(state.spec, table.name, persons)
        erased = erase(table, change, request, delete=False)
        logs = redact_log(table, values, delete=False)
        if not erased and not logs:
            continue
        yield Place(
            kind,
            state.ws.name_of(table),
            erased.rows,
            erased.rewritten + logs,
            erased.removed,
            erased.size,
            act=partial(_erase_table, state, table, change, request, values),
        )


def claim_tables(state: WorkspaceState) -> None:
    """Claim the tables, so that they refuse commits of runs that held the pipeline's lease earlier.

    Raises:
        UserError: a table that headrace does not write.
        LeaseLost: another process is at work by now.
    """
    for table in tables_of(state.ws, state.pipeline):
        claim(table, state.fence)


def change_of(spec: Spec, name: str, persons: Persons) -> tuple[str, Change, Values]:
    """(kind, what becomes of its rows, what must not be in its log) of a table by its name."""
    exact = exactly(persons.texts)
    if name == _QUARANTINE or name.endswith(f"_{_QUARANTINE}"):
        columns = ("_raw", "_reason")
        # The log has the smallest and the largest line, perhaps cut: a value may be cut at their ends.
        values = dict.fromkeys(columns, lambda text, cut: persons.occurs_in(str(text), cut))
        return _QUARANTINE, Change(columns, partial(_without_lines, persons)), values
    if name == "vocabulary":
        names = vocabularies_of(Workflow.from_spec(spec), persons.column)
        return "vocabulary", Change(("name", "value"), partial(_without_values, persons, names)), {"value": exact}
    if name == "statistics":
        return "statistics", Change(("side", "column", "histogram"), partial(_without_bins, spec, persons)), {}
    kind = "events" if name == "events" or name in spec.sources else "table"
    return kind, Change((persons.column,), partial(_without_rows, persons)), {persons.column: exact}


def _erase_table(state: WorkspaceState, table: Location, change: Change, request: str, values: Values) -> str:
    erased = erase(table, change, request, delete=True, fence=state.fence)
    redact_log(table, values, delete=True, check=state.check_lease)
    return "; ".join(erased.left)


def _without_rows(persons: Persons, rows: pa.Table) -> tuple[pa.Table, int]:
    is_theirs = persons.mask(rows.column(persons.column))
    return (rows.filter(pa.array(~is_theirs)), int(is_theirs.sum())) if is_theirs.any() else (rows, 0)


def _without_lines(persons: Persons, rows: pa.Table) -> tuple[pa.Table, int]:
    texts = (rows.column(name).to_pylist() for name in ("_raw", "_reason"))
    is_theirs = np.array([any(map(persons.occurs_in, both)) for both in zip(*texts, strict=True)], np.bool_)
    return (rows.filter(pa.array(~is_theirs)), int(is_theirs.sum())) if is_theirs.any() else (rows, 0)


def _without_values(persons: Persons, names: Collection[str], rows: pa.Table) -> tuple[pa.Table, int]:
    of_name = np.isin(rows.column("name").to_numpy(zero_copy_only=False).astype(str), sorted(names))
    is_theirs = of_name & persons.mask(rows.column("value"))
    if not is_theirs.any():
        return rows, 0
    # A file may have no column of codes: then a row's position is its code.
    codes = rows.column("code").to_pylist() if "code" in rows.schema.names else range(rows.num_rows)
    position = rows.schema.get_field_index("value")
    values = with_placeholders(rows.column("value").to_pylist(), is_theirs, codes)
    return rows.set_column(
        position, rows.schema.field(position), pa.array(values, rows.schema.field(position).type)
    ), int(is_theirs.sum())


def _without_bins(spec: Spec, persons: Persons, rows: pa.Table) -> tuple[pa.Table, int]:
    """Return the most frequent values of the column, and of the features that were made of it."""
    columns_of_values = {("input", persons.column), *(("feature", name) for name in _features_of(spec, persons))}
    histograms, count = [], 0
    columns = (rows.column(name).to_pylist() for name in ("side", "column", "histogram"))
    for side, column, bins in zip(*columns, strict=True):
        new = bins
        if (side, column) in columns_of_values and bins is not None:
            new = [
                b | {"value": with_placeholders([b["value"]], [True], [i])[0]} if b["value"] in persons.texts else b
                for i, b in enumerate(bins)
            ]
            count += sum(a is not b for a, b in zip(new, bins, strict=True))
        histograms.append(new)
    if not count:
        return rows, 0
    position = rows.schema.get_field_index("histogram")
    return rows.set_column(
        position, rows.schema.field(position), pa.array(histograms, rows.schema.field(position).type)
    ), count


def _features_of(spec: Spec, persons: Persons) -> set[str]:
    """Features in whose statistics values of the column can be: by their names, where there is a vocabulary.

    Without one a feature's categories are codes, which are numbers as integers are.
    """
    return {
        name
        for chain in Workflow.from_spec(spec).chains
        for name, output in chain.outputs.items()
        if persons.column in chain.sources[name] and (output.vocabulary or not persons.integers)
    }


def warehouse_places(state: WorkspaceState, persons: Persons) -> Iterator[Place]:
    """Yield the warehouse and the online store, if the pipeline has published and the column is a key of the scores.

    Raises:
        UserError: the warehouse or the store cannot be reached.
    """
    spec, ws = state.spec, state.ws
    if spec.publish is None or spec.score is None or persons.column not in (spec.score.user.key, spec.score.item.key):
        return
    if not any(m.stage in ("score", "publish") for _, m in state.manifests()):
        return
    keys: list[Key] = sorted(map(int, persons.texts)) if persons.integers else sorted(persons.texts)
    with open_target(spec, ws, state.lock) as target:
        rows, files = target.rows_with(persons.column, keys), target.leftovers(persons.column, keys)
        if rows or files:
            note = f"{len(rows)} days, {min(rows)} to {max(rows)}" if rows else "of no published day"
            note = "; ".join(filter(None, (note, target.not_reached)))
            act = partial(_erase_published, target, persons.column, keys)
            yield Place("warehouse", target.label, sum(rows.values()), removed=files, note=note, act=act)
        if staged := target.kept_labels():
            yield Place(
                "warehouse",
                ", ".join(staged),
                removed=len(staged),
                note="failed audits",
                act=partial(_drop_staged, target),
            )
    if spec.publish.online is None or persons.column != spec.score.user.key:
        return
    with open_store(spec, ws, state.lock) as store:
        users = store.users_with(sorted(persons.texts))
        if users:
            yield Place("online", store.label, users, act=partial(store.erase, sorted(persons.texts)))


def claim_warehouse(state: WorkspaceState) -> None:
    """Claim the warehouse and the online store as `claim_tables` does the tables.

    Raises:
        UserError: the warehouse or the store cannot be reached.
        LeaseLost: another process is at work by now.
    """
    spec = state.spec
    if spec.publish is not None and any(m.stage in ("score", "publish") for _, m in state.manifests()):
        with open_target(spec, state.ws, state.lock) as target:
            target.claim()
        if spec.publish.online is not None:
            with open_store(spec, state.ws, state.lock) as store:
                store.claim()


def _erase_published(target: Target, column: str, keys: list[Key]) -> str:
    return target.erase(column, keys)


def _drop_staged(target: Target) -> None:
    target.drop_kept()
