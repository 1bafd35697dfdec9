"""Checkpoints of a Delta table's log without some values: each file gives way to one that says the same of the table.

They are not removed: of a log whose first commits are gone, a checkpoint is all that older versions rest on. Kinds of
checkpoints: headrace.lake.delta.checkpoint. A sidecar file gets another name, since checkpoints name it with its size;
then these are written again, and the old one goes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.redact_statistics import SIDES, Values, is_value, without_values
from headrace.storage import Location

_SIDECARS, _SIDECAR = "_sidecars", "sidecar"
_LAST = "_last_checkpoint"
_ACTIONS = ("add", "remove")
_STATS, _PARSED = "stats", "stats_parsed"


@dataclass(frozen=True)
class _Sidecar:
    """A sidecar file that took the place of another."""

    path: str
    size: int
    #: Milliseconds since 1970.
    modified: int


def redact_checkpoints(log: Location, values: Values, delete: bool, check: Callable[[], None]) -> int:
    """Take the values of some columns out of all checkpoints; readers of any version find what they found.

    May be killed anywhere, and done again.

    Args:
        log: the folder `_delta_log`.
        values: by column, whether what statistics have of it must go.
        delete: do it; else it is counted.
        check: see `headrace.lake.redact.redact_log`.

    Returns:
        files that have some.
    """
    found, instead, old = 0, dict[str, _Sidecar](), list[Location]()
    for file in (log / _SIDECARS).entries():
        groups = _cleaned(file, values, {}) if file.suffix == ".parquet" else None
        if groups is None:
            continue
        found += 1
        if delete:
            new = file.parent / f"{uuid.uuid4()}.parquet"
            _write(new, groups)
            info = new.info()
            instead[file.name] = _Sidecar(new.name, info.size, info.modified_ns // 1_000_000)
            old.append(file)
    for file in log.entries():
        if ".checkpoint" not in file.name or file.suffix not in (".parquet", ".json"):
            continue
        text = _cleaned_text(file, values, instead) if file.suffix == ".json" else None
        groups = _cleaned(file, values, instead) if file.suffix == ".parquet" else None
        if text is None and groups is None:
            continue
        found += 1
        if delete:
            check()
            # It may repeat what is in a checkpoint; without it readers list the log.
            remove_checksum(log / _LAST)
            (log / _LAST).remove()
            remove_checksum(file)
            if groups is not None:
                _write(file, groups)
            elif text is not None:
                file.put_text(text)
    for file in old:
        remove_checksum(file)
        file.remove()
    return found


def remove_checksum(file: Location) -> None:
    """Remove what Hadoop's local file system keeps beside a file that it wrote: it refuses one that is another now."""
    (file.parent / f".{file.name}.crc").remove()


def _write(file: Location, groups: Sequence[pa.Table]) -> None:
    with file.new_file() as path, pq.ParquetWriter(path, groups[0].schema, compression="snappy") as out:
        for rows in groups:
            out.write_table(rows, row_group_size=max(1, rows.num_rows))


def _cleaned_text(file: Location, values: Values, instead: Mapping[str, _Sidecar]) -> str | None:
    """A checkpoint of JSON as it is to be; None: as it is."""
    lines = file.read_text().splitlines()
    clean = []
    for line in lines:
        action = json.loads(line)
        for kind in _ACTIONS:
            if (action.get(kind) or {}).get(_STATS):
                action[kind][_STATS] = without_values(action[kind][_STATS], values)
        if new := _instead((action.get(_SIDECAR) or {}).get("path"), instead):
            action[_SIDECAR] |= {"path": new.path, "sizeInBytes": new.size, "modificationTime": new.modified}
        clean.append(line if action == json.loads(line) else json.dumps(action, separators=(",", ":")))
    return None if clean == lines else "".join(f"{line}\n" for line in clean)


