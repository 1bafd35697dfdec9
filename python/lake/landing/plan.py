"""Plan of a load: the days whose files are not loaded, and those that an earlier run has left to be loaded again.

A file is unchanged if its name, size and content are the same, whatever its time. A loaded file that no longer exists
was purged: its day stays as it was loaded. (To remove a file's rows, deliver it empty.)
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

#: Files whose checksums are computed at the same time: hashing releases the interpreter's lock.
_READERS = 4
_LOG = logging.getLogger("headrace.lake")

#: Landing bytes of a batch, which is read and staged as one. More bytes take several batches.
BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class DayFiles:
    """Landing files of one day, and the record of its last load."""

    #: The existing files.
    day: LandingDay
    #: The last load; None: the day was never loaded.
    record: LoadRecord | None
    #: Identity of each existing file: the recorded one where the file is unchanged, else [name, size, SHA-256].
    identities: tuple[list[Any], ...]

    @property
    def ds(self) -> str:
        """The landing day."""
        return self.day.ds

    @property
    def unchanged(self) -> frozenset[str]:
        """Names of the existing files that are loaded."""
        recorded = self.record.files if self.record is not None else []
        return frozenset(i[0] for i in self.identities if i in recorded)

    @property
    def is_new(self) -> bool:
        """True where an existing file has not been loaded."""
        return self.record is None or len(self.unchanged) < len(self.identities)

    @property
    def purged(self) -> tuple[str, ...]:
        """Names of loaded files that no longer exist."""
        names = {f.name for f in self.day.files}
        return () if self.record is None else tuple(str(f[0]) for f in self.record.files if f[0] not in names)

    @property
    def version(self) -> str:
        """Fingerprint of the files that the day is loaded from, also purged ones. A new or changed file changes it."""
        files = self.identities if self.record is None or self.is_new else self.record.files
        return fingerprint({"files": list(files)})


def day_files(day: LandingDay, record: LoadRecord | None) -> DayFiles:
    """Compare the files of a day with its record. Files of the same size and another time are read."""
    with ThreadPoolExecutor(_READERS) as pool:
        return DayFiles(day, record, tuple(pool.map(lambda f: _identity(f, record), day.files)))


def covered_days(ctx: SourceContext, history: LoadHistory) -> tuple[DayFiles, ...]:
    """Return the days with landing files, or loaded from some, that a run covers: oldest first, the run's own last.

    Raises:
        UserError: the run's own day has no files and is not loaded; the message has the glob.
        IncompleteError: the run's own day lacks what `source.complete` asks for; the message says what.
            Incomplete days before it are left out, or stay as they were loaded.
    """
    days, source = [], ctx.landing_source
    for ds in days_of_run(source, ctx.ds):
        with ctx.naming_keys():
            files, missing_parts = files_to_take(ctx, ds, history.records.get(ds))
        if missing_parts and ds == ctx.ds:
            raise incomplete(ctx, ds, missing_parts)
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
    """Return the files from which a day may be loaded, and the missing parts of a day with new files.

    An incomplete day has the files that it was loaded from, or None.
    """
    source = ctx.landing_source
    # Before the files are listed: see headrace.lake.landing.source_context.
    missing_parts = missing_markers(source, ctx.ws, ds)
    day = find_files(source, ctx.ws, ds)
    files = day_files(day, record) if day.files or record is not None else None
    if not missing_parts or (files is not None and not files.is_new):
        return files, []
    if day.files and ds != ctx.ds:
        warn_left_out(ds, "; ".join(missing_parts))
    return None if record is None else day_files(LandingDay(ds, ()), record), missing_parts


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
    """The days to load, and the records of loaded days."""

    #: The days to load, oldest first.
    files: tuple[DayFiles, ...]
    #: The newest record of each day that is loaded.
    records: Mapping[str, LoadRecord]
    #: Fingerprints of the declaration, see LoadRecord.
    declared: str
    judged: str
    #: Days to load that have lost rows by others since their first load.
    erased: frozenset[str]
    #: Days to load whose unchanged files may have rows that the table must not get back: others have deleted them, or
    #: the rows of a day nearby that they repeat.
    withhold: frozenset[str]
    #: Version of the events' table that the plan rests on; -1: the table does not exist.
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
        ctx: the source.
        history: the load history of the events' table.
        covered: the days that the run covers, its own last.
        version: version of the stage ingest.

    Raises:
        UserError: a day must be loaded again and cannot be: its files are gone, or others have deleted rows of it that
            can no longer be told.
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
        reason = _reason_to_load(files, history, changed) or _damaged_quarantine(ctx, files.record)
        if reason is not None and _can_load(files, reason, is_run_day):
            to_load[files.ds] = files
    if source.daily and table.keys:
        reload |= {x for d in to_load if d in records for x in loaded_after(d, records, table.late_days)}
    for ds in sorted(reload - set(to_load)):
        reloaded, _ = files_to_take(ctx, ds, records[ds])
        if reloaded is not None and _can_load(reloaded, "an earlier day changed", is_run_day=False):
            to_load[ds] = reloaded
    days = tuple(to_load[ds] for ds in sorted(to_load))
    erased = frozenset(ds for ds in to_load if _is_erased(history, ds))
    withhold = frozenset(
        f.ds for f in days if f.unchanged and any(_is_erased(history, d) for d in _days_with_duplicates(ctx, f.ds))
    )
    return LoadPlan(days, records, declared, judged, erased, withhold, history.version)


def loaded_after(ds: str, records: Mapping[str, LoadRecord], late_days: int) -> list[str]:
    """Return loaded days within `late_days` after `ds`."""
    return [d for d in (following(ds, k) for k in range(1, late_days + 1)) if d in records]


def declaration(source: Source, table: Table, version: int) -> str:
    """Return a fingerprint of the settings that decide how a row is loaded, without those that only stop a day."""
    row_settings, files = table.model_dump(mode="json"), declared_source(source)
    row_settings["expectations"] = {"ranges": row_settings["expectations"]["ranges"]}
    run_settings: tuple[str, ...] = ("path", "catch_up_days")
    if isinstance(source, TableSource):
        run_settings = ("version", "as_of", "catch_up_days", "changed_days")
    files = {k: v for k, v in files.items() if k not in run_settings}
    if isinstance(source, TableSource) and source.day is not None and source.day.changes:
        policy = source.changed_days
        files["ignored"] = [kind for kind in ("updates", "deletes") if getattr(policy, kind) == "ignore"]
    return fingerprint({"version": version, "table": row_settings, "source": files})


def declared_source(source: Source) -> dict[str, Any]:
    """Return the section `source` for fingerprints, without `complete`: it decides when a day is loaded, not how."""
    return source.model_dump(mode="json", exclude={"complete"})


def _is_changed(
    ctx: SourceContext, history: LoadHistory, record: LoadRecord, now: tuple[str, str], version: int, is_run_day: bool
) -> bool:
    """Return whether a day must be loaded again because the declaration has changed since its load.

    Wider types of columns alone need no load: the day's files are read as the wider types. They need one where values
    of such a column were too large for the old type, and are in quarantine.

    Args:
        ctx: the source.
        history: the load history of the events' table.
        record: the day's load.
        now: `declared` and `judged` of the declaration, as in the record.
        version: version of the stage ingest.
        is_run_day: whether the day is the run's own: earlier days are not judged again.
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


def _reason_to_load(files: DayFiles, history: LoadHistory, changed: bool) -> str | None:
    """Return why a day must be loaded, or None. `changed`: whether its declaration has changed (`_is_changed`).

    Raises:
        UserError: the table has lost files of a day from which others have deleted rows.
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
    """Return why a loaded day's bad rows must be written again (a torn commit, a missing or short file), or None."""
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
    """Return whether the day's files still exist.

    Raises:
        UserError: they do not, and the day is the run's own.
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


def _days_with_duplicates(ctx: SourceContext, ds: str) -> list[str]:
    """Return a day and the days whose rows its rows may repeat."""
    late = ctx.table.late_days if ctx.table.keys and ctx.source.daily else 0
    return [following(ds, k) for k in range(-late, late + 1)]
