"""The stage `ingest`: landing files to the lake's Delta tables, one commit a landing day of each source."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog, damaged_file
from headrace.lake.landing.load_history import LoadHistory, row_counts
from headrace.lake.landing.plan import DayFiles, LoadPlan, covered_days, declared_source, plan_load
from headrace.lake.landing.source_context import SourceContext, source_contexts
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output

# Imported late: a loaded day is recognised without Spark, and landing files need no reader of tables.
if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.lake.landing.check_days import TableCheck
    from headrace.lake.landing.table_days import TableLook

_LOG = logging.getLogger("headrace.lake")

#: Attempts to plan and load one source in a run: others may change the table between a plan and its commits.
_ATTEMPTS = 5


class Ingest(Stage):
    """Load the landing files of a day, and of earlier days that are not loaded, exactly once, source by source."""

    name = "ingest"
    version = 1
    needs: tuple[str, ...] = ()

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the sections `source`, `table` and `sources`."""
        named = {
            name: {"source": declared_source(s.source), "table": s.table.model_dump(mode="json")}
            for name, s in spec.sources.items()
        }
        return {
            "source": declared_source(spec.source),
            "table": spec.table.model_dump(mode="json"),
            **({"sources": named} if named else {}),
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return one input for each covered day and source: the files from which the day is loaded.

        They include purged files of a loaded day. Of a table they are the day's data files.

        Raises:
            UserError: the run's own day has no files of a source and is not loaded.
            IncompleteError: the run's own day lacks something that `source.complete` asks for.
        """
        return tuple(i for source in source_contexts(ctx) for i in _SourceState.look_up(source).inputs())

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that tables have their versions, and loaded events are on disk and not deleted by others."""
        # Each source has two outputs, in the order of the sources.
        outputs = iter(manifest.outputs)
        for source in source_contexts(ctx):
            outputs_of_source, facts = (next(outputs), next(outputs)), _facts_of(source, manifest)
            table = source.table_source
            if table is None:
                reason = _reason_of_loss(source, outputs_of_source, facts)
            else:
                from headrace.lake.landing.table_days import why_gone

                reason = why_gone(source, table, outputs_of_source, facts)
            if reason is not None:
                return reason
        return None

    def run(self, ctx: Context) -> Result:
        """Load days of landing files that are not loaded (`load`), and check days of tables (`check_days`).

        Raises:
            UserError: files that are damaged, changed while they were read, or lack a required column; a day that is
                empty or breaks an expectation; refused columns; a declaration that does not fit the table. Earlier days
                and the sources before this one are loaded.
            IncompleteError: the run's own day is behind its watermark.
        """
        states = [_SourceState.look_up(source) for source in source_contexts(ctx)]
        if tuple(i for state in states for i in state.inputs()) != ctx.inputs:
            raise UserError(f"what {ctx.ds} is loaded from came or changed as the run began; run again")
        plans = [state.plan(self.version) for state in states]
        if any(plans):
            import headrace.lake.landing.load  # noqa: F401  (while Spark starts)
            from headrace.lake.spark.session import session

            with session(ctx.spec.spark, ctx.ws, f"ingest {ctx.spec.pipeline} {ctx.ds}") as spark:
                for state, plan in zip(states, plans, strict=True):
                    self._load(state, plan, spark)
        else:
            _LOG.info("all sources up to %s are loaded already", ctx.ds)
        return result(states)

    def _load(self, state: _SourceState, plan: LoadPlan | TableCheck | None, spark: SparkSession) -> None:
        """Load by a plan, or by a new one where others have changed the table since."""
        from headrace.lake.delta.transaction import TransactionOvertaken

        for attempt in range(_ATTEMPTS):
            try:
                return _load(state.ctx, plan, spark)
            except TransactionOvertaken as e:
                if attempt == _ATTEMPTS - 1:
                    raise
                _LOG.warning("%s: planned again from the newest version", e)
            again = _SourceState.look_up(state.ctx)
            if tuple(again.inputs()) != tuple(state.inputs()):
                raise UserError(f"what {state.ctx.ds} is loaded from came or changed meanwhile; run again")
            plan = again.plan(self.version)


@dataclass(frozen=True)
class _SourceState:
    """State of a source at the start of a run: the days of its landing files, or its table."""

    ctx: SourceContext
    files: tuple[DayFiles, ...] = ()
    table: TableLook | None = None

    @staticmethod
    def look_up(ctx: SourceContext) -> _SourceState:
        table = ctx.table_source
        if table is None:
            return _SourceState(ctx, covered_days(ctx, ctx.history()))
        from headrace.lake.landing.table_days import look

        return _SourceState(ctx, table=look(ctx, table))

    def inputs(self) -> Iterator[Input]:
        """Yield the inputs that the manifest names."""
        return _inputs(self.ctx, self.files) if self.table is None else self.table.inputs()

    def plan(self, version: int) -> LoadPlan | TableCheck | None:
        """Return the plan of the load; None: there is nothing to load."""
        if self.table is not None:
            from headrace.lake.landing.check_days import TableCheck

            check = TableCheck(self.table, version)
            return check if check.days else None
        plan = plan_load(self.ctx, self.ctx.history(), self.files, version)
        return plan if plan.days else None

    def result(self) -> Result:
        """Return the source's outputs, row counts and facts after the load."""
        if self.table is None:
            return _source_result(self.ctx)
        from headrace.lake.landing.table_days import table_result

        return table_result(self.table)


def _load(source: SourceContext, plan: LoadPlan | TableCheck | None, spark: SparkSession) -> None:
    if plan is None:
        return
    if source.name is not None:
        _LOG.info("source %s:", source.name)
    if not isinstance(plan, LoadPlan):
        plan.run(spark)
        return
    from headrace.lake.landing.load import Load, check_columns, create_tables

    check_columns(source.table, source.events, source.key_prefix)
    create_tables(source.table, source.events, source.quarantine)
    Load(source, plan, spark).run()


def result(states: Sequence[_SourceState]) -> Result:
    """Return the rows and facts of this run's load, killed attempts included; else those of the day's earlier load."""
    main, *named = (state.result() for state in states)
    rows, facts = dict(main.rows), dict(main.facts)
    for name, of_source in zip((str(state.ctx.name) for state in states[1:]), named, strict=True):
        rows |= {f"{name}.{count}": n for count, n in of_source.rows.items()}
        facts["sources"] = {**facts.get("sources", {}), name: of_source.facts}
    return Result(outputs=tuple(o for state in (main, *named) for o in state.outputs), rows=rows, facts=facts)


def _source_result(ctx: SourceContext) -> Result:
    """Return the result of one source.

    The versions are those that last changed a day up to `ds`. Later days do not count, whenever they were loaded, so a
    rerun has the same result as the first run.
    """
    from headrace.lake.landing.expectations import summed

    history, quarantine = ctx.history(), LoadHistory(DeltaLog(ctx.quarantine))
    for of_table in (history, quarantine):
        of_table.save_summary()
    records = history.records
    records_of_run = history.loaded_by(ctx.key) or [records[ctx.ds]]
    rows = summed(r.rows for r in records_of_run)
    version = history.last_change(ctx.ds)
    kept_rows = row_counts(history.log, version, _own_days([r.ds for r in records_of_run], ctx.ds))
    if kept_rows is None:
        raise RuntimeError(f"version {version} of {ctx.events} is not whole after its load")
    states = {day.ds: history.state(day.ds) for day in covered_days(ctx, history) if day.ds in records}
    changed = [
        {"ds": ds, "rows": state.rows - records[ds].rows["kept"], "by": list(state.changed_by)}
        for ds, state in states.items()
        if state.changed_by
    ]
    bad_files = [
        {"ds": r.ds, "file": name, "reason": reason} for r in records_of_run for name, reason in r.bad_files.items()
    ]
    order = ("read", "kept", "quarantined", "duplicates", "deleted", "forgotten", "expanded")
    outputs = (
        ("delta", ctx.events, version, sum(kept_rows.values())),
        ("quarantine", ctx.quarantine, quarantine.last_change(ctx.ds), rows["quarantined"]),
    )
    return Result(
        outputs=tuple(
            Output(kind=kind, name=ctx.ws.name_of(path), version=str(committed), rows=count)
            for kind, path, committed, count in outputs
        ),
        rows={name: rows[name] for name in order if name in rows},
        facts={
            "days": [r.ds for r in records_of_run],
            "drift": [d for r in records_of_run for d in r.drift],
            "expectations": [c for r in records_of_run for c in r.expectations],
            "reasons": summed(r.reasons for r in records_of_run),
            **({"bad_files": bad_files} if bad_files else {}),
            # Rows that others removed (negative) or added since the load, by day.
            **({"changed_by_others": changed} if changed else {}),
        },
    )


def _reason_of_loss(ctx: SourceContext, outputs: Sequence[Output], facts: Mapping[str, Any]) -> str | None:
    """Return why the outputs that a manifest names are no longer valid, or None."""
    for output in outputs:
        log = DeltaLog(ctx.ws.locate(output.name))
        version = int(output.version)
        if not log.has(version):
            return f"version {version} of {output.name} is gone"
        days = _own_days(facts["days"], ctx.ds)
        files = log.files(version) or ()
        if (damage := damaged_file(f for f in files if f.partition.get("ds") in days)) is not None:
            return damage
        if output.kind != "delta":
            continue
        rows = row_counts(log, version, days)
        if rows is None or sum(rows.values()) != output.rows:
            return f"rows of version {version} of {output.name} are gone"
        removed = LoadHistory(log).removed_by_others(version, ctx.ds)
        if removed is not None:
            return f"rows of {output.name} were deleted or changed by {removed}"
    return None


def _inputs(ctx: SourceContext, days: Sequence[DayFiles]) -> Iterator[Input]:
    return (Input(kind="landing", name=ctx.input_name(d.ds), version=d.version) for d in days)


def _facts_of(ctx: SourceContext, manifest: Manifest) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = manifest.facts if ctx.name is None else manifest.facts["sources"][ctx.name]
    return facts


def _own_days(days: Iterable[str], ds: str) -> set[str]:
    """Return the days that a run for `ds` loaded and its dataset may see."""
    return {d for d in days if d <= ds}
