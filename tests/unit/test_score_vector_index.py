"""Files of item vectors, and the index over them, against arrays in memory and plain sorts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.compute.jagged import JaggedArray
from headrace.score.candidates import item_vectors
from headrace.score.candidates.item_vectors import (
    ItemVectors,
    VectorPart,
    build_index,
    cells_of,
    fewest_probes,
    recall_share,
    search_index,
)
from headrace.score.candidates.vector_source import FindItems, MeasureRecall, VectorSearch
from headrace.score.top_k import best_items
from headrace.score.vectors import ModelVectors
from headrace.storage import LeaseLost, Location, local
from tests.storage_support import memory_home


def write(folder: Path, rows: NDArray[np.int32], vectors: NDArray[np.float32], cuts: list[int]) -> ItemVectors:
    ends = [*cuts, len(rows)]
    parts = [(rows[a:b], vectors[a:b]) for a, b in zip([0, *ends], ends, strict=False) if b > a]
    return ItemVectors.of_arrays(parts, local(folder))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=40, unique=True).map(sorted), st.data())
def test_numbers_and_rows(tmp_path_factory: pytest.TempPathFactory, rows: list[int], data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("vectors")
    width = data.draw(st.integers(1, 3))
    vectors = np.arange(len(rows) * width, dtype=np.float32).reshape(-1, width)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=2)))
    stored = write(folder / "v", np.array(rows, np.int32), vectors, cuts)
    assert stored.rows == len(rows)
    if rows:
        assert np.array_equal(np.concatenate([v for _, v in stored.blocks()]), vectors)
        assert [first for first, _ in stored.blocks()] == np.cumsum([0, *[len(v) for _, v in stored.blocks()]])[
            :-1
        ].tolist()
        assert stored.item_rows(np.arange(len(rows))).tolist() == rows
        assert stored.longest == pytest.approx(np.linalg.norm(vectors, axis=1).max())
    requested = np.arange(-2, 64)
    assert stored.numbers(requested).tolist() == [rows.index(r) if r in rows else -1 for r in requested]


def test_a_task_that_was_lost_and_goes_on_changes_no_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    batch = pa.RecordBatch.from_pydict({"c0": pa.array([4, 7, 9], pa.int32())})
    folder = memory_home(monkeypatch, tmp_path / "cache") / "vectors"

    class Model:
        def known_vectors(self, batch: pa.RecordBatch) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
            return vectors, np.array([True, False, True])

    def attempt(building: Location) -> dict[str, Any]:
        (result,) = item_vectors._Write(building, cast(ModelVectors, Model()))([batch])
        (row,) = result.to_pylist()
        return cast("dict[str, Any]", row)

    with folder.new_folder() as building:
        attempt(building)
        row = attempt(building)
    with pytest.raises(LeaseLost):  # all is published since
        attempt(building)
    stored = ItemVectors(folder, 2, (VectorPart(*item_vectors._files(row["name"]), row["rows"]),), row["longest"], 0)
    assert [v.tolist() for _, v in stored.blocks()] == [vectors[[0, 2]].tolist()]
    assert stored.item_rows(np.arange(2)).tolist() == [4, 9]


def clustered(items: int, users: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Vectors of very different lengths around some centres."""
    rng = np.random.default_rng(5)
    centres = rng.standard_normal((60, width))
    vectors = centres[rng.integers(0, 60, items)] + 0.4 * rng.standard_normal((items, width))
    vectors *= rng.gamma(2, 1, items)[:, None]
    queries = centres[rng.integers(0, 60, users)] + 0.4 * rng.standard_normal((users, width))
    return vectors.astype(np.float32), queries.astype(np.float32)


def test_index(tmp_path: Path) -> None:
    vectors, queries = clustered(6_000, 200, 20)
    stored = write(tmp_path / "v", np.arange(6_000, dtype=np.int32), vectors, [2_500])
    index = build_index(stored, local(tmp_path / "index"), threads=2)
    assert index.cells == cells_of(6_000) == 93
    expected = np.argsort(-(queries.astype(np.float64) @ vectors.T.astype(np.float64)), axis=1)[:, :50]
    shares = []
    for probes in (4, 8, 32, index.cells):
        neighbours = search_index(index, queries, 50, probes, threads=1).items
        by_hand = [len({*f.tolist()} & {*w.tolist()}) / 50 for f, w in zip(neighbours, expected, strict=True)]
        shares.append(recall_share(neighbours, expected))
        assert shares[-1] == pytest.approx(np.mean(by_hand))
        assert all(len(set(f)) == 50 and min(f) >= 0 for f in neighbours.tolist())
    assert shares == sorted(shares)
    assert shares[1] > 0.8  # of 8 of 93 cells: items of random cells would give 0.09
    assert shares[-1] > 0.99  # of all cells: half precision alone is between
    # More of them begin with the same ones, as far as the cells have them.
    more = search_index(index, queries, 80, 32, threads=2).items
    fewer = search_index(index, queries, 50, 32, threads=1).items
    assert (more[:, :50] == fewer).mean() > 0.999
    # Built again, it is the same.
    rebuilt = build_index(stored, local(tmp_path / "again"), threads=1)
    assert np.array_equal(
        search_index(rebuilt, queries, 50, 8, threads=1).items, search_index(index, queries, 50, 8, 1).items
    )


