"""Paths into JSON objects, against plain indexing of what Python's `json` reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import path_steps
from headrace.lake.landing.exact_casts import Reached, parsed, reach, reached_by_lists, spelled_text

EVENT = {
    "items": [{"id": "a", "price": 1.5, "tags": [{"t": 1}, {"t": 2}]}, {"ID": "b", "tags": [{"t": 3}]}, None],
    "params": [{"key": "os", "value": {"s": "x"}}, {"key": "n", "value": {"i": 7}}, {"key": "n", "value": {"i": 8}}],
    "text": '{"list": [1, 2.50]}',
    "empty": [],
    "number": 5,
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("items[].id", ["a", "b", None]),
        ("items[0].price", "1.5"),
        ("items[1].ID", "b"),
        ("items[].tags[].t", ["1", "2", "3"]),
        ("params['os'].value.s", "x"),
        ("params.n.value.i", "7"),
        ("text.list[1]", "2.50"),
        ("empty[].id", []),
    ],
)
def test_what_paths_lead_to(path: str, expected: Any) -> None:
    assert reach(parsed(json.dumps(EVENT)), path_steps(path)) == Reached(expected, by_list=True)


@pytest.mark.parametrize("path", ["items[7].id", "params['gone'].value", "empty[0]", "empty['os']"])
def test_what_is_not_there(path: str) -> None:
    reached = reach(parsed(json.dumps(EVENT)), path_steps(path))
    assert (reached.value, reached.is_present, reached.obstacle) == (None, False, None)


@pytest.mark.parametrize("path", ["number[].id", "items.id", "items[].id.x", "number.x", "text[0]"])
def test_what_stands_in_the_way(path: str) -> None:
    reached = reach(parsed(json.dumps(EVENT)), path_steps(path))
    assert reached.obstacle is not None


@given(st.lists(st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.booleans())))
def test_fields_of_all_records(values: list[Any]) -> None:
    line = json.dumps({"o": [{"v": v} for v in values]})
    paths = {3: path_steps("o[].v")}
    target = reached_by_lists(line.encode(), paths)[3]
    assert json.loads(spelled_text(target.value) or "") == values
    assert target.is_present
    for text in ("[", line[:-1], '{"o": {"v": 1}}'):
        assert reached_by_lists(text.encode(), paths) == {}


def test_numbers_and_texts_are_as_they_are_spelled() -> None:
    value = parsed('{"a": [1.50, 12345678901234567890, -0, 1E3, "é\\u0000", true, null]}')
    assert spelled_text(value) == '{"a":[1.50,12345678901234567890,-0,1E3,"é\\u0000",true,null]}'
    deep = "[" * 100_000 + "]" * 100_000
    assert reached_by_lists(deep.encode(), {0: ("a", "b")}) == {}
