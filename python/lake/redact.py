"""The log of a Delta table without some values: its statistics have the smallest and largest value of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from headrace.lake.delta.damage import DAMAGED
from headrace.lake.delta.log import DeltaLog
from headrace.lake.forgotten import words_of
from headrace.lake.redact_checkpoint import redact_checkpoints, remove_checksum
from headrace.lake.redact_statistics import Values, is_value, without_values
from headrace.storage import Location

#: A checksum of a version, as Delta writes it: JSON.
_CHECKSUM = re.compile(r"\d{20}\.crc")
#: Literals of a predicate.
_QUOTED = (re.compile("'([^']*)'"), re.compile('"([^"]*)"'))


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
    log, folder, found = DeltaLog(table), table / "_delta_log", 0
    seen: set[int] = set()
    # Others may commit meanwhile, from what they read before, and remove old commits.
    while versions := log.versions() - seen:
        seen |= versions
        found += sum(_redact_commit(log, version, values, delete, check) for version in sorted(versions))
    found += redact_checkpoints(folder, values, delete, check)
    for file in folder.entries():
        # What a power cut has torn is of no use to anybody (headrace.lake.delta.damage).
        if file.suffix == DAMAGED or (_CHECKSUM.fullmatch(file.name) and _in_text(file, values)):
            found += 1
            if delete:
                check()
                remove_checksum(file)
                file.remove()
    return found


def _redact_commit(log: DeltaLog, version: int, values: Values, delete: bool, check: Callable[[], None]) -> bool:
    """Take the values out of one commit; whether it has some."""
    file = log.folder / "_delta_log" / f"{version:020d}.json"
    try:
        actions = list(log.actions(version))
    except FileNotFoundError:
        return False
    clean = [_without(action, values) for action in actions]
    if clean == actions:
        return False
    if delete:
        text = "".join(json.dumps(a, separators=(",", ":"), ensure_ascii=False) + "\n" for a in clean)
        check()
        remove_checksum(file)
        if file.is_file():
            file.put_text(text)
    return True


def _without(action: dict[str, Any], values: Values) -> dict[str, Any]:
    for kind in ("add", "remove"):
        if action.get(kind, {}).get("stats"):
            return {kind: {**action[kind], "stats": without_values(action[kind]["stats"], values)}}
    # How others have deleted rows says which: DELETE FROM ... WHERE user_id = 17.
    parameters = action.get("commitInfo", {}).get("operationParameters")
    predicate = (parameters or {}).get("predicate")
    if predicate and any(column in predicate and _in_words(predicate, is_one) for column, is_one in values.items()):
        return {"commitInfo": {**action["commitInfo"], "operationParameters": {**parameters, "predicate": "[]"}}}
    return action


def _in_words(text: str, is_one: Callable[[Any, bool], bool]) -> bool:
    literals = (word for quoted in _QUOTED for word in quoted.findall(text))
    return any(is_value(word, is_one) for word in (*words_of(text), *literals))


def _in_text(file: Location, values: Values) -> bool:
    """Whether a checksum's file, which repeats statistics, may have a value."""
    whole = file.read_text()
    text = whole.replace("\\", " ")
    if any(column in text and _in_words(text, is_one) for column, is_one in values.items()):
        return True
    # Texts of several words: by the statistics themselves.
    try:
        said = json.loads(whole)
    except ValueError:  # nobody can use it, and tables do without
        return True
    files = said.get("allFiles") if isinstance(said, dict) else None
    stats = [file["stats"] for file in files or [] if file.get("stats")]
    return any(without_values(one, values) != one for one in stats)
