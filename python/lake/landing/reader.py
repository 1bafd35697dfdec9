"""Contract of a reader of landing files; the batch of files that it reads; errors of a single file."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import LandingSource, Table
from headrace.config.source import following, midnight
from headrace.errors import UserError
from headrace.errors.translate import own_error
from headrace.lake.landing.delimited import DelimitedForm, QuotedFields
from headrace.lake.landing.files import LandingDay, LandingFile
from headrace.lake.landing.text_lines import DAMAGED, UNREADABLE, ReadLines
from headrace.plugins import import_class

_DAMAGED = re.compile(rf"({DAMAGED}|{UNREADABLE}) (\d+) ([^\n]*)")

#: Loggers that print traces, or tell of the clean-up, when a task cannot read its file.
_TASK_LOGGERS = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.util.Utils",
    "org.apache.hadoop.mapreduce.lib.output.FileOutputCommitter",
)

#: Columns of `LandingBatch.lines`, which every format hands on.
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

    def lines(self, chosen: Sequence[int], fields: QuotedFields | None = None) -> DataFrame:
        """Return the lines of some files, by their numbers.

        Args:
            chosen: the numbers.
            fields: of records that may go over several lines: each is on its first one, the others are empty.

        Returns:
            `_file` int, `_ds` string, `_source_file` string, `_from`/`_to` timestamp (an event's time is in
            [_from, _to); `_from` null where nothing is too late), `_line` bigint from 1, `_copy` int 0,
            `_text` string without its line end, `_fault` string: why the line is no row, where that is known
            (headrace.lake.landing.text_lines).
        """
        task = ReadLines(tuple((i, self.files[i][1].path) for i in chosen), fields)
        text = self.spark.range(0, len(chosen), 1, len(chosen)).mapInArrow(task, task.SCHEMA)
        return self._of_files(text, chosen)

    def event_times(self, ds: str) -> tuple[datetime | None, datetime]:
        """Return the range of a landing day's event times, [first, end) in UTC; `first` None: nothing is too late."""
        end = midnight(self.source, following(ds)) + timedelta(seconds=self.table.clock_skew_seconds)
        return midnight(self.source, following(ds, -self.table.late_days)) if self.source.daily else None, end

    def _of_files(self, text: DataFrame, chosen: Sequence[int]) -> DataFrame:
        """Return lines with what is known of their files."""
        text = text.withColumn("_text", F.expr("trim(trailing '\\r' from _text)"))
        bom = F.expr("trim(leading '\\ufeff' from _text)")
        known = self.spark.createDataFrame(
            [self._known(i) for i in chosen],
            "_file int, _ds string, _source_file string, _from timestamp, _to timestamp",
        )
        return text.join(F.broadcast(known), "_file").select(
            "_file",
            "_ds",
            "_source_file",
            "_from",
            "_to",
            "_line",
            F.lit(0).alias("_copy"),
            F.when(F.col("_line") == 1, bom).otherwise(F.col("_text")).alias("_text"),
            "_fault",
        )

    def _known(self, i: int) -> tuple[Any, ...]:
        ds, file = self.files[i]
        start, end = self.event_times(ds)
        return (i, ds, file.name, start, end)


@contextmanager
def damaged_file_named(batch: LandingBatch) -> Iterator[None]:
    """Raise FileDamaged for a job that fails on a file that cannot be read, but not for errors of its store.

    Spark's task loggers are off meanwhile: they print a trace for what becomes one message (anything else is raised
    with all that they would have said).
    """
    with _quiet_tasks(batch.spark):
        try:
            yield
        except (Py4JJavaError, PySparkException) as e:
            if own_error(e) is not None:  # a store is away, or refuses: nothing is known of the file
                raise
            match = _DAMAGED.search(str(e))
            if match is None:
                raise
            ds, file = batch.files[int(match[2])]
            raise FileDamaged(ds, file, match[3], match[1] == DAMAGED) from e


@contextmanager
def _quiet_tasks(spark: SparkSession) -> Iterator[None]:
    assert spark._jvm is not None
    log4j = spark._jvm.org.apache.logging.log4j
    previous_levels = {name: log4j.LogManager.getLogger(name).getLevel() for name in _TASK_LOGGERS}
    for name in _TASK_LOGGERS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    try:
        yield
    finally:
        for name, level in previous_levels.items():
            log4j.core.config.Configurator.setLevel(name, level)


class LandingReader(ABC):
    """A reader of one format of landing files.

    `read` and `finish` are plans of Spark. Where the lines are delimited text or JSON objects, `by_arrow` and `form`
    let Arrow read them, about ten times as fast; lines that Arrow is unsure of are judged by `form`, too
    (headrace.lake.landing.unsure_lines).
    """

    #: Whether Arrow may read the files, by `form`.
    by_arrow: ClassVar[bool] = False
    #: Whether Arrow may read columns that are declared as lists.
    lists_by_arrow: ClassVar[bool] = True
    #: Whether `finish` makes the rows anew: splits, drawn negatives.
    remakes_rows: ClassVar[bool] = False

    @abstractmethod
    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Return the lines of a batch as frames with the columns that `headrace.lake.landing.frame` describes.

        Raises:
            UserError: a file whose name or header is refused.
        """

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Return what becomes of a batch's typed rows (`headrace.lake.landing.frame`), with the same columns."""
        return rows

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm | None:
        """Return how a file of the batch is written, by its number in `batch.files`; None: JSON lines.

        Raises:
            UserError: a header that is refused.
        """
        raise NotImplementedError(f"{type(self).__name__} reads by Arrow, and has no form")


def reader_of(source: LandingSource) -> LandingReader:
    """Return the reader of a source's format.

    Raises:
        UserError: it cannot be imported, or is no reader.
    """
    key = f"source.format {source.format}"
    # What is imported is a subclass; one with abstract methods left raises TypeError here.
    return import_class(source.file_format.reader, LandingReader, key, "reader")()  # type: ignore[type-abstract]
