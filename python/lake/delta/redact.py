"""The log of a Delta table without some values: its statistics have the smallest and largest value of each file.

Commits and checkpoints are replaced file by file. Checkpoints are not removed: of a log whose first commits are gone, a
checkpoint is all that older versions rest on. A sidecar file gets another name, since checkpoints name it with its
size; then these are written again, and the old one goes.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.compute import pc
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.log_files import DAMAGED
from headrace.lake.forgotten import words_of
from headrace.storage import Location

#: A checksum of a version, as Delta writes it: JSON.
_CHECKSUM = re.compile(r"\d{20}\.crc")
#: Literals of a predicate.
_QUOTED = (re.compile("'([^']*)'"), re.compile('"([^"]*)"'))
_SIDECARS, _SIDECAR = "_sidecars", "sidecar"
_LAST = "_last_checkpoint"
_ACTIONS = ("add", "remove")
_STATS, _PARSED = "stats", "stats_parsed"
#: UTF-16 units of a text that statistics keep. A largest value that was cut ends with a character above the one that
#: came there: Unicode's last, or where that one was of ASCII, ASCII's last
#: (org.apache.spark.sql.delta.stats.StatisticsCollection.truncateMaxStringAgg).
_TEXT_UNITS = 32
_TIES = ("\U0010ffff", "\x7f")
#: By column: tells whether a minimum or maximum, or its prefix if it was cut, is or contains one of the values.
Values = Mapping[str, Callable[[Any, bool], bool]]
#: Keys of statistics with minima and maxima.
SIDES = ("minValues", "maxValues")


def redact_log(table: Location, values: Values, delete: bool, check: Callable[[], None] = lambda: None) -> int:
    """Take the values of some columns out of a table's log. Files, rows and versions stay as they are.

    Each file of a commit or a checkpoint is replaced in one step. Checksums that have one go.

    Args:
        table: its folder.
        values: by column, whether what the log has of it must go.
        delete: do it; else it is counted.
        check: called right before each file is replaced or removed; raises where another process is at work by now.

    Returns:
        files of the log that have some.
    """
    log, folder, count = DeltaLog(table), table / "_delta_log", 0
    seen: set[int] = set()
    # Other writers may commit meanwhile, from versions that they read before, and clean up old commits.
    while versions := log.versions() - seen:
        seen |= versions
        count += sum(_redact_commit(log, version, values, delete, check) for version in sorted(versions))
    count += redact_checkpoints(folder, values, delete, check)
    for file in folder.entries():
        # Files that a power cut has torn serve nobody (headrace.lake.delta.log_files).
        if file.suffix == DAMAGED or (_CHECKSUM.fullmatch(file.name) and _in_text(file, values)):
            count += 1
            if delete:
                check()
                remove_checksum(file)
                file.remove()
    return count


def _redact_commit(log: DeltaLog, version: int, values: Values, delete: bool, check: Callable[[], None]) -> bool:
    """Take the values out of one commit; whether it has some."""
    file = log.folder / "_delta_log" / f"{version:020d}.json"
    try:
        actions = list(log.actions(version))
    except FileNotFoundError:
        return False
    clean = [_redacted_action(action, values) for action in actions]
    if clean == actions:
        return False
    if delete:
        text = "".join(json.dumps(a, separators=(",", ":"), ensure_ascii=False) + "\n" for a in clean)
        check()
        remove_checksum(file)
        if file.is_file():
            file.put_text(text)
    return True


def _redacted_action(action: dict[str, Any], values: Values) -> dict[str, Any]:
    for kind in ("add", "remove"):
        if action.get(kind, {}).get("stats"):
            return {kind: {**action[kind], "stats": without_values(action[kind]["stats"], values)}}
    # Statements of other writers name values: DELETE FROM ... WHERE user_id = 17.
    parameters = action.get("commitInfo", {}).get("operationParameters")
    predicate = (parameters or {}).get("predicate")
    if predicate and any(column in predicate and _in_words(predicate, is_one) for column, is_one in values.items()):
        return {"commitInfo": {**action["commitInfo"], "operationParameters": {**parameters, "predicate": "[]"}}}
    return action


def _in_words(text: str, is_one: Callable[[Any, bool], bool]) -> bool:
    literals = (word for quoted in _QUOTED for word in quoted.findall(text))
    return any(is_value(word, is_one) for word in (*words_of(text), *literals))


def _in_text(file: Location, values: Values) -> bool:
    """Return whether a checksum's file, which repeats statistics, may have a value."""
    content = file.read_text()
    text = content.replace("\\", " ")
    if any(column in text and _in_words(text, is_one) for column, is_one in values.items()):
        return True
    # Texts of several words: by the statistics themselves.
    try:
        checksum = json.loads(content)
    except ValueError:  # unreadable statistics are optional: drop them
        return True
    files = checksum.get("allFiles") if isinstance(checksum, dict) else None
    stats = [file["stats"] for file in files or [] if file.get("stats")]
    return any(without_values(text_statistics, values) != text_statistics for text_statistics in stats)


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
        check: see `headrace.lake.delta.redact.redact_log`.

    Returns:
        files that have some.
    """
    count, instead, old = 0, dict[str, _Sidecar](), list[Location]()
    for file in (log / _SIDECARS).entries():
        groups = _cleaned(file, values, {}) if file.suffix == ".parquet" else None
        if groups is None:
            continue
        count += 1
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
        count += 1
        if delete:
            check()
            # It may repeat a checkpoint's content; without it readers list the log.
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
    return count


def remove_checksum(file: Location) -> None:
    """Remove what Hadoop's local file system keeps beside a file that it wrote: it refuses one that is another now."""
    (file.parent / f".{file.name}.crc").remove()


