"""The best K against a plain sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.score.top_k import top_k


def plain(scores: np.ndarray, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda j: (-float(row[j]), j))[:k] for row in scores]


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.integers(1, 30).flatmap(
            lambda m: st.lists(
                st.lists(
                    st.sampled_from([0.0, -0.0, 1e-45, 0.25, 0.5, 1.0, -1.0, -np.inf]) | st.floats(-2, 2, width=32),
                    min_size=m,
                    max_size=m,
                ),
                min_size=n,
                max_size=n,
            )
        )
    ),
    st.integers(1, 40),
)
def test_equals_a_sort_with_ties(rows: list[list[float]], k: int) -> None:
    scores = np.array(rows, dtype=np.float32)
    assert top_k(scores, k).tolist() == plain(scores, k)


@pytest.mark.parametrize("k", [1, 10, 999, 1000])
def test_many_columns_few_values(k: int) -> None:
    scores = np.random.default_rng(3).integers(0, 7, (4, 1000)).astype(np.float32) / 7
    assert top_k(scores, k).tolist() == plain(scores, k)
