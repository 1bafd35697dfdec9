"""The two Delta tables that ingest writes: `events` and `quarantine`, partitioned by `ds`."""

from __future__ import annotations

import logging
from collections.abc import Collection

from headrace.config import Table
from headrace.errors import UserError
from headrace.lake.delta.data_files import ddl_fields
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import create_table
from headrace.schema import is_wider
from headrace.storage import Location

_LOG = logging.getLogger("headrace.lake")

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
    """Compare the declared columns with those of the table, whose types may become wider by the load.

    Args:
        table: the declaration.
        events: the table's folder.
        where: before `table` in a key of the spec.

    Raises:
        UserError: the table has a declared column as a type that is neither the declared one nor a narrower one.
    """
    existing = {name.lower(): (name, type_) for name, type_ in DeltaLog(events).column_types().items()}
    for c in table.columns:
        name, type_ = existing.get(c.name.lower(), (c.name, c.stored_type))
        if name == c.name and is_wider(c.stored_type, type_):
            _LOG.info("%s: column '%s' becomes %s, and was %s; loaded days stay", events, name, c.stored_type, type_)
        elif name != c.name or type_ != c.stored_type:
            raise UserError(
                f"{where}table.columns declares '{c.name}' as {c.type}, but {events} has '{name}' as {type_}, and a "
                f"type can only become wider (int to bigint, float to double, decimals with more digits); give the "
                f"column another name, or the pipeline, or move that table away to load everything again"
            )


def may_have_rows(table: Location, days: Collection[str]) -> bool:
    """Whether a table has, or may have, rows of the days."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else []
    return files is None or any(f.partition.get("ds") in days for f in files)
