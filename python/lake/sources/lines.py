"""Landing files as numbered lines.

Each file is read as one split, so that Spark's `monotonically_increasing_id` counts its lines: the lower 33 bits are
the place within a task's partition, and a partition is one file. gzip files are one split anyway; for others, and to
keep small files from sharing a task, `one_file_a_task` sets the two sizes that Spark packs by. Files in compressions
that Spark cannot read, and those whose records go over several lines, are read by Python in its tasks, a file a task
too (headrace.lake.sources.text_lines).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, reduce
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import LandingSource, Table
from headrace.lake.landing import LandingDay, LandingFile, following, midnight
from headrace.lake.session import spark_settings
from headrace.lake.sources.compression import COMPRESSIONS, READ_BY_SPARK, ending
from headrace.lake.sources.text_lines import DAMAGED, QuotedFields, ReadLines
from headrace.lake.told_errors import own_error
from headrace.storage import Location

#: Place of a row within its partition: see monotonically_increasing_id in Spark's documentation.
_PLACE = (1 << 33) - 1
#: 4 TiB: above any file, far from overflowing when Spark adds it up once a file.
_UNSPLIT = 1 << 42
#: Files whose place a store is asked for at once.
_ASKED_AT_ONCE = 8
_GLOB_CHARACTERS = re.compile(r"([\[\]{}*?\\])")
_DAMAGED = re.compile(rf"{DAMAGED} (\S+) ([^\n]*)")
_FAILED = re.compile(r"FAILED_READ_FILE[^\]]*\] Encountered error while reading file (\S+?)\.\s")

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


@dataclass(frozen=True)
class LandingBatch:
    """The landing files of one or more days, which are read together."""

    spark: SparkSession
    source: LandingSource
    table: Table
    days: tuple[LandingDay, ...]
    #: The declared text columns whose values are ids (`table.ids`).
    ids: frozenset[str] = frozenset()
    #: Parquet files with some of the lines: `_file` int, `_line` bigint, `_text` string, each line without its line
    #: feed. None: all lines are read.
    left: tuple[Location, ...] | None = None

    @property
    def files(self) -> list[tuple[str, LandingFile]]:
        """(ds, file), oldest day first, by name within a day. The place in this list is a file's `_file`."""
        return [(day.ds, file) for day in self.days for file in day.files]

    def lines(self, chosen: Sequence[int], fields: QuotedFields | None = None) -> DataFrame:
        """The lines of some files, by their numbers.

        Args:
            chosen: the numbers.
            fields: of records that may go over several lines: each is on its first one, the others are empty.

        Returns:
            `_file` int, `_ds` string, `_source_file` string, `_from`/`_to` timestamp (an event's time is in
            [_from, _to); `_from` null where nothing is too late), `_line` bigint from 1, `_copy` int 0,
            `_text` string without its line end; with `fields` also `_open` boolean: a quoted field that begins in
            the line is not closed.
        """
        if self.left is not None:
            return self._of_files(self._left(chosen), "_file", chosen, [])
        by_spark = [i for i in chosen if fields is None and ending(self.files[i][1].name) in READ_BY_SPARK]
        by_python = [i for i in chosen if i not in by_spark]
        parts = [self._by_spark(by_spark)] if by_spark else []
        parts += [self._by_python(by_python, fields)] if by_python else []
        text = reduce(DataFrame.unionByName, parts)
        return self._of_files(text, "_path", chosen, [] if fields is None else ["_open"])

    def event_times(self, ds: str) -> tuple[datetime | None, datetime]:
        """When events of a landing day may have happened, [first, end) in UTC; `first` None: nothing is too late."""
        end = midnight(self.source, following(ds)) + timedelta(seconds=self.table.clock_skew_seconds)
        return midnight(self.source, following(ds, -self.table.late_days)) if self.source.daily else None, end

    def _left(self, chosen: Sequence[int]) -> DataFrame:
        """`_file`, `_line`, `_text`."""
        files = (file.spark_path for file in self.left or ())
        rows = self.spark.read.schema("_file int, _line bigint, _text string").parquet(*files)
        return rows.where(F.col("_file").isin(list(chosen)))

    def _of_files(self, text: DataFrame, key: str, chosen: Sequence[int], more: Sequence[str]) -> DataFrame:
        """Lines with what is known of their files, which a column `key` of both tells."""
        text = text.withColumn("_text", F.expr("trim(trailing '\\r' from _text)"))
        bom = F.expr("trim(leading '\\ufeff' from _text)")
        known = self.spark.createDataFrame(
            [self._known(i) for i in chosen],
            "_path string, _file int, _ds string, _source_file string, _from timestamp, _to timestamp",
        )
        # Left: a file that is not found again must be noticed, not lost.
        return text.join(F.broadcast(known), key, "left").select(
            "_file",
            "_ds",
            "_source_file",
            "_from",
            "_to",
            "_line",
            F.lit(0).alias("_copy"),
            F.when(F.col("_line") == 1, bom).otherwise(F.col("_text")).alias("_text"),
            *more,
        )

    def _by_spark(self, chosen: Sequence[int]) -> DataFrame:
        """`_path`, `_line`, `_text`."""
        paths = [_GLOB_CHARACTERS.sub(r"\\\1", self._spark_paths[i]) for i in chosen]
        text = self.spark.read.option("lineSep", "\n").text(paths)
        place = F.monotonically_increasing_id().bitwiseAND(F.lit(_PLACE)) + 1
        return text.select(
            F.col("_metadata.file_path").alias("_path"), place.alias("_line"), F.col("value").alias("_text")
        )

    def _by_python(self, chosen: Sequence[int], fields: QuotedFields | None) -> DataFrame:
        """The same, with `_open` where there are `fields`."""
        task = ReadLines(tuple((self.uri(i), self.files[i][1].path) for i in chosen), fields)
        text = self.spark.range(0, len(chosen), 1, len(chosen)).mapInArrow(task, task.SCHEMA)
        return text.select("_path", "_line", F.col("value").alias("_text"), *([] if fields is None else ["_open"]))

    def uri(self, i: int) -> str:
        """A file's place as Spark spells it."""
        assert self.spark._jvm is not None
        path, jvm = self._spark_paths[i], self.spark._jvm
        if self.files[i][1].path.scheme != "file":
            return str(jvm.org.apache.hadoop.fs.Path(path).toUri().toString())
        return str(jvm.java.io.File(path).toURI().toString())

    @cached_property
    def _spark_paths(self) -> tuple[str, ...]:
        """What Spark is given for each file: in a store that is asked for it, as published folders lie elsewhere."""
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            return tuple(pool.map(lambda file: file[1].path.spark_path, self.files))

    def _known(self, i: int) -> tuple[Any, ...]:
        ds, file = self.files[i]
        start, end = self.event_times(ds)
        return (self.uri(i), i, ds, file.name, start, end)


