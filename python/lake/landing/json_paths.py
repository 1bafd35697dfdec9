"""Values that a declared path leads to in a JSON object, and halves of surrogate pairs among them.

The steps are those of headrace.config.schema.path_steps. Names match as headrace.config.schema.match_names says. A
name or a key behind a list of records is the first record whose field `key` has it.

JSON may spell half a surrogate pair alone (`"\\ud83d"`): half an emoji that somebody has cut in two. It is no
character, and no text in UTF-8 can have it. U+FFFD, the replacement character, takes its place. Two different ids may
so become one: the columns that had some are recorded, for a row to be refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.schema import KEY_FIELD, Each, Element, is_of_list, match_names

_ANY = rb"\\u[dD][89a-fA-F]"
#: A pair; half of one; another escape, which may be a backslash before a `u`.
_ESCAPE = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
_HALF = re.compile("[\ud800-\udfff]")


class NumberText(str):
    """A number as the text spells it."""


@dataclass(frozen=True)
class Reached:
    """Target of a path in one object."""

    #: None where there is none, or null.
    value: Any
    #: Whether the object has the path's last field.
    is_present: bool = True
    #: Whether the path went through a list.
    by_list: bool = False
    #: What stands on the way and is neither what the path expects nor null; its value cannot be read.
    obstacle: Any = None


def parsed(line: bytes | str) -> Any:
    """Return what a text of JSON says, numbers as `NumberText`.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(line, parse_int=NumberText, parse_float=NumberText)


def reach(value: Any, steps: Sequence[str]) -> Reached:
    """Follow a path."""
    if not steps:
        return Reached(value)
    if value is None:
        return Reached(None, is_present=False)
    step, rest = steps[0], steps[1:]
    if isinstance(value, str) and not isinstance(value, NumberText) and not is_of_list(step):
        try:
            inside = parsed(value)
        except ValueError:
            inside = None
        if not isinstance(inside, Mapping):
            return Reached(None, obstacle=value)
        value = inside
    if isinstance(value, list):
        in_list = _reach_in_list(value, step, rest)
        return Reached(in_list.value, in_list.is_present, True, in_list.obstacle)
    if not isinstance(value, Mapping) or is_of_list(step):
        return Reached(None, by_list=is_of_list(step), obstacle=value)
    try:
        name = match_names([step], value).get(step)
    except ValueError:
        return Reached(None, obstacle=value)
    return Reached(None, is_present=False) if name is None else reach(value[name], rest)


def _reach_in_list(values: list[Any], step: str, rest: Sequence[str]) -> Reached:
    if isinstance(step, Each):
        reached = [reach(value, rest) for value in values]
        obstacle = next((values for target in reached if target.obstacle is not None), None)
        if any(isinstance(later, Each) for later in rest):
            return Reached(
                [e for target in reached if target.value is not None for e in target.value], obstacle=obstacle
            )
        return Reached([target.value for target in reached], obstacle=obstacle)
    if isinstance(step, Element):
        place = int(step)
        return reach(values[place], rest) if place < len(values) else Reached(None, is_present=False)
    records = [value for value in values if isinstance(value, Mapping) and KEY_FIELD in value]
    for record in records:
        if record[KEY_FIELD] == step:
            return reach(record, rest)
    return Reached(None, is_present=False, obstacle=values if values and not records else None)


def text_of(value: Any) -> str | None:
    """Return a value as text: a text itself, a number as it is spelled, lists and objects as JSON; None for null."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return _json(value)


def _json(value: Any) -> str:
    if isinstance(value, NumberText):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def reached_by_lists(line: bytes, paths: Mapping[int, Sequence[str]]) -> dict[int, Reached]:
    """Return what paths that go through a list there lead to in a line of JSON, by their numbers."""
    if b"[" not in line:
        return {}
    try:
        row = parsed(line)
        targets = {k: reach(row, path) for k, path in paths.items()}
    except (ValueError, RecursionError):  # no row in any case: no JSON, or too deep for any reader
        return {}
    return {k: target for k, target in targets.items() if target.by_list}


def without_halves(line: bytes) -> bytes:
    """Return a line of JSON with U+FFFD, as JSON spells it, for each half of a surrogate pair."""
    return _ESCAPE.sub(lambda m: m.group() if m.group(1) is None else rb"\ufffd", line)


def columns_with_halves(line: bytes, paths: Sequence[Sequence[str]]) -> list[int]:
    """Return which of some columns, by their paths in an object, have a text with half a surrogate pair."""
    try:
        row = parsed(line)
        return [i for i, path in enumerate(paths) if _has_half(reach(row, path).value)]
    except (ValueError, RecursionError):  # no row in any case: no JSON, or too deep for any reader
        return []


def _has_half(value: Any) -> bool:
    if isinstance(value, str):
        return _HALF.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has_half(key) or _has_half(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_has_half, value))
