"""The C++ loops over whole batches against torch's passes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute import native
from headrace.dataset import native as dataset
from headrace.embeddings.addressing import BatchIndexer, JaggedIndices
from headrace.embeddings.exchange import bucketize_bags
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.kernels import cpu
from headrace.embeddings.kernels.dispatch import find_duplicates
from headrace.embeddings.layout import Layout
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for
from headrace.embeddings.storage import empty_table
from headrace.embeddings.update_rules import ADAGRAD_EPS, fused_step
from headrace.errors import UserError


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**31 - 1))))
def test_duplicates_are_those_of_a_stable_sort(values: list[int]) -> None:
    x = torch.tensor(values, dtype=torch.int32)
    got = find_duplicates(x)
    payload = torch.arange(x.numel()) * 7
    ordered, starts = got.in_order(payload)
    with patch.object(native, "library", lambda: None):
        expected = find_duplicates(x)
    assert torch.equal(ordered, payload[expected.order])
    assert torch.equal(starts, expected.starts)
    for a, b in (
        (got.unique, expected.unique),
        (got.order, expected.order),
        (got.starts, expected.starts),
        (got.group, expected.group),
        (got.inverse(), expected.inverse()),
    ):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 5_000), st.integers(0, 2**31 - 1))),
    cuts=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**31)), max_size=40),
)
def test_duplicates_come_range_by_range_as_they_appear(values: list[int], cuts: list[int]) -> None:
    ends = [*sorted(cuts), 2**31]
    duplicates = find_duplicates(torch.tensor(values, dtype=torch.int32), torch.tensor(ends))
    expected = sorted(dict.fromkeys(values), key=lambda v: bisect_right(ends, v))  # stable: as they appear
    assert duplicates.unique.tolist() == expected
    assert [expected[i] for i in duplicates.inverse().tolist()] == values
    order, starts = duplicates.order.tolist(), [*duplicates.starts.tolist(), len(values)]
    for value, first, last in zip(expected, starts, starts[1:], strict=False):
        assert order[first:last] == [i for i, v in enumerate(values) if v == value]


@pytest.mark.parametrize("width", [3, 16, 32, 40, 64, 128])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_of_rowwise_adagrad(width: int, decay: float) -> None:
    """Against NumPy in float64, rows in any order, each with any number of gradients."""
    rng = np.random.default_rng(width)
    rows, touched, many = 50, 30, 200
    table, state = rng.normal(size=(rows, width)).astype(np.float32), rng.random((rows, 1)).astype(np.float32)
    gradient = rng.normal(size=(many, width)).astype(np.float32)
    unique = rng.permutation(rows)[:touched].astype(np.int32)
    row_of = rng.integers(0, touched, many)
    expected, sums = table.astype(np.float64), state[:, 0].astype(np.float64)
    for u, row in enumerate(unique):
        total = gradient[row_of == u].astype(np.float64).sum(0) + decay * expected[row]
        sums[row] += (total**2).mean()
        expected[row] -= 0.05 * total / (np.sqrt(sums[row]) + ADAGRAD_EPS)
    order, starts = cpu.group(torch.from_numpy(row_of), touched)
    got, got_state = torch.from_numpy(table.copy()), torch.from_numpy(state.copy())
    rowwise = fused_step("rowwise_adagrad", got)
    assert rowwise is not None
    rowwise(
        got,
        [got_state],
        torch.from_numpy(unique),
        starts,
        order,
        many,
        torch.from_numpy(gradient),
        lr=0.05,
        decay=decay,
        step=1,
    )
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got_state[:, 0].numpy(), sums, rtol=2e-5)


def test_a_million_values_are_sorted() -> None:
    x = torch.from_numpy(np.random.default_rng(1).integers(0, 2**31, 1_000_000).astype(np.int32)) % 700_000
    values, order = torch.sort(x, stable=True)
    got = find_duplicates(x)
    assert torch.equal(got.order, order)
    assert torch.equal(got.unique, values.unique_consecutive())


@st.composite
def batches(draw: st.DrawFn) -> tuple[Plan, torch.Tensor]:
    world = draw(st.integers(1, 4))
    tables = [Table(f"t{i}", draw(st.integers(1, 30)), draw(st.sampled_from([2, 3]))) for i in range(3)]
    kinds = st.sampled_from(["table_wise", "row_wise", "column_wise", "data_parallel"])
    blocks = [b for t in tables for b in blocks_for(t, draw(kinds), world, draw(st.integers(0, world - 1)))]
    lookups = []
    for i in range(draw(st.integers(1, 5))):
        length = draw(st.sampled_from([None, 1, 3]))
        pooling = draw(st.sampled_from(["sum", "mean", "max", "none"]))
        lookups.append(Lookup(f"f{i}", f"t{draw(st.integers(0, 2))}", length or 1, length is not None, pooling))
    plan = Plan(tuple(tables), tuple(lookups), tuple(blocks), world)
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    sizes = np.array([plan.by_name[x.table].rows for x in lookups for _ in range(x.length)])
    codes = (rng.random((draw(st.sampled_from([0, 1, 7])), len(sizes))) ** 2 * sizes).astype(np.int64)
    return plan, torch.from_numpy(codes)


@settings(max_examples=100, deadline=None)
@given(batch=batches())
def test_occurrences_are_those_of_torch(batch: tuple[Plan, torch.Tensor]) -> None:
    plan, codes = batch
    batcher = BatchIndexer(Layout(plan, plan.world_size - 1))
    got = batcher.padded(codes, None)
    with patch.object(native, "library", lambda: None):
        expected = batcher.padded(codes, None)
    assert_same_occurrences(got, expected)


def assert_same_occurrences(got: list[JaggedIndices], expected: list[JaggedIndices]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.num_bags == b.num_bags
        for name in ("indices", "bag_ids", "offsets", "weights", "divisor"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None), name
            assert x is None or (torch.equal(x, y) and x.dtype == y.dtype), name


@settings(max_examples=100, deadline=None)
@given(batch=batches(), data=st.data())
def test_occurrences_of_a_jagged_batch_are_those_of_torch(
    batch: tuple[Plan, torch.Tensor], data: st.DataObject
) -> None:
    """Features of one, of as many and of any number of codes, weighted or not, with padding and without."""
    plan, codes = batch
    lookups, inputs, slot = [], [], 0
    for x in plan.lookups:
        part, slot = codes[:, slot : slot + x.length], slot + x.length
        x = replace(x, padding_idx=data.draw(st.sampled_from([None, 0, 1])))
        kind = data.draw(st.sampled_from(["matrix", "jagged", "weighted"]))
        if kind == "matrix":
            inputs.append(part.int() if data.draw(st.booleans()) else part)
        else:
            lengths = torch.tensor([data.draw(st.integers(0, x.length)) for _ in range(len(part))], dtype=torch.int64)
            jagged = JaggedTensor.of_lengths(part.reshape(-1)[: int(lengths.sum())], lengths)
            if kind == "weighted" and x.pooling == "sum":
                x, jagged = replace(x, weighted=True), replace(jagged, weights=torch.rand(jagged.values.numel()))
            inputs.append(jagged)
        lookups.append(x)
    batcher = BatchIndexer(Layout(replace(plan, lookups=tuple(lookups)), plan.world_size - 1))
    got = batcher.jagged(inputs)
    with patch.object(native, "library", lambda: None):
        assert_same_occurrences(got, batcher.jagged(inputs))


@settings(max_examples=100, deadline=None)
@given(batch=batches(), weighted=st.booleans())
def test_bags_are_cut_as_by_torch(batch: tuple[Plan, torch.Tensor], weighted: bool) -> None:
    plan, codes = batch
    layout = Layout(plan, 0)
    for group, bags in zip(layout.groups, BatchIndexer(layout).padded(codes, None), strict=True):
        if bags.bag_ids is None:
            continue
        weights = torch.rand(bags.indices.numel()) if weighted else None
        cut, fused = replace(bags, weights=weights), layout.fused_tables[group.fused]
        got = bucketize_bags(fused, cut)
        with patch.object(native, "library", lambda: None):
            expected = bucketize_bags(fused, cut)
            vectors = torch.rand(expected.bag_ids.numel(), 3)
            sums = expected.sum(vectors, bags.num_bags)
        assert (got.ids_per_rank, got.bags_per_rank) == (expected.ids_per_rank, expected.bags_per_rank)
        for name in ("indices", "weights", "begins", "bag_ids"):
            x, y = getattr(got, name), getattr(expected, name)
            assert (x is None and y is None) or (torch.equal(x, y) and x.dtype == y.dtype), name
        assert torch.equal(got.sum(vectors, bags.num_bags), sums)


@pytest.mark.parametrize("code", [-1, 30, 2**40, -(2**63)])
def test_a_code_outside_its_table_is_named(code: int) -> None:
    plan = Plan(
        (Table("t", 30, 2),),
        (Lookup("a", "t"), Lookup("b", "t", 2, True)),
        tuple(blocks_for(Table("t", 30, 2), "row_wise", 3)),
        3,
    )
    batcher = BatchIndexer(Layout(plan, 0))
    codes = torch.ones(5, 3, dtype=torch.int64)
    codes[4, 2] = code
    with pytest.raises(UserError, match=rf"feature 'b': code {code} is outside its embedding table of 30 rows"):
        batcher.padded(codes, None)


def test_large_pages_are_memory_like_any_other() -> None:
    """A large table and small ones, filled and read at both ends."""
    for rows, columns in [(0, 4), (1, 1), (300_000, 16)]:
        table = empty_table(rows, columns).fill_(1.5)
        assert table.shape == (rows, columns)
        assert float(table.double().sum()) == 1.5 * rows * columns


@pytest.mark.parametrize("module", [native, dataset], ids=["embeddings", "dataset"])
def test_a_library_of_another_version_is_not_used(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    module.library.cache_clear()
    try:
        with patch.object(module, "_VERSION", -1):
            assert module.library() is None
        assert "version -1" not in caplog.text
        assert "-1 is needed" in caplog.text
        assert "Run: make native" in caplog.text
    finally:
        module.library.cache_clear()
    assert module.library() is not None


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / native.EMBEDDINGS.file
    assert native.EMBEDDINGS.load(file, native._VERSION) is None
    assert caplog.text == ""
    file.write_bytes(b"no library")
    assert native.EMBEDDINGS.load(file, native._VERSION) is None
    assert "does not load" in caplog.text
