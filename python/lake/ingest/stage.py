"""The stage `ingest`: landing files to the lake's Delta table, one commit a landing day."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.lake import landing
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest import load_history
from headrace.lake.ingest.assess import summed
from headrace.lake.ingest.load import Load
from headrace.lake.ingest.plan import plan_load
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
        return {"source": spec.source.model_dump(mode="json"), "table": spec.table.model_dump(mode="json")}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The landing files of each day covered, as one input a day. UserError where the run's own day has none."""
        found = landing.days(ctx.spec.source, ctx.ws, ctx.ds)
        return tuple(
            Input(kind="landing", name=f"landing/{ctx.spec.pipeline}/{day.ds}", version=day.version) for day in found
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Both tables still have their version, and the events of the days loaded are on disk."""
        for output in manifest.outputs:
            log = DeltaLog(ctx.ws.locate(output.name))
            version = int(output.version)
            if not log.has(version):
                return f"version {version} of {output.name} is gone"
            if output.kind != "delta":
                continue
            rows = load_history.row_counts(log, version, set(manifest.facts["days"]))
            if rows is None or sum(rows.values()) != output.rows:
                return f"rows of version {version} of {output.name} are gone"
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
        plan = plan_load(ctx, self.version)
        if plan.days:
            with session(ctx.spec.spark, ctx.ws, f"ingest {ctx.spec.pipeline} {ctx.ds}") as spark:
                check_columns(ctx.spec.table, events)
                create_tables(spark, ctx.spec.table, events, quarantine)
                Load(ctx, plan, spark, events, quarantine).run()
        else:
            _LOG.info("all landing files up to %s are loaded already", ctx.ds)
        return result(ctx)


def result(ctx: Context) -> Result:
    """What this run, its killed attempts included, has loaded; else what the day was loaded with."""
    events, quarantine = (ctx.ws.table(ctx.spec.pipeline, name) for name in ("events", "quarantine"))
    records = load_history.read(DeltaLog(events))
    mine = [records[ds] for ds in sorted(records) if records[ds].key == ctx.key] or [records[ctx.ds]]
    rows = summed(r.rows for r in mine)
    order = ("read", "kept", "quarantined", "duplicates", "expanded")
    return Result(
        outputs=tuple(
            Output(kind=kind, name=ctx.ws.name_of(path), version=str(DeltaLog(path).version), rows=rows[count])
            for kind, path, count in (("delta", events, "kept"), ("quarantine", quarantine, "quarantined"))
        ),
        rows={name: rows[name] for name in order if name in rows},
        facts={
            "days": [r.ds for r in mine],
            "drift": [d for r in mine for d in r.drift],
            "expectations": [c for r in mine for c in r.expectations],
            "reasons": summed(r.reasons for r in mine),
        },
    )
