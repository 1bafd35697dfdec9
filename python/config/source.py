"""The section `source`: landing files or a table, the days of a run, and when a day is complete."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from headrace.config.formats import FILE_FORMATS, TABLE_FORMATS, FileFormat, TableFormat, check_format, is_table_format
from headrace.config.schema import EpochUnit, TimeFormat, is_of_list, path_steps
from headrace.config.section import LocationText, PatternText, Section, checked_days, names_day, path_of_day
from headrace.errors import nearest

#: In place of a duration: the end of the day, whatever its length.
END_OF_DAY = "end_of_day"
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_duration(text: str) -> timedelta:
    """Return the duration that a text such as `36h`, `1d`, `23h30m` or `90s` means.

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
    """A time column that must have reached a moment."""

    #: A column of the table, timestamp or date: for example when a row was written.
    column: str
    #: The greatest value must have reached this: `end_of_day`, or a time after the beginning of the day (`36h`).
    at_least: Annotated[str, AfterValidator(_moment)] = END_OF_DAY


class ControlFile(Section):
    """A file that says how many rows the day has."""

    #: Path of the file, with {ds}; below the workspace's lake unless absolute or a URI.
    path: LocationText
    #: Path of the number in a JSON object: `counts.rows`. Without `key` and `column` the file is the number alone.
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
    def _one_format(self) -> ControlFile:
        if self.key is not None and self.column is not None:
            raise ValueError("key is for JSON and column for CSV; give one of them")
        return self


class Complete(Section):
    """Conditions of a complete day: all that are set must hold. Until then a run for the day ends with exit code 75."""

    #: A file of this name exists in the day's folder (that of `source.path`, up to its first wildcard): _SUCCESS.
    success_file: str | None = None
    #: This file exists, with {ds} in its name; below the workspace's lake unless absolute or a URI.
    marker: LocationText | None = None
    #: A time column of the day's rows has reached a moment.
    watermark: Watermark | None = None
    #: This file exists, and the day has the number of rows in it (headers and empty lines do not count; bad rows do).
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


#: What may be done about rows that came, changed or went after their day was taken.
LateChange = Literal["accept", "refuse"]
RowChange = Literal["accept", "ignore", "refuse"]

_DAY_PARTS = 3
_IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*")


_EPOCH_UNITS = get_args(EpochUnit)


def _time_spelling(text: str) -> str:
    if text not in _EPOCH_UNITS:
        if "%" not in text:
            units = ", ".join(_EPOCH_UNITS)
            raise ValueError(f"'{text}' is no spelling of times: one of {units}, or a format such as %d.%m.%Y %H:%M")
        TimeFormat(text)
    return text


#: How a column of times is spelled: a unit of numbers since 1970, or a format in the words of `strptime`.
TimeSpelling = Annotated[str, AfterValidator(_time_spelling)]


