"""Every kind of sharding, pooling, optimizer and world against one dense torch model in one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.compute import native
from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Block, Lookup, Plan, Table, blocks_for
from headrace.errors import UserError
from tests.plans_support import (
    KINDS,
    OPTIMIZERS,
    STEPS,
    TABLES,
    Case,
    assert_same_bits,
    cases,
    check,
    check_any,
    everything,
    planned,
    train,
)

# Said once by torch, of its own optimizers.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sharding", [*KINDS, "mixed"])
def test_ten_steps_equal_a_dense_model(sharding: str, kind: str, world: int) -> None:
    # All poolings at once; one rank without rows in some steps.
    kinds = KINDS if sharding == "mixed" else [sharding] * 4
    rows = tuple(tuple((step + 2 * rank) % 4 if world > 1 else 4 for rank in range(world)) for step in range(STEPS))
    check(Case(planned(kinds, world), rows, 5, EmbeddingOptimizer(kind=kind, learning_rate=0.1), world % 2 == 0))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_bags_summed_by_their_owners_equal_a_dense_model(sharding: str, kind: str, world: int) -> None:
    lookups = (
        Lookup("sum", "a", 3, True),
        Lookup("mean", "b", 4, True, "mean"),
        Lookup("weighted", "a", 5, True, "sum", True),
        Lookup("max", "tiny", 3, True, "max"),
        Lookup("wide", "wide", 2, True),
        Lookup("again", "b", 2, True),
    )
    blocks = [
        b for i, t in enumerate(TABLES) for b in blocks_for(t, sharding, world, i % world, pooled=t.name != "tiny")
    ]
    rows = tuple(tuple((step + 2 * rank) % 4 for rank in range(world)) for step in range(STEPS))
    plan = Plan(TABLES, lookups, tuple(blocks), world)
    check(Case(plan, rows, 6, EmbeddingOptimizer(kind=kind, learning_rate=0.1), world % 2 == 0))


def test_a_bag_that_one_owner_sums_has_the_same_bits() -> None:
    lookups = (
        Lookup("sum", "a", 3, True),
        Lookup("weighted", "a", 5, True, "sum", True),
        Lookup("b", "b", 4, True, "mean"),
    )
    tables = (Table("a", 40, 6), Table("b", 11, 6, "bf16"))
    outs = []
    for world, pooled in [(1, False), (3, True), (4, True)]:
        blocks = [
            *blocks_for(tables[0], "table_wise", world, world - 1, pooled=pooled),
            *blocks_for(tables[1], "column_wise", world, pooled=pooled),
        ]
        case = Case(Plan(tables, lookups, tuple(blocks), world), ((9,) * world,), 3)
        batch = case.padded(0, 0)
        outs += run_ranks(world, lambda c, p=case.plan, b=batch: ShardedEmbeddings(p, c, seed=8).features(*b))
    for got in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, outs[0], strict=True))


@pytest.mark.parametrize(
    ("lookup", "kind"),
    [
        (Lookup("f", "t", 2, True, "max"), "table_wise"),
        (Lookup("f", "t"), "row_wise"),
        (Lookup("f", "t", 2, True), "dp"),
    ],
)
def test_what_owners_cannot_sum_is_refused(lookup: Lookup, kind: str) -> None:
    table = Table("t", 5, 4)
    blocks = [Block("t", range(4), 0, 0, True)] if kind == "dp" else blocks_for(table, kind, 2, pooled=True)
    with pytest.raises(ValueError, match="table 't' cannot be summed by its owners"):
        Plan((table,), (lookup,), tuple(blocks), 2)


def test_the_build_made_the_loops() -> None:
    assert native.library() is not None, "run make native"


@settings(max_examples=50, deadline=None)
@given(case=cases(), built=st.booleans())
def test_any_plan_equals_a_dense_model(case: Case, built: bool) -> None:
    with nullcontext() if built else patch.object(native, "library", lambda: None):
        check_any(case)


def test_lookups_give_the_same_bits_by_any_plan_on_any_world() -> None:
    alone = everything(1, planned(["table_wise"] * 4, 1), steps=1)
    codes, weights = alone.padded(0, 0)
    expected = ShardedEmbeddings(alone.plan, LocalCollective(), seed=8).features(codes, weights)
    for world, kinds in [(2, KINDS), (3, KINDS[::-1]), (4, ["column_wise"] * 4), (4, ["row_wise"] * 4)]:
        plan = planned(kinds, world)
        for got in run_ranks(world, lambda c, p=plan: ShardedEmbeddings(p, c, seed=8).features(codes, weights)):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rows_ahead", [False, True])
def test_preparing_ahead_changes_no_bit(rows_ahead: bool) -> None:
    case = everything(3, steps=6)
    now = run_ranks(3, lambda c: train(case, c))
    assert_same_bits(now, run_ranks(3, lambda c: train(case, c, ahead=True, rows_ahead=rows_ahead)))


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_rows_fetched_ahead_change_no_bit_of_any_plan(case: Case) -> None:
    world = case.plan.world_size
    now = run_ranks(world, lambda c: train(case, c))
    assert_same_bits(now, run_ranks(world, lambda c: train(case, c, ahead=True, rows_ahead=True)))


def test_rows_that_the_step_leaves_alone_travel_before_it() -> None:
    table = Table("t", 40, 4)
    plan = Plan((table,), (Lookup("f", "t"),), tuple(blocks_for(table, "row_wise", 2)), 2)

    def rank_main(c: Collective) -> tuple[list[int], Tensor, Tensor]:
        sent: list[int] = []
        inner = c.all_to_all
        # type: ignore[method-assign]
        c.all_to_all = lambda x, n: (sent.append(x.numel() * x.element_size()), inner(x, n))[1]
        embeddings = ShardedEmbeddings(plan, c, seed=1)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=1.0))
        first = embeddings(torch.arange(0, 20).view(-1, 1))
        following = embeddings.prepare(torch.arange(10, 40).view(-1, 1))
        following.prefetch()
        first.sum().backward()
        embeddings.step()
        sent.clear()
        got = embeddings(following).detach()
        between = list(sent)
        # A lookup and step that were not known of: nothing early may be used.
        late = embeddings.prepare(torch.arange(0, 4).view(-1, 1))
        late.prefetch()
        embeddings(torch.arange(0, 4).view(-1, 1)).sum().backward()
        embeddings.step()
        return between, got, embeddings(late) - embeddings(torch.arange(0, 4).view(-1, 1))

    for between, got, difference in run_ranks(2, rank_main):
        # Of 30 rows 10 are touched: 5 of each owner go to each of 2 ranks.
        assert between == [10 * 4 * 4]
        start = ShardedEmbeddings(
            Plan((table,), plan.lookups, tuple(blocks_for(table, "row_wise", 1)), 1), LocalCollective(), seed=1
        )
        expected = start(torch.arange(10, 40).view(-1, 1)).detach()
        expected[:10] -= 2.0  # both ranks' gradients
        torch.testing.assert_close(got, expected)
        assert not difference.any()


def test_a_rerun_gives_the_same_bits() -> None:
    case = everything(4, steps=5)
    first, second = (run_ranks(4, lambda c: train(case, c)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.embeddings.weights, b.embeddings.weights, strict=True))


def test_half_storage_halves_the_rows_and_the_message() -> None:
    sizes = {}
    for storage in ("fp32", "bf16"):
        tables = (Table("t", 50, 8, storage),)
        plan = Plan(tables, (Lookup("f", "t"),), tuple(blocks_for(tables[0], "row_wise", 2)), 2)

        def rank_main(c: Collective, plan: Plan = plan) -> tuple[int, int]:
            sent = []
            inner = c.all_to_all
            # type: ignore[method-assign]
            c.all_to_all = lambda x, n: (sent.append(x.numel() * x.element_size()), inner(x, n))[1]
            embeddings = ShardedEmbeddings(plan, c, seed=1)
            embeddings(torch.arange(50).view(50, 1))
            return embeddings.weight.element_size(), sent[-1]

        sizes[storage] = run_ranks(2, rank_main)
    assert sizes["fp32"] == [(4, 50 * 8 * 4)] * 2
    assert sizes["bf16"] == [(2, 50 * 8 * 2)] * 2


@pytest.mark.parametrize("pooled", [False, True])
def test_bfloat16_on_the_wire_rounds_each_number_once(pooled: bool) -> None:
    """Vectors are within 2^-8 of themselves (sums: of their terms), and so are one step's weights of plain SGD."""
    tables, lookups = (Table("t", 50, 8),), (Lookup("f", "t", 3, True),)
    blocks = tuple(blocks_for(tables[0], "row_wise", 2, pooled=pooled))
    by_precision = {}
    for wire in ("fp32", "bf16"):
        plan = Plan(tables, lookups, blocks, 2, wire)
        case = Case(plan, ((40, 40),), 4, EmbeddingOptimizer(kind="sgd", learning_rate=1.0))
        by_precision[wire] = run_ranks(2, lambda c, k=case: train(k, c))
    for exact, rounded in zip(by_precision["fp32"], by_precision["bf16"], strict=True):
        a, b = exact.outs[0][0], rounded.outs[0][0]
        assert not torch.equal(a, b)
        assert float((a - b).abs().max()) <= 3 * 0.05 * 2**-8
        moved = (exact.embeddings.weight - exact.start[0]).abs().max()
        difference = (exact.embeddings.weight - rounded.embeddings.weight).abs().max()
        assert 0 < float(difference) < 2**-7 * float(moved) + 1e-3


