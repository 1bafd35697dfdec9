"""`headrace run` and the stages' own verbs: what is pending, in as few applications as can be; `--dry-run` shows it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headrace import logs
from headrace.cli import summary
from headrace.cli.root import (
    VAR,
    Ds,
    Home,
    Model,
    Overlays,
    Panel,
    Pipeline,
    Sets,
    app,
    complete_stage,
    examples,
    overrides,
    workspace,
)
from headrace.cli.screen import out
from headrace.cli.summary import tell_refusals
from headrace.config.stages import ORDER, STAGES
from headrace.errors import (
    EXIT_BUSY,
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INCOMPLETE,
    EXIT_REFUSED,
    EXIT_USER_ERROR,
    RefusedError,
    UserError,
)

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.workspace import Workspace
    from headrace.jobs.output import StageEvent
    from headrace.stage import Stage
    from headrace.stage.manifest import Input, Output
    from headrace.storage import Location


@app.command(
    rich_help_panel=Panel.A_DAY,
    epilog=examples(
        "headrace run clicks --ds 2026-01-08",
        "headrace run clicks --ds 2026-01-08 --dry-run",
        "headrace run clicks --ds 2026-01-02 --until 2026-01-08 --to features",
        "headrace run clicks --ds 2026-01-08 --from train --to report --set train.epochs=5",
        "headrace run conf/pipelines/clicks.yaml --ds 2026-01-08 --home /data/headrace",
    ),
)
def run(
    pipeline: Pipeline,
    ds: Ds = None,
    until: Annotated[
        str | None,
        typer.Option("--until", help="The last day of a range that begins with --ds: all of them.", metavar="DATE"),
    ] = None,
    first: Annotated[
        str, typer.Option("--from", help="The first stage.", metavar="STAGE", autocompletion=complete_stage)
    ] = ORDER[0],
    last: Annotated[
        str, typer.Option("--to", help="The last stage.", metavar="STAGE", autocompletion=complete_stage)
    ] = ORDER[-1],
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Each stage as a Spark application of its own, with a JVM of its own.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run and why, what it reads and writes; start nothing.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="With --dry-run: do not try the warehouse, stores and MLflow's server.")
    ] = False,
    model: Model = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Bring a day up to date, stage by stage.

    Stages that follow each other share a Spark application where their settings of Spark agree; each commits what it
    made by itself. One that is done with the same inputs is left alone, so a run that was stopped goes on with the same
    command, and a second run changes nothing.

    A range of days (a backfill) is loaded in one pass, and each application serves its stages for all days; what comes
    out is what the days would give one by one, in order.
    """
    settings = overrides(overlays, sets, model)
    if dry:
        dry_run(pipeline, workspace(home), ds, settings, first, last, isolated, until, offline)
        return
    if offline:
        raise UserError("--offline goes with --dry-run: a run needs what the dry run leaves out")
    raise typer.Exit(run_stages(pipeline, workspace(home), ds, settings, first, last, isolated, until=until))


def stage_command(stage: str) -> Callable[..., None]:
    """Return the command that runs one stage alone."""

    def command(
        pipeline: Pipeline, ds: Ds = None, overlays: Overlays = None, sets: Sets = None, home: Home = VAR
    ) -> None:
        raise typer.Exit(run_stages(pipeline, workspace(home), ds, overrides(overlays, sets), stage, stage))

    return command


for _name, _help in ((entry.name, entry.help) for entry in STAGES.values()):
    if _name in ("features", "compare", "compare_versions", "estimate_policies", "score", "gate", "promote"):
        continue  # beside this file: features, compare, experiment, score, registry
    app.command(
        _name,
        short_help=_help,
        help=f"{_help} The same as `run --from {_name} --to {_name}`.",
        epilog=examples(f"headrace {_name} clicks --ds 2026-01-08"),
        rich_help_panel=Panel.STAGES,
    )(stage_command(_name))


#: Exit codes of jobs that have said in one message what is the matter.
_EXPLAINED = (EXIT_USER_ERROR, EXIT_REFUSED, EXIT_BUSY, EXIT_INCOMPLETE)


