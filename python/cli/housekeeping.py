"""`headrace gc`, `headrace forget`: commands that remove."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.root import VAR, Home, Json, Panel, Pipeline, Sets, app, examples, workspace
from headrace.cli.screen import out, print_json, table

if TYPE_CHECKING:
    from headrace.jobs.housekeeping.forget.persons import Place


@app.command(
    rich_help_panel=Panel.OPERATE,
    epilog=examples(
        "headrace gc clicks", "headrace gc clicks --delete", "headrace gc clicks --set housekeeping.datasets=2"
    ),
)
def gc(
    pipeline: Pipeline,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is listed; without, only list it.")] = False,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """List what a pipeline's section `housekeeping` does not retain; with --delete, remove it.

    Datasets, models, checkpoints, searches, logs, reports, files of killed runs, old days of tables, data files that
    no retained version names, days beyond the warehouse's retention. Models with an alias stay. Manifests stay and
    record the removals: `status` and `lineage` show them, and `run` makes the day again.
    """
    from headrace.config import load_spec
    from headrace.jobs.housekeeping.collect import collect

    spec = load_spec(pipeline, sets or [])
    ws = workspace(home).of(spec)
    steps = []
    steps_table = table("kind", "what", ">MiB", "why")
    for step in collect(spec, ws, datetime.now(UTC), delete):
        steps.append(step)
        steps_table.add_row(step.kind, step.name, f"{step.size / 2**20:,.1f}" if step.size else "–", step.reason)
    if as_json:
        records = [{"kind": s.kind, "what": s.name, "bytes": s.size, "reason": s.reason} for s in steps]
        print_json({"home": str(ws.home), "pipeline": spec.pipeline, "deleted": delete, "steps": records})
        return
    if steps:
        out.print(steps_table)
    # What is joined is written anew first, and goes when no version names it any more.
    total = sum(s.size for s in steps if s.kind != "compaction") / 2**20
    if delete:
        out.print(f"{len(steps)} removed, {total:,.1f} MiB")
    elif steps:
        out.print(f"{len(steps)} can go, {total:,.1f} MiB. Nothing was changed: add --delete to remove them")
    else:
        out.print("nothing can go")


@app.command(
    rich_help_panel=Panel.OPERATE,
    epilog=examples(
        "headrace forget clicks --column user_id --values persons.txt",
        "headrace forget clicks --column user_id --values persons.txt --delete",
    ),
)
def forget(
    pipeline: Pipeline,
    column: Annotated[str, typer.Option("--column", help="The column that tells persons apart.", metavar="NAME")],
    values: Annotated[Path, typer.Option("--values", help="A text file: one value a line.", metavar="FILE")],
    delete: Annotated[bool, typer.Option("--delete", help="Erase them; without, only list what there is.")] = False,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """List persons' data in all that a pipeline has written; with --delete, erase it and write a proof.

    Removes their rows from the lake's tables (older versions, too), the warehouse and the key-value store, and their
    values from vocabularies (codes stay assigned). Their embeddings become zero in all saved models. Datasets, caches
    and checkpoints are removed, and made again. Ingest never loads their rows again. Landing files and tables of your
    own are named, not changed. The same command continues after an interruption. Exit code 75: it can remove the rest
    later, at the time that it gives; 2: something must be done by hand.
    """
    from headrace.config import load_spec
    from headrace.jobs.housekeeping.forget import erase
    from headrace.jobs.housekeeping.forget.persons import Place, read_persons

    spec = load_spec(pipeline, sets or [])
    ws = workspace(home).of(spec)
    persons, now = read_persons(spec, column, values), datetime.now(UTC)
    places: list[Place] = []
    document: dict[str, Any] = {"home": str(ws.home), "pipeline": spec.pipeline, "deleted": delete}
    try:
        if not delete:
            places += erase.found_places(spec, ws, persons, now)
        for step in erase.forget(spec, ws, persons, now) if delete else ():
            if isinstance(step, Place):
                places.append(step)
            else:
                request, file = step
                document |= {"request": request.model_dump(mode="json"), "proof": str(file)}
    finally:
        _show_places(places, document, delete, as_json)


def _show_places(places: Sequence[Place], document: dict[str, Any], delete: bool, as_json: bool) -> None:
    if as_json:
        names = ("rows", "rewritten", "removed", "size", "note", "left", "later")
        print_json(
            document
            | {
                "places": [
                    {"kind": p.kind, "what": p.name, **{name: getattr(p, name) for name in names}} for p in places
                ]
            }
        )
        return
    places_table = table("kind", "what", ">rows", ">written again", ">removed", "")
    for p in places:
        counts = (f"{n:,}" if n else "–" for n in (p.rows, p.rewritten, p.removed))
        places_table.add_row(p.kind, p.name, *counts, "; ".join(x for x in (p.left, p.note) if x))
    if places:
        out.print(places_table)
    erasable = sum(p.act is not None for p in places)
    if delete:
        out.print(f"{erasable} places erased; proof: {document.get('proof', 'none, it did not end')}")
    elif erasable:
        out.print(f"{erasable} places have some. Nothing was changed: add --delete to erase them")
    elif any(p.left for p in places):
        out.print("nothing is left of them but what must be done by hand, or by a later run")
    else:
        out.print("nothing is left of them")
