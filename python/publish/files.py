"""Warehouses that load Parquet files: staging in the lake's staging folder, which executors write and Spark audits."""

from __future__ import annotations

import logging
import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.config.schema import quoted
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.publish.target import Check, PublishedDay, StagedDay, Target, published_columns, table_name
from headrace.stage import RunLock
from headrace.storage import Fence, Location, copies_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


#: Rows of a file, at most: enough for a load to be quick, few enough for one to be held by a client.
_FILE_ROWS = 5_000_000
#: File that marks a staged folder to be kept for inspection.
_KEPT_MARK = "_kept"


@dataclass
class StagedFiles:
    """A folder of Parquet files; see `headrace.publish.target.StagedDay`."""

    spark: SparkSession
    folder: Location
    ds: str
    key: str
    previous: PublishedDay | None
    rows: int = 0
    is_kept: bool = False
    view: str = field(default_factory=lambda: f"headrace_staged_{uuid.uuid4().hex[:8]}")

    @property
    def label(self) -> str:
        return str(self.folder)

    @property
    def relation(self) -> str:
        return self.quote(self.view)

    @property
    def day(self) -> str:
        return f"DATE '{self.ds}'"

    @property
    def files(self) -> list[Path]:
        """The Parquet files, in order of their names."""
        return sorted(f.local_path() for f in self.folder.entries() if f.suffix == ".parquet")

    def quote(self, name: str) -> str:
        return quoted(name)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.spark.sql(text).collect()]

    def frame(self) -> DataFrame:
        """Return the staged rows."""
        return self.spark.table(self.relation)

    def model(self) -> str:
        """Return the models that made the scores."""
        versions = self.query(f"SELECT DISTINCT model_version FROM {self.relation} ORDER BY 1")
        return ", ".join(str(v) for (v,) in versions)


@contextmanager
def staged_files(
    df: DataFrame,
    columns: Sequence[str],
    folder: Location,
    ds: str,
    key: str,
    published: tuple[Location, Mapping[str, int]],
) -> Iterator[StagedFiles]:
    """Write the day's scores below `folder`, `ds` as a date; gone at the end of the block unless they were kept.

    The pipeline's lease is held: what is below the folder belongs to runs that are gone, or was kept.

    Args:
        df: the scores.
        columns: those to write, in order.
        folder: of the pipeline's staging.
        ds: their day.
        key: of the run.
        published: the lake's Delta table of what was published, and the rows of the days in the warehouse.
    """
    from pyspark.sql import functions as F

    for entry in folder.entries() if folder.is_dir() else []:
        if entry.name.startswith(ds) or not (entry / _KEPT_MARK).is_file():
            entry.remove()
    place = folder / f"{ds}_{uuid.uuid4().hex[:8]}"
    spark = df.sparkSession
    staged = StagedFiles(spark, place, ds, key, None)
    previous = f"{staged.view}_previous"
    try:
        day = F.expr("try_cast(ds AS date)").alias("ds")
        chosen = df.select(*[day if c == "ds" else F.col(staged.quote(c)) for c in columns])
        chosen.write.option("maxRecordsPerFile", _FILE_ROWS).parquet(place.uri)
        spark.read.schema(chosen.schema).parquet(place.uri).createOrReplaceTempView(staged.view)
        staged.rows = spark.table(staged.relation).count()
        staged.previous = _previous(spark, previous, ds, *published)
        yield staged
    finally:
        spark.catalog.dropTempView(staged.view)
        spark.catalog.dropTempView(previous)
        if not staged.is_kept:
            place.remove()


def files_folder(folder: Location) -> Path:
    """Return the folder on this host that has the staged `files`: the folder itself, or the store's copies."""
    return folder.local_path() if folder.scheme == "file" else copies_folder()


def keep_folder(staged: StagedFiles) -> None:
    """Leave the folder for a look."""
    (staged.folder / _KEPT_MARK).put_text("its audit failed\n")
    staged.is_kept = True


def kept_folders(folder: Location, days: Sequence[str] | None = None) -> list[Location]:
    """Return the folders (of these days) that were kept."""
    entries = [entry for entry in folder.entries() if (entry / _KEPT_MARK).is_file()]
    return [entry for entry in entries if days is None or entry.name.startswith(tuple(f"{day}_" for day in days))]


