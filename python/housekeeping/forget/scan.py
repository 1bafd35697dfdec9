"""A search of every file of ours, by other means than those that erase: what is left of a value is found here.

Parquet files are decoded: a column of the same name has none of the values, and where these are texts, no column of
texts. Of all other files the bytes are searched, for texts of at least six bytes and integers of twelve digits or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.housekeeping.forget.persons import Persons
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.storage import Location

_BLOCK = 1 << 24


@dataclass
class Scan:
    """What a search looked at, and found."""

    files: int = 0
    parquet: int = 0
    bytes: int = 0
    #: Names of files that have a value.
    found: list[str] = field(default_factory=list)


def scan(state: WorkspaceState, persons: Persons) -> Scan:
    """Search all files of the pipeline below the workspace, and those that pipelines share; landing files are yours."""
    result = Scan()
    for file in _files(state):
        result.files += 1
        result.bytes += file.size()
        if file.suffix == ".parquet":
            result.parquet += 1
            has = _in_parquet(file, persons)
        else:
            has = _in_bytes(file.local_path(), persons)
        if has:
            result.found.append(state.ws.name_of(file))
    return result


def _files(state: WorkspaceState) -> Iterator[Location]:
    ws, mine = state.ws, state.pipeline
    places = [
        ws.table(mine, "x").parent,
        ws.lake / "staging" / mine,
        ws.lake / "warehouse",
        ws.dataset(mine, "x", "x").parent.parent,
        ws.model(mine, "x", "x").parent.parent,
        ws.search(mine, "x", "x").parent.parent,
        ws.runs(mine),
        ws.report(mine, "x").parent,
        ws.log(mine, "x", "x").parent.parent,
        ws.forgotten(mine),
        ws.store / "promotions",
        ws.store / "online",
        ws.encoded(mine),
        ws.mapped(mine),
        ws.spark_local,
    ]
    for place in places:
        yield from place.files()
    yield from (e for e in ws.store.entries() if e.name.startswith("mlflow.db"))


def _in_parquet(file: Location, persons: Persons) -> bool:
    parquet = pq.ParquetFile(file.local_path(), coerce_int96_timestamp_unit="us")
    names = [f.name for f in parquet.schema_arrow if _is_searched(f, persons)]
    for group in range(parquet.num_row_groups if names else 0):
        rows = parquet.read_row_group(group, columns=names, use_threads=False)
        if any(_in_values(rows.column(name), persons) for name in rows.column_names):
            return True
    return False


def _is_searched(f: Any, persons: Persons) -> bool:
    nested = pa.types.is_nested(f.type)
    text = nested or pa.types.is_string(f.type) or pa.types.is_large_string(f.type) or pa.types.is_dictionary(f.type)
    return f.name == persons.column or (text and not persons.integers)


def _in_values(values: Any, persons: Persons) -> bool:
    if not pa.types.is_nested(values.type):
        return bool(persons.mask(values).any())
    return any(_in_object(x, persons) for x in values.to_pylist())


def _in_object(value: Any, persons: Persons) -> bool:
    if isinstance(value, dict):
        return any(_in_object(v, persons) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_in_object(v, persons) for v in value)
    return (isinstance(value, str) or (persons.integers and isinstance(value, int))) and str(value) in persons.texts


def _in_bytes(file: Path, persons: Persons) -> bool:
    """Block by block; a value may lie across two."""
    before = b""
    with file.open("rb") as f:
        while persons.searchable and (block := f.read(_BLOCK)):
            if persons.in_bytes(before + block):
                return True
            # A byte more, which says whether an integer begins there.
            before = block[-persons.longest - 1 :]
    return False
