"""Vocabularies in their table, without Spark: refusals at reading, and the values of a pinned version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import UserError
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.delta_table import VocabularyTable
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
