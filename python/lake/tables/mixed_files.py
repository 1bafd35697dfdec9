"""Parquet files that need not have the same columns or types, as frames: one of all files that are stored alike.

No schema is merged: each file is read by its own, and only what is needed of it. So files may differ in columns that
nobody reads, and in types that the declaration can take. Spark's reader reads the files, except where it cannot: names
that differ in case alone, and file names that Hadoop takes for URIs. Tasks read those by Arrow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.config.schema import how_to_declare, quoted_names
from headrace.errors import UserError
from headrace.errors.translate import UnreadableDataFile
from headrace.lake.spark.tasks import cores_of, grouped, prepare_worker
from headrace.lake.tables.parquet import (
    StoredSchema,
    as_read,
    as_restored,
    escaped,
    has_nanoseconds,
    named,
    pruned,
    restored_columns,
    shorten_batches,
    unreadable,
)
from headrace.lake.tables.snapshot import FILE, LINE, StoredRows, TableFile, relative_file
from headrace.lake.values import with_unique_names
from headrace.storage import Location, StoreError

#: Spark has no type for Parquet's times in nanoseconds; `restored_columns` makes times of these numbers.
_NANOSECONDS = "spark.sql.legacy.parquet.nanosAsLong"
_NULL = "__HIVE_DEFAULT_PARTITION__"
#: Rows per batch of a task.
_BATCH_ROWS = 8_192


def partition_values(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield the `key=value` folders that a file is in."""
    for part in name.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals:
            yield unquote(key), None if value == _NULL else unquote(value)


@dataclass
class _Alike:
    """Files that are read together."""

    #: Columns to read of each file.
    struct: T.StructType
    #: Whether tasks read them by Arrow.
    by_arrow: bool
    files: list[TableFile] = field(default_factory=list)
    #: All columns, name to type.
    types: dict[str, str] = field(default_factory=dict)


def mixed_rows(
    spark: SparkSession,
    root: Location,
    files: Mapping[str, tuple[TableFile, StoredSchema]],
    paths: Collection[Sequence[str]],
) -> list[StoredRows]:
    """Return the rows of a folder's files.

    Args:
        spark: the session.
        root: the folder.
        files: at least one, by their paths in the folder.
        paths: what is needed of each row: steps from a column's name into it.

    Returns:
        an entry for all files that are stored alike: the needed columns, those of partitions as text, `_source_file`
        and `_source_line`.

    Raises:
        UserError: a needed column has a type that is not read, or its name may mean two columns.
    """
    needed = _Needed(paths, [schema for _, schema in files.values()])
    groups: dict[tuple[str, tuple[str, ...], bool], _Alike] = {}
    faults: dict[str, None] = {}
    for name, (file, schema) in files.items():
        keys = tuple(key for key, _ in partition_values(name))
        struct = needed.read_struct(schema, keys, name)
        faults |= dict.fromkeys(
            f"{name}: column '{f.name}' is {type_}, which headrace does not read"
            for f in struct.fields
            if (type_ := unreadable(f.dataType)) is not None
        )
        # Hadoop takes the part before a colon for a URI's scheme.
        by_arrow = needed.has_twins(schema) or ":" in name
        group = groups.setdefault((repr(struct), keys, by_arrow), _Alike(struct, by_arrow))
        group.files.append(file)
        group.types |= {f.name: f.dataType.simpleString() for f in schema.struct.fields} | dict.fromkeys(keys, "string")
    if faults:
        lines = list(faults)[:_SHOWN_FAULTS]
        if len(faults) > _SHOWN_FAULTS:
            lines.append(f"and {len(faults) - _SHOWN_FAULTS} more")
        raise UserError(
            "source: "
            + "\n".join(lines)
            + "\nLeave these columns out of table.columns, or have their writer use another type"
        )
    if any(has_nanoseconds(schema.struct) for schema in {id(s): s for _, s in files.values()}.values()):
        # Spark has no option of a read for it. Set only here: with it, the RAPIDS plugin reads no Parquet file.
        spark.conf.set(_NANOSECONDS, "true")
    shorten_batches(spark, [file for file, _ in files.values()])
    return [_rows(spark, root, group, list(keys)) for (_, keys, _), group in groups.items()]


