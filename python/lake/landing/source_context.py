"""One source of a pipeline for `ingest`: its declaration, its two tables, and whether a day of it is complete.

Markers and control files of `source.complete` are checked before the day's files are listed. Their writer puts them
last, so a list that is made afterwards has all files of the day. A watermark and a control file's count need the rows.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.config import (
    AnySource,
    ControlFile,
    LandingSource,
    Source,
    Table,
    TableSource,
    id_columns,
    parse_duration,
)
from headrace.config.schema import path_steps
from headrace.config.source import END_OF_DAY, following, midnight
from headrace.config.workspace import Workspace
from headrace.errors import IncompleteError, UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.files import day_folders, file_patterns, marker_places
from headrace.lake.landing.load_history import LoadHistory
from headrace.lake.scratch import task_folder
from headrace.stage import Context
from headrace.storage import Location, StoreRefused, is_uri

if TYPE_CHECKING:
    from headrace.lake.forgotten import ForgottenValues


@dataclass(frozen=True)
class SourceContext:
    """One source of a run. Sources are independent of each other."""

    run: Context
    #: Name of the source; None: the main source, whose table is `events`.
    name: str | None
    source: Source
    table: Table

    @property
    def ws(self) -> Workspace:
        return self.run.ws

    @property
    def pipeline(self) -> str:
        return self.run.spec.pipeline

    @property
    def ds(self) -> str:
        return self.run.ds

    @property
    def key(self) -> str:
        """The key of the run."""
        return self.run.key

    @property
    def events(self) -> Location:
        """The Delta table of good rows."""
        return self.ws.events(self.pipeline, self.name)

    @property
    def quarantine(self) -> Location:
        """The Delta table of bad rows."""
        return self.ws.quarantine(self.pipeline, self.name)

    def staging(self) -> AbstractContextManager[Location]:
        """Give an empty folder for staged rows, which is removed at the end."""
        return task_folder(self.run, "ingest", self.name)

    @property
    def forgotten(self) -> ForgottenValues | None:
        """Values in this source's columns that `headrace forget` has erased; None: there are none."""
        from headrace.lake.forgotten import ForgottenValues

        values = ForgottenValues.load(self.ws.forgotten_values(self.pipeline))
        return None if values is None else values.restricted_to([c.name for c in self.table.columns])

    @property
    def ids(self) -> frozenset[str]:
        """The declared text columns whose values are ids."""
        return id_columns(self.run.spec)[self.name]

    @property
    def table_source(self) -> TableSource | None:
        """The source if it is a table, else None."""
        return self.source if isinstance(self.source, TableSource) else None

    @property
    def landing_source(self) -> LandingSource:
        """The source if it is landing files.

        Raises:
            UserError: it is a table.
        """
        if isinstance(self.source, LandingSource):
            return self.source
        raise UserError(f"{self.key_prefix}source: {self.source.title} is a table, and this is done with landing files")

    def input_name(self, ds: str) -> str:
        """Return the name of a landing day in manifests: the URI of its files if the spec has one, else a path."""
        source = self.landing_source
        if is_uri(source.path):
            (pattern,) = file_patterns(source, self.ws, ds)
            return str(pattern)
        return f"landing/{self.pipeline}{'' if self.name is None else f'/{self.name}'}/{ds}"

    @property
    def key_prefix(self) -> str:
        """Prefix of `source` and `table` in a key of the spec, for messages."""
        return "" if self.name is None else f"sources.{self.name}."

    @contextmanager
    def naming_keys(self) -> Iterator[None]:
        """Replace a store's refusal by an error with the keys that name the place."""
        try:
            yield
        except StoreRefused as e:
            raise UserError(f"{self.key_prefix}source.path or source.complete: {e}") from None

    def history(self) -> LoadHistory:
        """Return the load history of the table's newest version."""
        return LoadHistory(DeltaLog(self.events))


def source_contexts(ctx: Context) -> Iterator[SourceContext]:
    """Yield the main source, then the named ones in the order of the spec."""
    spec = ctx.spec
    yield SourceContext(ctx, None, spec.source, spec.table)
    for name, named in spec.sources.items():
        yield SourceContext(ctx, name, named.source, named.table)


_LOG = logging.getLogger("headrace.lake")


