"""Folders of Parquet, ORC or Avro files as sources: what is listed is the table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import TableSource
from headrace.errors import UserError
from headrace.lake.session import spark_settings
from headrace.lake.source_tables.days import Bounds, days_of_file
from headrace.lake.source_tables.parquet_files import escaped, footer, shorten_batches
from headrace.lake.source_tables.snapshot import (
    FILE,
    LINE,
    READERS,
    FileSnapshot,
    TableFile,
    files_of,
    relative_file,
    relative_name,
)
from headrace.manifest import fingerprint
from headrace.storage import Location, StoreError
from headrace.storage.store import Info

_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class FolderSnapshot(FileSnapshot):
    """The files in a folder as they are now; `key=value` folders are partition columns."""

    source: TableSource
    folder: Location
    format: str
    versioned: bool = False

    @property
    def plain(self) -> bool:
        return self.format == "parquet"

    @cached_property
    def files(self) -> list[TableFile]:
        # Files without a byte are none to Spark either, and those of object stores stand for folders (`day=1/`).
        found = {name: info for name, info in self.folder.infos().items() if info.size and not _hidden(name)}
        if not found:
            what = f"{self.folder} has no data files" if self.folder.is_dir() else f"there is no folder {self.folder}"
            raise UserError(f"source: {what}; change source.path")
        with ThreadPoolExecutor(READERS) as pool:
            return sorted(pool.map(self._file, found, found.values()), key=lambda f: f.name)

    def _file(self, name: str, info: Info) -> TableFile:
        path, partition = self.folder / name, dict(_partition(name))
        time = None if self.source.day is None else self.source.day.time
        bounds, lacks = (None, False) if time is None or self.format != "parquet" else _bounds(path, time)
        first, last = days_of_file(self.source, partition, bounds)
        # A store's times may be of seconds.
        identity = f"{info.size}@{info.tag or info.modified_ns}"
        return TableFile(relative_name(path, self.folder), path, info.size, identity, first, last, partition, lacks)

    def pin(self, days: Mapping[str, str]) -> str:
        return fingerprint(dict(days))

    def rows(self, spark: SparkSession, days: Collection[str] | None) -> DataFrame:
        files = files_of(self, days) or self.files[:1]
        reader = spark.read.format(self.format).option("basePath", str(self.folder))
        reader = reader.option("mergeSchema", "true")
        # Partition values are text until the declaration says what they are.
        with spark_settings(spark, {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"}):
            try:
                frame = reader.load(escaped(files))
            except AnalysisException as e:
                if self.format == "avro":
                    raise UserError(
                        "source.format: avro needs Spark's Avro module, which is not part of its distribution: run "
                        "`make jars`"
                    ) from e
                raise
            except PySparkException as e:
                raise UserError(f"source: {self.source.shown} cannot be read: {_first_line(e)}") from e
        if self.format != "parquet":
            return frame
        shorten_batches(spark, files)
        place = F.col("_metadata.file_path"), F.col("_metadata.row_index")
        return frame.select("*", relative_file(self.folder, place[0]).alias(FILE), place[1].alias(LINE))


def _hidden(name: str) -> bool:
    """As Spark has it: names that begin with `_` or `.`, but for partitions."""
    return any(p.startswith(".") or (p.startswith("_") and "=" not in p) for p in name.split("/"))


def _partition(name: str) -> Iterator[tuple[str, str | None]]:
    for part in name.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals:
            yield unquote(key).lower(), None if value == _NULL else unquote(value)


def _bounds(path: Location, column: str) -> tuple[Bounds | None, bool]:
    """Least and greatest value of a column by the footer, and whether it may be null in a row."""
    try:
        file = footer(path)
    except StoreError:
        raise
    except (pa.ArrowException, OSError) as e:
        if _is_parquet(path):
            return None, True  # of a newer writer than our Arrow: Spark reads it
        raise UserError(f"source: {path} is no whole Parquet file: {e}") from None
    at = next((i for i, name in enumerate(file.schema.names) if name.lower() == column.lower()), None)
    low, high, nulls = None, None, False
    for group in range(file.num_row_groups):
        stats = None if at is None else file.row_group(group).column(at).statistics
        if stats is None or not stats.has_min_max:
            return None, True
        nulls |= not stats.has_null_count or stats.null_count > 0
        low = stats.min if low is None else min(low, stats.min)
        high = stats.max if high is None else max(high, stats.max)
    return None if low is None else (low, high), nulls


def _is_parquet(path: Location) -> bool:
    """Whether a file begins and ends as Parquet does."""
    with path.open_parts() as f:
        first = f.read(4)
        f.seek(max(0, path.size() - 4))
        return first == f.read(4) == b"PAR1"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
