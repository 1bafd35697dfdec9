"""What was asked to be forgotten, and the list that ingest consults: both durable before anything is erased."""

from __future__ import annotations

import hashlib
import socket
from datetime import datetime

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.account import user_name
from headrace.errors import UserError
from headrace.housekeeping.forget.persons import Persons
from headrace.lake.forgotten import ForgottenValues, listed_in
from headrace.own_records import newer_release
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

    @staticmethod
    def load(file: Location) -> Request:
        """The request in a file. Raises UserError where it is damaged, or of a newer release."""
        try:
            return Request.model_validate_json(file.read_text())
        except ValidationError as e:
            for fault in e.errors():
                if fault["type"] == "extra_forbidden":
                    raise newer_release(str(file), str(fault["loc"][-1])) from None
            raise UserError(
                f"{file} is damaged ({e.errors()[0]['msg']}): remove it, and run headrace forget again with its values"
            ) from None

    def save(self, folder: Location) -> None:
        """Write it in one step; `folder`: of the pipeline's requests."""
        (folder / self.id / "request.json").put_text(self.model_dump_json(indent=1) + "\n")


def begin(ws: Workspace, pipeline: str, persons: Persons, now: datetime) -> Request:
    """Write the list of hashes and the request. The same values again are the same request.

    Raises:
        UserError: the list or the request is damaged, or of a newer release.
    """
    listed = listed_in(ws.forgotten_values(pipeline), persons.column, sorted(persons.texts))
    name = _sha256(persons.column, *sorted(listed.hashes(persons.column, sorted(persons.texts))))[:_ID_CHARS]
    there = ws.forgotten(pipeline) / name / "request.json"
    if there.is_file():
        return Request.load(there)
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
    request = Request.load(file)
    return (request.erased or request.finished) is not None


def _sha256(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
