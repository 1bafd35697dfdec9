"""`headrace experiment ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.groups import Group
from headrace.cli.options import VAR, Home, Json, MaybePipeline, Overlays, Sets, examples, overrides, workspace
from headrace.cli.root import app

experiment_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Experiments: what the arms have brought, and the end of an arm."
)
app.add_typer(experiment_app, name="experiment")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A key of the section `experiments`.")]
AsOf = Annotated[str | None, typer.Option("--ds", help="Figures as of this day; else of the newest.", metavar="DATE")]


@experiment_app.command(
    epilog=examples(
        "headrace experiment status ranker clicks",
        "headrace experiment status ranker clicks --ds 2026-01-08 --json",
        "headrace experiment status ranker pipelines/shop.yaml",
    )
)
def status(
    name: Name,
    pipeline: MaybePipeline = None,
    ds: AsOf = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show the arms: users, the metric, differences from the control by day and in total, and what they are worth.

    In total over the days whose label is ripe: with an interval of one look (what was known of users before taken out,
    and without), and one that holds for daily looks. The sample ratio says whether the arms can be compared at all.
    """
    from headrace.commands.experiment import status as command

    command(workspace(home), name, pipeline, ds, overrides(overlays, sets), as_json)


@experiment_app.command(
    epilog=examples(
        "headrace experiment stop ranker clicks --arm weak --reason 'complaints of customers'",
        "headrace experiment stop ranker clicks --arm weak --reason 'a broken model' --ds 2026-01-08",
    )
)
def stop(
    name: Name,
    arm: Annotated[str, typer.Option("--arm", help="The arm; not the control.", metavar="ARM")],
    pipeline: MaybePipeline = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why; kept with who stopped it, and when.", metavar="TEXT")
    ] = None,
    ds: Annotated[
        str | None,
        typer.Option(
            "--ds",
            help="The first day whose lists are made without it; else the one after the newest that was scored.",
            metavar="DATE",
        ),
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Stop an arm for good: from then on its users get the control's model. The others stay where they are."""
    from headrace.commands.experiment import stop as command

    command(workspace(home), name, pipeline, arm, reason, ds, overrides(overlays, sets))


@experiment_app.command(
    epilog=examples(
        "headrace experiment estimate ranker bandit.yaml", "headrace experiment estimate ranker bandit.yaml --json"
    )
)
def estimate(
    name: Name,
    pipeline: MaybePipeline = None,
    ds: AsOf = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show, before the start, what each arm's model would have earned on the log, by its propensities.

    The models predict the logged rows of the day once for each action (`train.evaluation.off_policy`): IPS, SNIPS and
    doubly robust with intervals, and the differences from the control's model. Nothing is trained.
    """
    from headrace.commands.experiment import estimate as command

    raise typer.Exit(command(workspace(home), name, pipeline, ds, overrides(overlays, sets), as_json))
