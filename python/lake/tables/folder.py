"""Folders of Parquet, ORC or Avro files as sources: what is listed is the table.

Spark reads a folder of ORC or Avro files by one schema. Where a column's type differs by file, it ends with a trace, or
in a task of a later stage. So types are compared before: a file's footer or header is read, and no row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import Table, TableSource
from headrace.config.schema import unique_names
from headrace.errors import UserError
from headrace.errors.translate import own_error
from headrace.lake.spark.session import spark_settings
from headrace.lake.tables.days import Bounds, days_of_file, path_day, path_day_column
from headrace.lake.tables.mixed_files import mixed_rows, partition_values
from headrace.lake.tables.parquet import StoredSchema, escaped, footer, time_bounds
from headrace.lake.tables.snapshot import (
    DAY,
    FILE,
    READERS,
    WHOLE_TABLE,
    FileSnapshot,
    Snapshot,
    StoredRows,
    TableFile,
    TablePlace,
    files_of,
    relative_file,
    relative_name,
)
from headrace.lake.values import has_twins, with_unique_names
from headrace.stage.manifest import fingerprint
from headrace.storage import Location, StoreError, StoreRefused, location_of
from headrace.storage.store import Info


def check_same_types(files: Sequence[TableFile], form: str) -> None:
    """Compare the types of columns, and of fields within, of all files that have them.

    Files that cannot be opened here are left to Spark.

    Args:
        files: data files.
        form: orc or avro.

    Raises:
        UserError: a column has two types; names it with both files and types.
    """
    with ThreadPoolExecutor(READERS) as pool:
        types = [schema.types for schema in pool.map(lambda f: read_schema(f.path, f.identity, form), files)]
    first: dict[str, tuple[str, Location]] = {}
    for file, of_file in zip(files, types, strict=True):
        for column, type_ in of_file.items():
            earlier_type, earlier_file = first.setdefault(column, (type_, file.path))
            if earlier_type != type_:
                raise UserError(
                    f"source: column '{column}' is {earlier_type} in {earlier_file} and {type_} in {file.path}, and "
                    f"a folder of {form} files has one type for each column: write one of them again, or the folder as "
                    f"Parquet, whose files may differ"
                )


#: First bytes of a file.
_MAGIC = {"orc": b"ORC", "avro": b"Obj\x01"}
_MOST_HEADER_BYTES = 64 << 20
#: Errors of Arrow and fastavro for bytes that are no schema.
_NO_SCHEMA = (
    *(pa.ArrowException, OSError, EOFError),
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
)


@dataclass(frozen=True)
class FileSchema:
    """The schema that a file has in its footer or header."""

    #: The type of each column and field by its path, such as `user.id` or `tags[]`.
    types: Mapping[str, str] = field(default_factory=dict)
    #: The schema of an Avro file as it is written, JSON.
    text: str = ""
    #: Why it cannot be read here; None: it was read.
    fault: str | None = None
    #: Whether the file begins as its format does, so that Spark may read what Python does not.
    is_of_format: bool = True

    @property
    def has_twins(self) -> bool:
        """Return whether the names of two columns, or of two fields, differ in case alone."""
        return len({path.lower() for path in self.types}) < len(self.types)


@lru_cache(maxsize=1 << 16)
def read_schema(path: Location, identity: str, form: str) -> FileSchema:
    """Return the schema of an ORC or Avro file, which does not change while its identity does not."""
    del identity
    types: dict[str, str] = {}
    text = ""
    with path.open() as stream:
        is_of_format = stream.read(len(_MAGIC[form])) == _MAGIC[form]
        stream.seek(0)
        try:
            if form == "orc":
                _add_orc(stream, types)
            else:
                text = _add_avro_file(stream, types)
        except StoreError:
            raise
        except _NO_SCHEMA as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise
            return FileSchema({}, "", (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip("."), is_of_format)
    return FileSchema(types, text)


def _add_orc(stream: Any, column_types: dict[str, str]) -> None:
    from pyarrow import orc  # only such folders need it

    for column in orc.ORCFile(pa.PythonFile(stream, "r")).schema:
        _add_arrow(column.type, column.name, column_types)


@dataclass(frozen=True)
class _ShortReads:
    """A file of which a damaged length reads no more than a header may have."""

    stream: Any

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer than requested where that is more than `_MOST_HEADER_BYTES`."""
        data: bytes = self.stream.read(min(max(size, 0), _MOST_HEADER_BYTES))
        return data


