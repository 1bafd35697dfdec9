"""Request of an erasure, the search for what remains, and the proof: a JSON file and a text, without the values.

The request and the list of hashes that ingest consults are durable before anything is erased. The search reads every
file of the pipeline by other means than the erasure. Parquet files are decoded: a column of the same name has none of
the values, and no column of texts, or of anything nested, has a text of at least six bytes or an integer of twelve
digits or
more: a shorter one is in another column by chance. The bytes of all other files are searched for the same.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace import __version__
from headrace.config.workspace import Workspace
from headrace.errors import UserError, newer_release
from headrace.jobs.housekeeping.folders import REGISTERED_SUFFIXES
from headrace.jobs.housekeeping.forget.persons import Persons, Place
from headrace.jobs.housekeeping.workspace_state import WorkspaceState
from headrace.lake.forgotten import ForgottenValues, listed_in
from headrace.lake.scratch import STAGE_FOLDERS
from headrace.models.registry.artifact import staging
from headrace.publish.target import table_name
from headrace.stage.resources import user_name
from headrace.storage import Location, StoreAway, local
from headrace.storage.objects import copies

_ID_CHARS = 16

_BLOCK = 1 << 24
_COUNTS = ("rows", "rewritten", "removed", "size")


class ErasureRequest(BaseModel):
    """Content of `request.json`: who requested which erasure. The values are not in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    pipeline: str
    column: str
    #: Number of values, and the SHA-256 of the salt and the sorted list, by which the list can be verified.
    values: int
    sha256: str
    by: str
    begun: datetime
    #: Time since which the pipeline's own outputs lack the values; None: not yet, or (if `finished`) not recorded.
    erased: datetime | None = None
    #: Time since which no known place has them, other pipelines' copies on this host included; None: not yet.
    finished: datetime | None = None

    @staticmethod
    def load(file: Location) -> ErasureRequest:
        """Return the request in a file. Raises UserError where it is damaged, or of a newer release."""
        try:
            return ErasureRequest.model_validate_json(file.read_text())
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


