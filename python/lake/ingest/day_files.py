"""A landing day's files beside those that it was loaded from: what is new, the same, or gone.

A file is what it was if its name, size and content are the same, whenever it was written. A file that is gone was
purged: the day stays as it was loaded. (To take a file's rows back, deliver it empty.)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.errors import UserError
from headrace.lake import landing
from headrace.lake.ingest.completeness import incomplete, lacking, warn_left_out
from headrace.lake.ingest.load_history import LoadHistory, LoadRecord
from headrace.lake.ingest.source_context import SourceContext
from headrace.lake.landing import LandingDay, LandingFile
from headrace.manifest import fingerprint

#: Files whose checksums are computed at once: hashing lets go of the interpreter's lock.
_READERS = 4


@dataclass(frozen=True)
class DayFiles:
    """One day's."""

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
        """Whether a file that is there has not been loaded."""
        return self.record is None or len(self.unchanged) < len(self.identities)

    @property
    def gone(self) -> tuple[str, ...]:
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
    """The days that a run covers, oldest first, the run's own last: those with landing files, or loaded from some.

    Raises:
        UserError: there are no files for the run's own day, and it is not loaded; names the glob. (IncompleteError) The
            run's own day lacks what `source.complete` asks for; says what. Such days before it are left out, or stay as
            they were loaded.
    """
    found, source = [], ctx.landing_source
    for ds in landing.covered(source, ctx.ds):
        with ctx.naming_keys():
            files, lacks = files_to_take(ctx, ds, history.records.get(ds))
        if lacks and ds == ctx.ds:
            raise incomplete(ctx, ds, lacks)
        if files is not None:
            found.append(files)
    if not found or found[-1].ds != ctx.ds:
        tried = " nor ".join(map(str, landing.patterns(source, ctx.ws, ctx.ds)))
        what = f"for {ctx.ds} " if source.daily else ""
        raise UserError(
            f"no landing files {what}match {tried}; put them there, or change "
            f"{ctx.where}source.path (for example --set {ctx.where}source.path=/data/*.gz)"
        )
    return tuple(found)


def files_to_take(ctx: SourceContext, ds: str, record: LoadRecord | None) -> tuple[DayFiles | None, list[str]]:
    """The files of a day that may be loaded, and what a day with new ones lacks that is not complete.

    Such a day has the files that it was loaded from, or none (None).
    """
    source = ctx.landing_source
    # Before the files are listed: see headrace.lake.ingest.completeness.
    lacks = lacking(source, ctx.ws, ds)
    day = landing.find(source, ctx.ws, ds)
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
