"""Formats of sources: the keys of `source` that each allows, and the class that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from headrace.errors import UserError, nearest
from headrace.plugins import Seam, resolve

#: The catalog by which Spark reads Iceberg tables by path. `headrace.lake.spark.session` adds Iceberg's jar where a
#: property names its class.
ICEBERG_BY_PATH = {"spark.sql.catalog.default_iceberg": "org.apache.iceberg.spark.SparkCatalog"}


class FileFormat:
    """A format of landing files, as the checks of a spec see it.

    A package of another format extends this and offers it under a name in the group `headrace.sources`. The module
    must not import Spark: that is for the module of `reader`, which is imported when a day is loaded.
    """

    #: `module:Class` of the `headrace.lake.landing.formats.LandingReader` that reads it.
    reader: ClassVar[str]
    #: Columns that the spec must declare.
    columns: ClassVar[tuple[str, ...]] = ()
    #: Whether columns may be declared by `path`.
    paths: ClassVar[bool] = False
    #: Whether such a path may lead into a list.
    list_paths: ClassVar[bool] = False
    #: Whether a row may go over several lines (`source.multiline`).
    multiline: ClassVar[bool] = False
    #: Whether the format itself says how times are spelled.
    own_times: ClassVar[bool] = False


class TableFormat:
    """A format of tables that are read where they are, as the checks of a spec see it.

    A package of another format extends this and offers it under a name in the group `headrace.table_sources`; the name
    is also the provider that Spark's catalogs give for such tables.
    """

    #: `module:function` that opens a table at a version. Its arguments and result: see
    #: `headrace.lake.tables.opened.open_table`.
    opens: ClassVar[str]
    #: Whether the table is a folder of files without a log of its own, and so has no versions.
    is_files: ClassVar[bool] = False
    #: Whether the table records its changes (`source.day.changes`).
    has_changes: ClassVar[bool] = False
    #: Properties of the Spark session that reads it.
    properties: ClassVar[Mapping[str, str]] = {}


class Clicks(FileFormat):
    """Click logs as `headrace generate` writes them: JSON lines and CSV side by side."""

    reader = "headrace.lake.landing.formats:ClicksReader"
    paths = multiline = True


class Csv(FileFormat):
    """Delimited text."""

    reader = "headrace.lake.landing.formats:CsvReader"
    paths = multiline = True


class JsonLines(FileFormat):
    """JSON objects, one a line."""

    reader = "headrace.lake.landing.formats:JsonLinesReader"
    paths = list_paths = True


class DeltaFormat(TableFormat):
    """Delta tables."""

    opens = "headrace.lake.tables.change_feed:open_delta"
    has_changes = True


class IcebergFormat(TableFormat):
    """Iceberg tables."""

    opens = "headrace.lake.tables.iceberg:open_iceberg"
    properties = ICEBERG_BY_PATH


class Folder(TableFormat):
    """Folders of Parquet, ORC or Avro files."""

    opens = "headrace.lake.tables.folder:open_folder"
    is_files = True


_MODULE = "headrace.config.formats"
_BENCHMARK_SETS = ("criteo", "talkingdata", "movielens", "movielens_ncf", "lightgcn", "user_items")
#: `source.format` of landing files.
FILE_FORMATS = Seam(
    "headrace.sources",
    "format of landing files",
    FileFormat,
    {"clicks": f"{_MODULE}:Clicks", "csv": f"{_MODULE}:Csv", "jsonl": f"{_MODULE}:JsonLines"},
    dict.fromkeys(_BENCHMARK_SETS, "headrace-datasets"),
)
#: `source.format` of tables.
TABLE_FORMATS = Seam(
    "headrace.table_sources",
    "format of tables",
    TableFormat,
    {
        "delta": f"{_MODULE}:DeltaFormat",
        "parquet": f"{_MODULE}:Folder",
        "iceberg": f"{_MODULE}:IcebergFormat",
        "orc": f"{_MODULE}:Folder",
        "avro": f"{_MODULE}:Folder",
    },
)


def is_table_format(name: object) -> bool:
    """Return whether a format is one of tables: by its name, or as the class `module:Class`."""
    if not isinstance(name, str) or name in FILE_FORMATS.builtin:
        return False
    if ":" not in name:
        return TABLE_FORMATS.is_name(name)
    with suppress(UserError):  # told by `check_format`
        kind = resolve(name, "source.format", "format")
        return isinstance(kind, type) and issubclass(kind, TableFormat)
    return False


def check_format(name: object) -> None:
    """Check that a format is one of landing files, or of tables.

    Raises:
        ValueError: it is none, or cannot be imported.
    """
    text = str(name)
    if text in FILE_FORMATS.builtin or text in TABLE_FORMATS.builtin:
        return
    seam = TABLE_FORMATS if is_table_format(name) else FILE_FORMATS
    if ":" in text or seam.is_name(text):
        try:
            seam.find(text, "format")
        except UserError as e:
            raise ValueError(str(e).removeprefix("format: ")) from None
        return
    files, tables = FILE_FORMATS.known(), TABLE_FORMATS.known()
    hint = nearest(text, [*files, *tables])
    raise ValueError(f"'{name}' is no format{hint}; files: {', '.join(files)}; tables: {', '.join(tables)}")