def _add_avro_file(stream: Any, column_types: dict[str, str]) -> str:
    """Add the types of a file's columns; return its schema as it is written. Raises ValueError where it has none."""
    from fastavro import reader
    from fastavro.schema import SchemaParseException, UnknownType

    header: Any = _ShortReads(stream)
    try:
        file = reader(header)
    except (SchemaParseException, UnknownType) as e:
        raise ValueError(str(e)) from e
    written: Any = file.writer_schema
    for column in written.get("fields", ()) if isinstance(written, Mapping) else ():
        _add_avro(column["type"], column["name"], column_types)
    return str(file.metadata["avro.schema"])


def _add_arrow(type_: pa.DataType, path: str, column_types: dict[str, str]) -> None:
    if pa.types.is_struct(type_):
        column_types[path] = "struct"
        for field in type_:
            _add_arrow(field.type, f"{path}.{field.name}", column_types)
    elif pa.types.is_list(type_):
        column_types[path] = "list"
        _add_arrow(type_.value_type, f"{path}[]", column_types)
    elif pa.types.is_map(type_):
        column_types[path] = "map"
        _add_arrow(type_.key_type, f"{path}[key]", column_types)
        _add_arrow(type_.item_type, f"{path}[value]", column_types)
    elif pa.types.is_decimal(type_):
        # Of several precisions, Spark takes the largest.
        column_types[path] = f"decimal with {type_.scale} digits behind the point"
    else:
        column_types[path] = str(type_)


def _add_avro(type_: Any, path: str, column_types: dict[str, str]) -> None:
    if isinstance(type_, list):
        types = [t for t in type_ if t != "null"]
        if len(types) == 1:
            _add_avro(types[0], path, column_types)
        elif types:  # null alone: other files may have a type
            column_types[path] = "a union"
        return
    kind = type_["type"] if isinstance(type_, Mapping) else str(type_)
    if kind == "record":
        column_types[path] = "record"
        for field in type_["fields"]:
            _add_avro(field["type"], f"{path}.{field['name']}", column_types)
    elif kind == "array":
        column_types[path] = "array"
        _add_avro(type_["items"], f"{path}[]", column_types)
    elif kind == "map":
        column_types[path] = "map"
        _add_avro(type_["values"], f"{path}[value]", column_types)
    elif isinstance(type_, Mapping) and type_.get("logicalType") == "decimal":
        column_types[path] = f"decimal({type_['precision']},{type_.get('scale', 0)})"
    elif isinstance(type_, Mapping) and "logicalType" in type_:
        column_types[path] = f"{kind} ({type_['logicalType']})"
    elif kind != "null":
        column_types[path] = str(kind)


def with_aliases(schema: str) -> str:
    """Return an Avro schema by which a reader finds fields that differ in case alone under names that do not.

    Args:
        schema: as a file has it, JSON.
    """
    return json.dumps(_aliased(json.loads(schema)))


def _aliased(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_aliased(branch) for branch in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _aliased(schema[key]) for key in ("type", "items", "values") if key in schema}
    if "fields" in schema:
        names = [field["name"] for field in schema["fields"]]
        inner["fields"] = [
            _aliased(field) | ({} if new == old else {"name": new, "aliases": [old]})
            for field, old, new in zip(schema["fields"], names, unique_names(names), strict=True)
        ]
    return {**schema, **inner}


