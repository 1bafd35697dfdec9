"""The section `source.complete`: what says that a day of a source is complete, so that it may be taken."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, field_validator, model_validator

from headrace.config.section import LocationText, Section
from headrace.schema import is_of_list, path_steps

#: In place of a duration: the end of the day, whatever its length.
END_OF_DAY = "end_of_day"
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_duration(text: str) -> timedelta:
    """`36h`, `1d`, `23h30m`, `90s`.

    Raises:
        ValueError: it is no such duration.
    """
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"'{text}' is no duration such as 36h, 23h30m or 90s")
    days, hours, minutes, seconds = (int(n or 0) for n in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _moment(text: str) -> str:
    if text != END_OF_DAY:
        parse_duration(text)
    return text


class Watermark(Section):
    """A time column that has come so far."""

    #: A column of the table, timestamp or date: for example when a row was written.
    column: str
    #: Its greatest value must have reached this: `end_of_day`, or so long after the beginning of the day (`36h`).
    at_least: Annotated[str, AfterValidator(_moment)] = END_OF_DAY


class ControlFile(Section):
    """A file that says how many rows the day has."""

    #: With {ds} in it; below the workspace's lake unless absolute or a URI.
    path: LocationText
    #: The number's place in a JSON object: `counts.rows`. Without `key` and `column` the file is the number alone.
    key: str | None = None
    #: The number is the sum of this column of a CSV file with a header.
    column: str | None = None

    @field_validator("key")
    @classmethod
    def _is_path(cls, value: str | None) -> str | None:
        if value is not None and any(map(is_of_list, path_steps(value))):
            raise ValueError(f"'{value}' leads into a list; the number must stand in objects alone")
        return value

    @model_validator(mode="after")
    def _one(self) -> ControlFile:
        if self.key is not None and self.column is not None:
            raise ValueError("key is for JSON and column for CSV; give one of them")
        return self


class Complete(Section):
    """When a day is complete: all that is given must hold. Until then a run for the day ends with exit code 75."""

    #: A file of this name is in the day's folder (that of `source.path`, up to its first wildcard): _SUCCESS.
    success_file: str | None = None
    #: This file is there, with {ds} in its name; below the workspace's lake unless absolute or a URI.
    marker: LocationText | None = None
    #: A time column of the day's rows has come so far.
    watermark: Watermark | None = None
    #: This file is there, and the day has as many rows as it says (headers and empty lines are none; bad rows are).
    control: ControlFile | None = None

    @field_validator("success_file")
    @classmethod
    def _is_name(cls, value: str | None) -> str | None:
        if value is not None and (not value or "/" in value):
            raise ValueError(f"'{value}' is no file's name")
        return value

    @model_validator(mode="after")
    def _some(self) -> Complete:
        if not self.model_dump(exclude_none=True):
            raise ValueError("say how: success_file, marker, watermark or control")
        return self