def one_file_a_task(spark: SparkSession) -> AbstractContextManager[None]:
    """Within, scans that start read each file in a task of its own."""
    return spark_settings(
        spark,
        {
            "spark.sql.files.maxPartitionBytes": str(_UNSPLIT),
            "spark.sql.files.openCostInBytes": str(_UNSPLIT),
            "spark.sql.files.maxPartitionNum": str((1 << 31) - 1),
        },
    )


@contextmanager
def damaged_file_named(batch: LandingBatch) -> Iterator[None]:
    """Within, a job that fails on a file that cannot be read raises FileDamaged, but for errors of its store.

    Spark's task loggers are off meanwhile: they print a trace for what becomes one message (anything else is raised
    with all that they would have said).
    """
    with _quiet_tasks(batch.spark):
        try:
            yield
        except (Py4JJavaError, PySparkException) as e:
            if own_error(e) is not None:  # a store is away, or refuses: nothing is known of the file
                raise
            message = str(e)
            found = _FAILED.search(message) or _DAMAGED.search(message)
            if found is None:
                raise
            name = found.group(1)
            for i, (ds, file) in enumerate(batch.files):
                if _slashes(batch.uri(i)) == _slashes(name):
                    cause = found.group(2) if found.re is _DAMAGED else _cause(file, message)
                    raise FileDamaged(ds, file, cause) from e
            raise


def _slashes(uri: str) -> str:
    """`file:///a` and `file:/a` are one."""
    return "/" + uri.removeprefix("file:").lstrip("/")


def _cause(file: LandingFile, message: str) -> str:
    if "Unexpected end of" in message or "EOFException" in message:
        return "it ends in the middle (truncated)"
    if kind := ending(file.name):
        return f"its {COMPRESSIONS[kind]} data are damaged"
    return "it cannot be read"


@contextmanager
def _quiet_tasks(spark: SparkSession) -> Iterator[None]:
    assert spark._jvm is not None
    log4j = spark._jvm.org.apache.logging.log4j
    before = {name: log4j.LogManager.getLogger(name).getLevel() for name in _TASK_LOGGERS}
    for name in _TASK_LOGGERS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    try:
        yield
    finally:
        for name, level in before.items():
            log4j.core.config.Configurator.setLevel(name, level)