def missing_markers(source: AnySource, ws: Workspace, ds: str) -> list[str]:
    """Return a clause for a message for each marker and control file that a day lacks."""
    complete = source.complete
    if complete is None:
        return []
    clauses = []
    if complete.success_file is not None:
        folders = day_folders(source, ws, ds)
        if not any((folder / complete.success_file).is_file() for folder in folders):
            clauses.append(f"{complete.success_file} is not in {' nor '.join(map(str, folders))}")
    if complete.marker is not None and _first(complete.marker, ws, ds) is None:
        clauses.append(f"the marker {_place_texts(complete.marker, ws, ds)} is not there")
    if complete.control is not None:
        control = _first(complete.control.path, ws, ds)
        size = None if control is None else _size(control)
        if size is None:
            clauses.append(f"the control file {_place_texts(complete.control.path, ws, ds)} is not there")
        elif not size:
            clauses.append(f"the control file {control} is still empty")
    return clauses


def declared_rows(source: AnySource, ws: Workspace, ds: str) -> int | None:
    """Return the number of rows that a day's control file states; None where the spec names none.

    Raises:
        UserError: the file is gone, or the number is not where the spec says.
    """
    if source.complete is None or source.complete.control is None:
        return None
    control = source.complete.control
    path = _first(control.path, ws, ds)
    missing_error = UserError(f"the control file {_place_texts(control.path, ws, ds)} of {ds} is gone")
    if path is None:
        raise missing_error
    try:
        return _number(path.read_text(), control)
    except FileNotFoundError:  # removed just now
        raise missing_error from None
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as e:
        place_of_number = (
            f"key '{control.key}'" if control.key else f"column '{control.column}'" if control.column else "the number"
        )
        raise UserError(
            f"control file {path}: {place_of_number} is no number of rows ({e}); deliver it again, or say where the "
            f"number is (source.complete.control: key of a JSON object, or column of a CSV file)"
        ) from None


def required_watermark(source: AnySource, ds: str) -> datetime | None:
    """Return the time (UTC) that the watermark's column must reach for a day; None: the spec has no watermark."""
    if source.complete is None or source.complete.watermark is None:
        return None
    at_least = source.complete.watermark.at_least
    if at_least == END_OF_DAY:
        return midnight(source, following(ds))
    return midnight(source, ds) + parse_duration(at_least)


def behind_watermark(source: AnySource, ds: str, greatest: datetime | None) -> str | None:
    """Return a clause for a message that says why the watermark holds a day back; None: it does not.

    `greatest`: the greatest value of the watermark's column (aware, UTC); None: the column has no value.
    """
    required = required_watermark(source, ds)
    if required is None or (greatest is not None and greatest >= required):
        return None
    assert source.complete is not None
    assert source.complete.watermark is not None
    reached = "nothing" if greatest is None else greatest.isoformat()
    return f"'{source.complete.watermark.column}' has reached {reached}, and {required.isoformat()} is wanted"


def incomplete(ctx: SourceContext, ds: str, lacks: Sequence[str]) -> IncompleteError:
    """Return the error that a day is not complete yet, with its reasons."""
    day = ds if ctx.name is None else f"{ds} of source '{ctx.name}'"
    return IncompleteError(f"{day} is not complete yet: {'; '.join(lacks)}. Nothing of it was loaded; try again later")


@lru_cache(maxsize=1 << 10)
def warn_left_out(ds: str, reason: str) -> None:
    """Log once that a day before the run's own is left out, however often a run lists its days."""
    _LOG.warning("%s is left out as it is not complete: %s", ds, reason)


def _first(path: str, ws: Workspace, ds: str) -> Location | None:
    return next((place for place in marker_places(path, ws, ds) if place.is_file()), None)


def _size(file: Location) -> int | None:
    """Return the bytes of a file; None where it was removed just now."""
    with suppress(FileNotFoundError):
        return file.size()
    return None


def _place_texts(path: str, ws: Workspace, ds: str) -> str:
    return " or ".join(map(str, marker_places(path, ws, ds)))


def _number(text: str, control: ControlFile) -> int:
    text = text.removeprefix("\ufeff")
    if control.key is not None:
        value = json.loads(text)
        for step in path_steps(control.key):
            value = value[step]
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"it is {json.dumps(value)}")
        number = int(value)
    elif control.column is not None:
        number = sum(int(row[control.column]) for row in csv.DictReader(io.StringIO(text, newline="")))
    else:
        number = int(text)
    if number < 0:
        raise ValueError(f"it is {number}")
    return number
