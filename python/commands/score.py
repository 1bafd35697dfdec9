"""`headrace score --input`: scores of a table of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.commands.run import resolve
from headrace.commands.screen import out
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.models.predictor import read_meta
from headrace.stage import Context
from headrace.storage import is_uri, local, local_folder, location_of
from headrace.workspace import Workspace


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
    found = {name: Manifest.load(ws.manifest(spec.pipeline, day, name)) for name in names}
    ctx = Context(spec, ws, day, {name: m for name, m in found.items() if m is not None})
    chosen = scoring_model(ctx)
    read_meta(ws.locate(chosen.output.name))
    with session(spec.spark, ws, f"score {place}") as spark:
        rows = score_table(ctx, chosen, spark, place, folder)
    out.print(f"{rows:,} rows scored by model {chosen.output.version}: {folder}", markup=False)
