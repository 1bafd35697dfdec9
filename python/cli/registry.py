"""Commands about registered models: `models`, `gate`, `promote`, `rollback`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from headrace.cli.options import VAR, Ds, Home, Json, Overlays, Pipeline, Sets, examples, overrides, workspace
from headrace.cli.root import app
from headrace.stages import STAGES

_PANEL = "Stages, in the day's order"
Reason = Annotated[
    str | None, typer.Option("--reason", help="Why; kept with the version and in the log.", metavar="TEXT")
]


class ModelStage(StrEnum):
    """The stages that register models."""

    train = "train"
    baseline = "baseline"
    second_stage = "second_stage"


@app.command(epilog=examples("headrace models clicks", "headrace models clicks --stage baseline --json"))
def models(
    pipeline: Pipeline,
    stage: Annotated[
        ModelStage | None, typer.Option("--stage", help="Whose models; else those that the gate judges.")
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show registered models: version, day, aliases, verdict, metrics, size; who has decided about them, and why."""
    from headrace.commands.registry import models as command

    command(workspace(home), pipeline, None if stage is None else stage.value, sets or [], as_json)


@app.command(
    short_help=STAGES["gate"].help,
    epilog=examples("headrace gate clicks --ds 2026-01-08", "headrace gate clicks --ds 2026-01-08 --json"),
    rich_help_panel=_PANEL,
)
def gate(
    pipeline: Pipeline,
    ds: Ds = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Judge the day's model by the rules of the spec, and show every rule's figure; exit code 3 where it is refused.

    The same as `run --from gate --to gate`, with a table.
    """
    from headrace.commands.registry import gate as command

    raise typer.Exit(command(pipeline, workspace(home), ds, overrides(overlays, sets), as_json))


@app.command(
    short_help=STAGES["promote"].help,
    epilog=examples(
        "headrace promote clicks --ds 2026-01-08", "headrace promote clicks 7 --reason 'the labels of Monday were late'"
    ),
    rich_help_panel=_PANEL,
)
def promote(
    pipeline: Pipeline,
    version: Annotated[
        str | None, typer.Argument(metavar="[VERSION]", help="A version of the registry (headrace models).")
    ] = None,
    ds: Ds = None,
    reason: Reason = None,
    allow_older: Annotated[
        bool, typer.Option("--allow-older", help="Also where the champion is of a later day.")
    ] = False,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Make the day's model the champion, unless its verdict is against it or the champion is of a later day.

    The same as `run --from promote --to promote`. With a VERSION: make that one the champion, whatever its verdict; who
    did so, when and why is kept with it and logged.
    """
    if version is None:
        from headrace.commands.run import run as run_stages

        raise typer.Exit(run_stages(pipeline, workspace(home), ds, overrides(overlays, sets), "promote", "promote"))
    from headrace.commands.registry import override as command

    command(workspace(home), pipeline, version, reason, overrides(overlays, sets), allow_older)


@app.command(
    epilog=examples("headrace rollback clicks", "headrace rollback clicks --to 5 --reason 'clicks fell by a third'")
)
def rollback(
    pipeline: Pipeline,
    to: Annotated[
        str | None, typer.Option("--to", help="The version; else the champion before.", metavar="VERSION")
    ] = None,
    reason: Reason = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Take the champion back, and give its place to an earlier version; scoring goes on with that one."""
    from headrace.commands.registry import rollback as command

    command(workspace(home), pipeline, to, reason or "", sets or [])
