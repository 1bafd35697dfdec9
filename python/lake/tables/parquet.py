"""The columns of one Parquet file as its footer has them: types for Spark's reader, and bounds of a time column.

A footer lists *leaves*: the scalars at the ends of structs, lists and maps, with names of their own. `StoredSchema`
puts them back below their top-level columns, so that a leaf never stands for a column of the same name.

Three kinds of types have no counterpart in Spark 4.0 and are marked: times in nanoseconds, which Spark reads as
integers (`spark.sql.legacy.parquet.nanosAsLong`); columns of nulls alone (Arrow's null type); and types that Spark does
not read at all (TIME, decimals of more than 38 digits), which are refused where they are declared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config.schema import KEY_FIELD, is_of_list, quoted_names
from headrace.lake.tables.days import Bounds
from headrace.lake.tables.snapshot import FILE, LINE, READERS, TableFile, relative_file
from headrace.storage import Location, StoreError

_EPOCH = datetime(1970, 1, 1)
#: Units of a Parquet time, in a second.
_IN_A_SECOND = {"milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_SIGNED: Mapping[int, T.DataType] = {8: T.ByteType(), 16: T.ShortType(), 32: T.IntegerType(), 64: T.LongType()}
#: Bits of an unsigned type -> the type as which Spark reads it, which holds every value.
_UNSIGNED: Mapping[int, T.DataType] = {
    8: T.ShortType(),
    16: T.IntegerType(),
    32: T.LongType(),
    64: T.DecimalType(20, 0),
}
_PLAIN: Mapping[str, T.DataType] = {
    "BOOLEAN": T.BooleanType(),
    "INT32": T.IntegerType(),
    "INT64": T.LongType(),
    "INT96": T.TimestampType(),
    "FLOAT": T.FloatType(),
    "DOUBLE": T.DoubleType(),
    "BYTE_ARRAY": T.BinaryType(),
    "FIXED_LEN_BYTE_ARRAY": T.BinaryType(),
}
_MOST_DIGITS = 38
#: Most schemas in the cache.
_KNOWN_SCHEMAS = 64
#: Smaller files are not searched for row groups with much text.
_LARGE_FILE = 64 << 20
#: Bytes of a column in a row group, and mean bytes of a value, above which batches are shorter.
_LARGE_COLUMN, _LONG_VALUE = 256 << 20, 1 << 10
_BATCH_ROWS = "spark.sql.parquet.columnarReaderBatchSize"
_FEW_ROWS = 64
_GLOB_CHARACTERS = re.compile(r"([\[\]{}*?\\])")


class Nanoseconds(T.DataType):
    """A timestamp in nanoseconds since 1970, with or without a zone."""

    def __init__(self, zone: bool) -> None:
        self.zone = zone

    def simpleString(self) -> str:
        return "timestamp(nanoseconds)" if self.zone else "timestamp_ntz(nanoseconds)"


class Unreadable(T.DataType):
    """A type that Spark does not read."""

    def __init__(self, spelling: str) -> None:
        self.spelling = spelling

    def simpleString(self) -> str:
        return self.spelling


@dataclass(frozen=True, eq=False)
class StoredSchema:
    """The top-level columns of a file."""

    #: Their types; leaves may be Nanoseconds, Unreadable and Spark's NullType.
    struct: T.StructType
    #: By top-level column: its number among the footer's leaves; None where it is nested.
    leaves: tuple[int | None, ...]

    @staticmethod
    def from_footer(metadata: pq.FileMetaData) -> StoredSchema | None:
        """Return the schema that a footer has; None where Arrow and the footer disagree about its leaves.

        Raises:
            pyarrow.ArrowException: a type that Arrow does not know.
        """
        for schema, known in _KNOWN:
            if schema.equals(metadata.schema):
                return known
        parsed = _parsed(metadata.schema)
        if parsed is not None:
            _KNOWN.insert(0, (metadata.schema, parsed))
            del _KNOWN[_KNOWN_SCHEMAS:]
        return parsed


#: Files of a table mostly have one schema: parsed ones, the newest first.
_KNOWN: list[tuple[pq.ParquetSchema, StoredSchema]] = []


def named(struct: T.StructType, name: str) -> list[T.StructField]:
    """Return the field of exactly that name, else all whose names differ from it in case alone."""
    same = [f for f in struct.fields if f.name.lower() == name.lower()]
    return [f for f in same if f.name == name] or same


def time_bounds(metadata: pq.FileMetaData, column: str) -> tuple[Bounds | None, bool]:
    """Return least and greatest value of a top-level column of times or dates, and whether a row may lack one.

    Bounds are a date or a datetime (without zone where the column has none); None on a side beyond the years 1 to 9999.
    They are None as a whole where the footer does not tell.

    Raises:
        pyarrow.ArrowException: a type that Arrow does not know.
    """
    schema = StoredSchema.from_footer(metadata)
    fields = [] if schema is None else named(schema.struct, column)
    if schema is None or len(fields) != 1:
        return None, True
    leaf = schema.leaves[schema.struct.fields.index(fields[0])]
    if leaf is None:
        return None, True
    logical = json.loads(metadata.schema.column(leaf).logical_type.to_json())
    low: Any = None
    high: Any = None
    nulls = False
    for group in range(metadata.num_row_groups):
        stats = metadata.row_group(group).column(leaf).statistics
        if stats is None or not stats.has_min_max:
            return None, True
        nulls |= not stats.has_null_count or stats.null_count > 0
        # As integers, since Python's dates do not cover all values.
        low = stats.min_raw if low is None else min(low, stats.min_raw)
        high = stats.max_raw if high is None else max(high, stats.max_raw)
    if low is None or logical["Type"] not in ("Date", "Timestamp"):
        return None, True
    return (_moment(low, logical), _moment(high, logical)), nulls


def _moment(raw: int, logical: Mapping[str, Any]) -> date | datetime | None:
    """Return the date or time that an integer of a footer is; None beyond the years 1 to 9999."""
    try:
        if logical["Type"] == "Date":
            return (_EPOCH + timedelta(days=raw)).date()
        micros = raw * 10**6 // _IN_A_SECOND[logical["timeUnit"]]
        moment = _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return None
    return moment.replace(tzinfo=UTC) if logical["isAdjustedToUTC"] else moment


def pruned(type_: T.DataType, paths: Sequence[Sequence[str]]) -> T.DataType | None:
    """Return a type with what paths lead to, and nothing else; None where they lead nowhere.

    Args:
        type_: of a column, or a file's struct.
        paths: steps from here; the empty one leads to all of it. A struct's field is `named`.
    """
    if any(not path for path in paths):
        return type_
    if isinstance(type_, T.StructType):
        further: dict[str, list[Sequence[str]]] = {}
        for path in paths:
            for field in named(type_, path[0]):
                further.setdefault(field.name, []).append(path[1:])
        children = [(f.name, pruned(f.dataType, further[f.name])) for f in type_.fields if f.name in further]
        fields = [T.StructField(name, inner) for name, inner in children if inner is not None]
        return T.StructType(fields) if fields else None
    if isinstance(type_, T.MapType):
        value = pruned(type_.valueType, [path[1:] for path in paths])
        return None if value is None else T.MapType(type_.keyType, value)
    if isinstance(type_, T.ArrayType):
        # A key finds a record by its field `key`.
        keys = [(KEY_FIELD,) for path in paths if not is_of_list(path[0])]
        element = pruned(type_.elementType, [*keys, *(path[1:] for path in paths)])
        return None if element is None else T.ArrayType(element)
    return type_


def as_read(type_: T.DataType) -> T.DataType:
    """Return the type that Spark's reader is asked for."""
    if isinstance(type_, T.NullType):
        return T.IntegerType()
    return T.LongType() if isinstance(type_, Nanoseconds) else _rebuilt(type_, as_read)


