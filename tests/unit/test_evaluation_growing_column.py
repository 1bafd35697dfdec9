"""Columns that batches are added to: against numpy.concatenate."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.train.evaluation.predict import GrowingColumn

BATCHES = st.lists(
    st.tuples(st.sampled_from(["f4", "i8", "U3", "U9", "O"]), st.integers(0, 50_000)), min_size=1, max_size=6
).filter(lambda drawn: len({kind[0] in "fi" for kind, _ in drawn if kind != "O"}) < 2)


@settings(max_examples=40, deadline=None)
@given(BATCHES)
def test_a_column_is_its_batches_one_behind_the_other(drawn: list[tuple[str, int]]) -> None:
    batches = [np.arange(i, i + rows).astype(kind) for i, (kind, rows) in enumerate(drawn)]
    column = GrowingColumn(np.float32)
    assert (len(column.array), column.array.dtype) == (0, np.float32)
    for batch in batches:
        column.add(batch)
    expected = np.concatenate(batches)
    assert column.array.dtype == expected.dtype
    assert np.array_equal(column.array, expected)


def test_memory_is_one_piece() -> None:
    column = GrowingColumn(np.float32)
    for _ in range(100):
        column.add(np.zeros(4_096, np.float32))
    held = column.array.base
    assert held is not None
    assert 409_600 <= len(held) <= 2 * 409_600
