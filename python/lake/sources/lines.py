"""Landing files as numbered lines.

Each file is read as one split, so that Spark's `monotonically_increasing_id` counts its lines: the lower 33 bits are
the place within a task's partition, and a partition is one file. gzip files are one split anyway; for others, and to
keep small files from sharing a task, `one_file_a_task` sets the two sizes that Spark packs by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import LandingSource, Table
from headrace.lake.landing import LandingDay, LandingFile, following, midnight
from headrace.lake.session import spark_settings

#: Place of a row within its partition: see monotonically_increasing_id in Spark's documentation.
_PLACE = (1 << 33) - 1
#: 4 TiB: above any file, far from overflowing when Spark adds it up once a file.
_UNSPLIT = 1 << 42
_GLOB_CHARACTERS = re.compile(r"([\[\]{}*?\\])")
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

    @property
    def files(self) -> list[tuple[str, LandingFile]]:
        """(ds, file), oldest day first, by name within a day. The place in this list is a file's `_file`."""
        return [(day.ds, file) for day in self.days for file in day.files]

    def lines(self, chosen: Sequence[int]) -> DataFrame:
        """The lines of some files, by their numbers.

        Returns:
            `_file` int, `_ds` string, `_source_file` string, `_from`/`_to` timestamp (an event's time is in
            [_from, _to); `_from` null where nothing is too late), `_line` bigint from 1, `_copy` int 0,
            `_text` string without its line end.
        """
        files = self.files
        paths = [_GLOB_CHARACTERS.sub(r"\\\1", str(files[i][1].path)) for i in chosen]
        text = self.spark.read.option("lineSep", "\n").text(paths)
        place = F.monotonically_increasing_id().bitwiseAND(F.lit(_PLACE)) + 1
        text = text.select(
            F.col("_metadata.file_path").alias("_path"),
            place.alias("_line"),
            F.expr("trim(trailing '\\r' from value)").alias("_text"),
        )
        bom = F.expr("trim(leading '\\ufeff' from _text)")
        known = self.spark.createDataFrame(
            [self._known(i) for i in chosen],
            "_path string, _file int, _ds string, _source_file string, _from timestamp, _to timestamp",
        )
        # Left: a file that is not found again must be noticed, not lost.
        return text.join(F.broadcast(known), "_path", "left").select(
            "_file",
            "_ds",
            "_source_file",
            "_from",
            "_to",
            "_line",
            F.lit(0).alias("_copy"),
            F.when(F.col("_line") == 1, bom).otherwise(F.col("_text")).alias("_text"),
        )

    def _known(self, i: int) -> tuple[Any, ...]:
        ds, file = self.files[i]
        end = midnight(self.source, following(ds)) + timedelta(seconds=self.table.clock_skew_seconds)
        start = midnight(self.source, following(ds, -self.table.late_days)) if self.source.daily else None
        assert self.spark._jvm is not None
        uri = self.spark._jvm.java.io.File(str(file.path)).toURI().toString()
        return (uri, i, ds, file.name, start, end)


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
    """Within, a job that fails on a file that cannot be read raises FileDamaged.

    Spark's task loggers are off meanwhile: they print a trace for what becomes one message (anything else is raised
    with all that they would have said).
    """
    with _quiet_tasks(batch.spark):
        try:
            yield
        except (Py4JJavaError, PySparkException) as e:
            message = str(e)
            found = _FAILED.search(message)
            if found is None:
                raise
            name = found.group(1)
            for ds, file in batch.files:
                assert batch.spark._jvm is not None
                uri = batch.spark._jvm.java.io.File(str(file.path)).toURI().toString()
                if _slashes(uri) == _slashes(name):
                    raise FileDamaged(ds, file, _cause(file, message)) from None
            raise


def _slashes(uri: str) -> str:
    """`file:///a` and `file:/a` are one."""
    return "/" + uri.removeprefix("file:").lstrip("/")


def _cause(file: LandingFile, message: str) -> str:
    if "Unexpected end of" in message or "EOFException" in message:
        return "it ends in the middle (truncated)"
    if file.name.endswith(".gz"):
        return "its gzip data are damaged"
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
