"""`headrace features build`, `headrace features explain`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from headrace.cli.root import Panel, Pipeline, Sets, StageGroup, app, examples
from headrace.cli.run import stage_command
from headrace.cli.screen import out
from headrace.config.stages import STAGES

features_app = typer.Typer(
    cls=StageGroup,
    no_args_is_help=True,
    help=f"{STAGES['features'].help} `features PIPELINE` is `features build PIPELINE`.",
    short_help=STAGES["features"].help,
    epilog=examples("headrace features clicks --ds 2026-01-08", "headrace features explain clicks"),
)
app.add_typer(features_app, name="features", rich_help_panel=Panel.STAGES)
features_app.command(
    "build",
    help=f"{STAGES['features'].help} The same as `run --from features --to features`.",
    epilog=examples("headrace features build clicks --ds 2026-01-08"),
)(stage_command("features"))


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
    from headrace.config import load_spec
    from headrace.features.workflow.graph import draw, graph_of

    # soft_wrap: a diagram's source must not be broken over lines.
    out.print(draw(graph_of(load_spec(pipeline, sets or [])), form.value), markup=False, soft_wrap=True)
