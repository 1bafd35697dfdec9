"""`headrace forget`: what there is of persons, and its going."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.commands.screen import out, print_json, table
from headrace.config import load_spec
from headrace.jobs.housekeeping.forget import erase
from headrace.jobs.housekeeping.forget.persons import Place, read_persons
from headrace.workspace import Workspace


def forget(
    ws: Workspace,
    pipeline: str,
    column: str,
    values: Path,
    delete: bool,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """List what a pipeline has of the persons in a file; with `delete`, erase it and write the proof.

    Raises:
        UserError: see `read_persons` and `headrace.jobs.housekeeping.forget.erase`.
    """
    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
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
        _show(places, document, delete, as_json)


def _show(places: Sequence[Place], document: dict[str, Any], delete: bool, as_json: bool) -> None:
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
