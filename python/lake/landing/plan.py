"""Days that a run has to load: those whose files are not loaded, and those that an earlier run left to be reloaded.

A file is what it was if its name, size and content are the same, whenever it was written. A file that is gone was
purged: the day stays as it was loaded. (To take a file's rows back, deliver it empty.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.config import Source, Table, TableSource
from headrace.config.schema import is_wider
from headrace.config.source import days_of_run, following
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog, damaged_file
from headrace.lake.faults import kind_unreadable
from headrace.lake.landing.files import LandingDay, LandingFile, file_patterns, find_files
from headrace.lake.landing.load_history import LoadHistory, LoadRecord
from headrace.lake.landing.source_context import SourceContext, incomplete, missing_markers, warn_left_out
from headrace.stage.manifest import fingerprint

#: Files whose checksums are computed at once: hashing lets go of the interpreter's lock.
_READERS = 4
_LOG = logging.getLogger("headrace.lake")

#: Landing bytes that are read and staged together. More days than that are loaded in several batches.
BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class DayFiles:
    """Landing files of one day, and its record."""

    #: The files that are there.
    day: LandingDay
    #: Of the last load; None before any.
    record: LoadRecord | None
    #: Of each file that is there: as recorded where it is the same, else [name, size, SHA-256].
    identities: tuple[list[Any], ...]

    @property
    def ds(self) -> str:
        """The landing day."""
        return self.day.ds

    @property
    def unchanged(self) -> frozenset[str]:
        """Names of the files that are there and were loaded."""
        recorded = self.record.files if self.record is not None else []
        return frozenset(i[0] for i in self.identities if i in recorded)

    @property
    def is_new(self) -> bool:
        """True where an existing file has not been loaded."""
        return self.record is None or len(self.unchanged) < len(self.identities)

    @property
    def purged(self) -> tuple[str, ...]:
        """Names of loaded files that are not there any more."""
        names = {f.name for f in self.day.files}
        return () if self.record is None else tuple(str(f[0]) for f in self.record.files if f[0] not in names)

    @property
    def version(self) -> str:
        """A fingerprint of the files that the day is loaded from, purged ones among them: another one as soon as a file
        comes or changes.
        """
        files = self.identities if self.record is None or self.is_new else self.record.files
        return fingerprint({"files": list(files)})


def day_files(day: LandingDay, record: LoadRecord | None) -> DayFiles:
    """Compare the files of a day with its record. Reads those whose size is the same and whose time is another."""
    with ThreadPoolExecutor(_READERS) as pool:
        return DayFiles(day, record, tuple(pool.map(lambda f: _identity(f, record), day.files)))


def covered_days(ctx: SourceContext, history: LoadHistory) -> tuple[DayFiles, ...]:
    """Return the days with landing files, or loaded from some, that a run covers: oldest first, the run's own last.

    Raises:
        UserError: there are no files for the run's own day, and it is not loaded; names the glob. (IncompleteError) The
            run's own day lacks what `source.complete` asks for; says what. Such days before it are left out, or stay as
            they were loaded.
    """
    days, source = [], ctx.landing_source
    for ds in days_of_run(source, ctx.ds):
        with ctx.naming_keys():
            files, lacks = files_to_take(ctx, ds, history.records.get(ds))
        if lacks and ds == ctx.ds:
            raise incomplete(ctx, ds, lacks)
        if files is not None:
            days.append(files)
    if not days or days[-1].ds != ctx.ds:
        tried = " nor ".join(map(str, file_patterns(source, ctx.ws, ctx.ds)))
        of_day = f"for {ctx.ds} " if source.daily else ""
        raise UserError(
            f"no landing files {of_day}match {tried}; put them there, or change "
            f"{ctx.key_prefix}source.path (for example --set {ctx.key_prefix}source.path=/data/*.gz)"
        )
    return tuple(days)


def files_to_take(ctx: SourceContext, ds: str, record: LoadRecord | None) -> tuple[DayFiles | None, list[str]]:
    """Return the files of a day that may be loaded, and what a day with new ones lacks that is not complete.

    Such a day has the files that it was loaded from, or none (None).
    """
    source = ctx.landing_source
    # Before the files are listed: see headrace.lake.landing.source_context.
    lacks = missing_markers(source, ctx.ws, ds)
    day = find_files(source, ctx.ws, ds)
    files = day_files(day, record) if day.files or record is not None else None
    if not lacks or (files is not None and not files.is_new):
        return files, []
    if day.files and ds != ctx.ds:
        warn_left_out(ds, "; ".join(lacks))
    return None if record is None else day_files(LandingDay(ds, ()), record), lacks


def _identity(file: LandingFile, record: LoadRecord | None) -> list[Any]:
    recorded = next((f for f in record.files if f[0] == file.name), None) if record is not None else None
    if record is None or recorded is None or recorded[1] != file.size:
        return [file.name, file.size, file.sha256()]
    if file.tag and file.name in record.tags:
        is_same = file.tag == record.tags[file.name]
    else:
        # Records of older releases have the time in the file's identity.
        is_same = file.mtime_ns in (record.modified.get(file.name), recorded[2])
    return recorded if is_same else [file.name, file.size, file.sha256()]


@dataclass(frozen=True)
class LoadPlan:
    """The days to load and what is known of those that are loaded."""

    #: Oldest first.
    files: tuple[DayFiles, ...]
    #: The newest record of each day that is loaded.
    records: Mapping[str, LoadRecord]
    #: Fingerprints of the declaration, see LoadRecord.
    declared: str
    judged: str
    #: Days to load of which others have deleted rows since they were first loaded.
    erased: frozenset[str]
    #: Days to load of whose files, where they are unchanged, rows that are not in the table must stay out: others have
    #: deleted them, or what they repeat on a day nearby.
    withhold: frozenset[str]
    #: Of the events' table, at which all this was found; -1: there was none.
    version: int = -1

    @property
    def days(self) -> tuple[LandingDay, ...]:
        """The days to load, oldest first."""
        return tuple(f.day for f in self.files)

    def batches(self) -> Iterator[list[DayFiles]]:
        """Yield the days in groups of at most BATCH_BYTES, or of one day."""
        batch: list[DayFiles] = []
        for files in self.files:
            if batch and sum(f.day.size for f in batch) + files.day.size > BATCH_BYTES:
                yield batch
                batch = []
            batch.append(files)
        if batch:
            yield batch


def plan_load(ctx: SourceContext, history: LoadHistory, covered: Sequence[DayFiles], version: int) -> LoadPlan:
    """Compare the landing files with the load history.

    Args:
        ctx: of the source.
        history: of the events' table.
        covered: the days that the run covers, its own last.
        version: of the stage ingest.

    Raises:
        UserError: a day must be loaded again and cannot be: its files are gone, or others have deleted rows of it that
            cannot be known any more.
    """
    source, table, records = ctx.source, ctx.table, history.records
    declared, judged = declaration(source, table, version), fingerprint(table.model_dump(mode="json"))
    reload = history.to_load_again()
    to_load: dict[str, DayFiles] = {}
    for files in covered:
        is_run_day = files.ds == ctx.ds
        changed = files.record is not None and _is_changed(
            ctx, history, files.record, (declared, judged), version, is_run_day
        )
        reason = _why_load(files, history, changed) or _damaged_quarantine(ctx, files.record)
        if reason is not None and _can_load(files, reason, is_run_day):
            to_load[files.ds] = files
    if source.daily and table.keys:
        reload |= {x for d in to_load if d in records for x in loaded_after(d, records, table.late_days)}
    for ds in sorted(reload - set(to_load)):
        again, _ = files_to_take(ctx, ds, records[ds])
        if again is not None and _can_load(again, "an earlier day changed", is_run_day=False):
            to_load[ds] = again
    days = tuple(to_load[ds] for ds in sorted(to_load))
    erased = frozenset(ds for ds in to_load if _is_erased(history, ds))
    withhold = frozenset(f.ds for f in days if f.unchanged and any(_is_erased(history, d) for d in _near(ctx, f.ds)))
    return LoadPlan(days, records, declared, judged, erased, withhold, history.version)


def loaded_after(ds: str, records: Mapping[str, LoadRecord], late_days: int) -> list[str]:
    """Return loaded days within `late_days` after `ds`."""
    return [d for d in (following(ds, k) for k in range(1, late_days + 1)) if d in records]


def declaration(source: Source, table: Table, version: int) -> str:
    """Return a fingerprint of all that decides what becomes of a row; not of what only stops a day."""
    of_rows, files = table.model_dump(mode="json"), declared_source(source)
    of_rows["expectations"] = {"ranges": of_rows["expectations"]["ranges"]}
    of_runs: tuple[str, ...] = ("path", "catch_up_days")
    if isinstance(source, TableSource):
        of_runs = ("version", "as_of", "catch_up_days", "changed_days")
    files = {k: v for k, v in files.items() if k not in of_runs}
    if isinstance(source, TableSource) and source.day is not None and source.day.changes:
        policy = source.changed_days
        files["ignored"] = [kind for kind in ("updates", "deletes") if getattr(policy, kind) == "ignore"]
    return fingerprint({"version": version, "table": of_rows, "source": files})


def declared_source(source: Source) -> dict[str, Any]:
    """Return the section `source` for fingerprints: all but `complete`, which says when a day is loaded, not how."""
    return source.model_dump(mode="json", exclude={"complete"})


def _is_changed(
    ctx: SourceContext, history: LoadHistory, record: LoadRecord, now: tuple[str, str], version: int, is_run_day: bool
) -> bool:
    """Return whether the declaration has changed since a day's load so that the day must be loaded again.

    It must not where columns have only got wider types: its files are read as the wider ones. It must where such a
    column's values were too large for the type then, and are in quarantine.

    Args:
        ctx: of the source.
        history: of the events' table.
        record: of the day's load.
        now: `declared` and `judged` of the declaration, as in the record.
        version: of the stage ingest.
        is_run_day: whether the day is the run's own: days before it are not judged anew.
    """

    def differs(declared: str, judged: str) -> bool:
        return record.declared != declared or (is_run_day and record.judged != judged)

    if not differs(*now):
        return False
    types = history.log.column_types(record.version)
    narrower = {c.name: types[c.name] for c in ctx.table.columns if is_wider(c.stored_type, types.get(c.name, ""))}
    if not narrower:
        return True
    columns = tuple(c.model_copy(update={"type": narrower.get(c.name, c.type)}) for c in ctx.table.columns)
    then = ctx.table.model_copy(update={"columns": columns})
    if differs(declaration(ctx.source, then, version), fingerprint(then.model_dump(mode="json"))):
        return True
    return any(kind_unreadable(c) in record.reasons for c in columns if c.name in narrower)


def _why_load(files: DayFiles, history: LoadHistory, changed: bool) -> str | None:
    """Return why a day is loaded (again), or None. `changed`: whether its declaration has, see `_is_changed`.

    Raises:
        UserError: the table has lost files of a day of which others have deleted rows.
    """
    record = files.record
    if record is None:
        return "it is not loaded"
    if files.is_new:
        if files.purged:
            _LOG.warning("%s: landing files %s are gone, so their rows go, too", files.ds, ", ".join(files.purged))
        return "its landing files changed"
    state = history.state(files.ds)
    if state.damage is not None:
        if state.changed_by:
            raise UserError(
                f"{files.ds} of {history.log.folder} is damaged ({state.damage}), and rows of it were deleted before "
                f"({', '.join(state.changed_by)}): loading it again would bring them back. RESTORE the table to a "
                f"version that is whole, or deliver the day's landing files again without those rows"
            )
        _LOG.warning("%s: %s", files.ds, state.damage)
        return state.damage
    if state.changed_by:
        _LOG.warning(
            "%s: others have changed its rows (%s): %s now, %s when it was loaded; it stays as it is",
            files.ds,
            ", ".join(state.changed_by),
            f"{state.rows:,}",
            f"{record.rows['kept']:,}",
        )
    return "its declaration changed" if changed else None


def _damaged_quarantine(ctx: SourceContext, record: LoadRecord | None) -> str | None:
    """Return why bad rows of a loaded day must be written again: their commit is torn, a file is missing or short."""
    if record is None:
        return None
    log = DeltaLog(ctx.quarantine)
    version = log.version
    files = [] if version is None else log.files(version) or []
    damage = damaged_file(f for f in files if f.partition.get("ds") == record.ds)
    if record.rows.get("quarantined") and (version or 0) < record.quarantine:
        damage = f"version {record.quarantine} of {ctx.quarantine} is gone"
    if damage is not None:
        _LOG.warning("%s: %s", record.ds, damage)
    return damage


def _can_load(files: DayFiles, reason: str, is_run_day: bool) -> bool:
    """Return whether the files exist that the day would be loaded from.

    Raises:
        UserError: they are not, and the day is the run's own.
    """
    if files.is_new or not files.purged:
        return bool(files.day.files)
    message = f"{files.ds} must be loaded again ({reason}), but of its landing files {', '.join(files.purged)} are gone"
    if is_run_day:
        raise UserError(f"{message}; put them back, or undo the change")
    _LOG.warning("%s; it stays as it was loaded", message)
    return False


def _is_erased(history: LoadHistory, ds: str) -> bool:
    """Return whether others have deleted rows of a loaded day."""
    return ds in history.records and (history.records[ds].erased or bool(history.state(ds).changed_by))


def _near(ctx: SourceContext, ds: str) -> list[str]:
    """Return a day and those on which its duplicates may have been kept."""
    late = ctx.table.late_days if ctx.table.keys and ctx.source.daily else 0
    return [following(ds, k) for k in range(-late, late + 1)]
