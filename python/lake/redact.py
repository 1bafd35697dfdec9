"""The log of a Delta table without some values: its statistics have the smallest and largest value of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.parquet as pq

from headrace.lake.delta.log import DeltaLog
from headrace.lake.forgotten import words_of
from headrace.storage import Location

#: Characters of a text that statistics keep; what was cut ends with Unicode's last.
_KEPT = 32
_TIE = "\U0010ffff"
#: A checksum of a version, as Delta writes it: JSON.
_CHECKSUM = re.compile(r"\d{20}\.crc")


#: By column: whether a smallest or largest value, or the beginning of a longer text, is or has one of the values.
Values = Mapping[str, Callable[[Any, bool], bool]]


def redact_log(table: Location, values: Values, delete: bool) -> tuple[int, list[str]]:
    """Take the values of some columns out of a table's log. Files, rows and versions stay as they are.

    Each commit's file is replaced in one step. Checkpoints and checksums that have one go, where the commits alone say
    all.

    Args:
        table: its folder.
        values: by column, whether what the log has of it must go.
        delete: do it; else it is counted.

    Returns:
        files of the log that have some; and what could not be done.
    """
    log, folder, found = DeltaLog(table), table / "_delta_log", 0
    left: list[str] = []
    versions = log.versions()
    for version in sorted(versions):
        actions = list(log.actions(version))
        clean = [_without(action, values) for action in actions]
        if clean != actions:
            found += 1
            if delete:
                text = "".join(json.dumps(a, separators=(",", ":"), ensure_ascii=False) + "\n" for a in clean)
                file = folder / f"{version:020d}.json"
                remove_checksum(file)
                file.put_text(text)
    whole = len(versions) == max(versions, default=-1) + 1
    for file in folder.entries():
        named = ".checkpoint" in file.name and file.suffix == ".parquet" and _in_checkpoint(file, values)
        if not named and not (_CHECKSUM.fullmatch(file.name) and _in_text(file, values)):
            continue
        found += 1
        if not whole and file.suffix != ".crc":
            left.append(
                f"{file} has statistics with values, and the log is not whole without it: write a new checkpoint "
                f"(DeltaLog.forTable(spark, path).checkpoint()) and remove this one"
            )
        elif delete:
            (folder / "_last_checkpoint").remove()
            remove_checksum(folder / "_last_checkpoint")
            remove_checksum(file)
            file.remove()
    return found, left


def remove_checksum(file: Location) -> None:
    """Remove what Hadoop's local file system keeps beside a file that it wrote: it refuses one that is another now."""
    (file.parent / f".{file.name}.crc").remove()


def exactly(texts: frozenset[str]) -> Callable[[Any, bool], bool]:
    """For `Values`: of a column that has such values, text or integers."""

    def is_one(value: Any, cut: bool) -> bool:
        return str(value) in texts or (cut and any(t.startswith(value) for t in texts))

    return is_one


def _without(action: dict[str, Any], values: Values) -> dict[str, Any]:
    for kind in ("add", "remove"):
        if action.get(kind, {}).get("stats"):
            stats = json.loads(action[kind]["stats"])
            clean = _clean(stats, values)
            if clean != stats:
                text = json.dumps(clean, separators=(",", ":"), ensure_ascii=False)
                return {kind: {**action[kind], "stats": text}}
    # How others have deleted rows says which: DELETE FROM ... WHERE user_id = 17.
    parameters = action.get("commitInfo", {}).get("operationParameters")
    predicate = (parameters or {}).get("predicate")
    if predicate and any(column in predicate and _in_words(predicate, is_one) for column, is_one in values.items()):
        return {"commitInfo": {**action["commitInfo"], "operationParameters": {**parameters, "predicate": "[]"}}}
    return action


def _clean(stats: dict[str, Any], values: Values) -> dict[str, Any]:
    sides = {side: stats[side] for side in ("minValues", "maxValues") if isinstance(stats.get(side), dict)}
    gone = {c for of in sides.values() for c, is_one in values.items() if c in of and _is_one(of[c], is_one)}
    return stats | {side: {c: v for c, v in of.items() if c not in gone} for side, of in sides.items()}


def _is_one(value: Any, is_one: Callable[[Any, bool], bool]) -> bool:
    if not isinstance(value, str):
        return is_one(value, False)
    begin = value.removesuffix(_TIE)
    return is_one(begin, len(begin) >= _KEPT)


def _in_words(text: str, is_one: Callable[[Any, bool], bool]) -> bool:
    return any(is_one(word, False) for word in words_of(text))


def _in_checkpoint(file: Location, values: Values) -> bool:
    parquet = pq.ParquetFile(file.local_path())
    if "add" not in parquet.schema_arrow.names:
        return False
    for group in range(parquet.num_row_groups):
        for add in parquet.read_row_group(group, columns=["add"]).column("add").to_pylist():
            found = [json.loads(add["stats"])] if add and add.get("stats") else []
            found += [add["stats_parsed"]] if add and add.get("stats_parsed") else []
            if any(_clean(stats, values) != stats for stats in found):
                return True
    return False


def _in_text(file: Location, values: Values) -> bool:
    """Whether a checksum's file, which repeats statistics, may have a value."""
    text = file.read_text().replace("\\", " ")
    return any(column in text and _in_words(text, is_one) for column, is_one in values.items())
