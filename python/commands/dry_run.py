"""`headrace run --dry-run`: which stages would run and why, what they would read and write. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.commands.run import between, resolve
from headrace.commands.screen import out, plain, table
from headrace.config import Spec
from headrace.config.source import LandingSource
from headrace.manifest import Input, Manifest, Output
from headrace.stage import Stage, plan_run
from headrace.stages import STAGES
from headrace.workspace import Workspace

#: Inputs and outputs of a stage that are named one by one.
_LISTED = 4


@dataclass(frozen=True)
class PlannedStage:
    """Plan of a run at one stage of a day."""

    ds: str
    stage: str
    runs: bool
    #: Why it would run; where it would not, why not.
    why: str
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

    Raises:
        UserError: as `run` would before it starts anything.
    """
    # Late: jobs bring the stages, and with them pyspark (no JVM).
    from headrace.jobs.applications import applications
    from headrace.jobs.day_range import days_of, submissions, turns
    from headrace.jobs.stages import load_stage, require_stage

    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    names = between(first, last)
    stages = [name for name in names if STAGES[name].applies(spec)]
    if not stages:
        require_stage(spec, names[0])
    days = days_of(spec, day, until)
    planned: list[PlannedStage] = []
    for group, of in submissions(applications(stages, spec, isolated), days, spec):
        for name, of_day in turns(group, of, spec):
            planned.append(_plan(load_stage(name), spec, ws, of_day, planned))
    running, period = sum(p.runs for p in planned), days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    out.print(f"{spec.pipeline}, {period}: {running} of {len(planned)} stages would run\n", markup=False)
    rows_table = table(*(["day"] if len(days) > 1 else []), "stage", "would run", "why", "reads", "writes")
    for p in planned:
        state = plain("yes", style="bold") if p.runs else plain("no", style="dim")
        reads, writes = (plain("\n".join(_some(lines))) for lines in (p.reads, p.writes))
        rows_table.add_row(*([p.ds] if len(days) > 1 else []), p.stage, state, plain(p.why), reads, writes)
    out.print(rows_table)
    return planned


def _plan(stage: Stage, spec: Spec, ws: Workspace, ds: str, before: Sequence[PlannedStage]) -> PlannedStage:
    needs, mine = [need.rstrip("?") for need in stage.needs], {p.stage: p for p in before if p.ds == ds}
    again = [name for name in needs if name in mine and mine[name].runs]
    if again:
        # What those make decides what this one reads: its inputs are not known yet.
        why = "not yet run for this date"
        if Manifest.load(ws.manifest(spec.pipeline, ds, stage.name)) is not None:
            why = f"if what {', '.join(again)} {'makes' if len(again) == 1 else 'make'} is new"
        reads = [f"what {name} makes" if name in again else name for name in needs if name in mine]
        return PlannedStage(ds, stage.name, True, why, tuple(reads), _places(stage.name, spec, ds, "<key>"))
    plan = plan_run(stage, spec, ws, ds)
    reads = [_named(i) for i in plan.inputs]
    if plan.reason is None:
        assert plan.manifest is not None
        why, writes = "done with the same inputs", tuple(_named(o) for o in plan.manifest.outputs)
        # What it made for a day before may be read for this one: an earlier model, a dataset that is appended to.
        earlier = [p.ds for p in before if p.stage == stage.name and p.ds < ds and p.runs]
        if earlier:
            why = f"done, unless what {stage.name} makes for {max(earlier)} changes its inputs"
        return PlannedStage(ds, stage.name, False, why, tuple(reads), writes)
    return PlannedStage(ds, stage.name, True, plan.reason, tuple(reads), _places(stage.name, spec, ds, plan.ctx.key))


def _places(stage: str, spec: Spec, ds: str, key: str) -> tuple[str, ...]:
    scores = (spec.publish and spec.publish.table) or f"{spec.pipeline}_scores"
    if stage == "ingest":
        return tuple(_source_tables(spec))
    return tuple(p.format(pipeline=spec.pipeline, ds=ds, key=key, scores=scores) for p in STAGES[stage].writes)


def _source_tables(spec: Spec) -> Iterator[str]:
    """Yield the tables of each source. Rows of a table are not copied: only its bad ones are recorded."""
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
