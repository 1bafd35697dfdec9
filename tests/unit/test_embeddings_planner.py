"""The planner of sharding: costs, memory, searches, and the popularity of codes that it reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.cli.plan import plan_sharding, show_sharding
from headrace.comm.base import ThreadCollective, run_ranks
from headrace.comm.shared_memory import SharedCollective, shared
from headrace.config import EmbeddingOptimizer, Sharding, TableSharding
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.planner.cost import GIB, OtherMemory, plan_load
from headrace.embeddings.planner.search import Planned, plan_tables
from headrace.embeddings.planner.tables import Popularity, load_tables
from headrace.embeddings.sharding_plan import Lookup, Table, tables_of
from headrace.errors import UserError
from headrace.storage import local
from headrace.train.setup.state import sampled_popularity

KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel"]


def make(
    given_tables: Sequence[Table],
    world: int,
    optimizer: str = "adagrad",
    batch: int = 256,
    other_memory: OtherMemory | None = None,
    card: bool = False,
    **settings: object,
) -> Planned:
    lookups = [Lookup(t.name, t.name) for t in given_tables]
    return plan_tables(
        given_tables,
        lookups,
        world,
        batch_size=batch,
        optimizer=optimizer,
        settings=Sharding(**{"kind": "auto", **settings}),
        other_memory=other_memory or OtherMemory(),
        card=card,
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Table], int, Sharding]:
    world = draw(st.integers(1, 9))
    tables = [
        Table(
            f"t{i}", draw(st.one_of(st.integers(1, 12), st.integers(1, 20_000))), draw(st.sampled_from([1, 8, 32, 96]))
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    rules = {
        t.name: TableSharding(kind=draw(st.sampled_from([None, *KINDS])), storage=draw(st.sampled_from([None, "bf16"])))
        for t in tables
        if draw(st.booleans())
    }
    memory = draw(st.sampled_from([None, 0.0005, 0.004, 0.05]))
    node = draw(st.sampled_from([1, 2, 4]))
    return (
        tables,
        world,
        Sharding(
            kind=draw(st.sampled_from(["auto", "row_wise"])),
            tables=rules,
            memory_gib=memory,
            ranks_per_node=node,
            zipf=draw(st.sampled_from([0.0, 1.05])),
        ),
    )


@settings(max_examples=80, deadline=None)
@given(problem=problems(), optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam"]), card=st.booleans())
def test_everything_is_held_once_within_the_memory_or_it_says_why(
    problem: tuple[list[Table], int, Sharding], optimizer: str, card: bool
) -> None:
    tables, world, given_settings = problem
    lookups = [Lookup(t.name, t.name) for t in tables]

    def plan() -> Planned:
        return plan_tables(
            tables, lookups, world, batch_size=64, optimizer=optimizer, settings=given_settings, card=card
        )

    try:
        planned = plan()
    except UserError as e:
        refused = str(e)
    else:
        refused = ""
    if refused:
        assert given_settings.memory_gib is not None
        assert re.search(r"table 't\d' .* does not fit", refused)
        return
    assert planned.plan == plan().plan
    states = {"sgd": 0, "adagrad": 1, "adam": 2}
    held, in_host = np.zeros(world), np.zeros(world)
    for t in planned.plan.tables:
        rule = given_settings.tables.get(t.name, TableSharding())
        assert t.storage == (rule.storage or "fp32")
        blocks = planned.plan.blocks_of(t.name)
        if blocks[0].replicated:
            assert rule.kind in (None, "data_parallel")
        if rule.kind == "data_parallel":
            assert blocks[0].replicated
        if rule.kind == "table_wise":
            assert len(blocks) == 1
            assert blocks[0].ranks == 1
        copies = np.zeros((t.rows, t.dim), dtype=int)
        for rank in range(world):
            for b in blocks:
                rows = planned.plan.rows_on(b, rank)
                if rank == 0 or not b.replicated:
                    copies[rows.start : rows.stop : rows.step, b.columns.start : b.columns.stop] += 1
                width = len(b.columns)
                state = 4 if optimizer == "rowwise_adagrad" else 4 * width * states[optimizer]
                row = width * (2 if t.storage == "bf16" else 4) + state
                cached = t.cached < 1 and not b.replicated
                held[rank] += len(rows) * ((row + 25) * t.cached + 4 if cached else row)
                in_host[rank] += len(rows) * row * cached
        assert (copies == 1).all()
    np.testing.assert_allclose(planned.load.memory, held)
    np.testing.assert_allclose(planned.load.host, in_host)
    assert card or not in_host.any()
    if given_settings.memory_gib is not None:
        assert (planned.load.memory + planned.load.buffers).max() <= given_settings.memory_gib * GIB
    again = plan_load(planned.work, planned.plan)
    np.testing.assert_allclose(planned.load.sent, again.sent, rtol=1e-9, atol=1e-3)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.5])
@pytest.mark.parametrize("rows", [1, 7, 1_500, 200_000])
def test_distinct_rows_are_those_of_a_draw(rows: int, exponent: float) -> None:
    popularity = Popularity.zipf(rows, exponent)
    assert float(popularity.rows.sum()) == rows
    assert float((popularity.rows * popularity.chance).sum()) == pytest.approx(1)
    chance = np.arange(1, rows + 1) ** -exponent
    rng = np.random.default_rng(1)
    draws = [np.unique(rng.choice(rows, 5_000, p=chance / chance.sum())) for _ in range(20)]
    assert popularity.distinct(5_000) == pytest.approx(np.mean([len(d) for d in draws]), rel=0.02, abs=0.3)
    for ranks in (1, 3, 8):
        places = popularity.distinct_by_shard(5_000, ranks)
        got = np.mean([np.bincount(d % ranks, minlength=ranks) for d in draws], axis=0)
        np.testing.assert_allclose(places, got, rtol=0.05, atol=1)
        assert places.sum() == pytest.approx(popularity.distinct(5_000))


@pytest.mark.parametrize(("rows", "exponent"), [(300, 1.05), (20_000, 1.05), (20_000, 0.0)])
def test_a_sample_tells_how_many_rows_a_larger_batch_asks_for(rows: int, exponent: float) -> None:
    chance = np.arange(1, rows + 1) ** -exponent
    chance /= chance.sum()
    rng = np.random.default_rng(1)
    popularity = Popularity.sampled(np.bincount(rng.choice(rows, 20_000, p=chance)), rows)
    assert float((popularity.rows * popularity.chance).sum()) == pytest.approx(1)
    assert float(popularity.rows.sum()) == rows
    for lookups in (1_000, 10_000, 60_000):
        true = -np.expm1(lookups * np.log1p(-chance)).sum()
        assert popularity.distinct(lookups) == pytest.approx(true, rel=0.2)


class Counting(ThreadCollective):
    """Counts what leaves the rank, and what comes, without what it says to itself."""

    def __init__(self, inner: ThreadCollective) -> None:
        super().__init__(inner._rendezvous, inner.world.rank)
        self.sent = self.received = 0

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        got, counts = super().all_to_all(x, send_rows)
        row = x[:1].numel() * x.element_size() if len(x) else 0
        received_row_bytes = got[:1].numel() * got.element_size() if len(got) else 0
        self.sent += (sum(send_rows) - send_rows[self.world.rank]) * row
        self.received += (sum(counts) - counts[self.world.rank]) * received_row_bytes
        return got, counts


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise", "mixed"])
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_a_step_are_those_that_were_planned(kind: str, world: int, pooled: bool, wire: str) -> None:
    tables = [Table("a", 20_000, 32), Table("b", 5_000, 32, "bf16"), Table("c", 300, 48)]
    lookups = [Lookup(t.name, t.name, n, True) for t, n in zip(tables, (5, 3, 1), strict=True)]
    storage = {"b": "bf16"}
    kinds = KINDS if kind == "mixed" else [kind] * 3
    rules = {
        t.name: TableSharding(kind=k, storage=storage.get(t.name), pooled=pooled)
        for t, k in zip(tables, kinds, strict=False)
    }
    batch = 1_000
    chances = {t.name: np.arange(1, t.rows + 1) ** -1.05 for t in tables}
    for chance in chances.values():
        chance[0] = 0.0  # code 0 would be padding
        chance /= chance.sum()
    planned = plan_tables(
        tables,
        lookups,
        world,
        batch_size=batch * world,
        optimizer="rowwise_adagrad",
        settings=Sharding(kind="auto", tables=rules, wire=wire),
        popularity={name: Popularity(np.ones(len(c)), c) for name, c in chances.items()},
    )
    assert any(b.pooled for b in planned.plan.blocks) == pooled

    def rank_main(c: ThreadCollective) -> tuple[int, int]:
        counting = Counting(c)
        embeddings = ShardedEmbeddings(planned.plan, counting, seed=1)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad"))
        rng = np.random.default_rng(c.world.rank)
        codes = []
        for t, x in zip(tables, lookups, strict=True):
            codes.append(rng.choice(t.rows, (batch, x.length), p=chances[t.name]))
        outs = embeddings.features(torch.from_numpy(np.concatenate(codes, axis=1)))
        sum(o.sum() for o in outs).backward()
        embeddings.step()
        return counting.sent, counting.received

    measured = np.array(run_ranks(world, rank_main), dtype=float)
    np.testing.assert_allclose(planned.load.sent, measured[:, 0], rtol=0.06)
    np.testing.assert_allclose(planned.load.received, measured[:, 1], rtol=0.06)


@pytest.mark.parametrize(("kind", "pooled"), [("row_wise", False), ("table_wise", True), ("data_parallel", False)])
def test_shared_memory_is_what_was_planned(kind: Any, pooled: bool) -> None:
    world, batch = 3, 2_000
    tables, lookups = [Table("a", 20_000, 32), Table("b", 9_000, 32)], [Lookup("a", "a", 4, True), Lookup("b", "b")]
    rules = {t.name: TableSharding(kind=kind, pooled=pooled and t.name == "a") for t in tables}
    planned, unshared = (
        plan_tables(
            tables,
            lookups,
            world,
            batch_size=batch * world,
            optimizer="sgd",
            other_memory=OtherMemory(0.0, shares),
            settings=Sharding(kind="auto", tables=rules, zipf=0.0),
        )
        for shares in (True, False)
    )
    assert planned.plan == unshared.plan

    def rank_main(c: ThreadCollective) -> int:
        collective = shared(c)
        assert isinstance(collective, SharedCollective)
        embeddings = ShardedEmbeddings(planned.plan, collective, seed=1)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd"))
        rng = np.random.default_rng(c.world.rank)
        following = None
        for _ in range(4):
            codes = torch.from_numpy(rng.integers(1, [20_000] * 4 + [9_000], (batch, 5)))
            prepared, following = following, embeddings.prepare(codes)  # ids travel ahead
            if prepared is not None:
                out = embeddings(prepared)
                c.barrier()  # nobody is late
                out.sum().backward()
                embeddings.step()
                c.barrier()
        assert following is not None
        following.drop()
        c.barrier()
        collective.close()
        return collective.nbytes

    measured, expected = run_ranks(world, rank_main), planned.load.buffers - unshared.load.buffers
    if kind == "table_wise":  # an owner's rows and the gradients that it sends share a slot, and are planned apart
        assert (expected / 2 < measured).all()
        assert (measured < 1.1 * expected).all()
    else:
        np.testing.assert_allclose(measured, expected, rtol=0.1)


def test_what_raw_ids_take_is_not_planned_again() -> None:
    make(BIG, 4, "rowwise_adagrad", memory_gib=0.3)
    with pytest.raises(
        UserError, match=r"does not fit.* on each of 4 rank\(s\) of 0\.2 GiB \(beside 0\.1 GiB for raw ids\)"
    ):
        make(BIG, 4, "rowwise_adagrad", other_memory=OtherMemory(0.1 * GIB), memory_gib=0.3)
    with pytest.raises(UserError, match=r"raw ids take up to 0\.4 GiB of each rank, which has 0\.3"):
        make(BIG, 4, other_memory=OtherMemory(0.4 * GIB), memory_gib=0.3)
    with pytest.raises(UserError, match="does not fit"):
        make(BIG, 4, "rowwise_adagrad", other_memory=OtherMemory(saves_copies=True), memory_gib=0.3)
    make(BIG, 4, "rowwise_adagrad", other_memory=OtherMemory(saves_copies=True), memory_gib=0.55)


def test_the_cheaper_of_rows_and_sums_is_planned() -> None:
    tables = [Table("short", 1_000_000, 64), Table("long", 1_000_000, 64), Table("hot", 30, 64)]
    lookups = [Lookup("short", "short", 1, True), Lookup("long", "long", 50, True), Lookup("hot", "hot", 50, True)]
    rules = {t.name: TableSharding(kind="table_wise") for t in tables}
    settings = Sharding(kind="auto", tables=rules, node_gbps=10, memory_gbps=1_000)
    planned = plan_tables(tables, lookups, 2, batch_size=16_384, optimizer="sgd", settings=settings)
    assert {t.name: planned.plan.blocks_of(t.name)[0].pooled for t in tables} == {
        "short": False,
        "long": True,
        "hot": False,
    }
    # Whole tables with sums together, though the first alone would make its rank the slowest.
    alike = [Table(f"t{i}", 1_000_000, 64) for i in range(4)]
    cpus = Sharding(kind="auto", memory_gbps=10, node_gbps=1, latency_us=100)
    for ids, pooled in [(4, True), (1, False)]:
        features = [Lookup(t.name, t.name, ids, True) for t in alike]
        chosen = plan_tables(alike, features, 2, batch_size=16_384, optimizer="sgd", settings=cpus)
        assert {b.pooled for b in chosen.plan.blocks} == {pooled}
        assert {chosen.plan.kind_of(t.name) for t in alike} == {"table_wise" if pooled else "row_wise"}
    with pytest.raises(UserError, match=r"train\.sharding\.tables\.short\.pooled"):
        plan_tables(
            tables,
            [Lookup("short", "short"), *lookups[1:]],
            2,
            batch_size=64,
            optimizer="sgd",
            settings=Sharding(kind="auto", tables={"short": TableSharding(pooled=True)}),
        )


BIG = [Table("user", 3_000_000, 64), Table("item", 400_000, 64), Table("flag", 3, 64)]


def test_a_plan_that_cannot_fit_says_what_would_make_it_fit() -> None:
    with pytest.raises(UserError) as caught:
        make(BIG, 4, memory_gib=0.3)
    message = str(caught.value)
    assert message.startswith("table 'user' (3,000,000 rows of 64, 1.43 GiB with its optimizer's states) does not fit")
    ranks = int(re.search(r"fit with (\d+) ranks", message).group(1))
    assert ranks > 4
    make(BIG, ranks, memory_gib=0.3)
    assert "storage=bf16" not in message  # 1.2 GiB of 1.2: there are the buffers of a step, too
    assert "rowwise_adagrad" in message
    make(BIG, 4, "rowwise_adagrad", memory_gib=0.3)
    dim = int(re.search(r"embedding_dim=(\d+)", message).group(1))
    make([Table(t.name, t.rows, dim) for t in BIG], 4, memory_gib=0.3)
    buckets = int(re.search(r"'user' hashed to ([\d,]+) buckets", message).group(1).replace(",", ""))
    make([Table("user", buckets, 64), *BIG[1:]], 4, memory_gib=0.3)
    assert buckets > 1_500_000
    with pytest.raises(UserError):
        make([Table("user", int(buckets * 1.1), 64), *BIG[1:]], 4, memory_gib=0.3)


def test_tables_that_do_not_fit_a_gpu_are_cached(capsys: pytest.CaptureFixture[str]) -> None:
    """The planner caches as few tables as it must, the largest first, each with the largest share of rows that fits."""
    everything = make(BIG, 2, memory_gib=2.0, card=True)
    assert [t.cached for t in everything.plan.tables] == [1, 1, 1]
    planned = make(BIG, 2, memory_gib=0.5, card=True)
    user, item, flag = planned.plan.tables
    assert (item.cached, flag.cached) == (1, 1)
    assert 0.3 < user.cached < 0.7
    assert planned.load.carried.min() > 0
    assert planned.load.host.sum() == 3_000_000 * 64 * 8
    assert ((planned.load.memory + planned.load.buffers) / GIB > 0.4).all()
    show_sharding(planned, "big")
    output = capsys.readouterr().out
    assert f"fp32, {user.cached:.1%} on GPU" in output
    assert "in host" in output
    smaller = make(BIG, 2, memory_gib=0.1, card=True)
    assert [t.cached < 1 for t in smaller.plan.tables] == [True, True, False]
    # Fewer rows on the card, more of them on their way.
    assert smaller.load.carried.sum() > planned.load.carried.sum()
    rule = TableSharding(cached=0.25)
    assert make(BIG, 2, memory_gib=2.0, card=True, tables={"item": rule}).plan.by_name["item"].cached == 0.25
    assert make(BIG, 2, memory_gib=2.0, tables={"item": rule}).plan.by_name["item"].cached == 1
    with pytest.raises(UserError, match="does not fit"):
        make(BIG, 2, memory_gib=0.001, card=True)


def test_a_constraint_that_cannot_be_met_is_named() -> None:
    with pytest.raises(UserError, match=r"table 'user' .* as train\.sharding\.tables\.user\.kind=table_wise asks"):
        make(BIG, 8, memory_gib=0.5, tables={"user": TableSharding(kind="table_wise")})
    with pytest.raises(UserError, match="no table 'users' in the model; its tables: flag, item, user"):
        make(BIG, 8, tables={"users": TableSharding(kind="table_wise")})


def test_a_slow_network_and_small_tables_are_replicated() -> None:
    tables = [Table("a", 50, 8), Table("b", 20, 8)]
    planned = make(tables, 4, "sgd", batch=100_000, latency_us=50.0)
    assert {planned.plan.kind_of(t.name) for t in tables} == {"data_parallel"}
    large = make([*tables, Table("user", 5_000_000, 8)], 4, "sgd", batch=4_000)
    assert large.plan.kind_of("user") != "data_parallel"


def test_hundreds_of_tables_on_thousands_of_ranks() -> None:
    rng = np.random.default_rng(3)
    sizes = (10 ** rng.uniform(1, 9.5, 300)).astype(int)
    tables = [Table(f"t{i}", int(n), int(rng.choice([16, 64, 128]))) for i, n in enumerate(sizes)]
    planned = make(tables, 2_048, "rowwise_adagrad", batch=2**18, memory_gib=70)
    total = planned.load.memory + planned.load.buffers
    assert planned.load.memory.sum() > 2**40
    assert total.max() <= 70 * GIB


@pytest.mark.parametrize("world", [8, 64])
def test_the_shipped_tables_fit(world: int, capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    planned = plan_sharding(Workspace(tmp_path), None, "mlperf", None, world, 80.0, [])
    output = capsys.readouterr().out
    assert "204,184,588 rows" in output
    assert "expected time" in output
    rows = sum(t.rows for t in load_tables("mlperf").tables)
    assert planned.load.memory.sum() == pytest.approx(rows * 128 * 8, rel=1e-3)
    # Memory is even too, at hardly any cost.
    assert planned.load.memory.max() <= 2 * planned.load.memory.mean()
    uneven = planned.work.settings.model_copy(update={"memory_imbalance": None})
    work = planned.work
    fastest = plan_tables(
        work.tables, work.lookups, world, batch_size=work.batch_size, optimizer=work.optimizer, settings=uneven
    )
    seconds, least = (p.load.seconds(uneven).max() for p in (planned, fastest))
    assert seconds <= 1.02 * least
    if world == 64:
        assert fastest.load.memory.max() > 2 * fastest.load.memory.mean()


def test_settings_of_declared_tables(tmp_path: object) -> None:
    def seconds(*sets: str) -> float:
        planned = plan_sharding(Workspace(tmp_path), None, "criteo-1tb", None, 16, None, sets)
        return float(planned.load.seconds(planned.work.settings).max())

    slow = ["train.sharding.network_gbps=0.1", "train.sharding.node_gbps=0.1"]
    assert seconds(*slow) > 20 * seconds()
    with pytest.raises(UserError, match=r"--set train\.epochs: without a pipeline only keys of train\.sharding"):
        seconds(*slow, "train.epochs=2")
    with pytest.raises(UserError, match=r"--set: train\.sharding\.network_gbps: .* greater than 0 \(got -1\)"):
        seconds("train.sharding.network_gbps=-1")
    with pytest.raises(UserError, match=r"unknown key 'train\.sharding\.network_gbs'; did you mean"):
        seconds("train.sharding.network_gbs=1")


def test_what_cannot_be_even_is_planned_all_the_same() -> None:
    tables = [Table("large", 30_000_000, 16), Table("small", 100_000, 16)]
    rule = {"large": TableSharding(kind="table_wise")}
    planned = make(tables, 4, "sgd", tables=rule)
    assert planned.load.memory.max() > 1.5 * GIB > planned.load.memory.mean()


def test_tables_must_be_said(tmp_path: object) -> None:
    with pytest.raises(UserError, match="say which tables"):
        plan_sharding(Workspace(tmp_path), None, None, None, 8, None, [])
    with pytest.raises(UserError, match="pipeline 'clicks' has no dataset"):
        plan_sharding(Workspace(tmp_path), "clicks", None, None, 8, None, [])
    with pytest.raises(UserError, match="no tables 'mlpref'; shipped: criteo-1tb, mlperf, mlperf-onehot"):
        load_tables("mlpref")


def test_codes_of_all_features_of_a_table_are_counted_and_padding_is_not(tmp_path: Path) -> None:
    schema = DatasetSchema(
        features=(
            Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=50),
            Feature(
                name="seen",
                kind=Kind.CATEGORICAL,
                dtype="int32",
                cardinality=9,
                vocabulary="item",
                length=2,
                is_list=True,
            ),
            Feature(name="item", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, vocabulary="item"),
            Feature(name="click", kind=Kind.LABEL, dtype="float32"),
        )
    )
    columns = {
        "user": [0, 1, 1, 1],
        "seen": [[3], [3], [], [4, 3]],
        "item": [3, 5, 5, 0],
        "click": [0.0, 1.0, 0.0, 0.0],
    }
    types = {n: pa.float32() if n == "click" else pa.int32() for n in columns} | {"seen": pa.list_(pa.int32())}
    table = pa.table({n: pa.array(v, types[n]) for n, v in columns.items()})
    (tmp_path / "train").mkdir()
    for part in range(3):
        pq.write_table(table, tmp_path / "train" / f"{part}.parquet")
    popularity = sampled_popularity(local(tmp_path), schema, *tables_of(schema, 4))
    # item: 3 four times a file, 5 twice, 0 (of the scalar) and 4 once; nothing was seen once in three files.
    assert popularity["item"].rows.tolist() == [1, 1, 2, 5]
    np.testing.assert_allclose(popularity["item"].chance, [4 / 8, 2 / 8, 1 / 8, 0])
    assert popularity["user"].rows.tolist() == [1, 1, 48]
    np.testing.assert_allclose(popularity["user"].chance, [3 / 4, 1 / 4, 0])