#: Faults that a message shows.
_SHOWN_FAULTS = 5


class _Needed:
    """Columns and fields that are read of files, by their paths."""

    def __init__(self, paths: Collection[Sequence[str]], schemas: Iterable[StoredSchema]) -> None:
        self._paths = sorted({tuple(path) for path in paths})
        self._firsts = {path[0].lower(): path[0] for path in self._paths}
        #: Needed columns that a file has in two spellings, by their names in lower case.
        self._twins: dict[str, list[str]] = {}
        for schema in {id(s): s for s in schemas}.values():
            for low in self._firsts:
                same = [f.name for f in schema.struct.fields if f.name.lower() == low]
                if len(same) > 1:
                    self._twins[low] = same
        self._structs: dict[tuple[int, tuple[str, ...]], T.StructType] = {}

    def read_struct(self, schema: StoredSchema, partitions: tuple[str, ...], file: str) -> T.StructType:
        """Return what is read of a file; its partition columns stand in its path."""
        key = (id(schema), partitions)
        if key not in self._structs:
            outside = {p.lower() for p in partitions}
            stored = T.StructType([f for f in schema.struct.fields if f.name.lower() not in outside])
            self._check(stored, file)
            needed = pruned(stored, self._paths)
            self._structs[key] = needed if isinstance(needed, T.StructType) else T.StructType([])
        return self._structs[key]

    def has_twins(self, schema: StoredSchema) -> bool:
        """Return whether a needed column or field has another one beside it whose name differs in case alone."""
        return any(_twins_on(schema.struct, path) for path in self._paths)

    def _check(self, stored: T.StructType, file: str) -> None:
        """Raise UserError where a name may mean two columns."""
        declared = {path[0] for path in self._paths}
        for name in sorted(declared):
            fields = [f.name for f in named(stored, name) if f.name == name or f.name not in declared]
            spellings = sorted(self._twins.get(name.lower(), []))
            if fields and spellings and fields != [name]:
                raise UserError(
                    f"source: '{name}' may mean {' or '.join(map(repr, spellings))}: files have both, and {file} has "
                    f"none that is spelled '{name}'; {how_to_declare(spellings)}"
                )


def _twins_on(type_: T.DataType, path: Sequence[str]) -> bool:
    if not path:
        return False
    if isinstance(type_, T.MapType):
        return _twins_on(type_.valueType, path[1:])
    if isinstance(type_, T.ArrayType):
        return _twins_on(type_.elementType, path[1:])
    if not isinstance(type_, T.StructType):
        return False
    same = [f for f in type_.fields if f.name.lower() == path[0].lower()]
    return len(same) > 1 or any(_twins_on(f.dataType, path[1:]) for f in same)


def _rows(spark: SparkSession, root: Location, group: _Alike, partitions: list[str]) -> StoredRows:
    return StoredRows(
        (_by_arrow if group.by_arrow else _by_spark)(spark, root, group, partitions), group.files[0].name, group.types
    )


def _by_spark(spark: SparkSession, root: Location, group: _Alike, partitions: list[str]) -> DataFrame:
    stored = T.StructType([f for f in group.struct.fields if not isinstance(f.dataType, T.NullType)])
    reader = spark.read.schema(as_read(stored)).option("basePath", str(root))  # type: ignore[arg-type]
    place = relative_file(root, F.col("_metadata.file_path")), F.col("_metadata.row_index")
    return reader.parquet(*escaped(group.files)).select(
        *restored_columns(group.struct), *quoted_names(partitions), place[0].alias(FILE), place[1].alias(LINE)
    )


