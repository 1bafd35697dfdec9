"""The collection of named features against torch's EmbeddingBag and Embedding in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag

from headrace.comm.base import Collective, run_ranks
from headrace.config import DynamicTable
from headrace.embeddings import (
    EmbeddingCollection,
    EmbeddingFeature,
    EmbeddingOptimizer,
    JaggedTensor,
    Sharding,
    TableSharding,
)
from headrace.errors import UserError

FEATURES = [
    EmbeddingFeature("user", 6, 40),
    EmbeddingFeature("bought", 6, 30, table="item", pooling="mean", ids=3),
    EmbeddingFeature("shown", 6, 30, table="item", padding_idx=0),
    EmbeddingFeature("rated", 6, 30, table="item", weighted=True),
    EmbeddingFeature("best", 6, 30, table="item", pooling="max"),
    EmbeddingFeature("history", 6, 30, table="item", pooling="none"),
    EmbeddingFeature("pair", 9, 7, pooling="none"),
    EmbeddingFeature("country", 4, 5),
]
ROWS = {f.table_name: (f.rows or 0, f.dim) for f in FEATURES}
STEPS, BATCH, RATE = 4, 12, 0.1


def batch(step: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return ids, lengths and weights of each feature of the global batch."""
    rng, inputs = np.random.default_rng(step), {}
    for f in FEATURES:
        lengths = rng.integers(0, 5, BATCH)
        if f.name in ("user", "country", "pair"):
            lengths[:] = 2 if f.name == "pair" else 1
        n = int(lengths.sum())
        ids = (rng.random(n) ** 2 * (f.rows or 0)).astype(np.int64)
        inputs[f.name] = (torch.from_numpy(ids), torch.from_numpy(lengths), torch.from_numpy(rng.random(n, np.float32)))
    return inputs


def part(step: int, rank: int, world: int) -> dict[str, Any]:
    """Return a rank's even share, in several forms."""
    rows, inputs = slice(rank * BATCH // world, (rank + 1) * BATCH // world), {}
    for f in FEATURES:
        ids, lengths, weights = batch(step)[f.name]
        jagged = JaggedTensor.of_lengths(ids, lengths, weights if f.weighted else None).rows(rows.start, rows.stop)
        inputs[f.name] = jagged
    inputs["country"] = inputs["country"].flat().values.int()  # [B]
    inputs["pair"] = inputs["pair"].flat().values.view(-1, 2)  # [B, 2]
    return inputs


def look_up(tables: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return each feature's vectors of the whole batch, computed by torch."""
    vectors = {}
    for f in FEATURES:
        ids, lengths, weights = batch(step)[f.name]
        table, starts = tables[f.table_name], lengths.cumsum(0) - lengths
        if f.pooling == "none":
            vectors[f.name] = embedding(ids, table)
        else:
            scales = weights if f.weighted else None
            padding = f.padding_idx
            out = embedding_bag(ids, table, starts, mode=f.pooling, per_sample_weights=scales, padding_idx=padding)
            vectors[f.name] = out
    return vectors


def flat(vectors: Tensor | JaggedTensor) -> Tensor:
    return vectors.flat().values if isinstance(vectors, JaggedTensor) else vectors.reshape(-1, vectors.shape[-1])


def loss_of(vectors: dict[str, Tensor], share: float) -> Tensor:
    return sum(((v.sin() - 0.3 * (i + 1)) ** 2).sum() for i, v in enumerate(vectors.values())) * share


def trained(c: Collective, sharding: Sharding, ahead: bool = False, **more: Any) -> dict[str, Any]:
    world, rank = c.world.size, c.world.rank
    optimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=RATE)
    tables = EmbeddingCollection(FEATURES, optimizer=optimizer, comm=c, sharding=sharding, batch_size=BATCH, **more)
    start = {name: tables.table(name) for name in ROWS}
    batches: Any = ((part(step, rank, world), step) for step in range(STEPS))
    outs = []
    for inputs, _ in tables.pipeline(batches) if ahead else batches:
        outputs = tables(inputs)
        assert list(outputs) == [f.name for f in FEATURES]
        assert len(inputs["country"]) == BATCH // world  # the inputs are there as well
        vectors = {name: flat(v) for name, v in outputs.items()}
        loss_of(vectors, world / BATCH).backward()  # a mean over this rank's rows
        tables.step()
        outs.append({name: v.detach() for name, v in vectors.items()})
    return {"start": start, "outs": outs, "last": {name: tables.table(name) for name in ROWS}}


SHARDINGS = {
    "rows": Sharding(),
    "auto": Sharding(kind="auto"),
    "mixed": Sharding(
        kind="auto",
        tables={
            "user": TableSharding(kind="row_wise"),
            "item": TableSharding(kind="column_wise"),
            "pair": TableSharding(kind="table_wise"),
            "country": TableSharding(kind="data_parallel"),
        },
    ),
}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_equals_torch(world: int, sharding: str) -> None:
    ranks = run_ranks(world, lambda c: trained(c, SHARDINGS[sharding]))
    tables = {name: torch.nn.Parameter(t.clone()) for name, t in ranks[0]["start"].items()}
    optimizer = torch.optim.Adagrad(tables.values(), lr=RATE)
    for step in range(STEPS):
        vectors = look_up(tables, step)
        for name, expected in vectors.items():
            got = torch.cat([r["outs"][step][name] for r in ranks])
            torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5, msg=name)
        optimizer.zero_grad()
        loss_of(vectors, 1 / BATCH).backward()
        optimizer.step()
    for r in ranks:
        for name, t in tables.items():
            torch.testing.assert_close(r["last"][name], t.detach(), rtol=2e-4, atol=2e-5, msg=name)
            assert not torch.equal(t.detach(), r["start"][name])


