"""The best items by dot products against a plain sort of all scores."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.compute.jagged import JaggedArray
from headrace.errors import UserError
from headrace.score import top_k
from headrace.score.top_k import best_items, check_products, library, longest


@pytest.fixture(params=["native", "numpy"], scope="module")
def way(request: pytest.FixtureRequest) -> Any:
    """Both ways, one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(top_k, "library", lambda: None)
        elif library() is None:
            pytest.skip("not built: make native")
        yield request.param


def brute(
    queries: NDArray[np.float32], items: NDArray[np.float32], k: int, excluded: list[list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Rank by sorting pairs (score, number) in Python."""
    numbers, scores = [], []
    for query, left_out in zip(queries.astype(np.float64), excluded, strict=True):
        all_ = [(-float(query @ x), i) for i, x in enumerate(items.astype(np.float64)) if i not in set(left_out)]
        best = sorted(all_)[:k]
        numbers.append([i for _, i in best] + [-1] * (k - len(best)))
        scores.append([-s for s, _ in best] + [-np.inf] * (k - len(best)))
    return numbers, scores


def lists(values: list[list[int]]) -> JaggedArray:
    flat = np.array([x for row in values for x in row], np.int32)
    return JaggedArray(np.cumsum([0, *map(len, values)]).astype(np.int64), flat)


# Small whole numbers: sums are exact whatever their order, and ties are many.
@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.float32], int, list[list[int]], list[int]]:
    users, count, width = draw(st.integers(1, 30)), draw(st.integers(1, 90)), draw(st.sampled_from([1, 2, 5, 16, 33]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    span = draw(st.sampled_from([1, 2, 40]))
    queries, items = (rng.integers(-span, span + 1, (n, width)).astype(np.float32) for n in (users, count))
    if draw(st.booleans()):  # the same items again and again
        items = items[rng.integers(0, max(1, count // 4), count)]
    most = draw(st.sampled_from([0, 3, count + 5]))
    excluded = [rng.integers(-1, count + 3, rng.integers(0, most + 1)).tolist() for _ in range(users)]
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=3)))
    return queries, items, draw(st.sampled_from([1, 2, 7, 40, 200])), excluded, [0, *cuts, count]


@given(cases(), st.integers(1, 3), st.sampled_from([1, 5_000, top_k.BLOCK_BYTES]))
def test_equal_to_a_sort_of_all_scores(way: str, case: Any, threads: int, block_bytes: int) -> None:
    queries, items, k, excluded, cuts = case
    blocks = [(a, items[a:b]) for a, b in pairwise(cuts)]
    result = best_items(queries, blocks, k, excluded=lists(excluded), threads=threads, block_bytes=block_bytes)
    numbers, scores = brute(queries, items, k, excluded)
    assert result.items.tolist() == numbers
    assert result.scores.tolist() == scores


def test_of_many_items_in_blocks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "_BLOCK_SCORES", 1 << 18)  # 32 users of a block
    rng = np.random.default_rng(3)
    queries, items = (rng.standard_normal((n, 24)).astype(np.float32) for n in (70, 20_000))
    scores = queries.astype(np.float64) @ items.astype(np.float64).T
    best = np.argsort(-scores, axis=1)
    # What a user likes best must not be shown: the k next ones are.
    result = best_items(queries, [(0, items)], 50, excluded=JaggedArray(np.arange(71) * 60, best[:, :60].reshape(-1)))
    assert (result.items == best[:, 60:110]).mean() > 0.999  # float32 may order neighbours otherwise
    expected = np.take_along_axis(scores, result.items.astype(np.int64), axis=1)
    np.testing.assert_allclose(result.scores, expected, rtol=1e-4, atol=1e-5)
    assert np.all(np.diff(result.scores, axis=1) <= 0)


@pytest.mark.skipif(library() is None, reason="not built: make native")
def test_a_users_result_depends_on_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "library", library)
    rng = np.random.default_rng(4)
    queries, items = (rng.standard_normal((n, 37)).astype(np.float32) for n in (50, 3_000))
    together = best_items(queries, [(0, items)], 20, threads=2)
    single_results = [best_items(queries[i : i + 1], [(0, items[:17]), (17, items[17:])], 20) for i in range(50)]
    assert together.scores.tobytes() == np.concatenate([a.scores for a in single_results]).tobytes()
    assert together.items.tobytes() == np.concatenate([a.items for a in single_results]).tobytes()


def test_numbers_that_are_none_are_refused(way: str) -> None:
    items = np.ones((4, 2), np.float32)
    for wrong in (np.nan, np.inf):
        with pytest.raises(UserError, match="vectors of users are not all finite"):
            best_items(np.array([[1, wrong]], np.float32), [(0, items)], 1)
    with pytest.raises(ValueError, match="columns"):
        best_items(np.ones((1, 3), np.float32), [(0, items)], 1)
    assert longest(np.array([[3, 4], [0, 1]], np.float32)) == 5
    check_products(1e19, 1e19)
    with pytest.raises(UserError, match="beyond float32"):
        check_products(1e20, 1e20)


def test_no_user_and_no_item(way: str) -> None:
    items = np.ones((4, 2), np.float32)
    assert best_items(np.empty((0, 2), np.float32), [(0, items)], 3).items.shape == (0, 3)
    result = best_items(np.ones((2, 2), np.float32), [], 3)
    assert result.items.tolist() == [[-1] * 3] * 2
    assert np.isneginf(result.scores).all()


def test_the_search_needs_no_spark() -> None:
    """Programs that have a registered model and its requirements alone have no pyspark."""
    code = "import sys; sys.modules['pyspark'] = None; import headrace.score.top_k, headrace.library.pyfunc"
    subprocess.run([sys.executable, "-c", code], check=True)
