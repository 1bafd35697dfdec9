"""The snapshot of a source table: which format it has, where it is, which version is meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from headrace.config import Table, TableSource
from headrace.config.formats import TABLE_FORMATS
from headrace.config.schema import quoted_names
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.spark.requirements import S3_FILES, S3A
from headrace.lake.tables.snapshot import Snapshot, TablePlace
from headrace.plugins import resolve
from headrace.storage import location_of


def table_name(source: TableSource, ws: Workspace, place: TablePlace) -> str:
    """Return the table for a manifest: its name in a catalog, or its path as the workspace names it."""
    return source.table or ws.name_of(location_of(place.path))


def find_table(source: TableSource, ws: Workspace, spark: SparkSession | None) -> TablePlace | None:
    """Return where the table is, None where a catalog must be asked and there is no session to do so.

    Raises:
        UserError: no such table, or one that is not read.
    """
    if source.path is not None:
        assert source.format is not None
        places = ws.read_places(source.path)
        existing = None if len(places) == 1 else next((p for p in places if p.is_dir()), None)
        return TablePlace(source.format, str(existing or places[0]))
    return None if spark is None else _in_catalog(source, spark)


def open_table(
    source: TableSource, table: Table, place: TablePlace, days: Mapping[str, str], version: str | None = None
) -> Snapshot:
    """Return the table at one version.

    Args:
        source: names it.
        table: declares its columns.
        place: where it is.
        days: of those that were taken, what `Snapshot.day_versions` said then.
        version: that `Snapshot.pin` gave before; None: the one that the spec asks for.

    Raises:
        UserError: it is not there, or is not read.
    """
    known = TABLE_FORMATS.find(place.format, "source.format")
    if source.day is not None and source.day.changes and not known.has_changes:
        raise UserError(f"source.day.changes: {source.title} is {place.format}, and Delta tables alone record changes")
    opens = resolve(known.opens, f"source.format {place.format}", "format of tables")
    return cast(Snapshot, opens(source, table, place, days, version))


def _in_catalog(source: TableSource, spark: SparkSession) -> TablePlace:
    from headrace.lake.tables.iceberg_metadata import named_place  # late: most tables are given by their paths

    assert source.table is not None
    name = ".".join(quoted_names(source.table.split(".")))
    try:
        rows = spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    except AnalysisException as e:
        raise UserError(
            f"source.table: Spark finds no table {source.table} ({str(e).splitlines()[0]}); a catalog of another "
            f"service is added by spark.properties: {{spark.sql.catalog.NAME: ...}}"
        ) from None
    description: Mapping[str, str] = {r["col_name"].lower(): str(r["data_type"]) for r in rows}
    format_, location = description.get("provider", "").lower(), description.get("location", "")
    if not TABLE_FORMATS.is_name(format_):
        kind = f"of format {format_}" if format_ else "a view"
        raise UserError(f"source.table: {source.table} is {kind}, which headrace does not read as a source")
    place = named_place(location, f"source.table: the files of {source.table} are at {location}")
    if place.scheme == "s3" and not spark.conf.get(S3_FILES, ""):
        raise UserError(
            f"source.table: the files of {source.table} are at {location}, and this session has no file system for "
            f"S3: run `make s3`, or with jars of your own say `{S3_FILES}: {S3A}` in spark.properties"
        )
    folder = str(place)
    if format_ != "iceberg":
        return TablePlace(format_, folder)
    # The session's catalog may have cached older metadata.
    spark.sql(f"REFRESH TABLE {name}")
    newest = spark.table(f"{name}.metadata_log_entries").collect()[-1]
    return TablePlace(format_, folder, str(named_place(newest["file"])))