def _cleaned(file: Location, values: Values, instead: Mapping[str, _Sidecar]) -> list[pa.Table] | None:
    """The row groups of a checkpoint's file as they are to be; None: as they are."""
    parquet = pq.ParquetFile(file.local_path(), coerce_int96_timestamp_unit="us")
    schema = _instants(parquet)
    groups, changed = [], False
    for number in range(parquet.num_row_groups):
        rows = before = parquet.read_row_group(number, use_threads=False)
        for kind in _ACTIONS:
            rows = _with(rows, kind, lambda actions: _without_values(actions, values))
        rows = _with(rows, _SIDECAR, lambda sidecars: _renamed(sidecars, instead))
        changed |= rows is not before
        groups.append(rows.cast(schema))
    return groups if changed else None


def _with(rows: pa.Table, name: str, change: Callable[[pa.StructArray], pa.StructArray]) -> pa.Table:
    """The same table where the change of a column gives the same array."""
    at = rows.schema.get_field_index(name)
    if at < 0:
        return rows
    array = rows.column(at).combine_chunks()
    new = change(array)
    return rows if new is array else rows.set_column(at, rows.schema.field(at), new)


def _without_values(actions: pa.StructArray, values: Values) -> pa.StructArray:
    if (texts := _child(actions, _STATS)) is not None:
        old = texts.to_pylist()
        new = [None if text is None else without_values(text, values) for text in old]
        if new != old:
            actions = _set(actions, (_STATS,), pa.array(new, texts.type))
    for column, is_one in values.items():
        # As a struct, of the tables' types.
        there = {side: of for side in SIDES if (of := _child(actions, _PARSED, side, column)) is not None}
        gone = [False] * len(actions)
        for of in there.values():
            gone = [g or is_value(v, is_one) for g, v in zip(gone, of.to_pylist(), strict=True)]
        if any(gone):
            for side, of in there.items():
                actions = _set(
                    actions, (_PARSED, side, column), pc.if_else(pa.array(gone), pa.scalar(None, of.type), of)
                )
    return actions


def _renamed(sidecars: pa.StructArray, instead: Mapping[str, _Sidecar]) -> pa.StructArray:
    new = [_instead(path, instead) for path in sidecars.field("path").to_pylist()]
    if not any(new):
        return sidecars
    fields = {"path": "path", "sizeInBytes": "size", "modificationTime": "modified"}
    for name, of in fields.items():
        column = sidecars.field(name)
        said = [was if one is None else getattr(one, of) for one, was in zip(new, column.to_pylist(), strict=True)]
        sidecars = _set(sidecars, (name,), pa.array(said, column.type))
    return sidecars


def _instead(path: str | None, instead: Mapping[str, _Sidecar]) -> _Sidecar | None:
    return None if path is None else instead.get(unquote(path).rsplit("/", 1)[-1])


def _child(array: pa.StructArray, *path: str) -> pa.Array | None:
    found: pa.Array = array
    for name in path:
        if not pa.types.is_struct(found.type) or found.type.get_field_index(name) < 0:
            return None
        found = found.field(name)
    return found


def _set(array: pa.StructArray, path: tuple[str, ...], new: pa.Array) -> pa.StructArray:
    """The struct with another array at a path in it."""
    children = [array.field(i) for i in range(array.type.num_fields)]
    at = array.type.get_field_index(path[0])
    children[at] = _set(children[at], path[1:], new) if path[1:] else new
    return pa.StructArray.from_arrays(children, fields=list(array.type), mask=array.is_null())


def _instants(parquet: pq.ParquetFile) -> pa.Schema:
    """The file's schema; times of 96 bits, which are Spark's instants, as those of 64."""
    leaves = (parquet.schema.column(i) for i in range(len(parquet.schema)))
    wide = {tuple(leaf.path.split(".")) for leaf in leaves if leaf.physical_type == "INT96"}
    schema = parquet.schema_arrow
    return pa.schema([_instant(f, wide) for f in schema], metadata=schema.metadata)


def _instant(field: pa.Field, wide: set[tuple[str, ...]]) -> pa.Field:
    """`wide`: paths of leaves, from the field on."""
    below = {path[1:] for path in wide if path[0] == field.name}
    if () in below:
        return field.with_type(pa.timestamp("us", "UTC"))
    if below and pa.types.is_struct(field.type):
        return field.with_type(pa.struct([_instant(child, below) for child in field.type]))
    return field
