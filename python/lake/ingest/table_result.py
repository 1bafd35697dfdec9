"""What a run of ingest says of a source table in its manifest, and whether that still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config import TableSource
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest.assess import summed
from headrace.lake.ingest.source_context import SourceContext
from headrace.lake.ingest.table_look import GONE, TableLook
from headrace.lake.ingest.taken_days import TakenDays
from headrace.lake.tables.opened import TablePlace, open_table, table_name
from headrace.manifest import Output
from headrace.stage import Result


def table_result(seen: TableLook) -> Result:
    """What this run, its killed attempts included, has taken; else what the day was taken with."""
    ctx = seen.ctx
    taken = TakenDays.read(DeltaLog(ctx.quarantine))
    assert taken.version is not None
    days = {ds: taken.days[ds] for ds in seen.versions if ds in taken.days}
    mine = [d for d in days.values() if d.key == ctx.key] or [days[ctx.ds]]
    rows = summed(d.rows for d in mine)
    changed = [{"ds": d.ds, **d.changes} for d in mine if any(d.changes.values())]
    name = table_name(seen.source, ctx.ws, seen.place)
    return Result(
        outputs=(
            Output(kind="table", name=name, version=seen.snapshot.pin(seen.versions), rows=rows["kept"]),
            Output(
                kind="quarantine",
                name=ctx.ws.name_of(ctx.quarantine),
                version=str(taken.version),
                rows=rows["quarantined"],
            ),
        ),
        rows=rows,
        facts={
            "days": [d.ds for d in mine],
            "drift": [x for d in mine for x in d.drift],
            "expectations": [c for d in mine for c in d.expectations],
            "reasons": summed(d.reasons for d in mine),
            # What headrace.lake.tables.declared.PinnedTable is made from.
            "table": {
                "name": name,
                "place": seen.place.facts(),
                "days": {d.ds: [d.files, d.left_out] for d in days.values()},
            },
            **({"changed_days": changed} if changed else {}),
        },
    )


def why_gone(
    ctx: SourceContext, source: TableSource, outputs: Sequence[Output], facts: Mapping[str, Any]
) -> str | None:
    """Why what a manifest says of a source table does not hold any more, or None.

    Args:
        ctx: of the source.
        source: the table.
        outputs: of the source, in the manifest.
        facts: of the source, in the manifest.
    """
    table, quarantine = outputs
    if not DeltaLog(ctx.quarantine).has(int(quarantine.version)):
        return f"version {quarantine.version} of {quarantine.name} is gone"
    days = facts["table"]["days"]
    try:
        was = {ds: files for ds, (files, _) in days.items()}
        snapshot = open_table(source, ctx.table, TablePlace(**facts["table"]["place"]), was, table.version)
        now = snapshot.day_versions(days)
    except UserError as e:
        return str(e)
    changed = [ds for ds, (files, _) in days.items() if now.get(ds, GONE) != files]
    if changed:
        return f"files of {table.name} of {changed[0]} are others"
    return snapshot.lost(ctx.ds)
