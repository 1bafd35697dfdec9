"""Expectations of a day and its columns beside their declaration, checked before anything is committed.

They are checked by the profiles of the day's files: counts of rows, nulls, reasons and columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from headrace.config import Expectations, Table
from headrace.config.source import following, midnight
from headrace.errors import UserError
from headrace.lake.landing.files import file_patterns
from headrace.lake.landing.formats import LandingBatch
from headrace.lake.landing.load_history import LoadRecord
from headrace.lake.landing.plan import DayFiles, LoadPlan, loaded_after
from headrace.lake.landing.source_context import SourceContext, declared_rows

#: A column is retyped where more than this share of its values in a file are not of its type.
_RETYPED_SHARE = 0.5
_FILES_SHOWN = 3
_LOG = logging.getLogger("headrace.lake")

#: Characters that Delta refuses in a column's name (without column mapping).
_NOT_IN_NAMES = set(" ,;{}()\n\t=")


@dataclass(frozen=True)
class UnreadableValues:
    """Values of one column in one file that are not of its type."""

    count: int
    example: str


@dataclass
class FileProfile:
    """Profile of one landing file."""

    ds: str
    name: str
    #: Why none of it was read (`expectations.max_bad_files`); None: it was.
    fault: str | None = None
    #: Data lines: neither headers nor empty ones.
    read: int = 0
    good: int = 0
    bad: int = 0
    #: Rows that must not come back (headrace.lake.forgotten), good or not.
    forgotten: int = 0
    #: Rows beyond one a line (lists that are exploded, drawn negatives).
    expanded: int = 0
    #: Bad rows that do not even read as a line.
    broken: int = 0
    #: Declared columns that no row of the file has a key for.
    absent: frozenset[str] = frozenset()
    #: Undeclared columns.
    extra: frozenset[str] = frozenset()
    #: By column: values, good rows' or not, that are of the type.
    readable: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, UnreadableValues] = field(default_factory=dict)
    #: By column: texts of good rows that have U+FFFD for half a surrogate pair.
    mended: dict[str, int] = field(default_factory=dict)
    #: By column of `expectations.null_rate`: nulls in good rows.
    nulls: dict[str, int] = field(default_factory=dict)
    #: First reason of each bad row.
    reasons: dict[str, int] = field(default_factory=dict)
    newest: datetime | None = None
    #: Greatest value of the column of `source.complete.watermark` in good rows.
    watermark: datetime | None = None

    @staticmethod
    def moment(micros: int) -> datetime:
        """Return a moment by its microseconds since 1970."""
        return datetime.fromtimestamp(micros / 1e6, UTC)


def empty_profiles(table: Table, batch: LandingBatch) -> list[FileProfile]:
    """Return a profile without rows of each file of a batch, in order."""
    nulls = dict.fromkeys(table.expectations.null_rate, 0)
    return [FileProfile(ds, file.name, nulls=dict(nulls)) for ds, file in batch.files]


@dataclass(frozen=True)
class Drift:
    """A column that is not as declared."""

    ds: str
    column: str
    change: Literal["new", "missing", "retyped", "mended"]
    detail: str


@dataclass(frozen=True)
class ExpectationCheck:
    """One expectation: `value` against `limit`."""

    ds: str
    name: str
    value: float | None
    limit: float
    ok: bool


def column_drifts(files: Sequence[FileProfile], table: Table, accepted: frozenset[str]) -> list[Drift]:
    """Return new, missing and retyped columns of a day, by name.

    Args:
        files: the day's.
        table: the declaration.
        accepted: undeclared columns that the table has already.
    """
    drifts: list[Drift] = []
    ds, nowhere = files[0].ds, in_no_file(files)
    for name in sorted({name for f in files for name in f.extra} - accepted):
        drifts.append(Drift(ds, name, "new", f"in {_names([f for f in files if name in f.extra])}"))
    for column in table.columns:
        files_without = [f for f in files if column.name in f.absent]
        if files_without:
            place = f"in no row of {_names(files_without)}"
            place = f"in no file of the day ({_names(files_without)})" if column.name in nowhere else place
            drifts.append(Drift(ds, column.name, "missing", place))
        retyped_files = [f for f in files if _retyped(f, column.name)]
        if retyped_files:
            example = retyped_files[0].unreadable[column.name].example
            count = sum(f.unreadable[column.name].count for f in retyped_files)
            values = count + sum(f.readable.get(column.name, 0) for f in retyped_files)
            drifts.append(
                Drift(
                    ds,
                    column.name,
                    "retyped",
                    f"declared {column.type}, but {count:,} of {values:,} values are not "
                    f"({_looks_like(example)} such as '{example}') in {_names(retyped_files)}",
                )
            )
        mended = [f for f in files if f.mended.get(column.name)]
        if mended:
            count = sum(f.mended[column.name] for f in mended)
            had = f"{count:,} values had half a surrogate pair and have U+FFFD in its place, in {_names(mended)}"
            drifts.append(Drift(ds, column.name, "mended", had))
    return drifts


def in_no_file(files: Sequence[FileProfile]) -> frozenset[str]:
    """Return the declared columns that none of a day's files with rows has."""
    absent = [f.absent for f in files if f.read]
    return frozenset.intersection(*absent) if absent else frozenset()


