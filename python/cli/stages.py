"""Commands that run stages: `run`, and a verb for each stage."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from headrace.cli.groups import StageGroup
from headrace.cli.options import (
    VAR,
    Ds,
    Home,
    Model,
    Overlays,
    Pipeline,
    Sets,
    complete_stage,
    examples,
    overrides,
    workspace,
)
from headrace.cli.root import app
from headrace.stages import ORDER, STAGES


@app.command(
    epilog=examples(
        "headrace run clicks --ds 2026-01-08",
        "headrace run clicks --ds 2026-01-08 --dry-run",
        "headrace run clicks --ds 2026-01-02 --until 2026-01-08 --to features",
        "headrace run clicks --ds 2026-01-08 --from train --to report --set train.epochs=5",
        "headrace run conf/pipelines/clicks.yaml --ds 2026-01-08 --home /data/headrace",
    )
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
    from headrace.commands.dry_run import dry_run
    from headrace.commands.run import run as command

    settings = overrides(overlays, sets, model)
    if dry:
        dry_run(pipeline, workspace(home), ds, settings, first, last, isolated, until)
        return
    raise typer.Exit(command(pipeline, workspace(home), ds, settings, first, last, isolated, until=until))


def _stage_command(stage: str) -> Callable[..., None]:
    def command(
        pipeline: Pipeline, ds: Ds = None, overlays: Overlays = None, sets: Sets = None, home: Home = VAR
    ) -> None:
        from headrace.commands.run import run as run_stages

        raise typer.Exit(run_stages(pipeline, workspace(home), ds, overrides(overlays, sets), stage, stage))

    return command


for _name, _help in ((entry.name, entry.help) for entry in STAGES.values()):
    if _name in ("features", "compare", "compare_versions", "estimate_policies", "score", "gate", "promote"):
        continue  # below, in cli/compare.py, cli/experiment.py, cli/score.py and cli/registry.py
    app.command(
        _name,
        short_help=_help,
        help=f"{_help} The same as `run --from {_name} --to {_name}`.",
        epilog=examples(f"headrace {_name} clicks --ds 2026-01-08"),
        rich_help_panel="Stages, in the day's order" if STAGES[_name].dag else None,
    )(_stage_command(_name))

features_app = typer.Typer(
    cls=StageGroup,
    no_args_is_help=True,
    help=f"{STAGES['features'].help} `features PIPELINE` is `features build PIPELINE`.",
    short_help=STAGES["features"].help,
    epilog=examples("headrace features clicks --ds 2026-01-08", "headrace features explain clicks"),
)
app.add_typer(features_app, name="features", rich_help_panel="Stages, in the day's order")
features_app.command(
    "build",
    help=f"{STAGES['features'].help} The same as `run --from features --to features`.",
    epilog=examples("headrace features build clicks --ds 2026-01-08"),
)(_stage_command("features"))


class GraphFormat(StrEnum):
    """Output formats of a graph."""

    text = "text"
    mermaid = "mermaid"
    dot = "dot"


@features_app.command(
    epilog=examples(
        "headrace features explain clicks",
        "headrace features explain clicks --format mermaid",
        "headrace features explain clicks --format dot | dot -Tsvg > features.svg",
    )
)
def explain(
    pipeline: Pipeline,
    form: Annotated[GraphFormat, typer.Option("--format", help="How to write it.")] = GraphFormat.text,
    sets: Sets = None,
) -> None:
    """Show what is made of which columns: operators, types, vocabularies, tags. Needs no data."""
    from headrace.commands.features import explain as command
    from headrace.config import load_spec

    command(load_spec(pipeline, sets or []), form.value)