class AnySource(Section):
    """The keys that all sources have."""

    #: Days before the run's day that are loaded as well, if they are not loaded yet.
    catch_up_days: int = Field(default=30, ge=0)
    #: Time zone of the source (IANA name). A day lasts from midnight to midnight in it (23 or 25 hours where the clocks
    #: change), and times without an offset belong to it. The lake has UTC.
    timezone: str = "UTC"
    #: Formats of time columns that are not ISO 8601: numbers since 1970 in UTC (epoch_seconds, epoch_milliseconds,
    #: epoch_microseconds, epoch_nanoseconds), or a format of `strptime` (`"%d.%m.%Y %H:%M"`; landing files alone).
    timestamps: Mapping[str, TimeSpelling] = Field(default_factory=dict)
    #: Conditions for a complete day. None: a day is taken in its state at the run.
    complete: Complete | None = None

    @field_validator("timezone")
    @classmethod
    def _zone_exists(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            hint = nearest(value, available_timezones())
            raise ValueError(f"'{value}' is no IANA time zone such as Europe/Berlin{hint}") from None
        return value

    def epoch_unit(self, column: str) -> EpochUnit | None:
        """Return what the numbers of a column of times count; None where it has none."""
        return next((unit for unit in get_args(EpochUnit) if self.timestamps.get(column) == unit), None)

    def time_format(self, column: str) -> TimeFormat | None:
        """Return the format of a column's times; None where they are ISO 8601, or numbers."""
        spelled = self.timestamps.get(column)
        return None if spelled is None or spelled in _EPOCH_UNITS else TimeFormat(spelled)

    @property
    def number_marks(self) -> tuple[str, str | None]:
        """Return the sign before the fraction of a number, and the one between each three digits (None: nothing)."""
        return ".", None

    @property
    def daily(self) -> bool:
        """Return whether each day brings rows of its own; else a run's day holds all of the source."""
        raise NotImplementedError

    @property
    def places(self) -> tuple[str, ...]:
        """Return the paths and URIs that the source names: of rows, and of files that say that a day is complete."""
        complete = self.complete
        named = (complete.marker, complete.control.path if complete.control else None) if complete else ()
        return tuple(text for text in (self._path, *named) if text is not None)

    @property
    def _path(self) -> str | None:
        raise NotImplementedError


class LandingSource(AnySource):
    """Landing files.

    `path` is a glob, below the workspace's lake unless absolute or a URI. With `{ds}` in it, each day has its own files
    (a day's run also catches up on earlier days not yet loaded); without, the files are one snapshot, loaded as the
    run's ds.
    """

    #: Format of the files.
    format: Annotated[str, FILE_FORMATS]
    #: A glob, as a path or a URI. {ds} is the day, {ds:%Y/%m/%d} the day in another format (%Y, %m, %d, without leading
    #: zeros %-m, %-d).
    path: PatternText
    #: csv only: the character between two fields.
    separator: str = ","
    #: csv only: the escape character before a quote within a quoted field, and before itself there (Spark's form: a
    #: backslash). null: quotes are doubled (RFC 4180), which is read in any case.
    escape: str | None = None
    #: csv only: whether the first line of each file has the names of the columns; otherwise they are the declared ones,
    #: in order.
    header: bool = True
    #: csv only: the text that means null, besides the empty one.
    null_value: str | None = None
    #: csv only: further texts that mean null.
    null_values: tuple[str, ...] = ()
    #: csv only: the decimal separator of numbers.
    decimal: Literal[".", ","] = "."
    #: csv only: the thousands separator of numbers; a blank also matches a no-break space.
    thousands: Literal[".", ",", " ", "'", "_"] | None = None
    #: Delimited text (csv, clicks) only: a quoted field may have line breaks. Python reads the files, each in one task.
    multiline: bool = False
    #: csv only: whether blanks around fields and names of the header are removed.
    trim: bool = False

    @field_validator("format", mode="before")
    @classmethod
    def _format_exists(cls, value: Any) -> Any:
        check_format(value)
        return value

    @model_validator(mode="after")
    def _escape_is_a_character(self) -> LandingSource:
        if self.escape is not None:
            if self.format != "csv":
                raise ValueError(f"escape: fields of format '{self.format}' have none; leave it out")
            is_sign = len(self.escape) == 1 and self.escape.isascii() and self.escape.isprintable()
            if not is_sign or self.escape in ('"', " ", self.separator):
                raise ValueError(f"escape: {self.escape!r} must be one character of ASCII, no quote and no separator")
        return self

    @model_validator(mode="after")
    def _numbers_are_told_apart(self) -> LandingSource:
        if self.decimal == self.thousands:
            raise ValueError(f"decimal and thousands are both '{self.decimal}'")
        for key in ("null_values", "decimal", "thousands"):
            if self.format != "csv" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: format '{self.format}' says itself how values are written; leave it out")
        return self

    @property
    def null_texts(self) -> tuple[str, ...]:
        """Return the texts that mean null, besides the empty one."""
        return (*([] if self.null_value is None else [self.null_value]), *self.null_values)

    @model_validator(mode="after")
    def _success_file_is_of_a_day(self) -> LandingSource:
        # Two days differ before the first wildcard.
        first, second = (
            list(itertools.takewhile(lambda part: not glob.has_magic(part), path_of_day(self.path, ds).split("/")[:-1]))
            for ds in ("2000-01-31", "2011-12-10")
        )
        if self.complete and self.complete.success_file and self.daily and first == second:
            raise ValueError(
                f"complete.success_file: path {self.path} has no folder for each day before its first wildcard; use "
                f"complete.marker"
            )
        return self

    @model_validator(mode="after")
    def _multiline_is_for_delimited_text(self) -> LandingSource:
        if self.multiline and not self.file_format.multiline:
            raise ValueError(f"multiline: a row of format '{self.format}' is one line; leave it out")
        return self

    @property
    def number_marks(self) -> tuple[str, str | None]:
        return self.decimal, self.thousands

    @property
    def daily(self) -> bool:
        return names_day(self.path)

    @property
    def _path(self) -> str | None:
        return self.path

    @property
    def file_format(self) -> type[FileFormat]:
        """Return the class that describes the format."""
        return FILE_FORMATS.find(self.format, "source.format")


class SourceDay(Section):
    """A day of a table: one of four definitions."""

    #: A column whose value is the day (a date, or text such as 2026-01-31 or 20260131); it need not be declared. Or
    #: three, whose values are year, month and day, of any number of digits: [year, month, day].
    partition: str | tuple[str, ...] | None = None
    #: Parquet, ORC, Avro: how the path of a file below the table's begins, with the day as in a landing file's path:
    #: `{ds:%Y/%m/%d}`, `*/{ds:%Y%m%d}`. What follows is free.
    path: str | None = None
    #: A column of timestamps or dates: a day's rows are those between two midnights in `source.timezone`.
    time: str | None = None
    #: Delta with a change data feed: a day's rows are those that commits inserted and updated since the day before it,
    #: up to its midnight in `source.timezone`. The first day that is taken has the table as it was then.
    changes: bool = False

    @model_validator(mode="after")
    def _one_definition(self) -> SourceDay:
        if sum(key is not None for key in (self.partition, self.time, self.path)) + self.changes != 1:
            raise ValueError("name one of partition: COLUMN, time: COLUMN, path: PATTERN, changes: true")
        if isinstance(self.partition, tuple) and len({name.lower() for name in self.partition}) != _DAY_PARTS:
            raise ValueError("partition: name one column, or three that are year, month and day")
        if self.path is not None and not names_day(checked_days(self.path)):
            raise ValueError(f"path: '{self.path}' has no day; write {{ds}}, or {{ds:%Y/%m/%d}}")
        return self

    @property
    def partitions(self) -> tuple[str, ...]:
        """Return the partition columns: none, the day's, or those of year, month and day."""
        if self.partition is None:
            return ()
        return (self.partition,) if isinstance(self.partition, str) else self.partition


class ChangedDays(Section):
    """Actions for rows of a day that differ from those that the day had when it was first taken.

    With `day.changes`, about what the feed has of a day besides new rows.
    """

    #: Rows that came since. With `day.changes`: rows that were inserted on a day and whose event was before it;
    #: `table.late_days` says which of them are too old.
    late: LateChange = "accept"
    #: Rows with the same `table.keys` and other values. With `day.changes`: `accept` makes an updated row one of the
    #: day of its update, with the values that it has since; `ignore` leaves it as it was, and takes `table.keys`.
    updates: RowChange = "accept"
    #: Rows that are gone. `accept` leaves them out from then on; `ignore`, with `day.changes` alone, keeps them.
    deletes: RowChange = "accept"


class TableSource(AnySource):
    """A table that is read where it is, at a pinned version; nothing of it is copied.

    Given by `path` and `format`, or by `table`, a name in a catalog of the Spark session (`spark.properties` may add
    catalogs). Without `day` the whole table is one snapshot, taken as the run's ds.
    """

    #: With `path`: format of the table.
    format: Annotated[str, TABLE_FORMATS] | None = None
    #: The folder of a table: a path, relative to `lake` unless absolute, or a URI (`s3://BUCKET/FOLDER`, `gs:`,
    #: `abfss:`, `hdfs:`, `file:`).
    path: LocationText | None = None
    #: `events`, `database.events` or `catalog.database.events`.
    table: str | None = None
    #: Definition of a day; null: the whole table is one snapshot.
    day: SourceDay | None = None
    #: The version that is read (Delta's version, Iceberg's snapshot id) instead of the newest.
    version: int | None = None
    #: The newest version that was committed up to this time is read (ISO 8601 with an offset).
    as_of: str | None = None
    #: Actions for days that changed after they were taken.
    changed_days: ChangedDays = ChangedDays()

    @field_validator("format", mode="before")
    @classmethod
    def _format_exists(cls, value: Any) -> Any:
        if value is not None:
            check_format(value)
            if not is_table_format(value):
                raise ValueError(f"'{value}' is a format of landing files; tables: {', '.join(TABLE_FORMATS.known())}")
        return value

    @field_validator("table")
    @classmethod
    def _is_identifier(cls, value: str | None) -> str | None:
        if value is not None and not _IDENTIFIER.fullmatch(value):
            raise ValueError(f"'{value}' is no name such as catalog.database.events")
        return value

    @field_validator("as_of")
    @classmethod
    def _is_instant(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                offset = datetime.fromisoformat(value).utcoffset()
            except ValueError:
                offset = None
            if offset is None:
                raise ValueError(f"'{value}' is no time with an offset such as 2026-01-31T00:00:00Z")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> TableSource:
        if (self.path is None) == (self.table is None):
            raise ValueError("give path and format, or table")
        if self.path is not None and self.format is None:
            raise ValueError(f"key 'format' is missing: of {self.path}; tables: {', '.join(TABLE_FORMATS.known())}")
        if self.path is not None and names_day(self.path):
            raise ValueError("path of a table has no {ds}: say what its days are by day: {partition: COLUMN}")
        if self.day is not None and self.day.path is not None and not self.is_files:
            raise ValueError("day.path is of files in folders; name a partition or a time column")
        if self.version is not None and self.as_of is not None:
            raise ValueError("version and as_of say the same twice; give one of them")
        if self.complete and self.complete.success_file and not self.is_files:
            raise ValueError("complete.success_file is of files in folders; use complete.marker")
        if self.is_files and (self.version is not None or self.as_of is not None):
            raise ValueError(f"format {self.format} has no versions; leave version and as_of out")
        of_path = self.table_format
        if self.day is not None and self.day.changes and of_path is not None and not of_path.has_changes:
            raise ValueError("day.changes is of Delta tables; name a partition or a time column")
        if "ignore" in (self.changed_days.updates, self.changed_days.deletes) and not (self.day and self.day.changes):
            raise ValueError("changed_days: ignore is of day.changes; other days have the rows that the table has")
        return self

    @property
    def daily(self) -> bool:
        return self.day is not None

    @property
    def _path(self) -> str | None:
        return self.path

    @property
    def is_files(self) -> bool:
        """Return whether the table is a folder of files without a log of its own."""
        return self.table_format is not None and self.table_format.is_files

    @property
    def table_format(self) -> type[TableFormat] | None:
        """Return the class that describes the format; None: the table's catalog knows it."""
        return None if self.format is None else TABLE_FORMATS.find(self.format, "source.format")

    @property
    def title(self) -> str:
        """Return the table for a message: its name, or its format and path."""
        return self.table if self.table is not None else f"{self.format} {self.path}"


def _kind(value: Any) -> str:
    if isinstance(value, TableSource):
        return "table"
    if isinstance(value, Mapping) and ("table" in value or is_table_format(value.get("format"))):
        return "table"
    return "landing"


#: A source of a pipeline: a table where `table` is given or `format` is one of tables, else landing files.
Source = Annotated[
    Annotated[LandingSource, Tag("landing")] | Annotated[TableSource, Tag("table")], Discriminator(_kind)
]


def days_of_run(source: AnySource, ds: str) -> list[str]:
    """Return the days that a run for `ds` covers, oldest first: of a daily source `catch_up_days` before it, too."""
    earlier_days = source.catch_up_days if source.daily else 0
    return [following(ds, -k) for k in range(earlier_days, -1, -1)]


def midnight(source: AnySource, ds: str) -> datetime:
    """Return the instant in UTC at which a landing day begins in the source's time zone."""
    day = date.fromisoformat(ds)
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(source.timezone)).astimezone(UTC)


def following(ds: str, days: int = 1) -> str:
    """Return the day so many days after (or before) another."""
    return (date.fromisoformat(ds) + timedelta(days=days)).isoformat()
