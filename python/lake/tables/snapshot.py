"""One version of a source table: its data files and the days they may hold, and its rows for Spark.

A row's place is the data file that holds it and its position there: `_source_file` is the file's path relative to the
table (as Spark spells it in URIs), `_source_line` the row's number in the file, from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from urllib.parse import quote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import TableSource
from headrace.lake.values import stored_name
from headrace.stage.manifest import fingerprint
from headrace.storage import Location, missing, not_as_written
from headrace.storage.uri import other_schemes

FILE, LINE = "_source_file", "_source_line"
#: Column of `Snapshot.rows` with the day (yyyy-MM-dd) of each row, where no column of the table says it.
DAY = "__day"
#: `StoredRows.place` of a table whose rows are all stored alike.
WHOLE_TABLE = "the table"
#: Before and after every day.
FIRST, LAST = "", "9999-99-99"
#: Concurrent reads of footers.
READERS = 16
#: Characters, besides letters and digits, that Java's URIs do not escape in a path.
_URI_SAFE = "/-_.!~*'()+,;:$&=@"


@dataclass(frozen=True)
class TableFile:
    """One live data file."""

    #: `_source_file` of its rows.
    name: str
    path: Location
    #: Bytes.
    size: int
    #: Identity of its content: it differs where the live rows do.
    identity: str
    #: The first and last day of which it may hold rows; a file of no day: both FIRST.
    first: str = FIRST
    last: str = LAST
    #: Values of partition columns as text, by column.
    partition: Mapping[str, str | None] | None = None
    #: Whether it may hold rows of no day besides: without a value in `day.time`, of which bounds do not tell.
    may_lack_days: bool = False

    def may_hold(self, ds: str) -> bool:
        """Return whether the file may hold rows of a day."""
        return self.first <= ds <= self.last


@dataclass(frozen=True)
class StoredRows:
    """Rows that are stored alike: each column has one type."""

    #: At least the requested columns; where the format has them, `_source_file` and `_source_line`.
    frame: DataFrame
    #: Where they are, for messages: the table, or one of its files.
    place: str
    #: All columns as they are stored, name to type.
    types: Mapping[str, str]

    @staticmethod
    def from_frame(frame: DataFrame) -> StoredRows:
        """Return all rows of a table that has one schema."""
        fields = (f for f in frame.schema.fields if f.name not in (FILE, LINE, DAY))
        return StoredRows(frame, WHOLE_TABLE, {stored_name(f): f.dataType.simpleString() for f in fields})


class Snapshot(Protocol):
    """A source table at one version."""

    @property
    def format(self) -> str:
        """Return the name of its format (`headrace.config.formats.TABLE_FORMATS`)."""
        ...

    @property
    def plain(self) -> bool:
        """Return whether the data files are Parquet, each row of which is live under the names that the file has."""
        ...

    @property
    def versioned(self) -> bool:
        """Return whether older versions can be read."""
        ...

    @property
    def files(self) -> Sequence[TableFile]:
        """Return the live data files, by name."""
        ...

    def day_versions(self, days: Collection[str]) -> dict[str, str]:
        """Return for each day a text that changes with its rows; days without rows are left out."""
        ...

    def why_no_rows(self, ds: str) -> str:
        """Return a clause for a message: why `day_versions` leaves the day out."""
        ...

    def lost(self, ds: str) -> str | None:
        """Return a clause for a message: what the rows of a day are read from is gone; None: it is there."""
        ...

    def pin(self, days: Mapping[str, str]) -> str:
        """Return its version for a manifest; `days`: `day_versions` of the days that are read."""
        ...

    def stored_rows(
        self, spark: SparkSession, days: Collection[str] | None, paths: Collection[Sequence[str]]
    ) -> list[StoredRows]:
        """Return the rows, by how they are stored: at least one entry.

        Args:
            spark: the session.
            days: at least the rows of these; None: all.
            paths: what is needed of each row: steps from a column's name into it.

        Raises:
            UserError: a file is damaged, or has a needed column as a type that is not read.
        """
        ...


class FileSnapshot(ABC):
    """Base of snapshots of tables whose files have days: it answers what `Snapshot` asks of days."""

    @property
    @abstractmethod
    def files(self) -> Sequence[TableFile]:
        """Return the live data files, by name."""

    def day_versions(self, days: Collection[str]) -> dict[str, str]:
        """Return for each day a text that changes with its rows; days without rows are left out."""
        files_of_day: dict[str, list[list[str]]] = {}
        for file in self.files:
            for ds in days:
                if file.may_hold(ds):
                    files_of_day.setdefault(ds, []).append([file.name, file.identity])
        return {ds: fingerprint({"files": sorted(of_day)}) for ds, of_day in sorted(files_of_day.items())}

    def why_no_rows(self, ds: str) -> str:
        """Return a clause for a message: why `day_versions` leaves the day out."""
        known = sorted(f.last for f in self.files if f.first and f.first == f.last)
        return f"its days are {known[0]} to {known[-1]}" if known else "it has no files of that day"

    def damage(self, days: Collection[str] | None) -> str | None:
        """Return a clause for a message: a file of the days that is gone, or has another size than the log says."""
        return not_as_written({f.path: f.size for f in files_of(self, days)})

    def lost(self, ds: str) -> str | None:
        """Return a clause for a message: a file of the day that is gone."""
        lost = missing([f.path for f in self.files if f.may_hold(ds)])
        return None if lost is None else f"{lost} is gone"


class OneSchemaRows(ABC):
    """Base of snapshots of tables with a log, which has one schema for all rows."""

    @abstractmethod
    def rows(self, spark: SparkSession, days: Collection[str] | None) -> DataFrame:
        """Return the rows of the days; None: all."""

    def stored_rows(
        self, spark: SparkSession, days: Collection[str] | None, paths: Collection[Sequence[str]]
    ) -> list[StoredRows]:
        """Return all rows of the days as one entry."""
        return [StoredRows.from_frame(self.rows(spark, days))]


def files_of(snapshot: Snapshot | FileSnapshot, days: Collection[str] | None) -> list[TableFile]:
    """Return the files that may hold rows of the days; None: all."""
    return [f for f in snapshot.files if days is None or any(f.may_hold(ds) for ds in days)]


def is_at(path: Location, name: str) -> bool:
    """Return whether an error of Spark's that names a file means this one, of whose scheme it may have another name."""
    schemes = [path.scheme, *other_schemes(path.scheme)]
    rest = str(path).removeprefix(f"{path.scheme}:")
    return name == str(path) or any(name == f"{scheme}:{rest}" for scheme in schemes)