@pytest.mark.parametrize("world", [1, 2])
def test_a_pipeline_changes_no_bit(world: int) -> None:
    now = run_ranks(world, lambda c: trained(c, SHARDINGS["rows"]))
    ahead = run_ranks(world, lambda c: trained(c, SHARDINGS["rows"], ahead=True))
    for a, b in zip(now, ahead, strict=True):
        assert all(torch.equal(a["last"][name], b["last"][name]) for name in ROWS)
        for x, y in zip(a["outs"], b["outs"], strict=True):
            assert all(torch.equal(x[name], y[name]) for name in x)


def test_a_pipeline_that_is_left_leaves_nothing_under_way() -> None:
    """Some batches are not looked up, the loop ends early, and another one begins."""

    def ranks(c: Collective) -> list[Tensor]:
        tables = EmbeddingCollection(FEATURES, comm=c)
        outputs = []
        for parity in range(2):
            for inputs, step in tables.pipeline((part(s, c.world.rank, 2), s) for s in range(STEPS)):
                if step % 2 == parity:
                    outputs.append(tables(inputs).side_by_side().detach())
                if step == 2:
                    break
        for inputs in tables.pipeline([part(0, c.world.rank, 2)]):
            outputs.append(tables(inputs).side_by_side().detach())
            with pytest.raises(RuntimeError, match="for one forward pass"):
                tables(inputs)
        return outputs

    for rank, outputs in enumerate(run_ranks(2, ranks)):
        alone = EmbeddingCollection(FEATURES)
        for got, step in zip(outputs, [0, 2, 1, 0], strict=True):
            out = alone(part(step, rank, 2))
            assert torch.equal(got, out.side_by_side())
            pooled = [out[f.name] for f in FEATURES if f.pooling != "none"]
            assert torch.equal(got, torch.cat(pooled, dim=1))


