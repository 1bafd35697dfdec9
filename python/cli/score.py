"""`headrace score`: the stage, or scores of a table of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.root import VAR, Ds, Home, Model, Overlays, Panel, Pipeline, Sets, app, examples, overrides, workspace
from headrace.cli.run import resolve
from headrace.cli.screen import out
from headrace.config.stages import STAGES
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.config.workspace import Workspace


@app.command(
    short_help=STAGES["score"].help,
    rich_help_panel=Panel.STAGES,
    epilog=examples(
        "headrace score clicks --ds 2026-01-08",
        "headrace score clicks --ds 2026-01-09 --model @champion",
        "headrace score clicks --ds 2026-01-09 --set score.incremental=true",
        "headrace score clicks --ds 2026-01-08 --input pairs --output scored --model 7",
    ),
)
def score(
    pipeline: Pipeline,
    ds: Ds = None,
    model: Model = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="Score the rows of this table instead: a Delta table, a folder or file of Parquet, or a file of CSV "
            "whose first line names its columns. It may be in a store (s3://...).",
            metavar="TABLE",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--output", help="Where these rows go, with their scores: a new folder on a file system.", metavar="TABLE"
        ),
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Score users x candidate items and keep the best for each user: the same as `run --from score --to score`.

    With score.incremental only users whose columns, candidates or model have changed are scored again; the result is
    the same.

    With --input and --output it scores any rows: pairs of a user and an item, whose other columns are those of the
    users and items of the day, or whole rows with the columns of the features.
    """
    from headrace.cli.run import run_stages as run_stages

    settings = overrides(overlays, sets, model)
    if source is None and target is None:
        raise typer.Exit(run_stages(pipeline, workspace(home), ds, settings, "score", "score"))
    if source is None or target is None:
        raise typer.BadParameter("--input and --output go together")
    score_rows(pipeline, workspace(home), ds, settings, source, target)


def score_rows(
    pipeline: str, ws: Workspace, ds: str | None, overrides: Sequence[str], source: str, target: str
) -> None:
    """Score the rows of a table, in a Spark application of this process.

    Args:
        pipeline: a shipped pipeline's name or a YAML file.
        ws: the workspace.
        ds: the day whose model scores, unless `score.model` is one of the registry; and as of which users and items
            have their columns.
        overrides: `key=value` for the spec.
        source: a Delta table, a folder or file of Parquet, or a file of CSV: a path, or a URI of any store.
        target: a folder of a file system that is not there yet.

    Raises:
        UserError: what the user can mend.
    """
    from headrace.models.predictor import read_meta
    from headrace.stage import Context
    from headrace.stage.manifest import Manifest
    from headrace.storage import is_uri, local, local_folder, location_of

    place, folder = location_of(source, "--input").as_plain(), local(local_folder(target, "--output"))
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    if is_uri(source):
        # The session reaches what the workspace says that it reads.
        ws = replace(ws, reads=(*ws.reads, source))
    if spec.score is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no section score, so users and items are not known")
    # Late: a misspelt key is told at once.
    from headrace.lake.spark.session import session
    from headrace.score.score_table import score_table
    from headrace.score.scoring_model import scoring_model
    from headrace.score.stage import ScoreCandidates

    names = [need.rstrip("?") for need in ScoreCandidates.needs]
    manifests = {name: Manifest.load(ws.manifest(spec.pipeline, day, name)) for name in names}
    ctx = Context(spec, ws, day, {name: m for name, m in manifests.items() if m is not None})
    chosen = scoring_model(ctx)
    read_meta(ws.locate(chosen.output.name))
    with session(spec.spark, ws, f"score {place}") as spark:
        rows = score_table(ctx, chosen, spark, place, folder)
    out.print(f"{rows:,} rows scored by model {chosen.output.version}: {folder}", markup=False)