def resolve(pipeline: str, ds: str | None, overrides: Sequence[str]) -> tuple[Spec, str]:
    """Read the spec and the day.

    Raises:
        UserError: the spec has faults, those included that a stage would come to; no day is given and the spec has
            none.
    """
    from headrace.config import load_spec, parse_ds

    spec = load_spec(pipeline, overrides)
    # Late: with the operators come pyarrow and pandas; a misspelt key should be told at once.
    from headrace.jobs.check_specs import check_spec

    check_spec(spec)
    if ds is not None:
        return spec, parse_ds(ds)
    if spec.ds is not None:
        return spec, spec.ds
    start = f", for example --ds {spec.generate.start} (the generator's first day)" if spec.generate else ""
    raise UserError(f"pipeline '{spec.pipeline}' has new data every day, so say which: --ds YYYY-MM-DD{start}")


def run_stages(
    pipeline: str,
    ws: Workspace,
    ds: str | None,
    overrides: Sequence[str] = (),
    first: str = ORDER[0],
    last: str = ORDER[-1],
    isolated: bool = False,
    show_results: bool = True,
    until: str | None = None,
) -> int:
    """Bring the stages from `first` to `last` up to date, in order; stop at the first that fails.

    Of a range of days each application serves its stages for all of them, so that all days' features are made in one,
    and then all days are trained; with a gate or a challenger, day by day (headrace.jobs.stages).

    What needs no work before the first stage that does is found out here, from manifests and the lake's log, without
    starting a JVM; after it, by the application.

    Args:
        pipeline: a shipped pipeline's name or a YAML file.
        ws: the workspace.
        ds: the day; None: the spec's.
        overrides: `key=value` for the spec.
        first: the first stage.
        last: the last stage.
        isolated: each stage as an application of its own, instead of one for those whose Spark settings agree.
        show_results: show the day's results at the end; of a range, the last day's.
        until: the last day of a range that begins with `ds`; None: that day alone.

    Returns:
        the exit code; 3 where all is done, and the gate has refused a day's model, and where there is no champion to
        score with for that reason.

    Raises:
        UserError: what the user can mend, found before anything was started.
    """
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    # Late: a misspelt key should be told at once.
    from headrace.jobs.observe.application import observed_run
    from headrace.jobs.output import StageEvent
    from headrace.jobs.stages import applications, execution_order, load_stage, submissions
    from headrace.jobs.submit import submit
    from headrace.stage import check_stage

    stages, days = _stages_and_days(spec, day, first, last, until)
    progress = _Progress(stages, days)
    with observed_run(spec, ws, day) as observed:
        for group, group_days in submissions(applications(stages, spec, isolated), days, spec):
            pending = list(group)
            try:
                while pending and all(
                    check_stage(load_stage(pending[0], spec), spec, ws, ds) is None for ds in group_days
                ):
                    for ds in group_days:
                        progress.show(StageEvent(pending[0], "skip", ds=ds))
                    pending.pop(0)
            except RefusedError:  # no champion to score with
                tell_refusals(spec, ws, stages, days)
                raise
            if not pending:
                continue
            progress.stage, progress.day = next(execution_order(pending, group_days, spec))
            last_day = group_days[-1] if len(group_days) > 1 else None
            observed.start()
            code = submit(pending, pipeline, spec, ws, group_days[0], overrides, progress.show, until=last_day)
            if code != EXIT_DONE:
                how = _explain_failure(progress.stage, code, ws.log(spec.pipeline, progress.day, progress.stage))
                observed.fail(f"{progress.stage} of {progress.day} did not finish: {how}")
                if progress.unended:
                    observed.fail_stage(progress.stage, progress.day, progress.unended, how)
                if code == EXIT_REFUSED:
                    tell_refusals(spec, ws, stages, days)
                return code if code in _EXPLAINED else EXIT_FAILURE
    if show_results and not logs.is_json():
        summary.show(spec, ws, days[-1], progress.states)
    return tell_refusals(spec, ws, stages, days)


