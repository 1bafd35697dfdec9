"""Lists in the dataset: they end with their values, and are padded again, in any layout that Arrow may have them in."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.jagged import JaggedArray, concatenated
from headrace.dataset import lists, native
from headrace.errors import UserError

MATRICES = st.integers(1, 5).flatmap(
    lambda length: st.lists(st.lists(st.sampled_from([0, 0, 1, 2, -3]), min_size=length, max_size=length), max_size=9)
)


def trimmed(matrix: np.ndarray) -> pa.ListArray:
    """Return the rows without their zeros, as lists in a slice whose offsets do not begin at 0."""
    rows, length = matrix.shape
    full = lists.from_arrays(np.arange(rows + 2) * length, np.append(np.full(length, 7, matrix.dtype), matrix))
    return lists.trim_zeros(full.slice(1))


def trim_plainly(row: list[int]) -> list[int]:
    while row and row[-1] == 0:
        row = row[:-1]
    return row


@given(MATRICES, st.sampled_from([np.int32, np.float32]), st.data())
def test_trimmed_and_padded_again(rows: list[list[int]], dtype: type, data: st.DataObject) -> None:
    length = len(rows[0]) if rows else 2
    matrix = np.array(rows, dtype).reshape(-1, length)
    stored = trimmed(matrix)
    assert stored.to_pylist() == [trim_plainly(r) for r in rows]
    # Cut into chunks and slices, whose offsets do not begin at 0.
    edges = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    start, ends = (edges[0], edges[1:]) if edges else (0, [])
    chunks = [stored.slice(a, b - a) for a, b in zip([start, *ends], [*ends, len(rows)], strict=True)]
    out = np.full((len(rows) - start, length), 9, np.int64 if dtype is np.int32 else np.float32)
    lists.pad(pa.chunked_array(chunks, stored.type), out, "here")
    np.testing.assert_array_equal(out, matrix[start:])
    columns = np.full((length, len(rows) - start), 9, out.dtype)  # as they lie in a batch
    lists.pad(pa.chunked_array(chunks, stored.type), columns.T, "here")
    np.testing.assert_array_equal(columns.T, matrix[start:])


@given(st.lists(st.lists(st.integers(-3, 3), max_size=5), max_size=9), st.data())
def test_rows_of_lists_are_taken_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    stored = pa.array([[1, 2], *rows], pa.list_(pa.int32())).slice(1)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20)) if rows else []
    for kind in (np.intp, np.int32):  # the second is the loader's, in C++
        taken = lists.from_arrays(*lists.take(*lists.to_numpy(stored), np.array(order, kind)))
        assert taken.to_pylist() == [rows[i] for i in order]
        assert not taken.type.value_field.nullable


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=20),
    longest=st.sampled_from([70, 64, 100]),
    kinds=st.sampled_from(
        [(np.int32, np.int64), (np.int64, np.int64), (np.float32, np.float32), (np.int32, np.float32)]
    ),
    built=st.booleans(),
    data=st.data(),
)
def test_lists_fill_the_columns_of_a_batch(
    lengths: list[int], longest: int, kinds: tuple[type, type], built: bool, data: st.DataObject
) -> None:
    """Some rows of lists, to some rows of a matrix that lies column by column, by C++ and by NumPy."""
    lengths = [min(n, longest) for n in lengths]
    first = data.draw(st.integers(0, len(lengths)))
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    values = np.arange(1, offsets[-1] + 1).astype(kinds[0])
    out = np.full((longest, len(lengths) + 3), 7, kinds[1])
    with nullcontext() if built else patch.object(native, "library", lambda: None):
        lists.fill(out[:, 2 + first : -1].T, JaggedArray(offsets[first:], values))
    expected = np.full_like(out, 7)
    for row in range(first, len(lengths)):
        expected[:, 2 + row] = 0
        expected[: lengths[row], 2 + row] = values[offsets[row] : offsets[row + 1]]
    np.testing.assert_array_equal(out, expected)


def test_negative_zero_inside_a_list_stays() -> None:
    assert str(trimmed(np.array([[-0.0, 1.0, -0.0]], np.float32)).to_pylist()) == "[[-0.0, 1.0]]"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1, 2, 3]]), "column 't' has a list of 3 values, and the schema says 2"),
        (pa.array([[1, None]]), "column 't' has 1 nulls"),
        (pa.array([[1], None]), "column 't' has 1 nulls"),
    ],
)
def test_what_no_batch_can_hold(column: pa.ListArray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lists.pad(column, np.empty((len(column), 2), np.int64), "column 't'")


def test_other_readers_see_plain_parquet_lists(tmp_path: Path) -> None:
    """The three levels that Spark, cuDF and pandas know, required ones."""
    table = pa.table({"tags": trimmed(np.array([[4, 0], [0, 0]], np.int32))})
    pq.write_table(table.cast(pa.schema([table.schema.field(0).with_nullable(False)])), tmp_path / "a.parquet")
    assert pq.ParquetFile(tmp_path / "a.parquet").schema.column(0).path == "tags.list.element"
    assert [list(v) for v in pq.read_table(tmp_path / "a.parquet").to_pandas()["tags"]] == [[4], []]


@given(st.lists(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=5), max_size=4), st.integers(0, 3))
def test_parts_are_concatenated(parts: list[list[list[int]]], skipped: int) -> None:
    """Parts that begin somewhere in their values, into one that begins at 0."""
    arrays = []
    for rows in parts:
        values = np.array([7] * skipped + [v for row in rows for v in row] + [8], np.int32)
        arrays.append(JaggedArray(np.cumsum([skipped, *map(len, rows)]).astype(np.int32), values))
    joined = concatenated(arrays, np.int64)
    rows = [row for part in parts for row in part]
    assert (joined.offsets[0], joined.offsets.dtype, joined.values.dtype, len(joined)) == (
        0,
        np.int64,
        np.int64,
        len(rows),
    )
    assert [joined.values[a:b].tolist() for a, b in zip(joined.offsets, joined.offsets[1:], strict=False)] == rows
    assert joined.to_padded(4).tolist() == [row + [0] * (4 - len(row)) for row in rows]
    assert joined.rows(1, 3).flat().tolist() == [v for row in rows[1:3] for v in row] if len(rows) > 3 else True
