"""Vocabularies in memory against a Python dict."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset import native
from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.lookup import FileLookup, Lookup, TextRows

BOTH = pytest.mark.parametrize("built", [True, False])
VALUES = st.one_of(
    st.text(max_size=12),
    st.text(st.sampled_from("aü\0z"), min_size=6, max_size=18),
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.sampled_from(["07", "-0", "0", "+1", " 1", "9223372036854775808", "1e3", "true", ""]),
)


@pytest.fixture(autouse=True)
def _build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    built = request.node.callspec.params.get("built") if hasattr(request.node, "callspec") else None
    if built and native.library() is None:
        pytest.skip("run make native")
    if built is False:
        monkeypatch.setattr(native, "library", lambda: None)


def lookup_of(values: list[str], first: int = 2) -> Lookup:
    return Lookup(pa.table({"value": values, "code": pa.array(range(first, first + len(values)), pa.int64())}))


def expected(vocabulary: list[str], values: list[Any]) -> list[int]:
    codes = {v: i + 2 for i, v in enumerate(vocabulary)}
    return [0 if v is None else codes.get(str(v), 1) for v in values]


@BOTH
@settings(deadline=None)
@given(vocabulary=st.lists(VALUES, unique=True, max_size=30), others=st.lists(st.none() | VALUES, max_size=30))
def test_strings(built: bool, vocabulary: list[str], others: list[str | None]) -> None:
    values = [*vocabulary, *others, None, *vocabulary[:1]]
    found = lookup_of(vocabulary).codes(pa.array(values, pa.string()))
    assert found.dtype == np.int32
    assert found.tolist() == expected(vocabulary, values)


@settings(deadline=None)
@given(st.lists(VALUES, unique=True, max_size=30), st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_integers_are_their_spelling(vocabulary: list[str], others: list[int | None]) -> None:
    near = [2**53, 2**53 + 1, 7, 0, 1]  # ids beyond a double's precision stay apart
    values = [*others, *near, None]
    vocabulary = [*dict.fromkeys([*vocabulary, str(2**53 + 1)])]
    assert lookup_of(vocabulary).codes(pa.array(values, pa.int64())).tolist() == expected(vocabulary, values)


def test_booleans() -> None:
    assert lookup_of(["false"]).codes(pa.array([True, False, None])).tolist() == [1, 2, 0]


def test_two_values_with_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(lookup, "xxhash64_strings", lambda values: np.zeros(len(values), np.int64))
    both, one = lookup_of(["a", "b"]), lookup_of(["a"])
    values = pa.array(["b", "a", "c", None])
    assert both.codes(values).tolist() == [3, 2, 1, 0]
    assert one.codes(values).tolist() == [1, 2, 1, 0]  # same hash is not same value


@BOTH
def test_rows_of_many_texts_in_parts_of_columns(built: bool) -> None:
    rng = np.random.default_rng(5)
    texts = [f"{'x' * (n % 13)}{n}" for n in rng.permutation(30_000).tolist()]
    # Slices, as parts are that were cut from longer columns.
    table = TextRows(pa.array(["not of it", *texts[:20_000]]).slice(1))
    asked = rng.permutation(30_000)
    wanted = np.where(asked < 20_000, asked, -1)
    found = table.find(pa.array(["nor this", *(texts[i] for i in asked)]).slice(1))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(table)).find(pa.array([texts[7], "?"])), [7, -1])
    assert TextRows(pa.array([], pa.string())).find(pa.array(["", "a"])).tolist() == [-1, -1]
    assert TextRows(pa.array([""])).find(pa.array(["", "a"])).tolist() == [0, -1]
    assert TextRows(pa.array(["a"])).find(pa.array([""])).tolist() == [-1]


def test_cardinality_is_the_highest_code_and_one() -> None:
    assert lookup_of([]).cardinality == 2
    assert lookup_of(["x", "y"]).cardinality == 4
    assert lookup_of(["x"], first=9).cardinality == 10  # of an old day, above a gap
    assert lookup_of(["x"], first=9).codes(pa.array(["x"])).tolist() == [9]
    assert lookup_of([]).codes(pa.array(["x", None])).tolist() == [1, 0]


@settings(deadline=None)
@given(st.lists(VALUES, unique=True, max_size=30), st.lists(VALUES, unique=True, max_size=30))
def test_values_that_are_there_once(vocabulary: list[str], others: list[str]) -> None:
    values = [None, *others]
    assert lookup_of(vocabulary).distinct.codes(pa.array(values, pa.string())).tolist() == expected(vocabulary, values)


def test_a_vocabulary_in_its_file(tmp_path: Path) -> None:
    vocabulary = [f"ü{i}" for i in range(20)] + [str(i) for i in range(20)] + ["true"]
    there = lookup_of(vocabulary)
    pq.write_table(there.table, tmp_path / "v", row_group_size=7)
    found = FileLookup(tmp_path / "v")
    assert (len(found), found.cardinality, found.table) == (len(there), there.cardinality, there.table)
    for values in (pa.array(["ü3", None, "x", "ü19", "ü3"]), pa.array([3, None, 77, 19, 3]), pa.array([True, False])):
        for one, other in ((found, there), (found.distinct, there.distinct)):
            assert one.codes(values).tolist() == other.codes(values).tolist()
    assert found.values_of([5, 1, 30, 99]) == there.values_of([5, 1, 30, 99]) == {5: "ü3", 30: "8"}
    pq.write_table(lookup_of([]).table, tmp_path / "none")
    assert FileLookup(tmp_path / "none").cardinality == 2
    assert FileLookup(tmp_path / "none").codes(pa.array(["a", None])).tolist() == [1, 0]
