"""Parquet files by their paths, with each row's file and position."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.lake.source_tables.snapshot import FILE, LINE, READERS, TableFile, relative_file
from headrace.lake.sources.frame import quoted
from headrace.storage import Location, StoreError

#: Smaller files have no row group of which as many bytes of text are likely.
_LARGE_FILE = 64 << 20
#: Bytes of a column in a row group, and of a value in the mean, with which batches are short.
_LARGE_COLUMN, _LONG_VALUE = 256 << 20, 1 << 10
_BATCH_ROWS = "spark.sql.parquet.columnarReaderBatchSize"
_FEW_ROWS = 64
_GLOB_CHARACTERS = re.compile(r"([\[\]{}*?\\])")


def escaped(files: Sequence[TableFile]) -> list[str]:
    """Their paths for a reader that takes them for globs."""
    return [_GLOB_CHARACTERS.sub(r"\\\1", str(f.path)) for f in files]


def footer(path: Location) -> pq.FileMetaData:
    """That of a Parquet file, of which no more is fetched.

    Raises:
        OSError: there is none, or it cannot be read.
        pyarrow.ArrowException: it is none that Arrow reads.
    """
    with path.open_parts() as f:
        return pq.ParquetFile(f).metadata


def arrow_reads(files: Sequence[TableFile]) -> bool:
    """Whether Arrow opens all of the files: those of newer writers may have types that this release does not know."""
    with ThreadPoolExecutor(READERS) as pool:
        return all(pool.map(lambda f: _opens(f.path), files))


def _opens(path: Location) -> bool:
    try:
        footer(path)
    except StoreError:  # which says nothing of the file
        raise
    except (pa.ArrowException, OSError):
        return False
    return True


def shorten_batches(spark: SparkSession, files: Sequence[TableFile]) -> None:
    """Have Spark's reader take few rows at once, from now on, where files have much text in long values.

    It takes 4,096, whose texts must be less than 2 GiB and fit the heap together. What a user has set stays. (Spark
    takes the number from the session when it runs a plan, and has no option for it.)
    """
    if spark.conf.get(_BATCH_ROWS, None) is not None:
        return
    large = [f.path for f in files if f.size > _LARGE_FILE]
    with ThreadPoolExecutor(READERS) as pool:
        if any(pool.map(_has_long_values, large)):
            spark.conf.set(_BATCH_ROWS, _FEW_ROWS)


def _has_long_values(path: Location) -> bool:
    try:
        found = footer(path)
    except StoreError:
        raise
    except (pa.ArrowException, OSError):
        return False  # of a newer writer than our Arrow, or no Parquet, of which Spark tells
    columns = (found.row_group(g).column(c) for g in range(found.num_row_groups) for c in range(found.num_columns))
    return any(
        c.physical_type == "BYTE_ARRAY" and c.total_uncompressed_size > max(_LARGE_COLUMN, _LONG_VALUE * c.num_values)
        for c in columns
    )


def read_parquet(
    spark: SparkSession, root: Location, files: Sequence[TableFile], schema: T.StructType, partitioned: Collection[str]
) -> DataFrame:
    """The rows of some files of a table.

    Args:
        spark: the session.
        root: of the table.
        files: what is read.
        schema: all columns of the table.
        partitioned: those whose values are in `TableFile.partition` and not in the files.

    Returns:
        the columns of `schema`, `_source_file`, `_source_line`.
    """
    stored = T.StructType([f for f in schema.fields if f.name not in partitioned])
    names = quoted([f.name for f in schema.fields])
    if not files:
        return spark.createDataFrame([], T.StructType([*schema.fields, *_PLACE.fields])).select(*names, FILE, LINE)
    shorten_batches(spark, files)
    frame = (
        spark.read.schema(stored)
        .parquet(*escaped(files))
        .select(
            "*", relative_file(root, F.col("_metadata.file_path")).alias(FILE), F.col("_metadata.row_index").alias(LINE)
        )
    )
    given = [f for f in schema.fields if f.name in partitioned]
    if not given:
        return frame.select(*names, FILE, LINE)
    known = spark.createDataFrame(
        [(f.name, *((f.partition or {}).get(g.name.lower()) for g in given)) for f in files],
        T.StructType([T.StructField(FILE, T.StringType()), *(T.StructField(g.name, T.StringType()) for g in given)]),
    )
    typed = [F.col(quoted([g.name])[0]).cast(g.dataType).alias(g.name) for g in given]
    # A file that is not found again must be noticed, not lost.
    found = F.coalesce(F.col("_known"), F.raise_error(F.concat(F.lit("no such data file: "), FILE)).cast("string"))
    known = known.select(FILE, F.col(FILE).alias("_known"), *typed)
    frame = frame.join(F.broadcast(known), FILE, "left")
    return frame.select(*names, found.alias(FILE), LINE)


_PLACE = T.StructType([T.StructField(FILE, T.StringType()), T.StructField(LINE, T.LongType())])