def test_wrong_batches_are_refused() -> None:
    plan = planned(KINDS, 1)
    embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
    codes = torch.zeros(2, plan.slots, dtype=torch.int64)
    with pytest.raises(ValueError, match="exactly where a lookup is weighted"):
        embeddings.features(codes)
    with pytest.raises(ValueError, match="weights must be float32"):
        embeddings.features(codes, torch.ones(2, 1))
    with pytest.raises(ValueError, match="call features"):
        embeddings(codes, torch.ones(2, plan.slots))
    none = JaggedTensor(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    good = [replace(none, weights=torch.empty(0)) if x.weighted else none for x in plan.lookups]
    assert [len(out) for out in embeddings.features(good)] == [2, 2, 2, 2, 2, 2, 0, 2]
    for number, bad, message in [
        (0, good[5], "'scalar': weights are given exactly where"),
        (5, none, "'weighted': weights are given exactly where"),
        (2, JaggedTensor(torch.tensor([1]), torch.zeros(2, dtype=torch.int64)), "of \\[1, 2\\] samples"),
        (2, JaggedTensor(torch.tensor([1]), torch.tensor([0, 2, 1])), "'sum': offsets must ascend"),
        (2, JaggedTensor(torch.tensor([1]), torch.tensor([0, 1, 2])), "'sum': offsets must ascend"),
        (2, JaggedTensor(torch.tensor([1.0]), torch.tensor([0, 1, 1])), "'sum': ids must be int32 or int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            embeddings.features([bad if i == number else x for i, x in enumerate(good)])
    with pytest.raises(ValueError, match="codes of 7 lookups, not of 8"):
        embeddings.features(good[1:])
    with pytest.raises(UserError, match="'wide': code 7 is outside its embedding table of 7 rows"):
        embeddings.features([*good[:7], JaggedTensor(torch.tensor([7]), torch.tensor([0, 1, 1]))])
    with pytest.raises(ValueError, match="lengths sum to 3, not to the 2 values"):
        JaggedTensor.of_lengths(torch.tensor([1, 2]), torch.tensor([1, 2]))


def test_rowwise_adagrad_of_a_table_cut_both_ways_is_refused() -> None:
    blocks = (Block("t", range(2), 0, 2), Block("t", range(2, 4), 0, 2))
    plan = Plan((Table("t", 5, 4),), (Lookup("f", "t"),), blocks, 2)

    def rank_main(c: Collective) -> None:
        ShardedEmbeddings(plan, c, seed=1).configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad"))

    with pytest.raises(ValueError, match="cut by columns and by rows"):
        run_ranks(2, rank_main)
    optimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=0.1)
    check(Case(plan, ((4, 5),) * 3, 2, optimizer))


@pytest.mark.parametrize("width", [1, 16, 37])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_loops_equal_torch(kind: str, width: int) -> None:
    # Thousands of bags and rows: more than one thread's share; popular rows, empty bags, rates by table.
    table, second = Table("t", 3_000, width), Table("u", 2_000, width)
    lookups = (Lookup("a", "t", 4, True), Lookup("b", "t", 3, True, "sum", True), Lookup("c", "u", 2, True, "mean"))
    plan = Plan((table, second), lookups, tuple(b for t in (table, second) for b in blocks_for(t, "row_wise", 1)), 1)
    # Adam's first steps are its rate in size however small a gradient is, so rounding shows in proportion to the rate.
    rate = 0.003 if kind == "adam" else 0.1
    optimizer = EmbeddingOptimizer(
        kind=kind, learning_rate=rate, weight_decay=0.01, tables={"u": TableOptimizer(learning_rate=3 * rate)}
    )
    case = Case(plan, ((2_500,),) * 2, 4, optimizer)
    with patch.object(native, "library", lambda: None):
        expected = train(case, LocalCollective())
    threads = torch.get_num_threads()
    weights = []
    for n in (1, 3):
        torch.set_num_threads(n)
        try:
            got = train(case, LocalCollective())
        finally:
            torch.set_num_threads(threads)
        weights.append(got.embeddings.weight)
        for a, b in zip(got.outs, expected.outs, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)
    assert torch.equal(*weights), "the bits depend on the number of threads"
    torch.testing.assert_close(weights[0], expected.embeddings.weight, rtol=1e-3, atol=2e-5)