def as_restored(type_: T.DataType) -> T.DataType:
    """Return the type of `restored`."""
    if isinstance(type_, Nanoseconds):
        return T.TimestampType() if type_.zone else T.TimestampNTZType()
    return _rebuilt(type_, as_restored)


def _rebuilt(type_: T.DataType, each: Any) -> T.DataType:
    if isinstance(type_, T.StructType):
        return T.StructType([T.StructField(f.name, each(f.dataType)) for f in type_.fields])
    if isinstance(type_, T.ArrayType):
        return T.ArrayType(each(type_.elementType))
    if isinstance(type_, T.MapType):
        return T.MapType(each(type_.keyType), each(type_.valueType))
    return type_


def restored(value: Column, type_: T.DataType) -> Column:
    """Return a value that was read as `as_read` as one of `as_restored`: nanoseconds are cut to microseconds."""
    if isinstance(type_, T.NullType):
        return F.lit(None)
    if isinstance(type_, Nanoseconds):
        floor = value - F.pmod(value, F.lit(1_000).cast("long"))
        moment = F.timestamp_micros(F.call_function("div", floor, F.lit(1_000).cast("long")))
        return moment if type_.zone else moment.cast("timestamp_ntz")
    if as_read(type_) == type_:
        return value
    if isinstance(type_, T.StructType):
        fields = [restored(value.getField(f.name), f.dataType).alias(f.name) for f in type_.fields]
        return F.when(value.isNotNull(), F.struct(*fields))
    if isinstance(type_, T.ArrayType):
        element = type_.elementType
        return F.transform(value, lambda e: restored(e, element))
    assert isinstance(type_, T.MapType)
    values = type_.valueType
    return F.transform_values(value, lambda _, v: restored(v, values))


