"""A search of every file of ours, by other means than those that erase: what is left of a value is found here.

Parquet files are decoded: a column of the same name has none of the values, and no column of texts, or of anything
nested, has a text of at least six bytes or an integer of twelve digits or more: a shorter one is another column's by
chance. Of all other files the bytes are searched, for the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.housekeeping.forget.persons import Persons
from headrace.housekeeping.models import REGISTERED_SUFFIXES
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.lake.handed_on import STAGE_FOLDERS
from headrace.publish.target import table_name
from headrace.registry.artifact import staging
from headrace.storage import Location, StoreAway, local
from headrace.storage.objects import copies

_BLOCK = 1 << 24


@dataclass
class Scan:
    """What a search looked at, and found."""

    files: int = 0
    parquet: int = 0
    bytes: int = 0
    #: Names of files that have a value.
    found: list[str] = field(default_factory=list)
    #: Names of files that could not be read, and were not looked at.
    unread: list[str] = field(default_factory=list)


def scan(state: WorkspaceState, persons: Persons) -> Scan:
    """Search all files of the pipeline below the workspace, and the registry, which pipelines share; landing files are
    yours, and other pipelines' files are theirs.
    """
    return _search(_files(state), state, persons, Scan())


def scan_copies(state: WorkspaceState, persons: Persons, result: Scan) -> Scan:
    """Add what this host has of files of a store, of whatever pipeline: `scan` fetches some itself."""
    found = () if state.ws.is_local else copies.kept()
    return _search(map(local, found), state, persons, result)


def _search(files: Iterable[Location], state: WorkspaceState, persons: Persons, result: Scan) -> Scan:
    for file in files:
        is_parquet = file.suffix == ".parquet"
        try:
            size = file.size()
            has = _in_parquet(file, persons) if is_parquet else _in_bytes(file.local_path(), persons)
        except FileNotFoundError:
            # It has gone meanwhile: of a database that others use, say.
            continue
        except StoreAway:  # nothing is known of the file: the same call does the rest later
            raise
        except (pa.ArrowInvalid, OSError):
            result.unread.append(state.ws.name_of(file))
            continue
        result.files += 1
        result.bytes += size
        result.parquet += is_parquet
        if has:
            result.found.append(state.ws.name_of(file))
    return result


def _files(state: WorkspaceState) -> Iterator[Location]:
    ws, mine = state.ws, state.pipeline
    places = [
        ws.table(mine, "x").parent,
        ws.staging(mine),
        ws.dataset(mine, "x", "x").parent.parent,
        ws.model(mine, "x", "x").parent.parent,
        ws.search(mine, "x", "x").parent.parent,
        ws.runs(mine),
        ws.report(mine, "x").parent,
        ws.log(mine, "x", "x").parent.parent,
        ws.forgotten(mine),
        ws.promotions(mine),
        ws.encoded(mine),
        ws.mapped(mine),
        *(staging(ws, mine + suffix) for suffix in REGISTERED_SUFFIXES),
        *(ws.spark_local / kind / mine for kind in STAGE_FOLDERS),
        *(e for e in (ws.spark_local / "prepared").entries() if e.name.startswith(f"{mine}-")),
    ]
    if state.spec.publish is not None:
        name, warehouse = table_name(state.spec), ws.lake / "warehouse"
        places += [warehouse / name, warehouse / f"{name}_current", warehouse / "headrace_publications" / name]
        places += [ws.store / "online" / f"{name}.lmdb"]
    for place in places:
        yield from [place] if place.is_file() else place.files()
    yield from (e for e in ws.store.entries() if e.name.startswith("mlflow.db"))


def _in_parquet(file: Location, persons: Persons) -> bool:
    parquet = pq.ParquetFile(file.local_path(), coerce_int96_timestamp_unit="us")
    names = [f.name for f in parquet.schema_arrow if _is_searched(f, persons)]
    for group in range(parquet.num_row_groups if names else 0):
        rows = parquet.read_row_group(group, columns=names, use_threads=False)
        if any(_in_values(rows.column(name), name, persons) for name in rows.column_names):
            return True
    return False


def _is_searched(f: Any, persons: Persons) -> bool:
    text = pa.types.is_string(f.type) or pa.types.is_large_string(f.type) or pa.types.is_dictionary(f.type)
    nested = pa.types.is_nested(f.type)
    other = (nested and not persons.integers) or ((nested or text) and bool(persons.long_texts))
    return f.name == persons.column or other


def _in_values(values: Any, name: str, persons: Persons) -> bool:
    if pa.types.is_nested(values.type):
        return any(_in_object(x, name, persons) for x in values.to_pylist())
    return bool(replace(persons, texts=_sought(name, persons)).mask(values).any())


def _in_object(value: Any, name: str, persons: Persons) -> bool:
    if isinstance(value, dict):
        return any(_in_object(v, k, persons) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return any(_in_object(v, name, persons) for v in value)
    kind = isinstance(value, str) or (persons.integers and isinstance(value, int))
    return kind and str(value) in _sought(name, persons)


def _sought(name: str, persons: Persons) -> frozenset[str]:
    """The values that are theirs in a column."""
    return persons.texts if name == persons.column else persons.long_texts


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