class _Progress:
    """Results of the stages, and a line about each."""

    def __init__(self, stages: Sequence[str], days: Sequence[str]) -> None:
        self._stages, self._days = list(stages), list(days)
        #: Whose turn it is.
        self.day = self._days[0]
        #: Whose turn it is.
        self.stage = self._stages[0]
        #: What is said at the end.
        self.states: dict[str, str] = {}
        #: The id of the attempt that has begun and said nothing of its end; empty: there is none.
        self.unended = ""

    def show(self, event: StageEvent) -> None:
        self.stage, self.day = event.stage, event.ds or self._days[0]
        self.unended = event.run_id if event.kind == "run" else ""
        if logs.is_json():
            self._log(event)
            return
        label = f"[{self._stages.index(event.stage) + 1}/{len(self._stages)}] {event.stage}"
        if len(self._days) > 1:
            label += f" of {self.day}"
        if event.kind == "skip":
            self.states[event.stage] = "nothing to do"
            out.print(f"{label}: already done with the same inputs; nothing to do", markup=False)
        elif event.kind == "run":
            out.print(f"[bold]{escape(label)}[/]: {escape(event.reason)}", soft_wrap=True)
        elif event.kind == "done":
            self.states[event.stage] = "done"

    def _log(self, event: StageEvent) -> None:
        messages = {"run": event.reason, "skip": "already done with the same inputs; nothing to do", "done": "done"}
        if event.kind in messages:
            fields = {"stage": event.stage, "ds": self.day, "run_id": event.run_id, "event": event.kind}
            out.print(
                logs.json_line(messages[event.kind], "INFO", "headrace.run", fields), markup=False, soft_wrap=True
            )


def _stages_and_days(
    spec: Spec, day: str, first: str, last: str, until: str | None
) -> tuple[list[str], tuple[str, ...]]:
    """Return the spec's stages from `first` to `last`, and the days.

    Raises:
        UserError: the spec has none of these stages, or there is no such range of days.
    """
    from headrace.jobs.stages import days_of, require_stage
    from headrace.stage import stage_entry

    names = between(spec, first, last)
    stages = [name for name in names if stage_entry(spec, name).applies(spec)]
    if not stages:
        require_stage(spec, names[0])
    return stages, days_of(spec, day, until)


def between(spec: Spec, first: str, last: str) -> tuple[str, ...]:
    """Return the stages from one to another, those included that the pipeline has no section for.

    Raises:
        UserError: one is unknown, or they are the wrong way round.
    """
    from headrace.stage import stage_order

    if first == last and first in STAGES:
        return (first,)
    order = stage_order(spec)
    for name in (first, last):
        if name not in order:
            raise UserError(f"no stage '{name}'; stages, in order: {', '.join(order)}")
    if order.index(first) > order.index(last):
        raise UserError(f"stage '{first}' comes after '{last}'; stages, in order: {', '.join(order)}")
    return order[order.index(first) : order.index(last) + 1]


def _explain_failure(stage: str, code: int, log: Location) -> str:
    """Print the failure of a stage, and return its short form."""
    how = "see the message above" if code in _EXPLAINED else f"exit code {code}"
    if code == 128 + signal.SIGTERM:
        how = "it was asked to stop"
    elif code > 128:
        how = f"killed by signal {code - 128}" + (" (out of memory?)" if code == 137 else "")
    if logs.is_json():
        line = logs.json_line(
            f"{stage} did not finish: {how}", "ERROR", "headrace.run", {"stage": stage, "log": str(log)}
        )
        out.print(line, markup=False, soft_wrap=True)
        return how
    out.print(f"[red]{stage} did not finish[/]: {how}. Its whole output: {escape(str(log))}")
    out.print("Finished stages are kept: the same command goes on from here.")
    return how


#: Inputs and outputs of a stage that are named one by one.
_LISTED = 4


@dataclass(frozen=True)
class PlannedStage:
    """Plan of a run at one stage of a day."""

    ds: str
    stage: str
    runs: bool
    #: Why it would run; where it would not, why not.
    reason: str
    #: What it reads, with versions where they are known.
    reads: tuple[str, ...]
    #: What it writes: of a finished stage with the versions that stay, else the places.
    writes: tuple[str, ...]