def restored_columns(struct: T.StructType) -> list[Column]:
    """`restored` of each column of a frame."""
    return [restored(F.col(quoted_names([f.name])[0]), f.dataType).alias(f.name) for f in struct.fields]


def unreadable(type_: T.DataType) -> str | None:
    """Return how a type is spelled that Spark does not read, or that it has within; None where Spark reads all."""
    return next((t.spelling for t in _leaf_types(type_) if isinstance(t, Unreadable)), None)


def has_nanoseconds(type_: T.DataType) -> bool:
    """Return whether a type is or has within a time in nanoseconds."""
    return any(isinstance(t, Nanoseconds) for t in _leaf_types(type_))


def _leaf_types(type_: T.DataType) -> Iterator[T.DataType]:
    inner: Sequence[T.DataType] = ()
    if isinstance(type_, T.StructType):
        inner = [f.dataType for f in type_.fields]
    elif isinstance(type_, T.ArrayType):
        inner = [type_.elementType]
    elif isinstance(type_, T.MapType):
        inner = [type_.keyType, type_.valueType]
    else:
        yield type_
    for child in inner:
        yield from _leaf_types(child)


def _parsed(schema: pq.ParquetSchema) -> StoredSchema | None:
    arrow = schema.to_arrow_schema()
    leaves = iter(range(len(schema)))
    fields, numbers = [], list[int | None]()
    try:
        for field in arrow:
            first = len(schema) - _remaining(leaves)
            type_ = _type(field.type, schema, leaves)
            fields.append(T.StructField(field.name, type_))
            numbers.append(None if isinstance(type_, (T.StructType, T.ArrayType, T.MapType)) else first)
    except StopIteration:
        return None
    return None if _remaining(leaves) else StoredSchema(T.StructType(fields), tuple(numbers))


def _remaining(leaves: Any) -> int:
    return int(leaves.__length_hint__())


def _type(arrow: pa.DataType, schema: pq.ParquetSchema, leaves: Iterator[int]) -> T.DataType:
    """Spark's type of a column. Raises StopIteration where the footer has fewer leaves than Arrow's type."""
    if pa.types.is_struct(arrow):
        inner = [arrow.field(i) for i in range(arrow.num_fields)]
        return T.StructType([T.StructField(f.name, _type(f.type, schema, leaves)) for f in inner])
    if pa.types.is_map(arrow):
        key = _type(arrow.key_type, schema, leaves)
        return T.MapType(key, _type(arrow.item_type, schema, leaves))
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow):
        return T.ArrayType(_type(arrow.value_type, schema, leaves))
    return _leaf_type(schema.column(next(leaves)))


