"""Items as mapped files, and the day's table of scores."""

from __future__ import annotations

import json
import pickle
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.lake.delta.day_table import check_table_columns
from headrace.score import items
from headrace.score.items import HASHES, ItemTable
from headrace.storage import LeaseLost, Location, local
from tests.storage_support import memory_home

_KEYS = {
    "text": (pa.string(), st.text(max_size=6)),
    "bigint": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "int": (pa.int32(), st.integers(-5, 5)),
    "date": (pa.date32(), st.dates(date(1990, 1, 1))),
    "decimal": (pa.decimal128(10, 2), st.decimals(-1000, 1000, places=2)),
}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), part_rows=st.integers(1, 9), chunk_rows=st.integers(1, 5))
@pytest.mark.parametrize("kind", _KEYS)
def test_rows_and_keys_are_those_of_a_sorted_list(
    kind: str, data: st.DataObject, part_rows: int, chunk_rows: int, tmp_path: Path
) -> None:
    type_, values = _KEYS[kind]
    known = data.draw(st.lists(values, unique=True, max_size=25))
    missing = data.draw(st.lists(st.one_of(values, st.none()), max_size=10))
    prices = list(range(len(known)))
    table = pa.table({"price": pa.array(prices, pa.int32()), "id.": pa.array(known, type_)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "_CHUNK_ROWS", chunk_rows)
        item_table = ItemTable.of_arrow(table, "id.", local(tmp_path / "items"), part_rows)
    item_table = pickle.loads(pickle.dumps(item_table))
    order = sorted(known, key=lambda k: k.encode() if isinstance(k, str) else k)
    assert item_table.rows == len(known) == len(item_table.open())
    assert item_table.open()["id."].to_pylist() == order
    assert all(p.rows <= part_rows for p in item_table.parts)
    requested = data.draw(st.permutations([*known, *missing]))
    expected = [order.index(k) if k in order else -1 for k in requested]
    assert item_table.rows_of(pa.array(requested, type_)).tolist() == expected
    rows = np.array(data.draw(st.lists(st.integers(0, len(known) - 1), max_size=30)) if known else [], np.int32)
    assert item_table.keys(rows).to_pylist() == [order[r] for r in rows]
    assert item_table.keys(pa.array(rows)).type == type_
    price = dict(zip(known, prices, strict=True))
    assert item_table.take("price", rows).to_pylist() == [price[order[r]] for r in rows]


def test_fingerprint_is_the_items_alone(tmp_path: Path) -> None:
    table = pa.table({"id": ["b", "a", None, "c"], "price": [Decimal(1), None, Decimal(2), Decimal(3)]})
    item_table = ItemTable.of_arrow(table, "id", local(tmp_path / "a"))
    reordered = ItemTable.of_arrow(table.take([3, 1, 0]), "id", local(tmp_path / "b"), part_rows=1)
    assert item_table.fingerprint == reordered.fingerprint
    assert item_table.rows == reordered.rows == 3
    assert len(reordered.parts) == 3
    smaller = ItemTable.of_arrow(table.slice(0, 2), "id", local(tmp_path / "c"))
    assert smaller.fingerprint != item_table.fingerprint
    # What is the same item has the same hashes in both.
    assert smaller.take(HASHES[0], np.array([0, 1])).equals(item_table.take(HASHES[0], np.array([0, 1])))


def test_no_items(tmp_path: Path) -> None:
    item_table = ItemTable.of_arrow(pa.table({"id": pa.array([None], pa.string())}), "id", local(tmp_path / "a"))
    assert item_table.rows == 0
    assert item_table.rows_of(pa.array(["a", None])).tolist() == [-1, -1]
    assert item_table.keys(np.array([], np.int32)).type == pa.string()


def test_a_task_that_was_lost_and_goes_on_changes_no_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "TaskContext", SimpleNamespace(get=lambda: SimpleNamespace(partitionId=lambda: 0)))
    table = pa.table({"id": ["a", "b"], **{h: np.arange(2) for h in HASHES}})
    folder = memory_home(monkeypatch, tmp_path / "cache") / "items"

    def attempt(building: Location) -> list[Any]:
        task = items._Write(building, tuple(table.column_names))
        return [json.loads(text) for batch in task(table.to_batches()) for text in batch["part"].to_pylist()]

    with folder.new_folder() as building:
        attempt(building)
        [[number, file, rows, _]] = attempt(building)
    with pytest.raises(LeaseLost):  # all is published since
        attempt(building)
    item_table = ItemTable(folder, "id", table.schema, (items.ItemPart(file, rows),), "")
    assert number == 0
    assert item_table.open().equals(table)


OPTIONAL = {"source": "string", "reason": "string"}


def table(path: Path, *names: str) -> None:
    write_deltalake(str(path), pa.table({n: pa.array([], pa.string()) for n in names}))


@pytest.mark.parametrize("key", ["user", "source", "reason"])
def test_a_key_may_have_the_name_of_an_optional_column(tmp_path: Path, key: str) -> None:
    table(tmp_path / "scores", "ds", key)
    check_table_columns(local(tmp_path / "scores"), {"ds": "string", key: "string"}, "", OPTIONAL)
    other_key = "items" if key == "user" else "user"
    with pytest.raises(UserError, match="has the columns"):
        check_table_columns(
            local(tmp_path / "scores"), {"ds": "string", other_key: "string"}, "its keys were others", OPTIONAL
        )


def test_days_may_have_optional_columns_or_not(tmp_path: Path) -> None:
    table(tmp_path / "scores", "ds", "user", "source")
    check_table_columns(local(tmp_path / "scores"), {"ds": "string", "user": "string"}, "", OPTIONAL)
    with pytest.raises(UserError, match="its keys were others"):
        check_table_columns(
            local(tmp_path / "scores"), {"ds": "string", "item": "string"}, "its keys were others", OPTIONAL
        )
