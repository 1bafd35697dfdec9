"""What was done, for whoever asks: a JSON file and a text, without the values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any

from headrace import __version__
from headrace.housekeeping.forget.place import Place
from headrace.housekeeping.forget.request import Request
from headrace.housekeeping.forget.scan import Scan
from headrace.storage import Location
from headrace.workspace import Workspace

_COUNTS = ("rows", "rewritten", "removed", "size")


def note(ws: Workspace, request: Request, place: Place, now: datetime) -> None:
    """Add a place to what the request has come to, before anything is done there: a run that is killed has said so."""
    line = json.dumps({"at": now.isoformat(), **_said(place)})
    _journal(ws, request).append(f"{line}\n".encode())


def write(
    ws: Workspace, request: Request, second: Sequence[Place], searched: Scan, left: Sequence[Place], now: datetime
) -> Location:
    """Write `proof.json` and `proof.txt` into the request's folder: what each of its runs has come to.

    Args:
        ws: the workspace.
        request: finished or not.
        second: what a second look has found.
        searched: what the search of all files has found.
        left: what could not be done, or is done by a later run.
        now: when.

    Returns:
        the text.
    """
    folder = ws.forgotten(request.pipeline) / request.id
    runs: dict[str, dict[str, Any]] = {}
    journal = _journal(ws, request)
    for line in journal.read_text().splitlines() if journal.is_file() else ():
        # A process that is killed may leave a part of one.
        with suppress(ValueError):
            said = json.loads(line)
            runs.setdefault(said.pop("at"), {"places": []})["places"].append(said)
    at_end = {
        "second_look": [_said(p) for p in second],
        "search": asdict(searched),
        "left": [_said(p) for p in left],
        "code_version": __version__,
    }
    runs[now.isoformat()] = runs.get(now.isoformat(), {"places": []}) | at_end
    listed = [{"at": at, **run} for at, run in sorted(runs.items())]
    text = json.dumps(request.model_dump(mode="json") | {"runs": listed}, indent=1) + "\n"
    (folder / "proof.json").put_text(text)
    (folder / "proof.txt").put_text(_text(request, listed))
    return folder / "proof.txt"


def _journal(ws: Workspace, request: Request) -> Location:
    return ws.forgotten(request.pipeline) / request.id / "places.jsonl"


def _said(place: Place) -> dict[str, Any]:
    found = {name: getattr(place, name) for name in ("kind", "what", *_COUNTS, "note", "left")}
    return {name: value for name, value in found.items() if value}


def _text(request: Request, runs: Sequence[dict[str, Any]]) -> str:
    state = f"finished {request.finished:%Y-%m-%d %H:%M:%S} UTC" if request.finished else "NOT FINISHED"
    lines = [
        f"Forgotten: {request.values:,} values of {request.column} in {request.pipeline}; {state}",
        f"request {request.id}, by {request.by}, begun {request.begun:%Y-%m-%d %H:%M:%S} UTC",
        f"SHA-256 of the salted list: {request.sha256}",
    ]
    for run in runs:
        lines += ["", f"{run['at'][:19]} UTC" + ("" if "search" in run else ", interrupted"), ""]
        lines += [_line(p) for p in run["places"]]
        if "search" not in run:
            continue
        found = run["search"]
        lines += [
            "",
            f"second look at all places: {len(run['second_look'])} have some",
            f"search of {found['files']:,} files ({found['parquet']:,} Parquet, decoded; {found['bytes'] / 2**20:,.1f} "
            f"MiB): {len(found['found'])} have some",
        ]
        lines += [f"  NOT LOOKED AT: {what}" for what in found["unread"]]
        lines += [f"  LEFT: {what}" for what in [*(p["what"] for p in run["second_look"]), *found["found"]]]
        # Proofs of earlier versions do not say.
        lines += [f"  LEFT: {p['what']}: {p['left']}" for p in run.get("left", ())]
    return "\n".join(lines) + "\n"


def _line(place: dict[str, Any]) -> str:
    counts = [
        f"{place[name]:,} {what}"
        for name, what in (("rows", "rows"), ("rewritten", "files written again"), ("removed", "files removed"))
        if name in place
    ]
    more = "".join(f"; {place[name]}" for name in ("note", "left") if name in place)
    return f"{place['kind']:<10} {place['what']}: {', '.join(counts) or '-'}{more}"
