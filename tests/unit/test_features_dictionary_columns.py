"""Loops over dictionary columns (C++ and their stand-ins) against NumPy and pandas."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset import native
from headrace.features.arrow import kernels
from headrace.features.arrow.collect import counted, in_parts

BOTH = pytest.mark.parametrize("built", [True, False])


@pytest.fixture(autouse=True)
def _build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    built = request.node.callspec.params["built"] if hasattr(request.node, "callspec") else True
    if built and native.library() is None:
        pytest.skip("run make native")
    if not built:
        monkeypatch.setattr(native, "library", lambda: None)


@BOTH
@pytest.mark.parametrize("width", [None, np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
def test_scatter(built: bool, width: type | None, dtype: type) -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(-(2**30), 2**30, 200).astype(dtype)
    index = None if width is None else rng.integers(0, 200, 200).astype(width)
    places = rng.permutation(400)[:200].astype(np.int32)
    out = np.full(400, 7, dtype)
    kernels.scatter(values, index, places, out)
    for place in range(400):
        matches = np.flatnonzero(places == place)
        index_of_value = matches[0] if len(matches) else -1
        assert out[place] == (
            7 if index_of_value < 0 else values[index_of_value] if index is None else values[index[index_of_value]]
        )


@BOTH
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.int64])
def test_take(built: bool, dtype: type) -> None:
    rng = np.random.default_rng(2)
    values, rows = rng.integers(0, 250, 90).astype(dtype), rng.integers(0, 90, 300).astype(np.int32)
    taken = kernels.take(values, rows)
    assert taken.dtype == dtype
    assert taken.tolist() == [values[row] for row in rows]


@BOTH
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_row_order(built: bool, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n = data.draw(st.sampled_from([0, 1, 5, 300, 3_000]))
    ends = np.iinfo(np.int64)
    # Even ones as real hashes are; few, some of them next to each other; the ends.
    few = np.array([ends.min, ends.min + 1, -1, 0, 1, 7, 2**40, ends.max])
    hashes = rng.integers(ends.min, ends.max, n) if data.draw(st.booleans()) else few[rng.integers(0, len(few), n)]
    parts = data.draw(st.sampled_from([1, 2, 40, 300, 70_000]))
    part = None
    if data.draw(st.booleans()):
        part = rng.integers(0, min(parts, 350) + 1, n).astype(kernels.index_type(parts + 1))  # the last is no part
    rows, sorted_, edges = kernels.row_order(hashes, part, parts if part is not None else 1)
    count = 1 if part is None else parts
    keys = [(0 if part is None else int(part[i]), int(hashes[i]), i) for i in range(n)]
    expected = sorted(key for key in keys if key[0] < count)
    assert rows.dtype == np.int32
    assert rows.tolist() == [i for _, _, i in expected]
    assert sorted_.tolist() == [h for _, h, _ in expected]
    sizes = np.bincount([p for p, _, _ in expected], minlength=count)
    assert edges.tolist() == [0, *np.cumsum(sizes).tolist()]


@BOTH
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_counts_and_widths(built: bool, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 3, 256, 257, 65_536, 65_537]))
    drawn = data.draw(st.lists(st.one_of(st.none(), st.integers(0, max(size - 2, 0))), min_size=1, max_size=60))
    start = data.draw(st.integers(0, len(drawn) - 1))
    repeated = drawn * data.draw(st.sampled_from([1, 40]))
    index = pa.array(repeated, pa.int32()).slice(start)
    expected = np.array([size - 1 if v is None else v for v in repeated[start:]])
    narrowed = kernels.narrow(index, size - 1, size)
    assert narrowed.dtype == (np.uint8 if size <= 256 else np.uint16 if size <= 65_536 else np.int32)
    assert narrowed.tolist() == expected.tolist()
    mask = np.array(
        [data.draw(st.booleans()) for _ in range(min(8, len(expected)))] + [True] * max(0, len(expected) - 8)
    )
    for chosen in (None, mask):
        picked = expected if chosen is None else expected[chosen]
        assert kernels.count(narrowed, chosen, size).tolist() == np.bincount(picked, minlength=size).tolist()


@BOTH
@given(
    values=st.lists(st.one_of(st.none(), st.integers(-5, 300), st.sampled_from([-(2**31), 2**31 - 1])), min_size=1),
    start=st.integers(0, 3),
    wide=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_integers_are_numbered_as_arrow_does(built: bool, values: list[int | None], start: int, wide: bool) -> None:
    array = pa.array(values, pa.int64() if wide else pa.int32()).slice(min(start, len(values) - 1))
    encoded, expected = kernels.dictionary_encode(array), array.dictionary_encode(null_encoding="encode")
    encoded.validate(full=True)
    assert encoded.dictionary.equals(expected.dictionary)
    assert encoded.indices.to_pylist() == expected.indices.to_pylist()
    assert encoded.indices.type == (pa.uint8() if len(expected.dictionary) <= 256 else pa.uint16())


@given(values=st.lists(st.one_of(st.none(), st.sampled_from("abcdefgh")), max_size=30), start=st.integers(0, 30))
@settings(deadline=None, max_examples=80)
def test_a_part_of_a_dictionary_column_keeps_the_values_that_it_has(values: list[str | None], start: int) -> None:
    part = pa.array(values, pa.string()).dictionary_encode().slice(min(start, len(values)))
    used_part = kernels.used(part)
    used_part.validate(full=True)
    assert used_part.to_pylist() == part.to_pylist()
    assert sorted(used_part.dictionary.to_pylist()) == sorted({v for v in part.to_pylist() if v is not None})


@given(
    parts=st.lists(
        st.lists(
            st.tuples(st.text(st.sampled_from("aü\0z"), max_size=18), st.integers(1, 5), st.integers(-3, 3)),
            max_size=30,
        ),
        min_size=1,
        max_size=4,
    ),
    least=st.integers(1, 6),
    at_once=st.sampled_from([3, 1 << 20]),
    few=st.sampled_from([0, 10, 1 << 20]),
)
@settings(deadline=None, max_examples=80)
def test_texts_are_counted_by_any_number_of_rounds_and_parts(
    parts: list[list[tuple[str, int, int]]], least: int, at_once: int, few: int
) -> None:
    sums: defaultdict[str, int] = defaultdict(int)
    first: dict[str, int] = {}
    arrays = []
    for part in parts:
        for text, rows, day in part:
            sums[text] += rows
            first[text] = min(day, first.get(text, day))
        # A slice, as parts are that were cut from a longer column.
        longer = [("not of it", 100, -9), *part]
        columns = (
            pa.array([t for t, _, _ in longer], pa.string()),
            pa.array([r for _, r, _ in longer], pa.int64()),
            pa.array([d for _, _, d in longer], pa.int64()),
        )
        arrays.append(tuple(c.slice(1) for c in columns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_TEXTS_AT_ONCE", at_once)
        by_rounds = kernels.counted_texts(arrays, least)
        tables = [pa.table(dict(zip(("key", "rows", "day"), columns, strict=True))) for columns in arrays]
        by_parts = counted([in_parts(table, few) for table in tables], least)
    expected = {t: (n, first[t]) for t, n in sums.items() if n >= least}
    for counts in (by_rounds, by_parts):
        assert counts is not None
        counts.validate(full=True)
        got = {r["key"]: (r["rows"], r["day"]) for r in counts.to_pylist()}
        assert got == expected
        assert counts.num_rows == len(expected)


def test_many_texts_are_counted() -> None:
    rng = np.random.default_rng(3)
    frames = [
        pd.DataFrame({"key": rng.integers(0, 60_000, 50_000).astype(str), "rows": 1, "day": day}) for day in (2, 1, 0)
    ]
    parts = []
    for frame in frames:
        table = pa.Table.from_pandas(frame, preserve_index=False)
        parts.append(tuple(table.column(c).combine_chunks() for c in ("key", "rows", "day")))
    counts = kernels.counted_texts(parts, 3)
    assert counts is not None
    sums = pd.concat(frames).groupby("key").agg({"rows": "sum", "day": "min"})
    expected = sums[sums["rows"] >= 3].sort_index()
    pd.testing.assert_frame_equal(counts.to_pandas().set_index("key").sort_index(), expected)
