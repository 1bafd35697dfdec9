"""Whether a day may be loaded: its columns and expectations, and the record that its commit will carry."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from headrace.errors import UserError
from headrace.lake import landing
from headrace.lake.ingest import expectations
from headrace.lake.ingest.completeness import declared_rows
from headrace.lake.ingest.day_files import DayFiles
from headrace.lake.ingest.load_history import LoadRecord
from headrace.lake.ingest.plan import LoadPlan, loaded_after
from headrace.lake.ingest.profile import FileProfile
from headrace.lake.ingest.source_context import SourceContext

_LOG = logging.getLogger("headrace.lake")

#: Characters that Delta refuses in a column's name (without column mapping).
_NOT_IN_NAMES = set(" ,;{}()\n\t=")


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
        globs = " nor ".join(map(str, landing.patterns(ctx.landing_source, ctx.ws, day.ds)))
        raise UserError(
            f"the {len(files)} landing files of {day.ds} hold no rows ({globs}); deliver them again, or set "
            f"{ctx.where}table.expectations.min_rows to 0"
        )
    declared = {c.name for c in table.columns}
    accepted = frozenset(n for n in existing if n not in declared and n != "ds" and not n.startswith("_"))
    drift = expectations.drift(files, table, accepted)
    for d in drift:
        _LOG.warning("%s: column '%s' is %s: %s", d.ds, d.column, d.change, d.detail)
    expectations.refuse(files, table, drift)
    # One of another type was added by somebody else: nothing is known of its values.
    extra = sorted(n for n in accepted if existing[n] == "string")
    if table.new_columns == "accept":
        extra += _acceptable([d.column for d in drift if d.change == "new"], existing)
    reasons = summed(f.reasons for f in files)
    end = landing.midnight(ctx.source, landing.following(day.ds))
    checks = expectations.check(day.ds, end, files, duplicates, table.expectations)
    wanted = declared_rows(ctx.source, ctx.ws, day.ds)
    if wanted is not None:
        checks.append(expectations.Check(day.ds, "control_rows", read, wanted, read == wanted))
    expectations.enforce(checks, drift, reasons, duplicates)
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
        drift=expectations.as_facts(drift),
        expectations=expectations.as_facts(checks),
        reasons=reasons,
        bad_files={f.name: f.fault for f in files if f.fault is not None},
    )
    return record, extra


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of counts by name."""
    total: dict[str, int] = {}
    for one in counts:
        for name, n in one.items():
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
