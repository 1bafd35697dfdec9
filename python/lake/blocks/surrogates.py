"""Half surrogate pairs in JSON lines.

JSON may spell one alone (`"\\ud83d"`): half an emoji that somebody has cut in two. It is no character, and no text in
UTF-8 can have it. In its place is U+FFFD, the replacement character. Two different ids may so become one: which columns
had some is told, for a row to be refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.blocks.json_paths import parsed, reach

_ANY = rb"\\u[dD][89a-fA-F]"
#: A pair; half of one; another escape, which may be a backslash before a `u`.
_ESCAPE = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
_HALF = re.compile("[\ud800-\udfff]")


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


@dataclass(frozen=True)
class SurrogatesTask:
    """A task over rows with a column `_text`, lines of JSON: adds `_sound`, the line without half surrogate pairs, and
    `_halves`, which declared columns had some. Pickled into tasks.
    """

    #: Of the declared columns.
    paths: tuple[tuple[str, ...], ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            text = batch.column(batch.schema.get_field_index("_text"))
            columns = [*batch.columns, *self._sound(text.view(pa.binary()))]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names, "_sound", "_halves"])

    def _sound(self, lines: pa.BinaryArray) -> tuple[pa.StringArray, pa.ListArray]:
        looked_at = pc.match_substring_regex(lines, _ANY.decode())
        places = np.flatnonzero(looked_at.to_numpy(zero_copy_only=False))
        halves: list[list[int] | None] = [None] * len(lines)
        if len(places):
            found = lines.take(pa.array(places)).to_pylist()
            for place, line in zip(places.tolist(), found, strict=True):
                halves[place] = columns_with_halves(line, self.paths) or None
            lines = pc.replace_with_mask(lines, looked_at, pa.array(map(without_halves, found), pa.binary()))
        return lines.view(pa.string()), pa.array(halves, pa.list_(pa.int32()))
