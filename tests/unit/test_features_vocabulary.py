"""Vocabularies: what is counted, and how values are looked up."""

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
from headrace.errors import UserError
from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.vocabulary.lookup import FileLookup, Lookup, TextRows
from headrace.storage import local
from tests.tables_support import commit_delta

RULES = {"word": VocabularyRule(min_count=1), "user": VocabularyRule(min_count=1)}
#: (name, value, code, count, added_ds)
Row = tuple[str, str, int, int, str]
FIRST: list[Row] = [
    ("word", "a", 2, 9, "2026-01-04"),
    ("word", "b", 3, 5, "2026-01-06"),
    ("user", "a", 2, 1, "2026-01-06"),
]


def commit(path: Path, rows: list[Row]) -> None:
    names = ("name", "value", "code", "count", "added_ds")
    commit_delta(path, pa.table({n: [r[i] for r in rows] for i, n in enumerate(names)}))


def counts(*values: str) -> pa.Table:
    types = pa.schema([("name", pa.string()), ("value", pa.string()), ("count", pa.int64()), ("day", pa.int64())])
    return pa.Table.from_pylist([{"name": "word", "value": v, "count": 1, "day": 0} for v in values], types)


def codes(path: Path, ds: str, counted: pa.Table, version: int | None) -> dict[str, dict[str, int]]:
    # Nothing that these tests look at is a Spark job: a pinned table is read only.
    spark: Any = None
    vocabularies = VocabularyTable(spark, local(path), ds, version).update(counted, RULES)
    return {name: dict(zip(*t.to_pydict().values(), strict=True)) for name, t in vocabularies.items()}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("word", "c", 3, 1, "2026-01-07"), r"'word' of .* code 3 for value 'b' .*2026-01-06\) and value 'c' .*-07\)"),
        (("word", "b", 4, 1, "2026-01-07"), r"'word' of .* value 'b' for code 3 .* and code 4 "),
        (("user", "b", 2, 1, "2026-01-07"), "'user' of .* code 2 for value 'a' "),
    ],
)
def test_a_code_or_value_that_was_given_twice_is_named(tmp_path: Path, row: Row, message: str) -> None:
    commit(tmp_path, FIRST)
    assert codes(tmp_path, "2026-01-08", counts(), 0)["word"] == {"a": 2, "b": 3}
    commit(tmp_path, [*FIRST, row])
    with pytest.raises(UserError, match=message):
        codes(tmp_path, "2026-01-08", counts(), 1)


def test_a_day_that_is_made_again_sees_what_it_saw(tmp_path: Path) -> None:
    """At the version that it left: an older day has added a value since, which was out of vocabulary."""
    commit(tmp_path, FIRST)
    commit(tmp_path, [*FIRST, ("word", "old", 4, 1, "2026-01-05"), ("word", "late", 5, 1, "2026-01-09")])
    words = {"a": 2, "b": 3}
    assert codes(tmp_path, "2026-01-06", counts("a", "b", "late"), 0)["word"] == words
    assert codes(tmp_path, "2026-01-06", counts("a", "b", "late"), 1)["word"] == words | {"old": 4, "late": 5}
    with pytest.raises(UserError, match="version 7, with which the dataset of 2026-01-06 was made, is no"):
        codes(tmp_path, "2026-01-06", counts("a"), 7)


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
@given(vocabulary=st.lists(VALUES, unique=True, max_size=30), unknown=st.lists(st.none() | VALUES, max_size=30))
def test_strings(built: bool, vocabulary: list[str], unknown: list[str | None]) -> None:
    values = [*vocabulary, *unknown, None, *vocabulary[:1]]
    actual = lookup_of(vocabulary).codes(pa.array(values, pa.string()))
    assert actual.dtype == np.int32
    assert actual.tolist() == expected(vocabulary, values)


@settings(deadline=None)
@given(st.lists(VALUES, unique=True, max_size=30), st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_integers_are_their_spelling(vocabulary: list[str], unknown: list[int | None]) -> None:
    near = [2**53, 2**53 + 1, 7, 0, 1]  # ids beyond a double's precision stay apart
    values = [*unknown, *near, None]
    vocabulary = [*dict.fromkeys([*vocabulary, str(2**53 + 1)])]
    assert lookup_of(vocabulary).codes(pa.array(values, pa.int64())).tolist() == expected(vocabulary, values)


def test_booleans() -> None:
    assert lookup_of(["false"]).codes(pa.array([True, False, None])).tolist() == [1, 2, 0]


def test_two_values_with_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(lookup, "xxhash64_strings", lambda values: np.zeros(len(values), np.int64))
    both, single = lookup_of(["a", "b"]), lookup_of(["a"])
    values = pa.array(["b", "a", "c", None])
    assert both.codes(values).tolist() == [3, 2, 1, 0]
    assert single.codes(values).tolist() == [1, 2, 1, 0]  # same hash is not same value


@BOTH
def test_rows_of_many_texts_in_parts_of_columns(built: bool) -> None:
    rng = np.random.default_rng(5)
    texts = [f"{'x' * (n % 13)}{n}" for n in rng.permutation(30_000).tolist()]
    # Slices, as parts are that were cut from longer columns.
    table = TextRows(pa.array(["not of it", *texts[:20_000]]).slice(1))
    positions = rng.permutation(30_000)
    expected = np.where(positions < 20_000, positions, -1)
    actual = table.find(pa.array(["nor this", *(texts[i] for i in positions)]).slice(1))
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, expected)
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
def test_values_that_are_there_once(vocabulary: list[str], unknown: list[str]) -> None:
    values = [None, *unknown]
    assert lookup_of(vocabulary).distinct.codes(pa.array(values, pa.string())).tolist() == expected(vocabulary, values)


def test_a_vocabulary_in_its_file(tmp_path: Path) -> None:
    vocabulary = [f"ü{i}" for i in range(20)] + [str(i) for i in range(20)] + ["true"]
    in_memory = lookup_of(vocabulary)
    pq.write_table(in_memory.table, tmp_path / "v", row_group_size=7)
    in_file = FileLookup(tmp_path / "v")
    assert (len(in_file), in_file.cardinality, in_file.table) == (
        len(in_memory),
        in_memory.cardinality,
        in_memory.table,
    )
    for values in (pa.array(["ü3", None, "x", "ü19", "ü3"]), pa.array([3, None, 77, 19, 3]), pa.array([True, False])):
        for file_lookup, memory_lookup in ((in_file, in_memory), (in_file.distinct, in_memory.distinct)):
            assert file_lookup.codes(values).tolist() == memory_lookup.codes(values).tolist()
    assert in_file.values_of([5, 1, 30, 99]) == in_memory.values_of([5, 1, 30, 99]) == {5: "ü3", 30: "8"}
    pq.write_table(lookup_of([]).table, tmp_path / "none")
    assert FileLookup(tmp_path / "none").cardinality == 2
    assert FileLookup(tmp_path / "none").codes(pa.array(["a", None])).tolist() == [1, 0]
