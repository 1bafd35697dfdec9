"""Persons' values in a list, and the places where the search of files and statistics finds them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.housekeeping.forget import places as places_module
from headrace.jobs.housekeeping.forget.persons import Persons, read_persons
from headrace.jobs.housekeeping.forget.proof import scan
from headrace.jobs.housekeeping.workspace_state import WorkspaceState
from tests.forget_support import shop

NOW = datetime(2026, 1, 9, tzinfo=UTC)
SPEC = shop()


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        ("usr_id", "x", "did you mean 'user_id'"),
        ("item_id", "7\nseven\n", "line 2: it is no bigint"),
        ("item_id", "9223372036854775808", "line 1"),
        ("user_id", " \n", "has no values"),
        ("user_id", "a\nb \n", "line 2: it begins or ends with a blank"),
    ],
)
def test_refused(tmp_path: Path, column: str, text: str, message: str) -> None:
    (tmp_path / "values").write_text(text)
    with pytest.raises(UserError, match=message):
        read_persons(SPEC, column, tmp_path / "values")


def test_values_of_texts(tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes("a\r\nb\u2028c\x0bd\n".encode())
    assert read_persons(SPEC, "user_id", tmp_path / "values").texts == {"a", "b\u2028c\x0bd"}


def test_the_search_trusts_short_values_in_their_own_column_alone(tmp_path: Path) -> None:
    ws, persons = Workspace(tmp_path), Persons("user_id", False, frozenset({"17", "user-0017"}))
    state = WorkspaceState(SPEC, ws, NOW)
    columns: dict[str, list[Any]] = {
        "user_id": ["17"],
        "item_id": ["17"],
        "other": ["user-0017"],
        "nested": [{"user_id": "17"}],
        "items": [["17", "18"]],
    }
    for name, values in columns.items():
        with (ws.table("clicks", name) / "x.parquet").new_file() as file:
            pq.write_table(pa.table({name: values}), file)
    # Of another pipeline, at work; and one of ours that was not written to its end.
    (ws.spark_local / "ingest" / "visits" / "half.parquet").put_text("PAR1")
    (ws.lake / "warehouse" / "visits_scores" / "half.parquet").put_text("user-0017")
    for kind in ("ingest", "tables", "vocabulary"):
        (ws.spark_local / kind / "clicks" / "half.parquet").put_text("PAR1")
    result = scan(state, persons)
    assert sorted(result.matches) == [f"lake/clicks/{name}/x.parquet" for name in ("nested", "other", "user_id")]
    unread = [f"spark/{kind}/clicks/half.parquet" for kind in ("ingest", "tables", "vocabulary")]
    assert sorted(result.unread) == unread


def test_the_search_finds_long_integers_in_texts_and_lists(tmp_path: Path) -> None:
    ws, persons = Workspace(tmp_path), Persons("user_id", True, frozenset({"17", "123456789012"}))
    columns: dict[str, list[Any]] = {
        "bins": [[{"value": "123456789012", "count": 3}]],
        "text": ["123456789012"],
        "short": [[{"value": "17", "count": 17}]],
        "item_id": [17],
        "user_id": [17],
    }
    for name, values in columns.items():
        with (ws.table("clicks", name) / "x.parquet").new_file() as file:
            pq.write_table(pa.table({name: values}), file)
    matches = scan(WorkspaceState(SPEC, ws, NOW), persons).matches
    assert sorted(matches) == [f"lake/clicks/{name}/x.parquet" for name in ("bins", "text", "user_id")]


def test_the_most_frequent_values_in_statistics() -> None:
    """Statistics of the input column lose them, and those of features whose categories are named by values."""
    sides = [("input", "user_id"), ("feature", "user_id"), ("feature", "item_id"), ("input", "item_id")]
    bins = [{"value": v, "count": n} for n, v in enumerate(["7", "8", None])]
    rows = pa.table({"side": [s for s, _ in sides], "column": [c for _, c in sides], "histogram": [bins] * 3 + [None]})
    for spec, persons in (
        (load_spec("clicks"), Persons("user_id", True, frozenset({"7"}))),
        (SPEC, Persons("user_id", False, frozenset({"7"}))),
    ):
        kind, change, _ = places_module.change_of(spec, "statistics", persons)
        new, count = change.apply(rows)
        assert (kind, count) == ("statistics", 2)
        remaining = [None if h is None else [b["value"] for b in h] for h in new["histogram"].to_pylist()]
        assert remaining[2:] == [["7", "8", None], None]
        assert all(h is not None and "7" not in h and h[1:] == ["8", None] for h in remaining[:2])
        assert new["histogram"].type == rows["histogram"].type


def test_values_of_integers(tmp_path: Path) -> None:
    (tmp_path / "values").write_text("\ufeff007\n +8\n\n-9\n")
    persons = read_persons(SPEC, "item_id", tmp_path / "values")
    assert persons.texts == {"7", "8", "-9"}
    assert persons.mask(pa.array([7, 9, None, -9], pa.int32())).tolist() == [True, False, False, True]
    assert [persons.occurs_in(t) for t in ("a;7", "77", '{"i": -9}', None)] == [True, False, True, False]