def refuse_columns(files: Sequence[FileProfile], table: Table, drifts: Sequence[Drift]) -> None:
    """Stop a day for its columns.

    Raises:
        UserError: a required column is missing from all of a file, or there are new columns and they are refused.
    """
    required = [c.name for c in table.columns if c.required]
    faults = [
        f"required column '{name}' is missing from all of landing file {f.name} ({f.read:,} rows)"
        for f in files
        if f.read > f.broken
        for name in required
        if name in f.absent
    ]
    if faults:
        raise UserError(
            "\n".join(faults) + f"\nNothing of {files[0].ds} was loaded; deliver the files again, or change the "
            "declaration (table.columns)"
        )
    new = [d for d in drifts if d.change == "new"]
    if new and table.new_columns == "refuse":
        text = "; ".join(f"'{d.column}' {d.detail}" for d in new)
        raise UserError(
            f"new columns on {files[0].ds}: {text}. Nothing of the day was loaded: declare them in table.columns, or "
            f"set table.new_columns to report or accept"
        )


def check_limits(
    ds: str, end: datetime, files: Sequence[FileProfile], duplicates: int, limits: Expectations
) -> list[ExpectationCheck]:
    """Return every expectation of a day, which ends at `end`: those that hold, too."""
    read = sum(f.read + f.expanded for f in files)
    good, bad = sum(f.good for f in files), sum(f.bad for f in files)
    kept_rows = good - duplicates
    checks = [ExpectationCheck(ds, "min_rows", kept_rows, limits.min_rows, kept_rows >= limits.min_rows)]
    if limits.max_rows is not None:
        checks.append(ExpectationCheck(ds, "max_rows", kept_rows, limits.max_rows, kept_rows <= limits.max_rows))
    rate = bad / read if read else 0.0
    checks.append(
        ExpectationCheck(ds, "max_bad_rate", round(rate, 6), limits.max_bad_rate, rate <= limits.max_bad_rate)
    )
    for column, limit in limits.null_rate.items():
        nulls = sum(f.nulls.get(column, 0) for f in files) / good if good else 0.0
        checks.append(ExpectationCheck(ds, f"null_rate.{column}", round(nulls, 6), limit, nulls <= limit))
    if bad_files := sum(f.fault is not None for f in files):
        checks.append(
            ExpectationCheck(ds, "max_bad_files", bad_files, limits.max_bad_files, bad_files <= limits.max_bad_files)
        )
    if limits.columns == "present":
        missing = len(in_no_file(files))
        checks.append(ExpectationCheck(ds, "columns", missing, 0, not missing))
    if limits.freshness_hours is not None:
        newest = max((f.newest for f in files if f.newest), default=None)
        age = None if newest is None else (end - newest).total_seconds() / 3600
        ok = age is not None and age <= limits.freshness_hours
        checks.append(
            ExpectationCheck(ds, "freshness_hours", None if age is None else round(age, 3), limits.freshness_hours, ok)
        )
    return checks


def enforce(
    checks: Sequence[ExpectationCheck], drifts: Sequence[Drift], reasons: dict[str, int], duplicates: int = 0
) -> None:
    """Stop a day whose expectations do not hold.

    Raises:
        UserError: lists each breached one with its value and limit, and what explains them.
    """
    breached = [c for c in checks if not c.ok]
    if not breached:
        return
    ds = breached[0].ds
    text = [f"{ds} breaks {len(breached)} of its expectations; nothing of the day was loaded:"]
    text += [f"  {_describe(c)}" for c in breached]
    if any(c.name in ("max_bad_rate", "min_rows") for c in breached) and reasons:
        most = sorted(reasons.items(), key=lambda r: (-r[1], r[0]))[:5]
        text.append("  bad rows: " + ", ".join(f"{kind} ({count:,})" for kind, count in most))
    if duplicates and any(c.name == "min_rows" for c in breached):
        text.append(f"  duplicates: {duplicates:,}")
    text += [f"  column '{d.column}' is {d.change}: {d.detail}" for d in drifts]
    text.append("Deliver the day again, or change table.expectations.")
    raise UserError("\n".join(text))


def as_facts(items: Sequence[ExpectationCheck] | Sequence[Drift]) -> list[dict[str, Any]]:
    """Return checks or drifts as a manifest has them."""
    return [asdict(item) for item in items]


def _describe(c: ExpectationCheck) -> str:
    value = "none" if c.value is None else f"{c.value:,.6g}" if isinstance(c.value, float) else f"{c.value:,}"
    kinds = {
        "min_rows": f"min_rows: {value} rows, at least {c.limit:,} wanted",
        "max_rows": f"max_rows: {value} rows, at most {c.limit:,} wanted",
        "columns": f"columns: {value} of the declared ones are in no file of the day, all must be present",
        "control_rows": f"{value} rows were read, and the control file says {c.limit:,}",
        "freshness_hours": f"freshness_hours: the newest event is {value} hours before the end of the day, "
        f"at most {c.limit:g} wanted",
    }
    return kinds.get(c.name, f"{c.name}: {value}, at most {c.limit:g} wanted")


