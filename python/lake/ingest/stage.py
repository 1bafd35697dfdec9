"""The stage `ingest`: landing files to the lake's Delta table, one commit a landing day."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.config import Spec, TableSource
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest.assess import summed
from headrace.lake.ingest.day_files import DayFiles, covered_days
from headrace.lake.ingest.load import Load
from headrace.lake.ingest.load_history import LoadHistory, last_change, row_counts
from headrace.lake.ingest.plan import declared_source, declared_table, plan_load
from headrace.lake.ingest.tables import check_columns, create_tables
from headrace.lake.ingest.typed_rows import check_table
from headrace.lake.session import session
from headrace.manifest import Input, Manifest, Output
from headrace.stage import Context, Result, Stage

_LOG = logging.getLogger("headrace.lake")


class Ingest(Stage):
    """Load the landing files of a day, and of earlier days that are not loaded, exactly once."""

    name = "ingest"
    version = 1
    needs: tuple[str, ...] = ()

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The sections `source` and `table`."""
        return {"source": declared_source(spec), "table": declared_table(spec)}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The landing files of each day covered, as one input a day; of a loaded day, purged ones among them.

        Raises:
            UserError: the run's own day has no files and is not loaded.
        """
        source = ctx.spec.source
        if isinstance(source, TableSource):
            raise UserError(f"source: tables are not read yet ({source.shown}); write its rows to files of text")
        history = LoadHistory(DeltaLog(ctx.ws.table(ctx.spec.pipeline, "events")))
        return _inputs(ctx, covered_days(ctx, history))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Both tables have their version, the events of the days loaded are on disk, and nobody has deleted some."""
        for output in manifest.outputs:
            log = DeltaLog(ctx.ws.locate(output.name))
            version = int(output.version)
            if not log.has(version):
                return f"version {version} of {output.name} is gone"
            if output.kind != "delta":
                continue
            rows = row_counts(log, version, _own_days(manifest.facts["days"], ctx.ds))
            if rows is None or sum(rows.values()) != output.rows:
                return f"rows of version {version} of {output.name} are gone"
            removed = LoadHistory(log).removed_by_others(version, ctx.ds)
            if removed is not None:
                return f"rows of {output.name} were deleted or changed by {removed}"
        return None

    def run(self, ctx: Context) -> Result:
        """Load what is not loaded (headrace.lake.ingest.load).

        Raises:
            UserError: files that are damaged, changed while they were read, or lack a required column; a day that is
                empty or breaks an expectation; refused columns; a declaration that does not fit the table. Days before
                that one are loaded.
        """
        check_table(ctx.spec.table)
        events, quarantine = (ctx.ws.table(ctx.spec.pipeline, name) for name in ("events", "quarantine"))
        history = LoadHistory(DeltaLog(events))
        covered = covered_days(ctx, history)
        if _inputs(ctx, covered) != ctx.inputs:
            raise UserError(f"landing files of {ctx.ds} or of days before came or changed as the run began; run again")
        plan = plan_load(ctx, history, covered, self.version)
        if plan.days:
            with session(ctx.spec.spark, ctx.ws, f"ingest {ctx.spec.pipeline} {ctx.ds}") as spark:
                check_columns(ctx.spec.table, events)
                create_tables(spark, ctx.spec.table, events, quarantine)
                Load(ctx, plan, spark, events, quarantine).run()
        else:
            _LOG.info("all landing files up to %s are loaded already", ctx.ds)
        return result(ctx)


def result(ctx: Context) -> Result:
    """What this run, its killed attempts included, has loaded; else what the day was loaded with.

    The versions are those that last changed a day up to `ds`: days after it, loaded before or since, are no part of
    what the run has made, and a rerun says what the first run said.
    """
    events, quarantine = (ctx.ws.table(ctx.spec.pipeline, name) for name in ("events", "quarantine"))
    log = DeltaLog(events)
    history = LoadHistory(log)
    records = history.records
    mine = [records[ds] for ds in sorted(records) if records[ds].key == ctx.key] or [records[ctx.ds]]
    rows = summed(r.rows for r in mine)
    version = history.last_change(ctx.ds)
    kept = row_counts(log, version, _own_days([r.ds for r in mine], ctx.ds))
    if kept is None:
        raise RuntimeError(f"version {version} of {events} is not whole after its load")
    states = {day.ds: history.state(day.ds) for day in covered_days(ctx, history) if day.ds in records}
    changed = [
        {"ds": ds, "rows": state.rows - records[ds].rows["kept"], "by": list(state.changed_by)}
        for ds, state in states.items()
        if state.changed_by
    ]
    order = ("read", "kept", "quarantined", "duplicates", "deleted", "expanded")
    outputs = (
        ("delta", events, version, sum(kept.values())),
        ("quarantine", quarantine, last_change(DeltaLog(quarantine), ctx.ds), rows["quarantined"]),
    )
    return Result(
        outputs=tuple(
            Output(kind=kind, name=ctx.ws.name_of(path), version=str(at), rows=count)
            for kind, path, at, count in outputs
        ),
        rows={name: rows[name] for name in order if name in rows},
        facts={
            "days": [r.ds for r in mine],
            "drift": [d for r in mine for d in r.drift],
            "expectations": [c for r in mine for c in r.expectations],
            "reasons": summed(r.reasons for r in mine),
            # Rows that others removed (negative) or added since the load, by day.
            **({"changed_by_others": changed} if changed else {}),
        },
    )


def _inputs(ctx: Context, days: Sequence[DayFiles]) -> tuple[Input, ...]:
    return tuple(Input(kind="landing", name=f"landing/{ctx.spec.pipeline}/{d.ds}", version=d.version) for d in days)


def _own_days(days: Iterable[str], ds: str) -> set[str]:
    """Of the days that a run for `ds` loaded, those that its dataset may see."""
    return {d for d in days if d <= ds}