def test_forms_of_outputs() -> None:
    tables = EmbeddingCollection(FEATURES)
    inputs = part(0, 1, 2)
    out = tables(inputs)
    history = out["history"]
    assert isinstance(history, JaggedTensor)
    assert torch.equal(history.lengths, inputs["history"].lengths)
    assert torch.equal(history.values, tables.table("item")[inputs["history"].flat().values])
    assert out["pair"].shape == (BATCH // 2, 2, 9)
    assert torch.equal(out["pair"], tables.table("pair")[inputs["pair"]])
    assert torch.equal(out["country"], tables.table("country")[inputs["country"].long()])
    padded = history.to_padded(7)
    assert padded.shape == (BATCH // 2, 7, 6)
    assert torch.equal(padded[3, : int(history.lengths[3])], history.rows(3, 4).flat().values)
    assert not padded[3, int(history.lengths[3]) :].any()


RAW = [
    EmbeddingFeature("session", 5, table="ids", pooling="mean", padding_idx=-1),
    EmbeddingFeature("user", 6, 40),
    EmbeddingFeature("sum", 5, table="ids", weighted=True),
    EmbeddingFeature("trail", 5, table="ids", pooling="none"),
    EmbeddingFeature("most", 3, pooling="max"),
]


def raw_part(step: int, rows: slice) -> dict[str, Any]:
    rng = np.random.default_rng(100 + step)
    inputs = {}
    for f in RAW:
        lengths = torch.from_numpy(rng.integers(0, 4, BATCH))
        n = int(lengths.sum())
        ids = torch.from_numpy(rng.integers(0, 40 if f.rows else 9, n)) * (1 if f.rows else 2**40) - int(not f.rows)
        weights = torch.from_numpy(rng.random(n, np.float32)) if f.weighted else None
        inputs[f.name] = JaggedTensor.of_lengths(ids, lengths, weights).rows(rows.start, rows.stop)
    return inputs


def raw_trained(c: Collective, ahead: bool) -> tuple[list[dict[str, Tensor]], EmbeddingCollection]:
    optimizer = EmbeddingOptimizer(kind="sgd", learning_rate=RATE)
    tables = EmbeddingCollection(RAW, optimizer=optimizer, comm=c)
    rows = slice(c.world.rank * BATCH // c.world.size, (c.world.rank + 1) * BATCH // c.world.size)
    batches = [raw_part(step, rows) for step in range(STEPS)]
    outs = []
    for inputs in tables.pipeline(batches) if ahead else batches:
        vectors = {name: flat(v) for name, v in tables(inputs).items()}
        loss_of(vectors, c.world.size / BATCH).backward()
        tables.step()
        outs.append({name: v.detach() for name, v in vectors.items()})
    return outs, tables


@pytest.mark.parametrize(("world", "ahead"), [(1, False), (2, False), (2, True)])
def test_raw_ids_equal_a_dictionary_of_vectors(world: int, ahead: bool) -> None:
    ranks = run_ranks(world, lambda c: raw_trained(c, ahead)[0])
    # Rows start where their ids say, whoever asks for them first.
    starts = EmbeddingCollection(RAW)
    rows: dict[str, dict[int, Tensor]] = {"ids": {}, "most": {}, "user": {}}
    tables = {"ids": "trail", "most": "most"}
    starts.embeddings.dynamic.configure_optimizer(EmbeddingOptimizer(kind="sgd"))
    empty = JaggedTensor(torch.empty(0, dtype=torch.int64), torch.zeros(10, dtype=torch.int64))
    each = torch.arange(9) * 2**40 - 1
    for table, feature in tables.items():
        inputs = {f.name: empty for f in RAW} | {"sum": JaggedTensor(empty.values, empty.offsets, torch.empty(0))}
        inputs[feature] = each
        initial_vectors = flat(starts(inputs)[feature])
        rows[table] = {int(i): v.detach().requires_grad_() for i, v in zip(each, initial_vectors, strict=True)}
    rows["user"] = {i: v.requires_grad_() for i, v in enumerate(starts.table("user"))}
    assert rows["ids"][-1].any()
    for step in range(STEPS):
        inputs_of_step, vectors = raw_part(step, slice(0, BATCH)), {}
        for f in RAW:
            x, out = inputs_of_step[f.name], []
            for sample in range(BATCH):
                bag_of_sample = x.rows(sample, sample + 1).flat()
                positions = [i for i, v in enumerate(bag_of_sample.values.tolist()) if v != f.padding_idx]
                bag = [rows[f.table_name][int(bag_of_sample.values[i])] for i in positions]
                if f.pooling == "none":
                    out += bag
                elif not bag:
                    out.append(torch.zeros(f.dim))
                elif f.pooling == "max":
                    out.append(torch.stack(bag).amax(0))
                else:
                    scales = [float(bag_of_sample.weights[i]) if f.weighted else 1.0 for i in positions]
                    total = sum(v * s for v, s in zip(bag, scales, strict=True))
                    out.append(total / len(bag) if f.pooling == "mean" else total)
            vectors[f.name] = torch.stack(out)
        for name, expected in vectors.items():
            got = torch.cat([r[step][name] for r in ranks])
            torch.testing.assert_close(got, expected.detach(), rtol=2e-4, atol=2e-5, msg=name)
        loss_of(vectors, 1 / BATCH).backward()
        for of_table in rows.values():
            for v in of_table.values():
                if v.grad is not None:
                    v.data -= RATE * v.grad
                    v.grad = None


def test_a_save_opens_on_any_number_of_ranks(tmp_path: Path) -> None:
    features = [*FEATURES, EmbeddingFeature("session", 5)]

    def collection(c: Collective, sharding: str) -> EmbeddingCollection:
        optimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=RATE)
        settings = {"sharding": SHARDINGS[sharding], "batch_size": BATCH, "reduction": "sum"}
        return EmbeddingCollection(features, optimizer=optimizer, comm=c, **settings)

    def step(tables: EmbeddingCollection, number: int, rank: int, world: int) -> Tensor:
        inputs = part(number, rank, world)
        inputs["session"] = inputs["user"].flat().values * 2**40
        out = tables(inputs)
        out.side_by_side().square().sum().backward()
        tables.step()
        return out.side_by_side().detach()

    def save(c: Collective) -> None:
        tables = collection(c, "mixed")
        for number in range(2):
            step(tables, number, c.world.rank, c.world.size)
        tables.save(tmp_path / "saved")
        tables.save(tmp_path / "saved")  # in place of the first

    run_ranks(3, save)

    def go_on(c: Collective) -> tuple[Tensor, dict[str, Tensor]]:
        tables = collection(c, "rows")
        tables.load(tmp_path / "saved")
        return step(tables, 2, c.world.rank, c.world.size), {name: tables.table(name) for name in ROWS}

    ((on_one_rank, last),) = run_ranks(1, go_on)
    for rank, (out, tables) in enumerate(run_ranks(2, go_on)):
        torch.testing.assert_close(out, on_one_rank[rank * BATCH // 2 : (rank + 1) * BATCH // 2])
        for name in ROWS:
            torch.testing.assert_close(tables[name], last[name])


def test_tables_are_set_and_read(tmp_path: Path) -> None:
    def set_and_read(c: Collective) -> None:
        tables = EmbeddingCollection(FEATURES, comm=c, sharding=SHARDINGS["mixed"], batch_size=BATCH)
        for name, shape in ROWS.items():
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            tables.set_table(name, weights)
            assert torch.equal(tables.table(name), weights)
        with pytest.raises(ValueError, match=r"table 'pair' is \[7, 9\], not \[7, 8\]"):
            tables.set_table("pair", torch.zeros(7, 8))

    run_ranks(3, set_and_read)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "at least"),
        ([EmbeddingFeature("a", 4, 3), EmbeddingFeature("a", 4, 3)], "two features of one name: a"),
        ([EmbeddingFeature("a", 4, 3), EmbeddingFeature("b", 4, 5, table="a")], "share table 'a', but say rows=3"),
        ([EmbeddingFeature("a", 4, 3), EmbeddingFeature("b", 4, table="a")], "share table 'a'"),
        ([EmbeddingFeature("a", 0, 3)], "dim=0"),
        ([EmbeddingFeature("a", 4, 3, padding_idx=3)], "padding_idx=3 is no row of 3"),
        ([EmbeddingFeature("a", 4, 3, pooling="mean", weighted=True)], "weights are for pooling='sum', not for 'mean'"),
    ],
)
def test_features_that_do_not_fit_are_refused(features: list[EmbeddingFeature], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EmbeddingCollection(features)


def test_inputs_that_do_not_fit_are_refused() -> None:
    tables = EmbeddingCollection(FEATURES)
    good = part(0, 0, 1)
    with pytest.raises(UserError, match="the inputs have no 'user'; did you mean 'usr'"):
        tables({"usr": good["user"], **{n: x for n, x in good.items() if n != "user"}})
    with pytest.raises(UserError, match="feature 'country': code 5 is outside its embedding table of 5 rows"):
        tables({**good, "country": torch.full((BATCH,), 5)})
    with pytest.raises(ValueError, match="'rated': weights are given exactly where"):
        tables({**good, "rated": good["shown"]})
    with pytest.raises(UserError, match=r"optimizer.dynamic: 'user' is no table of raw ids \(those are: none\)"):
        EmbeddingCollection(FEATURES, optimizer=EmbeddingOptimizer(dynamic={"user": DynamicTable()}))
    with pytest.raises(UserError, match="reduction is 'mean' or 'sum', not 'max'"):
        EmbeddingCollection(FEATURES, reduction="max")


@st.composite
def padded(draw: st.DrawFn) -> Tensor:
    rows, length = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    values = draw(st.lists(st.integers(0, 3), min_size=rows * length, max_size=rows * length))
    return torch.tensor(values, dtype=torch.int64).view(rows, length)


@settings(max_examples=50, deadline=None)
@given(matrix=padded(), data=st.data())
def test_jagged_tensors_are_lists_of_lists(matrix: Tensor, data: st.DataObject) -> None:
    lists = [[v for v in row if v] for row in matrix.tolist()]
    jagged = JaggedTensor.of_padded(matrix, 0)
    assert rows_of(jagged) == lists
    start = data.draw(st.integers(0, len(lists)))
    end = data.draw(st.integers(start, len(lists)))
    some = jagged.rows(start, end)
    assert (rows_of(some), rows_of(some.flat()), some.samples) == (lists[start:end], lists[start:end], end - start)
    assert rows_of(some.without(2)) == [[v for v in row if v != 2] for row in lists[start:end]]
    assert some.to_padded(2, 9).tolist() == [[*row, 9, 9][:2] for row in lists[start:end]]
    assert rows_of(JaggedTensor.of_lengths(jagged.values, jagged.lengths)) == lists
    assert rows_of(JaggedTensor.of_starts(jagged.values, jagged.offsets[:-1])) == lists
    vectors = JaggedTensor(some.flat().values.float().unsqueeze(1), some.flat().offsets)
    for pooling, pool in (("sum", sum), ("max", max), ("mean", np.mean)):
        expected = [[float(pool(row))] if row else [0.0] for row in lists[start:end]]
        torch.testing.assert_close(vectors.pooled(pooling), torch.tensor(expected).view(-1, 1))
    # Of equal numbers the first has the gradient.
    leaf = vectors.values.requires_grad_()
    replace(vectors, values=leaf).pooled("max").sum().backward()
    winners = [[float(i == row.index(max(row)))] for row in lists[start:end] for i in range(len(row))]
    assert not winners or leaf.grad.tolist() == winners


def rows_of(x: JaggedTensor) -> list[list[int]]:
    return [x.values[a:b].tolist() for a, b in zip(x.offsets, x.offsets[1:], strict=False)]


def test_batches_of_other_forms_pass_the_pipeline() -> None:
    """Mappings, and tuples of any length."""
    tables = EmbeddingCollection([EmbeddingFeature("a", 2, 4)])

    def batches() -> Iterator[Any]:
        yield {"a": torch.tensor([1]), "price": 3}
        yield {"a": torch.tensor([2])}, "label", "weight"

    first, (second, *rest) = tables.pipeline(batches())
    assert (first["price"], dict(first).keys(), rest) == (3, {"a", "price"}, ["label", "weight"])
    assert torch.equal(tables(second)["a"], tables.table("a")[2:3])