def _retyped(file: FileProfile, column: str) -> bool:
    wrong = file.unreadable.get(column)
    return wrong is not None and wrong.count > _RETYPED_SHARE * (wrong.count + file.readable.get(column, 0))


def _looks_like(example: str) -> str:
    """Return the narrowest type that an example would be."""
    for type_, read in (("bigint", int), ("double", float)):
        try:
            read(example)
        except ValueError:
            continue
        return type_
    if example.startswith("["):
        return "array"
    try:
        datetime.fromisoformat(example)
    except ValueError:
        return "boolean" if example.lower() in ("true", "false") else "string"
    return "timestamp"


def _names(files: Sequence[FileProfile]) -> str:
    text = ", ".join(f.name for f in files[:_FILES_SHOWN])
    return text + (f" and {len(files) - _FILES_SHOWN} more" if len(files) > _FILES_SHOWN else "")


def assess_day(
    ctx: SourceContext,
    plan: LoadPlan,
    day: DayFiles,
    files: Sequence[FileProfile],
    duplicates: int,
    deleted: int,
    existing: Mapping[str, str],
) -> tuple[LoadRecord, list[str]]:
    """Check a day that has been read.

    Args:
        ctx: of the source.
        plan: of the run.
        day: its landing files.
        files: what was found in them.
        duplicates: rows that repeat others.
        deleted: rows that stay out because others have deleted them.
        existing: columns of the events' table.

    Returns:
        the record of its load, and the undeclared columns that the table has or gets.

    Raises:
        UserError: the day has no rows, or not as many as its control file says; it breaks an expectation, or has
            columns that are refused.
    """
    table = ctx.table
    read, expanded = sum(f.read for f in files), sum(f.expanded for f in files)
    if not read and table.expectations.min_rows:
        globs = " nor ".join(map(str, file_patterns(ctx.landing_source, ctx.ws, day.ds)))
        raise UserError(
            f"the {len(files)} landing files of {day.ds} hold no rows ({globs}); deliver them again, or set "
            f"{ctx.key_prefix}table.expectations.min_rows to 0"
        )
    declared = {c.name for c in table.columns}
    accepted = frozenset(n for n in existing if n not in declared and n != "ds" and not n.startswith("_"))
    drift = column_drifts(files, table, accepted)
    for d in drift:
        _LOG.warning("%s: column '%s' is %s: %s", d.ds, d.column, d.change, d.detail)
    refuse_columns(files, table, drift)
    # One of another type was added by somebody else: nothing is known of its values.
    extra = sorted(n for n in accepted if existing[n] == "string")
    if table.new_columns == "accept":
        # Delta has no two columns whose names differ in case alone: the other one of a declared column is reported.
        lower = {name.lower() for name in declared}
        new = [d.column for d in drift if d.change == "new" and d.column.lower() not in lower]
        extra += _acceptable(new, existing)
    reasons = summed(f.reasons for f in files)
    end = midnight(ctx.source, following(day.ds))
    checks = check_limits(day.ds, end, files, duplicates, table.expectations)
    control_rows = declared_rows(ctx.source, ctx.ws, day.ds)
    if control_rows is not None:
        checks.append(ExpectationCheck(day.ds, "control_rows", read, control_rows, read == control_rows))
    enforce(checks, drift, reasons, duplicates)
    good, bad = sum(f.good for f in files), sum(f.bad for f in files)
    rows = {"read": read, "kept": good - duplicates - deleted, "quarantined": bad, "duplicates": duplicates}
    if deleted:
        rows["deleted"] = deleted
    if forgotten := sum(f.forgotten for f in files):
        rows["forgotten"] = forgotten
    if expanded:
        rows["expanded"] = expanded
    reloads = day.ds in plan.records and table.keys and ctx.source.daily
    record = LoadRecord(
        ds=day.ds,
        key=ctx.key,
        declared=plan.declared,
        judged=plan.judged,
        files=list(day.identities),
        modified={f.name: f.mtime_ns for f in day.day.files},
        tags={f.name: f.tag for f in day.day.files if f.tag},
        erased=day.ds in plan.erased,
        rows=rows,
        then=loaded_after(day.ds, plan.records, table.late_days) if reloads else [],
        drift=as_facts(drift),
        expectations=as_facts(checks),
        reasons=reasons,
        bad_files={f.name: f.fault for f in files if f.fault is not None},
    )
    return record, extra


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of counts by name."""
    total: dict[str, int] = {}
    for count_of_name in counts:
        for name, n in count_of_name.items():
            total[name] = total.get(name, 0) + n
    return total


def _acceptable(names: list[str], existing: Mapping[str, str]) -> list[str]:
    known = {n.lower() for n in existing}
    for name in names:
        if not name or name.startswith("_") or name.lower() in known or set(name) & _NOT_IN_NAMES:
            raise UserError(
                f"new column '{name}' cannot be added to the table: its name is empty, reserved, has a character that "
                f"Delta refuses, or differs from another column's in case alone. Set table.new_columns to report"
            )
        known.add(name.lower())
    return names