def uri_path(path: str) -> str:
    """Return a path as Spark's `_metadata.file_path` spells it."""
    return "".join(c if ord(c) > 127 else quote(c, safe=_URI_SAFE) for c in path)


def relative_name(path: Location, root: Location) -> str:
    """`_source_file` of a data file."""
    return uri_path(path.below(root)) if path.is_below(root) else _uri(path)


def relative_file(root: Location, file: Column) -> Column:
    """Return the same of a column of URIs."""
    prefix = f"{_uri(root)}/"
    outside = file if root.scheme == "file" else one_spelling(root.scheme, file)
    return F.when(file.startswith(prefix), F.substr(file, F.lit(len(prefix) + 1))).otherwise(outside)


def one_spelling(scheme: str, uri: Column) -> Column:
    """Return a column of URIs with the scheme that a Location has, where Spark has it by another name (s3a)."""
    schemes = "|".join(other_schemes(scheme))
    return F.regexp_replace(uri, f"^({schemes}):", f"{scheme}:") if schemes else uri


def _uri(path: Location) -> str:
    """Return a place as Spark's `_metadata.file_path` spells it."""
    return f"file:{uri_path(str(path))}" if path.scheme == "file" else f"{path.scheme}:/{uri_path(str(path.path))}"


@dataclass(frozen=True)
class TablePlace:
    """Format and place of a table, as a catalog or the spec names them; goes into manifests."""

    #: A name of `headrace.config.formats.TABLE_FORMATS`.
    format: str
    #: Its folder: an absolute path or a URI.
    path: str
    #: Of an Iceberg table: the metadata file that its catalog named as the newest when it was asked.
    metadata: str | None = None

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def is_still_valid(self, source: TableSource) -> bool:
        """Return whether the version that the spec names is found here without asking the catalog again."""
        return self.metadata is None or source.version is not None
