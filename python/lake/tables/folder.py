"""Folders of Parquet, ORC or Avro files as sources: what is listed is the table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import TableSource
from headrace.errors import UserError
from headrace.lake.spark.session import spark_settings
from headrace.lake.tables.days import Bounds, days_of_file, path_day, path_day_column
from headrace.lake.tables.mixed_files import mixed_rows, partition_values
from headrace.lake.tables.parquet import StoredSchema, escaped, footer, time_bounds
from headrace.lake.tables.snapshot import (
    DAY,
    FILE,
    READERS,
    FileSnapshot,
    StoredRows,
    TableFile,
    files_of,
    relative_file,
    relative_name,
)
from headrace.manifest import fingerprint
from headrace.storage import Location, StoreError
from headrace.storage.store import Info


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
        listed = {name: info for name, info in self.folder.infos().items() if not _hidden(name)}
        for name in listed:
            _check_name(self.folder, name)
        # In stores of objects those without a byte stand for folders (`day=1/`).
        data_files = {name: info for name, info in listed.items() if info.size}
        empty = [name for name in listed.keys() - data_files.keys() if name.endswith(f".{self.format}")]
        if empty:
            raise UserError(
                f"source: {self.folder / min(empty)} is empty, and no whole {self.format} file. Deliver it again, or "
                f"remove it"
            )
        if not data_files:
            fault = f"{self.folder} has no data files" if self.folder.is_dir() else f"there is no folder {self.folder}"
            raise UserError(f"source: {fault}; change source.path")
        with ThreadPoolExecutor(READERS) as pool:
            return sorted(pool.map(self._file, data_files, data_files.values()), key=lambda f: f.name)

    def _file(self, name: str, info: Info) -> TableFile:
        path = self.folder / name
        partition = {key.lower(): value for key, value in partition_values(name)}
        # A store's times may be of seconds.
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

    def stored_rows(
        self, spark: SparkSession, days: Collection[str] | None, paths: Collection[Sequence[str]]
    ) -> list[StoredRows]:
        """Return the rows; of Parquet an entry for all files that are stored alike."""
        files = files_of(self, days) or self.files[:1]
        if self.format != "parquet":
            check_same_types(files, self.format)
            return [StoredRows.from_frame(self._with_day(self._merged(spark, files), F.col("_metadata.file_path")))]
        with ThreadPoolExecutor(READERS) as pool:
            footers = list(pool.map(lambda f: _footer(f.path, f.identity, self._time), files))
        schemas = (f.schema or self._schema_by_spark(spark, file) for file, f in zip(files, footers, strict=True))
        named = {f.path.below(self.folder): (f, s) for f, s in zip(files, schemas, strict=True)}
        parts = mixed_rows(spark, self.folder, named, paths)
        return [replace(part, frame=self._with_day(part.frame, None)) for part in parts]

    def _with_day(self, frame: DataFrame, uri: Column | None) -> DataFrame:
        """Rows with DAY, where the paths of files say it; `uri`: of a row's file, where `_source_file` is not there."""
        if self.source.day is None or self.source.day.path is None:
            return frame
        file = F.col(FILE) if uri is None else relative_file(self.folder, uri)
        return frame.select("*", path_day_column(self.source, file).alias(DAY))

    def _merged(self, spark: SparkSession, files: Sequence[TableFile]) -> DataFrame:
        """Return all columns of ORC or Avro files, whose readers resolve each file's own schema."""
        reader = spark.read.format(self.format).option("basePath", str(self.folder)).option("mergeSchema", "true")
        # Partition values are text until the declaration says what they are.
        with spark_settings(spark, {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"}):
            try:
                return reader.load(escaped(files))
            except AnalysisException as e:
                if self.format == "avro":
                    raise UserError(
                        "source.format: avro needs Spark's Avro module, which is not part of its distribution: run "
                        "`make jars`"
                    ) from e
                raise
            except (PySparkException, Py4JJavaError) as e:
                raise UserError(f"source: {self.source.shown} cannot be read: {_first_line(e)}") from e

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


@lru_cache(maxsize=1 << 16)
def _footer(path: Location, identity: str, time: str | None) -> _Footer:
    """Return the footer of a file that does not change while its identity does not; a run asks for it several times.

    Raises:
        UserError: it is no Parquet file, or not a whole one.
    """
    try:
        metadata = footer(path)
        bounds, lacks = (None, False) if time is None else time_bounds(metadata, time)
        return _Footer(StoredSchema.from_footer(metadata), bounds, lacks)
    except StoreError:
        raise
    except (pa.ArrowException, OSError) as e:
        if _is_parquet(path):
            return _Footer(None, None, time is not None)  # Spark reads it
        raise UserError(
            f"source: {path} is no whole Parquet file: {_first_line(e)}. Deliver it again, or move it away; files "
            f"whose names begin with _ or . are left out"
        ) from None


def _is_parquet(path: Location) -> bool:
    """Return whether a file begins and ends as Parquet does."""
    with path.open_parts() as f:
        first = f.read(4)
        f.seek(max(0, path.size() - 4))
        return first == f.read(4) == b"PAR1"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


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
        types = list(pool.map(lambda f: _types(f.path, f.identity, form), files))
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


@lru_cache(maxsize=1 << 16)
def _types(path: Location, identity: str, form: str) -> Mapping[str, str]:
    """Return the type of each column and field of a file by its path, such as `user.id` or `tags[]`."""
    del identity  # the file does not change while it stays the same
    column_types: dict[str, str] = {}
    # Modules are imported late: only such folders need them.
    with path.open() as stream:
        if form == "orc":
            from pyarrow import orc

            try:
                schema = orc.ORCFile(pa.PythonFile(stream, "r")).schema
            except (pa.ArrowException, OSError):
                return {}
            for field in schema:
                _add_arrow(field.type, field.name, column_types)
            return column_types
        from fastavro import reader

        try:
            written: Any = reader(stream).writer_schema
        except (ValueError, EOFError, KeyError):
            return {}
    for field in written.get("fields", ()) if isinstance(written, Mapping) else ():
        _add_avro(field["type"], field["name"], column_types)
    return column_types


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
        # Spark takes the largest number of digits.
        column_types[path] = f"decimal with {type_.scale} digits behind the point"
    else:
        column_types[path] = str(type_)


def _add_avro(type_: Any, path: str, column_types: dict[str, str]) -> None:
    if isinstance(type_, list):
        types = [t for t in type_ if t != "null"]
        if len(types) == 1:
            _add_avro(types[0], path, column_types)
        elif types:  # null alone has the type of whatever others have
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
