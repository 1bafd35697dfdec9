"""The two Delta tables that ingest writes: `events` and `quarantine`, partitioned by `ds`."""

from __future__ import annotations

from collections.abc import Collection

from headrace.config import Table
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import create_table
from headrace.lake.ingest.data_file import ddl_fields
from headrace.storage import Location

#: Columns of the table of bad rows.
QUARANTINE = "_source_file string, _source_line bigint, _raw string, _reason string, ds string"


def create_tables(table: Table, events: Location, quarantine: Location) -> None:
    """Make both tables, empty, where they are not there. Needs an active session, which reads the declaration."""
    create_quarantine(quarantine)
    _create(events, f"{table.spark_schema}, _source_file string, _source_line bigint, ds string")


def create_quarantine(quarantine: Location) -> None:
    """Make the table of bad rows, empty, where it is not there. Needs an active session."""
    _create(quarantine, QUARANTINE)


def _create(path: Location, ddl: str) -> None:
    if DeltaLog(path).version is None:
        create_table(path, [f.jsonValue() for f in ddl_fields(ddl)], ["ds"])


def check_columns(table: Table, events: Location, where: str = "") -> None:
    """Raises UserError where the table has a declared column as another type. `where`: before `table` in a key."""
    existing = {name.lower(): (name, type_) for name, type_ in DeltaLog(events).columns().items()}
    for c in table.columns:
        if c.name.lower() not in existing:
            continue
        name, type_ = existing[c.name.lower()]
        if name != c.name or not _same_type(type_, c.stored_type):
            raise UserError(
                f"{where}table.columns declares '{c.name}' as {c.type}, but {events} has '{name}' as {type_}; give the "
                f"column another name, or the pipeline, or move that table away to load everything again"
            )


def may_have_rows(table: Location, days: Collection[str]) -> bool:
    """Whether a table has, or may have, rows of the days."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else []
    return files is None or any(f.partition.get("ds") in days for f in files)


def _same_type(existing: str, declared: str) -> bool:
    """Delta's spelling of a type against the declaration's."""
    simple = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
    if declared.startswith("array<"):
        element = {"int": "integer", "bigint": "long"}.get(declared[6:-1], declared[6:-1])
        return f'"elementType": "{element}"' in existing
    return simple.get(existing, existing) == declared