def test_users_whose_cells_have_too_few_get_the_best_others(tmp_path: Path) -> None:
    vectors, queries = clustered(640, 20, 4)
    stored = write(tmp_path / "v", np.arange(640, dtype=np.int32), vectors, [])
    index = build_index(stored, local(tmp_path / "index"), threads=1)
    neighbours = search_index(index, queries, 300, 1, threads=1).items
    best = best_items(queries, stored.blocks(), 640).items
    for f, b, five_best in zip(
        neighbours.tolist(), best.tolist(), search_index(index, queries, 5, 1, 1).items.tolist(), strict=True
    ):
        assert f[:5] == five_best
        assert len(set(f)) == 300
        among_best = [i for i, item in enumerate(f) if item in b[: len(f)]]
        assert len(among_best) > 200  # most are the best ones of all
    everything = search_index(index, queries, 700, 1, threads=1).items
    assert all(sorted(f[:640]) == list(range(640)) and set(f[640:]) == {-1} for f in everything.tolist())


@given(st.integers(1, 300), st.integers(1, 300))
def test_fewest_probes(needed: int, cells: int) -> None:
    tried = []

    def recall_of(probes: int) -> float:
        tried.append(probes)
        return min(probes / needed, 1)

    fewest = fewest_probes(recall_of, 1.0, cells)
    assert max(tried) <= cells
    if needed > cells:
        assert fewest is None
    else:
        assert fewest is not None
        assert needed <= fewest <= needed + max(1, fewest // 8)
    assert len(tried) <= 2 + 2 * cells.bit_length()


class ColumnVectors:
    """A stand-in for a model: vectors that are columns; those of length 0 are of unknown users."""

    def known_vectors(self, batch: pa.RecordBatch) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        vectors = np.column_stack([batch.column(c).to_numpy() for c in ("x", "y")]).astype(np.float32)
        return vectors, np.abs(vectors).sum(axis=1) > 0


@given(st.integers(0, 40), st.integers(0, 2**32))
def test_lists_of_users_who_are_asked_for_different_numbers(
    tmp_path_factory: pytest.TempPathFactory, n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(30) < 0.8).astype(np.int32)
    items = rng.integers(-9, 10, (len(rows), 2)).astype(np.float32)
    stored = write(tmp_path_factory.mktemp("vectors") / "v", rows, items, [])
    users = rng.integers(-2, 3, (n, 2)).astype(np.float32)
    fetch = rng.integers(0, 50, n).astype(np.int32)
    work = FindItems("wanted", cast(ModelVectors, ColumnVectors()), VectorSearch(stored, threads=1))
    columns = [pa.array(users[:, 0]), pa.array(fetch), pa.array(users[:, 1])]
    result = [
        x for b in work([pa.RecordBatch.from_arrays(columns, ["x", "wanted", "y"])]) for x in b["items"].to_pylist()
    ]
    for user, k, list_ in zip(users, fetch, result, strict=True):
        order = sorted(range(len(rows)), key=lambda i: (-float(items[i] @ user), i)) if np.any(user) else []
        assert list_ == [rows[i] for i in order[:k]]


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**32))
def test_blocked_items_are_not_among_the_best(
    tmp_path_factory: pytest.TempPathFactory, n: int, k: int, seed: int
) -> None:
    """Each user has as many items as requested of those that are not blocked, and the index is asked for no more."""
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(30) < 0.8).astype(np.int32)
    items = rng.integers(-9, 10, (len(rows), 2)).astype(np.float32)
    stored = write(tmp_path_factory.mktemp("vectors") / "v", rows, items, [])
    users = rng.integers(-2, 3, (n, 2)).astype(np.float32)
    blocked = [rng.permutation(30)[: rng.integers(0, 31)].tolist() for _ in range(n)]
    searched = Noted(stored, threads=1)
    work = FindItems("wanted", cast(ModelVectors, ColumnVectors()), searched, "blocked")
    columns = [*(pa.array(c) for c in users.T), pa.array([k] * n, pa.int32()), pa.array(blocked, pa.list_(pa.int32()))]
    batch = pa.RecordBatch.from_arrays(columns, ["x", "y", "wanted", "blocked"])
    # As Arrow cuts a batch: its lists do not begin with the first value.
    result = [x for part in (batch[: n // 3], batch[n // 3 :]) for b in work([part]) for x in b["items"].to_pylist()]
    for user, user_blocked, list_ in zip(users, blocked, result, strict=True):
        order = sorted(range(len(rows)), key=lambda i: (-float(items[i] @ user), i)) if np.any(user) else []
        assert list_ == [rows[i] for i in order if rows[i] not in user_blocked][:k]
    assert sum(searched.requested) <= n * k


@dataclass(frozen=True)
class Noted(VectorSearch):
    """Notes what is asked of it."""

    requested: list[int] = field(default_factory=list)

    def best(self, queries: NDArray[np.float32], k: int, excluded: JaggedArray | None = None) -> NDArray[np.int32]:
        self.requested.append(len(queries) * k)
        return super().best(queries, k, excluded)


@given(st.lists(st.integers(0, 90), max_size=60), st.integers(1, 200))
def test_users_are_cut_by_what_they_ask_for(
    tmp_path_factory: pytest.TempPathFactory, fetch: list[int], at_once: int
) -> None:
    """One user who asks for all items does not make room for as many for each of the others."""
    rng = np.random.default_rng(len(fetch))
    items = rng.integers(-9, 10, (70, 2)).astype(np.float32)
    stored = write(tmp_path_factory.mktemp("vectors") / "v", np.arange(70, dtype=np.int32), items, [])
    users, searched = rng.integers(1, 4, (len(fetch), 2)).astype(np.float32), Noted(stored, threads=1)
    work = FindItems("wanted", cast(ModelVectors, ColumnVectors()), searched, items_at_once=at_once)
    columns = [pa.array(users[:, 0]), pa.array(fetch, pa.int32()), pa.array(users[:, 1])]
    batches = list(work([pa.RecordBatch.from_arrays(columns, ["x", "wanted", "y"])]))
    lists = [x for b in batches for x in b["items"].to_pylist()]
    for user, k, list_ in zip(users, fetch, lists, strict=True):
        assert list_ == sorted(range(70), key=lambda i: (-float(items[i] @ user), i))[:k]
    assert all(b.num_rows == 1 or sum(b["c1"].to_pylist()) <= at_once for b in batches)
    assert max(searched.requested, default=0) < 2 * max(at_once, *fetch, 1)


def test_recall_is_measured_by_users_whom_the_model_knows(tmp_path: Path) -> None:
    vectors, queries = clustered(640, 60, 2)
    stored = write(tmp_path / "v", np.arange(640, dtype=np.int32), vectors, [])
    index = build_index(stored, local(tmp_path / "index"), threads=1)

    def measured(known: int) -> dict[str, Any]:
        # Those of whom nothing is known come first.
        users = np.concatenate([np.zeros((400, 2), np.float32), queries[:known]])
        batch = pa.RecordBatch.from_arrays([pa.array(users[:, 0]), pa.array(users[:, 1])], ["x", "y"])
        work = MeasureRecall(cast(ModelVectors, ColumnVectors()), VectorSearch(stored, 1, index), 20, 0.9)
        (measures,) = work([batch.slice(0, 300), batch.slice(300)])
        return cast(dict[str, Any], measures.to_pylist()[0])

    measurement = measured(60)
    assert (measurement["users"], measurement["recall"] >= 0.9) == (60, True)
    best = best_items(queries, stored.blocks(), 20).items
    assert measurement["recall"] == recall_share(search_index(index, queries, 20, measurement["probes"], 1).items, best)
    # Of nobody a recall of 1 would be reached by one cell.
    for user_count in (0, 5):
        none = measured(user_count)
        assert (none["users"], none["probes"], none["recall"]) == (user_count, None, None)


def test_recall_of_lists_with_gaps() -> None:
    best = np.array([[1, 2, -1], [4, 5, 6]], np.int32)
    assert recall_share(np.array([[2, 9, -1], [6, 5, 4]], np.int32), best) == 4 / 5
    assert recall_share(np.array([[-1, -1]], np.int32), np.array([[-1, -1]], np.int32)) == 1.0