@dataclass(frozen=True)
class FolderSnapshot(FileSnapshot):
    """The files in a folder as they are now; `key=value` folders are partition columns."""

    source: TableSource
    folder: Location
    format: str
    versioned: bool = False
    #: Names of files that cannot be read: they stay in `files`, and none of their rows is read.
    left_out: frozenset[str] = frozenset()

    @property
    def plain(self) -> bool:
        return self.format == "parquet"

    @cached_property
    def files(self) -> list[TableFile]:
        listed = {name: info for name, info in self.folder.infos().items() if not _hidden(name)}
        for name in listed:
            _check_name(self.folder, name)
        # In object stores, empty objects stand for folders (`day=1/`).
        data_files = {name: info for name, info in listed.items() if info.size or name.endswith(f".{self.format}")}
        if not data_files:
            fault = f"{self.folder} has no data files" if self.folder.is_dir() else f"there is no folder {self.folder}"
            raise UserError(f"source: {fault}; change source.path")
        with ThreadPoolExecutor(READERS) as pool:
            return sorted(pool.map(self._file, data_files, data_files.values()), key=lambda f: f.name)

    def _file(self, name: str, info: Info) -> TableFile:
        path = self.folder / name
        partition = {key.lower(): value for key, value in partition_values(name)}
        # Times of a store may have seconds only, so a tag is better.
        identity = f"{info.size}@{info.tag or info.modified_ns}"
        footer = _footer(path, identity, self._time) if self._time and self.format == "parquet" else _Footer()
        of_path = path_day(self.source, name)
        first, last = days_of_file(self.source, partition, footer.bounds) if of_path is None else (of_path, of_path)
        name, lacks = relative_name(path, self.folder), footer.may_lack_days
        return TableFile(name, path, info.size, identity, first, last, partition, lacks)

    @property
    def _time(self) -> str | None:
        return None if self.source.day is None else self.source.day.time

    def pin(self, days: Mapping[str, str]) -> str:
        return fingerprint(dict(days))

    def leaving_out(self, names: Collection[str]) -> FolderSnapshot:
        """Return the same files without the rows of some of them."""
        snapshot = replace(self, left_out=frozenset(names))
        snapshot.__dict__["files"] = self.files  # the pinned files, not a new listing
        return snapshot

    def faults(self, spark: SparkSession, days: Collection[str] | None) -> dict[str, str]:
        """Return why files that may hold rows of the days cannot be opened, by their names; None: of all days."""
        files = files_of(self, days)
        with ThreadPoolExecutor(READERS) as pool:
            faults = list(pool.map(self._fault, files))
        return {f.name: fault for f, fault in zip(files, faults, strict=True) if fault and not self._opens(spark, f)}

    def _fault(self, file: TableFile) -> str | None:
        """Return why Python cannot open a file; None where it can."""
        if not file.size:
            return f"it is empty, and no whole {self.format} file"
        if self.format == "parquet":
            return _footer(file.path, file.identity, self._time).fault
        fault = read_schema(file.path, file.identity, self.format).fault
        return None if fault is None else f"it is no whole {self.format} file: {fault}"

    def _opens(self, spark: SparkSession, file: TableFile) -> bool:
        """Return whether Spark opens an ORC or Avro file that Python does not open: one of a newer writer."""
        if not file.size or self.format == "parquet":
            return False
        if not read_schema(file.path, file.identity, self.format).is_of_format:
            return False
        try:
            _ = spark.read.format(self.format).load(escaped([file])).schema
        except (PySparkException, Py4JJavaError) as e:
            if isinstance(own_error(e), (StoreError, StoreRefused)):
                raise
            return False
        return True

    def stored_rows(
        self, spark: SparkSession, days: Collection[str] | None, paths: Collection[Sequence[str]]
    ) -> list[StoredRows]:
        """Return the rows; of Parquet an entry for all files that are stored alike."""
        files = [f for f in files_of(self, days) if f.name not in self.left_out] or self._any_file()
        if self.format != "parquet":
            check_same_types(files, self.format)
            frames = self._by_schema(spark, files, paths) or {WHOLE_TABLE: self._merged(spark, files)}
            dated = {place: self._with_day(x, F.col("_metadata.file_path")) for place, x in frames.items()}
            return [replace(StoredRows.from_frame(x), place=place) for place, x in dated.items()]
        with ThreadPoolExecutor(READERS) as pool:
            footers = list(pool.map(lambda f: _footer(f.path, f.identity, self._time), files))
        schemas = (f.schema or self._schema_by_spark(spark, file) for file, f in zip(files, footers, strict=True))
        named = {f.path.below(self.folder): (f, s) for f, s in zip(files, schemas, strict=True)}
        parts = mixed_rows(spark, self.folder, named, paths)
        return [replace(part, frame=self._with_day(part.frame, None)) for part in parts]

    def _any_file(self) -> list[TableFile]:
        """Return a file that can be opened, for its columns."""
        for file in self.files:
            if file.name not in self.left_out and self._fault(file) is None:
                return [file]
        raise UserError(f"source: {self.source.title} has no file that can be read")

    def _with_day(self, frame: DataFrame, uri: Column | None) -> DataFrame:
        """Rows with DAY, where the paths of files say it; `uri`: of a row's file, where `_source_file` is not there."""
        if self.source.day is None or self.source.day.path is None:
            return frame
        file = F.col(FILE) if uri is None else relative_file(self.folder, uri)
        return frame.select("*", path_day_column(self.source, file).alias(DAY))

    def _by_schema(
        self, spark: SparkSession, files: Sequence[TableFile], paths: Collection[Sequence[str]]
    ) -> dict[str, DataFrame]:
        """Return, by a file's name, the rows of all files of its schema, where columns' names differ in case alone.

        Spark's names have no case, so such columns get other names (headrace.lake.values). Nothing is
        returned where no file has such columns.
        """
        groups: dict[tuple[str, ...], list[TableFile]] = {}
        schemas = [read_schema(f.path, f.identity, self.format) for f in files]
        if not any(schema.has_twins for schema in schemas):
            return {}
        for file, schema in zip(files, schemas, strict=True):
            groups.setdefault((*schema.types, schema.text), []).append(file)
        return {group[0].name: self._renamed(spark, group, paths) for group in groups.values()}

    def _renamed(self, spark: SparkSession, files: Sequence[TableFile], paths: Collection[Sequence[str]]) -> DataFrame:
        reader = spark.read.format(self.format)
        settings = {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"}
        with spark_settings(spark, settings | {"spark.sql.caseSensitive": "true"}):
            stored = reader.load(escaped(files[:1])).schema
        if self.format == "orc":
            needed = {path[0].lower() for path in paths}
            twins = [f.name for f in stored.fields if f.name.lower() in needed and has_twins(f.dataType)]
            if twins:
                raise UserError(
                    f"source: column '{twins[0]}' of {files[0].path} has fields that differ in case alone, which "
                    f"headrace does not read from ORC: leave it out, or write the folder as Parquet"
                )
            # Columns match by position, not by name.
            reader = reader.option("orc.force.positional.evolution", "true")
        else:
            text = read_schema(files[0].path, files[0].identity, self.format).text
            reader = reader.option("avroSchema", with_aliases(text))
        schema = with_unique_names(stored)
        assert isinstance(schema, T.StructType)
        with spark_settings(spark, settings):
            return reader.schema(schema).option("basePath", str(self.folder)).load(escaped(files))

    def _merged(self, spark: SparkSession, files: Sequence[TableFile]) -> DataFrame:
        """Return all columns of ORC or Avro files, whose readers resolve each file's own schema."""
        reader = spark.read.format(self.format).option("basePath", str(self.folder)).option("mergeSchema", "true")
        # Partition values are text until the declaration says what they are.
        with spark_settings(spark, {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"}):
            try:
                return reader.load(escaped(files))
            except AnalysisException as e:
                if self.format == "avro" and "Failed to find data source" in str(e):
                    raise UserError(
                        "source.format: avro needs Spark's Avro module, which is not part of its distribution: run "
                        "`make jars`"
                    ) from e
                raise UserError(f"source: {self.source.title} cannot be read: {_first_line(e)}") from e
            except (PySparkException, Py4JJavaError) as e:
                if own_error(e) is not None:
                    raise
                raise UserError(f"source: {self.source.title} cannot be read: {_first_line(e)}") from e

    def _schema_by_spark(self, spark: SparkSession, file: TableFile) -> StoredSchema:
        """Return the schema of a file that Arrow cannot open."""
        try:
            struct = spark.read.parquet(*escaped([file])).schema
        except (PySparkException, Py4JJavaError) as e:
            raise UserError(f"source: {file.path} cannot be read: {_first_line(e)}") from e
        return StoredSchema(struct, (None,) * len(struct.fields))


def _check_name(folder: Location, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        printable = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise UserError(
            f"source: the name of {folder}/{printable} is not UTF-8, which Spark needs; rename it"
        ) from None


def _hidden(name: str) -> bool:
    """Return whether Spark leaves a file out: its name begins with `_` or `.`, and it is no partition."""
    return any(p.startswith(".") or (p.startswith("_") and "=" not in p) for p in name.split("/"))


@dataclass(frozen=True)
class _Footer:
    """Schema and time bounds in the footer of a Parquet file."""

    #: None: it is of a newer writer than our Arrow.
    schema: StoredSchema | None = None
    #: Of the column `day.time`.
    bounds: Bounds | None = None
    may_lack_days: bool = False
    #: Why the file cannot be read; None: it can.
    fault: str | None = None


@lru_cache(maxsize=1 << 16)
def _footer(path: Location, identity: str, time: str | None) -> _Footer:
    """Return the footer of a file that does not change while its identity does not; a run asks for it several times."""
    try:
        metadata = footer(path)
        bounds, lacks = (None, False) if time is None else time_bounds(metadata, time)
        return _Footer(StoredSchema.from_footer(metadata), bounds, lacks)
    except StoreError:
        raise
    except (pa.ArrowException, OSError) as e:
        if _is_parquet(path):
            return _Footer(None, None, time is not None)  # Spark reads it
        return _Footer(fault=f"it is no whole Parquet file: {_first_line(e).rstrip('.')}")


def _is_parquet(path: Location) -> bool:
    """Return whether a file begins and ends as Parquet does."""
    with path.open_parts() as f:
        first = f.read(4)
        f.seek(max(0, path.size() - 4))
        return first == f.read(4) == b"PAR1"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def open_folder(
    source: TableSource, table: Table, place: TablePlace, days: Mapping[str, str], version: str | None
) -> Snapshot:
    """Open a folder of files without a log; arguments as of `headrace.lake.tables.opened.open_table`."""
    return FolderSnapshot(source, location_of(place.path).as_plain(), place.format)
