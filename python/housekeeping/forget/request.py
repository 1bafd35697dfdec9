"""What was asked to be forgotten, and the list that ingest consults: both durable before anything is erased."""

from __future__ import annotations

import hashlib
import socket
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from headrace.account import user_name
from headrace.housekeeping.forget.persons import Persons
from headrace.lake.forgotten import ForgottenValues, listed_in
from headrace.storage import Location
from headrace.workspace import Workspace

_ID_CHARS = 16


class Request(BaseModel):
    """`request.json`: who asked for what. The values are not in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    pipeline: str
    column: str
    #: How many, and the SHA-256 of the salt and the sorted list: who has both can show that they are these.
    values: int
    sha256: str
    by: str
    begun: datetime
    #: When all that the pipeline has written was without them; None: not yet, or (if `finished`) before it was noted.
    erased: datetime | None = None
    #: When nothing was left that the command knows of, of other pipelines' copies on this host either; None: not yet.
    finished: datetime | None = None

    def save(self, folder: Location) -> None:
        """Write it in one step; `folder`: of the pipeline's requests."""
        (folder / self.id / "request.json").put_text(self.model_dump_json(indent=1) + "\n")


def begin(ws: Workspace, pipeline: str, persons: Persons, now: datetime) -> Request:
    """Write the list of hashes and the request. The same values again are the same request.

    Raises:
        UserError: the list is damaged.
    """
    listed = listed_in(ws.forgotten_values(pipeline), persons.column, sorted(persons.texts))
    name = _sha256(persons.column, *sorted(listed.hashes(persons.column, sorted(persons.texts))))[:_ID_CHARS]
    there = ws.forgotten(pipeline) / name / "request.json"
    if there.is_file():
        return Request.model_validate_json(there.read_text())
    request = Request(
        id=name,
        pipeline=pipeline,
        column=persons.column,
        values=len(persons.texts),
        sha256=_sha256(listed.salt, persons.column, *sorted(persons.texts)),
        by=f"{user_name()}@{socket.gethostname()}",
        begun=now,
    )
    request.save(ws.forgotten(pipeline))
    return request


def is_erased(ws: Workspace, pipeline: str, persons: Persons) -> bool:
    """Whether these values went from all that the pipeline has written, as far as the requests say."""
    known = ForgottenValues.load(ws.forgotten_values(pipeline))
    if known is None:
        return False
    name = _sha256(persons.column, *sorted(known.hashes(persons.column, persons.texts)))[:_ID_CHARS]
    file = ws.forgotten(pipeline) / name / "request.json"
    if not file.is_file():
        return False
    request = Request.model_validate_json(file.read_text())
    return (request.erased or request.finished) is not None


def _sha256(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