def dry_run(
    pipeline: str,
    ws: Workspace,
    ds: str | None,
    overrides: Sequence[str],
    first: str,
    last: str,
    isolated: bool = False,
    until: str | None = None,
    offline: bool = False,
) -> list[PlannedStage]:
    """Print what `run` would do now, stage by stage and day by day, in the order in which it would run them.

    Args:
        pipeline: a shipped pipeline's name or a YAML file.
        ws: the workspace.
        ds: the day; None: the spec's.
        overrides: `key=value` for the spec.
        first: the first stage.
        last: the last stage.
        isolated: as for `run`: it changes the order of a range.
        until: the last day of a range that begins with `ds`; None: that day alone.
        offline: do not try the connections that the stages need (headrace.cli.connections).

    Raises:
        UserError: as `run` would before it starts anything; a connection is refused.
        StoreAway: a store says that it is away.
    """
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    stages, days = _stages_and_days(spec, day, first, last, until)
    from headrace.cli.connections import check_connections, missing_packages

    warnings = missing_packages(spec, stages)
    if not offline:
        warnings += check_connections(spec, ws, stages)
    # Late: jobs bring the stages, and with them pyspark (no JVM).
    from headrace.jobs.stages import applications, execution_order, load_stage, submissions

    planned: list[PlannedStage] = []
    for group, group_days in submissions(applications(stages, spec, isolated), days, spec):
        for name, of_day in execution_order(group, group_days, spec):
            planned.append(_plan(load_stage(name, spec), spec, ws, of_day, planned))
    running, period = sum(p.runs for p in planned), days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    out.print(f"{spec.pipeline}, {period}: {running} of {len(planned)} stages would run", markup=False)
    for p in planned:
        subject = p.stage if len(days) == 1 else f"{p.stage} of {p.ds}"
        verdict = "[bold]would run[/]" if p.runs else "[dim]nothing to do[/]"
        out.print(f"\n[bold]{escape(subject)}[/]: {verdict}, {escape(p.reason)}", soft_wrap=True)
        for heading, names in (("reads", p.reads), ("writes" if p.runs else "wrote", p.writes)):
            for number, name in enumerate(_some(names)):
                out.print(f"  {'' if number else heading:<7} {name}", markup=False, soft_wrap=True)
    for warning in warnings:
        out.print(f"\nwarning: {warning}", markup=False, soft_wrap=True)
    return planned


def _plan(stage: Stage, spec: Spec, ws: Workspace, ds: str, previous_plans: Sequence[PlannedStage]) -> PlannedStage:
    from headrace.stage.manifest import Manifest
    from headrace.stage.protocol import needs_of, plan_run

    needs = [need.rstrip("?") for need in needs_of(stage, spec)]
    day_plans = {p.stage: p for p in previous_plans if p.ds == ds}
    again = [name for name in needs if name in day_plans and day_plans[name].runs]
    if again:
        # What those make decides what this one reads: its inputs are not known yet.
        reason = "not yet run for this date"
        if Manifest.load(ws.manifest(spec.pipeline, ds, stage.name)) is not None:
            reason = f"if what {', '.join(again)} {'makes' if len(again) == 1 else 'make'} is new"
        reads = [f"what {name} makes" if name in again else name for name in needs if name in day_plans]
        return PlannedStage(ds, stage.name, True, reason, tuple(reads), _places(stage.name, spec, ds, "<key>"))
    plan = plan_run(stage, spec, ws, ds)
    reads = [_named(i) for i in plan.inputs]
    if plan.reason is None:
        assert plan.manifest is not None
        reason, writes = "done with the same inputs", tuple(_named(o) for o in plan.manifest.outputs)
        # What it made for a day before may be read for this one: an earlier model, a dataset that is appended to.
        earlier = [p.ds for p in previous_plans if p.stage == stage.name and p.ds < ds and p.runs]
        if earlier:
            reason = f"done, unless what {stage.name} makes for {max(earlier)} changes its inputs"
        return PlannedStage(ds, stage.name, False, reason, tuple(reads), writes)
    return PlannedStage(ds, stage.name, True, plan.reason, tuple(reads), _places(stage.name, spec, ds, plan.ctx.key))


def _places(stage: str, spec: Spec, ds: str, key: str) -> tuple[str, ...]:
    from headrace.stage import stage_entry

    scores = (spec.publish and spec.publish.table) or f"{spec.pipeline}_scores"
    if stage == "ingest":
        return tuple(_source_tables(spec))
    places = stage_entry(spec, stage).writes
    return tuple(p.format(pipeline=spec.pipeline, ds=ds, key=key, scores=scores) for p in places)


def _source_tables(spec: Spec) -> Iterator[str]:
    """Yield the tables of each source. Rows of a table are not copied: only its bad ones are recorded."""
    from headrace.config.source import LandingSource

    folder = f"lake/{spec.pipeline}"
    for name, source in {"": spec.source, **{n: s.source for n, s in spec.sources.items()}}.items():
        if isinstance(source, LandingSource):
            yield f"{folder}/{name or 'events'}"
        yield f"{folder}/{name}_quarantine" if name else f"{folder}/quarantine"


def _named(thing: Input | Output) -> str:
    return f"{thing.name} ({thing.kind}, version {thing.version})"


def _some(lines: Sequence[str]) -> Iterable[str]:
    yield from lines[:_LISTED]
    if len(lines) > _LISTED:
        yield f"and {len(lines) - _LISTED:,} more"