def _leaf_type(leaf: Any) -> T.DataType:
    logical = json.loads(leaf.logical_type.to_json())
    kind, physical = logical["Type"], str(leaf.physical_type)
    if kind == "Null":
        return T.NullType()
    if kind == "Int":
        return (_SIGNED if logical["isSigned"] else _UNSIGNED)[logical["bitWidth"]]
    if kind == "Decimal":
        digits, scale = logical["precision"], logical["scale"]
        return T.DecimalType(digits, scale) if digits <= _MOST_DIGITS else Unreadable(f"decimal({digits},{scale})")
    if kind == "Date":
        return T.DateType()
    if kind == "Timestamp":
        zone = bool(logical["isAdjustedToUTC"])
        if logical["timeUnit"] == "nanoseconds":
            return Nanoseconds(zone)
        return T.TimestampType() if zone else T.TimestampNTZType()
    if kind == "Time":
        return Unreadable(f"time({logical['timeUnit']})")
    if kind in ("String", "Enum", "JSON"):
        return T.StringType()
    if kind in ("None", "BSON"):
        return _PLAIN.get(physical, Unreadable(physical.lower()))
    return Unreadable(f"{physical.lower()} ({kind.lower()})")


def escaped(files: Sequence[TableFile]) -> list[str]:
    """Return their paths for a reader that takes them for globs."""
    return [_GLOB_CHARACTERS.sub(r"\\\1", str(f.path)) for f in files]


def footer(path: Location) -> pq.FileMetaData:
    """Return the footer of a Parquet file, of which no more is fetched.

    Raises:
        OSError: there is none, or it cannot be read.
        pyarrow.ArrowException: it is none that Arrow reads.
    """
    with path.open_parts() as f:
        return pq.ParquetFile(f).metadata


def arrow_reads(files: Sequence[TableFile]) -> bool:
    """Return whether Arrow opens all of the files: those of newer writers may have types that this release does not
    know.
    """
    with ThreadPoolExecutor(READERS) as pool:
        return all(pool.map(lambda f: _opens(f.path), files))


def _opens(path: Location) -> bool:
    try:
        footer(path)
    except StoreError:  # the store failed: the file may be intact
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
        metadata = footer(path)
    except StoreError:
        raise
    except (pa.ArrowException, OSError):
        return False  # a newer writer than our Arrow, or no Parquet file: Spark reports it
    columns = (
        metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(metadata.num_columns)
    )
    return any(
        c.physical_type == "BYTE_ARRAY" and c.total_uncompressed_size > max(_LARGE_COLUMN, _LONG_VALUE * c.num_values)
        for c in columns
    )


def read_parquet(
    spark: SparkSession, root: Location, files: Sequence[TableFile], schema: T.StructType, partitioned: Collection[str]
) -> DataFrame:
    """Return the rows of some files of a table.

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
    names = quoted_names([f.name for f in schema.fields])
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
    partition_fields = [f for f in schema.fields if f.name in partitioned]
    if not partition_fields:
        return frame.select(*names, FILE, LINE)
    known = spark.createDataFrame(
        [(f.name, *((f.partition or {}).get(g.name.lower()) for g in partition_fields)) for f in files],
        T.StructType(
            [T.StructField(FILE, T.StringType()), *(T.StructField(g.name, T.StringType()) for g in partition_fields)]
        ),
    )
    typed = [F.col(quoted_names([g.name])[0]).cast(g.dataType).alias(g.name) for g in partition_fields]
    # A file without a match must cause an error, not lose its rows.
    checked_file = F.coalesce(
        F.col("_known"), F.raise_error(F.concat(F.lit("no such data file: "), FILE)).cast("string")
    )
    known = known.select(FILE, F.col(FILE).alias("_known"), *typed)
    frame = frame.join(F.broadcast(known), FILE, "left")
    return frame.select(*names, checked_file.alias(FILE), LINE)


_PLACE = T.StructType([T.StructField(FILE, T.StringType()), T.StructField(LINE, T.LongType())])
