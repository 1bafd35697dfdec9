"""`headrace gc`: what can go, and its going."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from headrace.commands.screen import out, print_json, table
from headrace.config import load_spec
from headrace.jobs.housekeeping.collect import collect
from headrace.workspace import Workspace


def gc(ws: Workspace, pipeline: str, delete: bool, overrides: Sequence[str] = (), as_json: bool = False) -> None:
    """List what the section `housekeeping` does not keep; with `delete`, remove it.

    Raises:
        UserError: see `headrace.jobs.housekeeping.collect.collect`.
    """
    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
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