def drop_kept_folders(folder: Location, days: Sequence[str] | None = None) -> list[str]:
    """Remove them. Returns their places."""
    entries = kept_folders(folder, days)
    for entry in entries:
        entry.remove()
    return [str(entry) for entry in entries]


def _previous(spark: SparkSession, view: str, ds: str, table: Location, days: Mapping[str, int]) -> PublishedDay | None:
    """Return the newest published day before `ds`, its rows as the lake's table has them."""
    earlier_days = sorted(day for day in days if day < ds)
    if not earlier_days:
        return None
    if not re.fullmatch(r"[0-9-]+", earlier_days[-1]) or DeltaLog(table).version is None:
        return None
    spark.read.format("delta").load(table.uri).where(f"ds = '{earlier_days[-1]}'").createOrReplaceTempView(view)
    return PublishedDay(earlier_days[-1], days[earlier_days[-1]], f"`{view}`")


log = logging.getLogger("headrace.publish")


@dataclass(frozen=True)
class Record:
    """The record of a publication."""

    key: str
    rows: int
    model: str
    source: str
    audit: list[dict[str, Any]]


class FilesTarget(Target):
    """A warehouse that takes a day as Parquet files."""

    def __init__(
        self, spec: Spec, ws: Workspace, kind: str, label: str, address: str, lock: RunLock | None = None
    ) -> None:
        assert spec.score is not None, "config refuses publish without score"
        self.kind, self.label, self.address = kind, label, address
        self.spec, self.ws, self.lock = spec, ws, lock
        self.name = table_name(spec)
        self.user, self.item = spec.score.user.key, spec.score.item.key
        #: (column, Spark's `simpleString`), set by `create`.
        self.columns: list[tuple[str, str]] = []

    @property
    def fence(self) -> Fence | None:
        """Return the fence that its commits carry; None: there is no lease."""
        return self.lock.fence if self.lock is not None else None

    def check_lease(self) -> None:
        """Right before what carries no token. Raises LeaseLost where another process is at work."""
        if self.lock is not None:
            self.lock.check()

    @property
    @abstractmethod
    def types(self) -> Mapping[str, str]:
        """Spark's `simpleString` of the types that the warehouse takes -> its own."""

    @property
    def staging(self) -> Location:
        """The folder of the pipeline's staged days, which executors write to: below the lake."""
        return self.ws.staging(self.spec.pipeline)

    def create(self, spark_types: Sequence[tuple[str, str]]) -> None:
        self.columns = published_columns(self.user, self.item, spark_types, self.types)
        self.create_table()

    @contextmanager
    def stage(self, df: DataFrame, ds: str, key: str) -> Iterator[StagedDay]:
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        tick = time.perf_counter()
        # `staged_files` removes what other runs have staged.
        self.check_lease()
        published = self.ws.table(self.spec.pipeline, "published"), self.rows_by_day()
        try:
            with staged_files(df, [c for c, _ in self.columns], self.staging, ds, key, published) as staged:
                log.info("staged %s rows in %.1f s", f"{staged.rows:,}", time.perf_counter() - tick)
                yield staged
        except (Py4JJavaError, PySparkException, OSError):
            # A later run may have removed the files: then the lost lease is the error.
            self.check_lease()
            raise

    def swap(self, staged: StagedDay, source: str, checks: Sequence[Check]) -> None:
        assert isinstance(staged, StagedFiles), "of stage()"
        record = Record(staged.key, staged.rows, staged.model(), source, [asdict(check) for check in checks])
        self.publish_files(staged, record)

    def keep(self, staged: StagedDay) -> None:
        assert isinstance(staged, StagedFiles), "of stage()"
        keep_folder(staged)

    def kept_labels(self, days: Sequence[str] | None = None) -> list[str]:
        return [str(folder) for folder in kept_folders(self.staging, days)]

    def drop_kept(self, days: Sequence[str] | None = None) -> list[str]:
        return drop_kept_folders(self.staging, days)

    def days(self) -> list[str]:
        return sorted(self.rows_by_day())

    @abstractmethod
    def create_table(self) -> None:
        """Make the table of `columns`, and its current view; add columns that it lacks."""

    @abstractmethod
    def publish_files(self, staged: StagedFiles, record: Record) -> None:
        """Make the files' rows the day's rows, and record it."""

    @abstractmethod
    def rows_by_day(self) -> dict[str, int]:
        """Return the number of published rows by day; empty where there is no table."""
