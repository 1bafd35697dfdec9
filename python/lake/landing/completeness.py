"""Whether a day of a source is complete, by the spec's `source.complete`.

Markers and control files are looked for before the day's files are listed: a writer puts them there last, so what is
listed after they were seen is all of the day. A watermark and a control file's count need the rows.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache

from headrace.config import AnySource, ControlFile, parse_duration
from headrace.config.source import END_OF_DAY
from headrace.errors import IncompleteError, UserError
from headrace.lake.calendar import following, midnight
from headrace.lake.landing.files import day_folders, marker_places
from headrace.lake.landing.source_context import SourceContext
from headrace.schema import path_steps
from headrace.storage import Location
from headrace.workspace import Workspace

_LOG = logging.getLogger("headrace.lake")


def lacking(source: AnySource, ws: Workspace, ds: str) -> list[str]:
    """What a day still lacks of markers and control files, each as a clause for a message; empty: nothing."""
    wanted = source.complete
    if wanted is None:
        return []
    found = []
    if wanted.success_file is not None:
        folders = day_folders(source, ws, ds)
        if not any((folder / wanted.success_file).is_file() for folder in folders):
            found.append(f"{wanted.success_file} is not in {' nor '.join(map(str, folders))}")
    if wanted.marker is not None and _first(wanted.marker, ws, ds) is None:
        found.append(f"the marker {_shown(wanted.marker, ws, ds)} is not there")
    if wanted.control is not None:
        control = _first(wanted.control.path, ws, ds)
        size = None if control is None else _size(control)
        if size is None:
            found.append(f"the control file {_shown(wanted.control.path, ws, ds)} is not there")
        elif not size:
            found.append(f"the control file {control} is still empty")
    return found


def declared_rows(source: AnySource, ws: Workspace, ds: str) -> int | None:
    """How many rows the control file of a day says it has; None where the spec names none.

    Raises:
        UserError: the file is gone, or the number is not where the spec says.
    """
    if source.complete is None or source.complete.control is None:
        return None
    control = source.complete.control
    path = _first(control.path, ws, ds)
    gone = UserError(f"the control file {_shown(control.path, ws, ds)} of {ds} is gone")
    if path is None:
        raise gone
    try:
        return _number(path.read_text(), control)
    except FileNotFoundError:  # removed just now
        raise gone from None
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as e:
        what = (
            f"key '{control.key}'" if control.key else f"column '{control.column}'" if control.column else "the number"
        )
        raise UserError(
            f"control file {path}: {what} is no number of rows ({e}); deliver it again, or say where the number is "
            f"(source.complete.control: key of a JSON object, or column of a CSV file)"
        ) from None


def wanted_watermark(source: AnySource, ds: str) -> datetime | None:
    """What the greatest value of the watermark's column must have reached (UTC); None where the spec names none."""
    if source.complete is None or source.complete.watermark is None:
        return None
    at_least = source.complete.watermark.at_least
    if at_least == END_OF_DAY:
        return midnight(source, following(ds))
    return midnight(source, ds) + parse_duration(at_least)


def behind(source: AnySource, ds: str, greatest: datetime | None) -> str | None:
    """Why a day is not complete by its watermark, as a clause for a message; None: it is.

    `greatest`: of the watermark's column (UTC, naive or aware alike not: aware); None: it has no value.
    """
    wanted = wanted_watermark(source, ds)
    if wanted is None or (greatest is not None and greatest >= wanted):
        return None
    assert source.complete is not None
    assert source.complete.watermark is not None
    reached = "nothing" if greatest is None else greatest.isoformat()
    return f"'{source.complete.watermark.column}' has reached {reached}, and {wanted.isoformat()} is wanted"


def incomplete(ctx: SourceContext, ds: str, lacks: Sequence[str]) -> IncompleteError:
    """That a day cannot be taken yet, and why."""
    day = ds if ctx.name is None else f"{ds} of source '{ctx.name}'"
    return IncompleteError(f"{day} is not complete yet: {'; '.join(lacks)}. Nothing of it was loaded; try again later")


@lru_cache(maxsize=1 << 10)
def warn_left_out(ds: str, why: str) -> None:
    """Say that a day before the run's own is not taken: once, however often a run looks at its days."""
    _LOG.warning("%s is left out as it is not complete: %s", ds, why)


def _first(path: str, ws: Workspace, ds: str) -> Location | None:
    return next((place for place in marker_places(path, ws, ds) if place.is_file()), None)


def _size(file: Location) -> int | None:
    """None where it was removed just now."""
    with suppress(FileNotFoundError):
        return file.size()
    return None


def _shown(path: str, ws: Workspace, ds: str) -> str:
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
