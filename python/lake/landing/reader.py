"""Contract of a reader of landing files; the batch of files that it reads; errors of a single file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession

from headrace.config import LandingSource, Table
from headrace.config.source import following, midnight
from headrace.errors import UserError
from headrace.lake.landing.delimited import LineForm
from headrace.lake.landing.files import LandingDay, LandingFile
from headrace.plugins import import_class

#: Columns that say where a row stands.
POSITION = ("_file", "_line", "_copy")


@dataclass
class FileDamaged(Exception):
    """A landing file that cannot be read to its end."""

    ds: str
    file: LandingFile
    cause: str
    #: Whether its bytes are at fault, and not the file system that does not give them.
    is_of_content: bool = True


class FileRefused(UserError):
    """A landing file that is no file of the source's format, by its name or its header."""

    def __init__(self, file: LandingFile, message: str) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True)
class LandingBatch:
    """The landing files of one or more days, which are read together."""

    spark: SparkSession
    source: LandingSource
    table: Table
    days: tuple[LandingDay, ...]
    #: The declared text columns whose values are ids (`table.ids`).
    ids: frozenset[str] = frozenset()

    @property
    def files(self) -> list[tuple[str, LandingFile]]:
        """(ds, file), oldest day first, by name within a day. The place in this list is a file's `_file`."""
        return [(day.ds, file) for day in self.days for file in day.files]

    def event_times(self, ds: str) -> tuple[datetime | None, datetime]:
        """Return the range of a landing day's event times, [first, end) in UTC; `first` None: nothing is too late."""
        end = midnight(self.source, following(ds)) + timedelta(seconds=self.table.clock_skew_seconds)
        return midnight(self.source, following(ds, -self.table.late_days)) if self.source.daily else None, end


class LandingReader(ABC):
    """A reader of one format of landing files.

    `form` says how a file's lines become rows. Tasks read them by Arrow where it may, about ten times as fast as one by
    one (headrace.lake.landing.write_rows).
    """

    #: Whether `finish` makes the rows anew: splits, drawn negatives. All lines are judged one by one then.
    remakes_rows: ClassVar[bool] = False

    @abstractmethod
    def form(self, batch: LandingBatch, number: int) -> LineForm | None:
        """Return how a file of the batch is written, by its number in `batch.files`; None: JSON lines.

        Raises:
            UserError: a file whose name or header is refused.
        """

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Return what becomes of a batch's rows, as a Spark frame with the same columns.

        Args:
            rows: `_ds`, `_source_file` string; `_file`, `_copy`, `_state` int; `_line` bigint; the declared columns;
                `_extra`, `_raw` and `_reason`. Rows of other states than GOOD are to stay as they are.
            batch: whose rows they are.
        """
        return rows


def reader_of(source: LandingSource) -> LandingReader:
    """Return the reader of a source's format.

    Raises:
        UserError: it cannot be imported, or is no reader.
    """
    key = f"source.format {source.format}"
    # What is imported is a subclass; one with abstract methods left raises TypeError here.
    return import_class(source.file_format.reader, LandingReader, key, "reader")()  # type: ignore[type-abstract]
