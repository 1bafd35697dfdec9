"""Half surrogate pairs in lines of JSON, against Python's own decoder."""

from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.landing.json_paths import columns_with_halves, without_halves

UNITS = st.sampled_from(["\ud83d", "\ude00", "\U0001f600", "\\", "u", "d83d", '"', "a", "é"])
TEXT = st.lists(UNITS, max_size=8).map("".join)


def decoded(text: str) -> str:
    """Return a text as JSON's reader has it: halves that stand beside each other are a pair."""
    read: str = json.loads(json.dumps(text))
    return read


@given(st.dictionaries(st.sampled_from(["a", "B", "c"]), TEXT), TEXT)
def test_each_half_is_a_replacement_character(row: dict[str, str], inner: str) -> None:
    line = json.dumps(row | {"o": {"In": [inner]}}).encode()
    parsed = json.loads(without_halves(line))
    for key, text in row.items():
        assert parsed[key] == re.sub("[\ud800-\udfff]", "\ufffd", decoded(text))
    has_surrogate = {key: re.search("[\ud800-\udfff]", decoded(text)) is not None for key, text in row.items()}
    expected = [
        has_surrogate.get("a", False),
        has_surrogate.get("B", False),
        re.search("[\ud800-\udfff]", decoded(inner)) is not None,
    ]
    assert columns_with_halves(line, [("a",), ("b",), ("o", "in")]) == [
        i for i, has_half in enumerate(expected) if has_half
    ]