def begin(ws: Workspace, pipeline: str, persons: Persons, now: datetime) -> ErasureRequest:
    """Write the list of hashes and the request. The same values again are the same request.

    Raises:
        UserError: the list or the request is damaged, or of a newer release.
    """
    listed = listed_in(ws.forgotten_values(pipeline), persons.column, sorted(persons.texts))
    name = _sha256(persons.column, *sorted(listed.hashes(persons.column, sorted(persons.texts))))[:_ID_CHARS]
    existing = ws.forgotten(pipeline) / name / "request.json"
    if existing.is_file():
        return ErasureRequest.load(existing)
    request = ErasureRequest(
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
    """Return whether these values went from all that the pipeline has written, as far as the requests say."""
    known = ForgottenValues.load(ws.forgotten_values(pipeline))
    if known is None:
        return False
    name = _sha256(persons.column, *sorted(known.hashes(persons.column, persons.texts)))[:_ID_CHARS]
    file = ws.forgotten(pipeline) / name / "request.json"
    if not file.is_file():
        return False
    request = ErasureRequest.load(file)
    return (request.erased or request.finished) is not None


def _sha256(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass
class Scan:
    """Result of a search."""

    files: int = 0
    parquet: int = 0
    bytes: int = 0
    #: Names of files that have a value.
    matches: list[str] = field(default_factory=list)
    #: Names of files that could not be read, and were not looked at.
    unread: list[str] = field(default_factory=list)


def scan(state: WorkspaceState, persons: Persons) -> Scan:
    """Search all files of the pipeline below the workspace, and the registry, which pipelines share.

    Landing files and other pipelines' files are not searched.
    """
    return _search(_files(state), state, persons, Scan())


def scan_copies(state: WorkspaceState, persons: Persons, result: Scan) -> Scan:
    """Search this host's copies of a store's files, of any pipeline, and add the result: `scan` itself fetches some."""
    copied_files = () if state.ws.is_local else copies.cached_files()
    return _search(map(local, copied_files), state, persons, result)


def _search(files: Iterable[Location], state: WorkspaceState, persons: Persons, result: Scan) -> Scan:
    for file in files:
        is_parquet = file.suffix == ".parquet"
        try:
            size = file.size()
            has = _in_parquet(file, persons) if is_parquet else _in_bytes(file.local_path(), persons)
        except FileNotFoundError:
            # Removed meanwhile, such as a file of a database in use.
            continue
        except StoreAway:  # the file could not be read: the same call continues later
            raise
        except (pa.ArrowInvalid, OSError):
            result.unread.append(state.ws.name_of(file))
            continue
        result.files += 1
        result.bytes += size
        result.parquet += is_parquet
        if has:
            result.matches.append(state.ws.name_of(file))
    return result


def _files(state: WorkspaceState) -> Iterator[Location]:
    ws, pipeline = state.ws, state.pipeline
    places = [
        ws.table(pipeline, "x").parent,
        ws.staging(pipeline),
        ws.dataset(pipeline, "x", "x").parent.parent,
        ws.model(pipeline, "x", "x").parent.parent,
        ws.search(pipeline, "x", "x").parent.parent,
        ws.runs(pipeline),
        ws.report(pipeline, "x").parent,
        ws.log(pipeline, "x", "x").parent.parent,
        ws.forgotten(pipeline),
        ws.promotions(pipeline),
        ws.encoded(pipeline),
        ws.mapped(pipeline),
        *(staging(ws, pipeline + suffix) for suffix in REGISTERED_SUFFIXES),
        *(ws.spark_local / kind / pipeline for kind in STAGE_FOLDERS),
    ]
    if state.spec.publish is not None:
        name, warehouse = table_name(state.spec), ws.lake / "warehouse"
        places += [warehouse / name, warehouse / f"{name}_current", warehouse / "headrace_publications" / name]
        places += [ws.store / "online" / f"{name}.lmdb"]
    for place in places:
        yield from [place] if place.is_file() else place.files()
    yield from (e for e in ws.store.entries() if e.name.startswith("mlflow.db"))


def _in_parquet(file: Location, persons: Persons) -> bool:
    parquet = pq.ParquetFile(file.local_path(), coerce_int96_timestamp_unit="us")
    names = [f.name for f in parquet.schema_arrow if _is_searched(f, persons)]
    for group in range(parquet.num_row_groups if names else 0):
        rows = parquet.read_row_group(group, columns=names, use_threads=False)
        if any(_in_values(rows.column(name), name, persons) for name in rows.column_names):
            return True
    return False


def _is_searched(f: Any, persons: Persons) -> bool:
    text = pa.types.is_string(f.type) or pa.types.is_large_string(f.type) or pa.types.is_dictionary(f.type)
    nested = pa.types.is_nested(f.type)
    has_texts = (nested and not persons.integers) or ((nested or text) and bool(persons.long_texts))
    return f.name == persons.column or has_texts


def _in_values(values: Any, name: str, persons: Persons) -> bool:
    if pa.types.is_nested(values.type):
        return any(_in_object(x, name, persons) for x in values.to_pylist())
    return bool(replace(persons, texts=_sought(name, persons)).mask(values).any())


def _in_object(value: Any, name: str, persons: Persons) -> bool:
    if isinstance(value, dict):
        return any(_in_object(v, k, persons) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return any(_in_object(v, name, persons) for v in value)
    kind = isinstance(value, str) or (persons.integers and isinstance(value, int))
    return kind and str(value) in _sought(name, persons)


def _sought(name: str, persons: Persons) -> frozenset[str]:
    """Return the values that are theirs in a column."""
    return persons.texts if name == persons.column else persons.long_texts


def _in_bytes(file: Path, persons: Persons) -> bool:
    """Search block by block; a value may lie across two."""
    tail = b""
    with file.open("rb") as f:
        while persons.searchable and (block := f.read(_BLOCK)):
            if persons.in_bytes(tail + block):
                return True
            # One byte more shows whether an integer begins there.
            tail = block[-persons.longest - 1 :]
    return False


def note(ws: Workspace, request: ErasureRequest, place: Place, now: datetime) -> None:
    """Add a place to the request's journal before it is erased, so that a killed run has recorded it."""
    line = json.dumps({"at": now.isoformat(), **_record(place)})
    _journal(ws, request).append(f"{line}\n".encode())


def write(
    ws: Workspace,
    request: ErasureRequest,
    second: Sequence[Place],
    searched: Scan,
    left: Sequence[Place],
    now: datetime,
) -> Location:
    """Write `proof.json` and `proof.txt` into the request's folder: the results of each of its runs.

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
            record = json.loads(line)
            runs.setdefault(record.pop("at"), {"places": []})["places"].append(record)
    at_end = {
        "second_look": [_record(p) for p in second],
        "search": {
            "files": searched.files,
            "parquet": searched.parquet,
            "bytes": searched.bytes,
            "found": searched.matches,
            "unread": searched.unread,
        },
        "left": [_record(p) for p in left],
        "code_version": __version__,
    }
    runs[now.isoformat()] = runs.get(now.isoformat(), {"places": []}) | at_end
    listed = [{"at": started, **run} for started, run in sorted(runs.items())]
    text = json.dumps(request.model_dump(mode="json") | {"runs": listed}, indent=1) + "\n"
    (folder / "proof.json").put_text(text)
    (folder / "proof.txt").put_text(_text(request, listed))
    return folder / "proof.txt"


def _journal(ws: Workspace, request: ErasureRequest) -> Location:
    return ws.forgotten(request.pipeline) / request.id / "places.jsonl"


def _record(place: Place) -> dict[str, Any]:
    fields = {"kind": place.kind, "what": place.name, **{n: getattr(place, n) for n in (*_COUNTS, "note", "left")}}
    return {name: value for name, value in fields.items() if value}


def _text(request: ErasureRequest, runs: Sequence[dict[str, Any]]) -> str:
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
        search = run["search"]
        lines += [
            "",
            f"second look at all places: {len(run['second_look'])} have some",
            f"search of {search['files']:,} files ({search['parquet']:,} Parquet, decoded; "
            f"{search['bytes'] / 2**20:,.1f} MiB): {len(search['found'])} have some",
        ]
        lines += [f"  NOT LOOKED AT: {name}" for name in search["unread"]]
        lines += [f"  LEFT: {name}" for name in [*(p["what"] for p in run["second_look"]), *search["found"]]]
        # Proofs of earlier releases lack `left`.
        lines += [f"  LEFT: {p['what']}: {p['left']}" for p in run.get("left", ())]
    return "\n".join(lines) + "\n"


def _line(place: dict[str, Any]) -> str:
    counts = [
        f"{place[name]:,} {unit}"
        for name, unit in (("rows", "rows"), ("rewritten", "files written again"), ("removed", "files removed"))
        if name in place
    ]
    more = "".join(f"; {place[name]}" for name in ("note", "left") if name in place)
    return f"{place['kind']:<10} {place['what']}: {', '.join(counts) or '-'}{more}"