def _write(file: Location, groups: Sequence[pa.Table]) -> None:
    with file.new_file() as path, pq.ParquetWriter(path, groups[0].schema, compression="snappy") as out:
        for rows in groups:
            out.write_table(rows, row_group_size=max(1, rows.num_rows))


def _cleaned_text(file: Location, values: Values, instead: Mapping[str, _Sidecar]) -> str | None:
    """Return a checkpoint of JSON as it is to be; None: as it is."""
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
    """Return the row groups of a checkpoint's file as they are to be; None: as they are."""
    parquet = pq.ParquetFile(file.local_path(), coerce_int96_timestamp_unit="us")
    schema = _instants(parquet)
    groups, changed = [], False
    for number in range(parquet.num_row_groups):
        rows = original = parquet.read_row_group(number, use_threads=False)
        for kind in _ACTIONS:
            rows = _with(rows, kind, lambda actions: _without_values(actions, values))
        rows = _with(rows, _SIDECAR, lambda sidecars: _renamed(sidecars, instead))
        changed |= rows is not original
        groups.append(rows.cast(schema))
    return groups if changed else None


def _with(rows: pa.Table, name: str, change: Callable[[pa.StructArray], pa.StructArray]) -> pa.Table:
    """Return the same table where the change of a column gives the same array."""
    index = rows.schema.get_field_index(name)
    if index < 0:
        return rows
    array = rows.column(index).combine_chunks()
    new = change(array)
    return rows if new is array else rows.set_column(index, rows.schema.field(index), new)


def _without_values(actions: pa.StructArray, values: Values) -> pa.StructArray:
    if (texts := _child(actions, _STATS)) is not None:
        old = texts.to_pylist()
        new = [None if text is None else without_values(text, values) for text in old]
        if new != old:
            actions = _set(actions, (_STATS,), pa.array(new, texts.type))
    for column, is_one in values.items():
        # As a struct, of the tables' types.
        sides = {
            side: side_values for side in SIDES if (side_values := _child(actions, _PARSED, side, column)) is not None
        }
        is_redacted = [False] * len(actions)
        for side_values in sides.values():
            is_redacted = [g or is_value(v, is_one) for g, v in zip(is_redacted, side_values.to_pylist(), strict=True)]
        if any(is_redacted):
            for side, side_values in sides.items():
                actions = _set(
                    actions,
                    (_PARSED, side, column),
                    pc.if_else(pa.array(is_redacted), pa.scalar(None, side_values.type), side_values),
                )
    return actions


def _renamed(sidecars: pa.StructArray, instead: Mapping[str, _Sidecar]) -> pa.StructArray:
    new = [_instead(path, instead) for path in sidecars.field("path").to_pylist()]
    if not any(new):
        return sidecars
    fields = {"path": "path", "sizeInBytes": "size", "modificationTime": "modified"}
    for name, attribute in fields.items():
        column = sidecars.field(name)
        new_values = [
            was if sidecar is None else getattr(sidecar, attribute)
            for sidecar, was in zip(new, column.to_pylist(), strict=True)
        ]
        sidecars = _set(sidecars, (name,), pa.array(new_values, column.type))
    return sidecars


def _instead(path: str | None, instead: Mapping[str, _Sidecar]) -> _Sidecar | None:
    return None if path is None else instead.get(unquote(path).rsplit("/", 1)[-1])


def _child(array: pa.StructArray, *path: str) -> pa.Array | None:
    child: pa.Array = array
    for name in path:
        if not pa.types.is_struct(child.type) or child.type.get_field_index(name) < 0:
            return None
        child = child.field(name)
    return child


def _set(array: pa.StructArray, path: tuple[str, ...], new: pa.Array) -> pa.StructArray:
    """Return the struct with another array at a path in it."""
    children = [array.field(i) for i in range(array.type.num_fields)]
    index = array.type.get_field_index(path[0])
    children[index] = _set(children[index], path[1:], new) if path[1:] else new
    return pa.StructArray.from_arrays(children, fields=list(array.type), mask=array.is_null())


def _instants(parquet: pq.ParquetFile) -> pa.Schema:
    """Return the file's schema; times of 96 bits, which are Spark's instants, as those of 64."""
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


def exactly(texts: frozenset[str]) -> Callable[[Any, bool], bool]:
    """For `Values`: of a column that has such values, text or integers."""

    def is_one(value: Any, cut: bool) -> bool:
        return str(value) in texts or (cut and any(t.startswith(value) for t in texts))

    return is_one


def without_values(text: str, values: Values) -> str:
    """Statistics as JSON; a column of which the smallest or the largest value must go loses both."""
    stats = json.loads(text)
    sides = {side: stats[side] for side in SIDES if isinstance(stats.get(side), dict)}
    redacted = {
        c
        for side_values in sides.values()
        for c, is_one in values.items()
        if c in side_values and is_value(side_values[c], is_one)
    }
    if not redacted:
        return text
    clean = stats | {
        side: {c: v for c, v in side_values.items() if c not in redacted} for side, side_values in sides.items()
    }
    return json.dumps(clean, separators=(",", ":"), ensure_ascii=False)


def is_value(value: Any, is_one: Callable[[Any, bool], bool]) -> bool:
    """Return whether a smallest or largest value, as statistics have it, must be removed."""
    if value is None:
        return False
    if not isinstance(value, str):
        return is_one(value, False)
    # One unit less, where the cut would have split a surrogate pair.
    if is_one(value, _units(value) >= _TEXT_UNITS - 1):
        return True
    begin = value[:-1]
    return value.endswith(_TIES) and is_one(begin, _units(begin) >= _TEXT_UNITS - 1)


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