def _by_arrow(spark: SparkSession, root: Location, group: _Alike, partitions: list[str]) -> DataFrame:
    tasks = grouped(group.files, lambda f: f.size, cores_of(spark))
    restored = as_restored(group.struct)
    assert isinstance(restored, T.StructType)
    fields = [*restored.fields, *(T.StructField(name, T.StringType()) for name in partitions)]
    fields += [T.StructField(FILE, T.StringType()), T.StructField(LINE, T.LongType())]
    stored = T.StructType([f for f in fields if not isinstance(f.dataType, T.NullType)])
    schema = with_unique_names(T.StructType(fields))
    assert isinstance(schema, T.StructType)
    is_null = [isinstance(f.dataType, T.NullType) for f in schema.fields]
    typed = T.StructType([f for f, null in zip(schema.fields, is_null, strict=True) if not null])
    work = _ArrowReader(tuple(map(tuple, tasks)), stored, to_arrow_schema(typed), frozenset(partitions))
    frame = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(work, typed)
    nulls = [
        F.lit(None).alias(f.name, metadata=f.metadata) for f, null in zip(schema.fields, is_null, strict=True) if null
    ]
    return frame.select("*", *nulls)


@dataclass(frozen=True)
class _ArrowReader:
    """Reads files in tasks."""

    tasks: tuple[tuple[TableFile, ...], ...]
    #: Columns to read, by their names in files.
    schema: T.StructType
    #: Columns as returned, by names that are unique regardless of case.
    returned: pa.Schema
    partitions: frozenset[str]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for file in self.tasks[number]:
                    try:
                        yield from self._file(file)
                    except StoreError:
                        raise
                    except (pa.ArrowException, OSError) as e:
                        if isinstance(e, OSError) and e.errno is not None:  # an error of the file system
                            raise
                        reason = f"Arrow cannot read it ({(str(e).splitlines() or [''])[0]})"
                        raise UnreadableDataFile.damaged(str(file.path), reason) from e

    def _file(self, file: TableFile) -> Iterator[pa.RecordBatch]:
        schema, first_row = to_arrow_schema(self.schema), 0
        stored = [f for f in schema if f.name not in (FILE, LINE, *self.partitions)]
        partition_values = {k.lower(): v for k, v in (file.partition or {}).items()}
        with file.path.open_parts() as source:
            parquet = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
            numbers = [parquet.schema_arrow.names.index(f.name) for f in stored]
            # Even without columns, Arrow's batches have their number of rows.
            names = [parquet.schema_arrow.names[i] for i in numbers]
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                n = batch.num_rows
                columns = [_cast(batch.column(batch.schema.names.index(f.name)), f, file) for f in stored]
                columns += [
                    pa.array([partition_values.get(f.name.lower())] * n, f.type)
                    for f in schema
                    if f.name in self.partitions
                ]
                columns += [pa.array([file.name] * n), pa.array(range(first_row, first_row + n), pa.int64())]
                first_row += n
                # Names within structs differ, too; the layout is the same.
                columns = [x.view(f.type) for x, f in zip(columns, self.returned, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=self.returned)


def _cast(column: pa.Array, stored_field: pa.Field, file: TableFile) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return _pruned(column, stored_field.type).cast(stored_field.type, safe=False)
    except pa.ArrowException as e:
        raise UserError(
            f"source: {file.path}: column '{stored_field.name}' is {column.type}, which Arrow does not read as "
            f"{stored_field.type}: {e}"
        ) from None


def _pruned(column: pa.Array, stored_type: pa.DataType) -> pa.Array:
    """Return a struct with the wanted fields alone; others as they are."""
    if not pa.types.is_struct(stored_type) or not pa.types.is_struct(column.type):
        return column
    fields = [stored_type.field(i) for i in range(stored_type.num_fields)]
    arrays = [_pruned(column.field(column.type.get_field_index(f.name)), f.type) for f in fields]
    return pa.StructArray.from_arrays(arrays, [f.name for f in fields], mask=column.is_null())
