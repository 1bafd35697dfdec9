"""Delta tables of which each run writes a day: one commit that replaces it, known by the run's key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.config.schema import is_wider
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog, damaged_file, sql_type
from headrace.lake.delta.transaction import Transaction
from headrace.stage import Context
from headrace.stage.manifest import Output
from headrace.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check_table_columns(
    table: Location, new_columns: Mapping[str, str], reason: str, optional: Mapping[str, str] = {}
) -> None:
    """Check that an existing table has the columns to be written: its other days stay readable.

    Their types may be narrower ones, which `write_day` widens.

    Args:
        new_columns: Delta's types by column, arrays as `array<float>`.
        reason: how a table comes to have others.
        optional: columns that days may have or not, null where a day has none.

    Raises:
        UserError: it has others.
    """
    existing = DeltaLog(table).column_types()
    columns, optional_types = (
        {name: sql_type(type_) for name, type_ in types.items()} for types in (new_columns, optional)
    )
    required = {name: type_ for name, type_ in existing.items() if name in columns or optional_types.get(name) != type_}
    same_types = all(
        columns.get(name) == type_ or is_wider(columns.get(name, ""), type_) for name, type_ in required.items()
    )
    if existing and not (same_types and required.keys() == columns.keys()):
        raise UserError(
            f"table {table} has the columns {existing}, but what is to be written has {columns}: {reason}. Move the "
            f"table away, or give the pipeline another name"
        )


def write_day(frame: DataFrame, table: Location, ctx: Context, stage: str) -> int:
    """Replace the rows of the run's day (column `ds`) in one commit, which names the run; the version of the commit."""
    existing = DeltaLog(table).column_types()
    if any(is_wider(type_, existing.get(name, "")) for name, type_ in frame.dtypes):
        Transaction(table, fence=ctx.fence).widen([field.jsonValue() for field in frame.schema.fields])
    metadata = json.dumps({"stage": stage, "ds": ctx.ds, "key": ctx.key})
    writer = (
        frame.write.format("delta")
        .mode("overwrite")
        .partitionBy("ds")
        .option("replaceWhere", f"ds = '{ctx.ds}'")
        .option("mergeSchema", "true")  # columns that earlier days did not have
        .option("userMetadata", metadata)
    )
    from headrace.lake.delta.with_spark import save_delta

    return save_delta(writer, table, ctx.fence, frame.schema)


def rows_of_day(table: Location, version: int, ds: str) -> int:
    """Return the number of a day's rows in a version."""
    return sum(f.rows or 0 for f in DeltaLog(table).files(version) or [] if f.partition.get("ds") == ds)


def verify_day(ws: Workspace, output: Output, ds: str) -> str | None:
    """Return why a version lacks a day's rows, or a file of them is missing or of another size, or None."""
    files = DeltaLog(ws.locate(output.name)).files(int(output.version))
    if files is None:
        return f"{output.name} has no version {output.version} any more"
    day_files = [f for f in files if f.partition.get("ds") == ds]
    if (fault := damaged_file(day_files)) is not None:
        return fault
    rows = sum((f.rows or 0) + f.erased for f in day_files)
    if rows != output.rows:
        return f"{output.name} version {output.version} has {rows} rows for {ds}, not {output.rows}"
    return None
