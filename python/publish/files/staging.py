"""A day's scores as Parquet files in the lake's staging folder: written by executors, audited by Spark's SQL."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.identifiers import quoted
from headrace.lake.delta.log import DeltaLog
from headrace.publish.target import PublishedDay
from headrace.storage import Location, copies_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Rows of a file, at most: enough for a load to be quick, few enough for one to be held by a client.
_FILE_ROWS = 5_000_000
#: A file in a folder that is kept for a look.
_KEPT = "_kept"


@dataclass
class StagedFiles:
    """A folder of Parquet files; see `headrace.publish.target.StagedDay`."""

    spark: SparkSession
    folder: Location
    ds: str
    key: str
    previous: PublishedDay | None
    rows: int = 0
    kept: bool = False
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
        """The staged rows."""
        return self.spark.table(self.relation)

    def model(self) -> str:
        """The models that made the scores."""
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
        if entry.name.startswith(ds) or not (entry / _KEPT).is_file():
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
        if not staged.kept:
            place.remove()


def files_folder(folder: Location) -> Path:
    """Where on this host the `files` of days are that are staged below a folder: there, or among the store's copies."""
    return folder.local_path() if folder.scheme == "file" else copies_folder()


def keep(staged: StagedFiles) -> None:
    """Leave the folder for a look."""
    (staged.folder / _KEPT).put_text("its audit failed\n")
    staged.kept = True


def kept(folder: Location, days: Sequence[str] | None = None) -> list[Location]:
    """The folders (of these days) that were kept."""
    found = [entry for entry in folder.entries() if (entry / _KEPT).is_file()]
    return [entry for entry in found if days is None or entry.name.startswith(tuple(f"{day}_" for day in days))]


def drop_kept(folder: Location, days: Sequence[str] | None = None) -> list[str]:
    """Remove them. Returns their places."""
    found = kept(folder, days)
    for entry in found:
        entry.remove()
    return [str(entry) for entry in found]


def _previous(spark: SparkSession, view: str, ds: str, table: Location, days: Mapping[str, int]) -> PublishedDay | None:
    """The newest published day before `ds`, its rows as the lake's table has them."""
    before = sorted(day for day in days if day < ds)
    if not before:
        return None
    if not re.fullmatch(r"[0-9-]+", before[-1]) or DeltaLog(table).version is None:
        return None
    spark.read.format("delta").load(table.uri).where(f"ds = '{before[-1]}'").createOrReplaceTempView(view)
    return PublishedDay(before[-1], days[before[-1]], f"`{view}`")
