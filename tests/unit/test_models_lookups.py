"""Networks with lookups of their own, against whole tables in plain torch; on several ranks, and of raw ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Model, Sharding, TableSharding
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.embeddings.collection import gather_table
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.planner.search import plan_tables
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.predictor import read_meta
from headrace.models.saved import load_model, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import local
from tests.unit.test_models_dlrm import SCHEMAS, batch

SCHEMA = SCHEMAS["both"]
SGD = EmbeddingOptimizer(kind="sgd", learning_rate=1.0)
INTERESTS = Model.model_validate({"class": "tests.plugin_models:Interests", "embedding_dim": 4})
#: Bytes of float32 sums in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def by_name(codes: Tensor, rows: slice) -> CategoricalBatch:
    """Lists with nulls in them, which count nothing: those of `codes` behind one another."""
    user, tags, rest = codes[rows, :1], codes[rows, 1:4], codes[rows, 4:]
    offsets = torch.arange(len(user) + 1) * 3
    return CategoricalBatch(torch.cat([user, rest], dim=1), [JaggedTensor(tags.reshape(-1).int(), offsets)])


def step_of(model: ShardedModel, continuous: Tensor, codes: Tensor, labels: Tensor, rows: slice) -> tuple[Any, ...]:
    """Tables before and after a step of SGD, outputs and the dense part's gradients."""
    model.configure_optimizer(SGD)
    tables = [t.name for t in model.embeddings.plan.tables]
    tables_before = {name: gather_table(model.embeddings, name) for name in tables}
    inputs = model.inputs_of(continuous[rows], by_name(codes, rows), labels[rows])
    outputs = model.outputs(inputs)
    loss = model.loss(outputs, inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    seen = model.take_gradient_sum()
    model.step_embeddings()
    after = {name: gather_table(model.embeddings, name) for name in tables}
    dense = {name: p.grad.clone() for name, p in model.named_dense_parameters() if p.grad is not None}
    return tables_before, after, {k: v.detach() for k, v in outputs.items()}, float(loss), dense, seen


def in_plain_torch(
    start_tables: dict[str, Tensor], network: nn.Module, continuous: Tensor, codes: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor, float]:
    """The same step over all rows with tables that are parameters: their gradients, logits and loss."""
    tables = {name: t.clone().requires_grad_() for name, t in start_tables.items()}
    sequences = [[c for c in row if c] for row in codes[:, 1:4].tolist()]
    flat = torch.tensor([c for s in sequences for c in s], dtype=torch.int64)
    lengths = torch.tensor([len(s) for s in sequences])
    means = [tables["tags"][s].mean(0) if s else torch.zeros(tables["tags"].shape[1]) for s in sequences]
    inputs = Inputs(
        InputFeatures.from_schema(SCHEMA, 4),
        continuous,
        torch.zeros(len(codes), 4, 4),
        labels,
        embeddings={
            "user": tables["user"][codes[:, 0]],
            "tags": JaggedTensor.of_lengths(tables["tags"][flat], lengths),
            "item": tables["item"][codes[:, 4]],
            "bias": tables["item.bias"][codes[:, 4]],
            "mean_tags": torch.stack(means),
            "items": tables["item"],
        },
        ids={"item": codes[:, 4]},
    )
    outputs = network(inputs)
    loss = network.loss(outputs, inputs)  # type: ignore[operator]
    loss.backward()
    grads = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in tables.items()}
    return grads, outputs["logits"].detach(), float(loss)


@pytest.mark.parametrize("sizes", [(24,), (9, 15), (24, 0)])
@pytest.mark.parametrize("auto", [False, True])
def test_a_step_is_that_of_whole_tables(sizes: tuple[int, ...], auto: bool) -> None:
    continuous, codes, labels = batch(SCHEMA, 5)
    ends = np.cumsum([0, *sizes])
    kinds = {"item": TableSharding(kind="column_wise"), "item.bias": TableSharding(kind="data_parallel")}

    def plan(tables: Any, lookups: Any, ranks: int) -> Any:
        sharding = Sharding(kind="auto", tables=kinds) if auto else Sharding()
        return plan_tables(tables, lookups, ranks, batch_size=24, optimizer="sgd", settings=sharding).plan

    def rank(collective: Collective) -> tuple[Any, ...]:
        local_rows = slice(int(ends[collective.world.rank]), int(ends[collective.world.rank + 1]))
        model = ShardedModel(SCHEMA, INTERESTS, collective, 3, plan)
        model.train()
        return step_of(model, continuous, codes, labels, local_rows)

    results = run_ranks(len(sizes), rank)
    tables_before = results[0][0]
    assert {name: list(t.shape) for name, t in tables_before.items()} == {
        "user": [30, 4],
        "tags": [9, 4],
        "item": [20, 4],
        "item.bias": [20, 1],
    }
    assert float(tables_before["item"].abs().max()) > 0.15 > 0.05 > float(tables_before["user"].abs().max())
    network = ShardedModel(SCHEMA, INTERESTS, LocalCollective(), 3).network
    grads, logits, loss = in_plain_torch(tables_before, network, continuous, codes, labels)
    torch.testing.assert_close(torch.cat([f[2]["logits"] for f in results]), logits, **CLOSE)
    assert sum(f[3] for f in results) == pytest.approx(loss, rel=1e-5)
    for name, gradient in grads.items():
        torch.testing.assert_close(tables_before[name] - results[0][1][name], gradient, msg=name, rtol=1e-4, atol=1e-5)
    for name, p in network.named_parameters():
        torch.testing.assert_close(sum(f[4][name] for f in results), p.grad, rtol=1e-4, atol=1e-5)
    assert results[0][5] is not None
    assert bool(results[0][5].isfinite())


def test_rows_start_by_table_row_and_bound_alone() -> None:
    """However they are spread; a bound scales what is drawn."""

    def tables(collective: Collective) -> dict[str, Tensor]:
        model = ShardedModel(SCHEMA, INTERESTS, collective, 3)
        return {t.name: gather_table(model.embeddings, t.name) for t in model.embeddings.plan.tables}

    one_rank, two_ranks = tables(LocalCollective()), run_ranks(2, tables)[1]
    assert all(torch.equal(one_rank[name], two_ranks[name]) for name in one_rank)
    plain = Model.model_validate({"class": "dcn_v2", "embedding_dim": 4, "args": {"deep_mlp": [4]}})
    usual = gather_table(ShardedModel(SCHEMA, plain, LocalCollective(), 3).embeddings, "item")
    torch.testing.assert_close(one_rank["item"], usual * 4)


class LookupNetwork(nn.Module):
    """Looks up what it is told to; logits are of the first lookup."""

    def __init__(self, features: InputFeatures, lookups: list[dict[str, Any]]) -> None:
        super().__init__()
        self.lookups = [EmbeddingLookup(**x) for x in lookups]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        self.seen = {x.name: inputs._lookup_results[x.name] for x in self.lookups}
        return {"logits": self.scale * torch.zeros(inputs.rows)}


def model_with(*lookups: dict[str, Any]) -> Model:
    return Model.model_validate({"class": f"{__name__}:LookupNetwork", "args": {"lookups": list(lookups)}})


@pytest.mark.parametrize(
    ("lookups", "message"),
    [
        (
            [{"name": "a", "feature": "itm", "dim": 2}],
            "asks for feature 'itm', which the dataset does not have; did you",
        ),
        ([{"name": "a", "feature": "item", "dim": 0}], "dim is 0"),
        ([{"name": "a", "feature": "item", "dim": 2, "pooling": "none"}], "as a sequence .* one value a row"),
        ([{"name": "a", "feature": "item", "dim": 2, "init_bound": 0.0}], "init_bound is 0.0"),
        ([{"name": "a", "feature": x, "dim": 2} for x in ("item", "user")], "another one has this name"),
        (
            [{"name": "a", "feature": "item", "dim": 2}, {"name": "b", "feature": "last", "dim": 3}],
            "'a' and 'b' of the model share table 'item', but say dim=2, .* dim=3",
        ),
    ],
)
def test_lookups_that_do_not_fit(lookups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ShardedModel(SCHEMA, model_with(*lookups), LocalCollective(), 1)


def test_a_network_with_lookups_has_no_vectors_of_all_features() -> None:
    model = ShardedModel(SCHEMA, INTERESTS, LocalCollective(), 1)
    continuous, codes, _ = batch(SCHEMA, 1)
    with pytest.raises(UserError, match="no vectors of all features"):
        _ = model.inputs_of(continuous, codes).vectors
    no = ShardedModel(SCHEMA, model_with(), LocalCollective(), 1)
    assert no(continuous, codes).tolist() == [0.0] * len(codes)


def test_ids_of_features_are_there_for_every_model() -> None:
    model = ShardedModel(SCHEMA, Model(embedding_dim=4), LocalCollective(), 1)
    continuous, codes, _ = batch(SCHEMA, 1)
    inputs = model.inputs_of(continuous, by_name(codes, slice(None)))
    assert torch.equal(inputs.ids("last"), codes[:, 5])  # type: ignore[arg-type]
    tags = inputs.ids("tags")
    assert isinstance(tags, JaggedTensor)
    assert tags.values.dtype == torch.int64
    lists = [tags.values[a:b].tolist() for a, b in zip(tags.offsets, tags.offsets[1:], strict=False)]
    assert lists == [[c for c in row if c] for row in codes[:, 1:4].tolist()]
    with pytest.raises(UserError, match=r"feature 'tag', which the dataset does not have; did you mean 'tags'"):
        inputs.ids("tag")
    drawn = model.train().inputs_of(continuous, codes)
    with pytest.raises(UserError, match=r"set train\.negatives"):
        _ = drawn.negatives


RAW = DatasetSchema(
    features=(
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="item", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True),
        Feature(name="seen", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True, length=4, is_list=True),
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)


def raw_batch(negatives: Tensor | None = None) -> CategoricalBatch:
    seen = JaggedTensor.of_lengths(torch.tensor([7, 0, -5, 7]), torch.tensor([3, 0, 1]))
    return CategoricalBatch(torch.tensor([[10**15, 1], [-3, 2], [10**15, 8]]), [seen], negatives)


@pytest.mark.parametrize("ranks", [1, 2])
def test_raw_ids_are_looked_up_by_name(ranks: int, tmp_path: Path) -> None:
    """Two tables over one feature, a sequence and drawn ids; tables learn, and are saved by their names."""
    drawn = torch.tensor([[5, 10**15], [-3, 5], [10**15, 6]])
    shape = model_with(
        {"name": "item", "feature": "item", "dim": 3, "init_bound": 0.5},
        {"name": "wide", "feature": "item", "dim": 5, "table": "wide"},
        {"name": "seen", "feature": "seen", "dim": 2, "pooling": "none"},
        {"name": "drawn", "feature": "item", "dim": 3, "ids": "negatives"},
        {"name": "user", "feature": "user", "dim": 2},
    )

    def rank(collective: Collective) -> dict[str, Any]:
        model = ShardedModel(RAW, shape, collective, 2, settings=SGD)
        model.configure_optimizer(SGD)
        model.train()
        local_rows = slice(None) if ranks == 1 else slice(0, 2) if collective.world.is_chief else slice(2, 3)
        numbers = torch.zeros(3, 1)[local_rows]
        rank_batch = raw_batch(drawn).rows(local_rows.start or 0, 3 if local_rows.stop is None else local_rows.stop)
        for _ in range(2):
            inputs = model.inputs_of(numbers, rank_batch)
            model.outputs(inputs)
            results = {name: inputs._lookup_results[name] for name in ("item", "wide", "drawn")}
            loss = sum((v.sum() for v in results.values()), inputs.sequence("seen").values.sum())  # type: ignore[union-attr]
            values = {name: v.detach().clone() for name, v in results.items()}  # type: ignore[union-attr]
            values["seen"] = inputs.sequence("seen").values.detach().clone()
            loss.backward()  # type: ignore[union-attr]
            model.step_embeddings()
        assert torch.equal(inputs.negatives, drawn[local_rows])
        save_model(
            local(tmp_path / "model"), model, workflow=local(tmp_path), pipeline="p", ds="d", key="k", metrics={}
        )
        return values | {"offsets": inputs.sequence("seen").offsets}

    parts = run_ranks(ranks, rank)
    item, wide, more, seen = (torch.cat([f[n] for f in parts]) for n in ("item", "wide", "drawn", "seen"))
    assert [list(x.shape) for x in (item, wide, more, seen)] == [[3, 3], [3, 5], [3, 2, 3], [3, 2]]
    for a, b in ((item[0], item[2]), (more[0, 1], item[0]), (more[1, 0], item[1]), (seen[0], seen[2])):
        assert torch.equal(a, b)
    assert not torch.equal(item[0], item[1])
    reloaded = load_model(local(tmp_path / "model"))
    reloaded(torch.zeros(3, 1), raw_batch())
    saved = reloaded.network.seen
    # One step of SGD further: how often an id is there is its gradient, and what it lost.
    counts = {"item": [4, 2, 4], "wide": [2, 1, 2]}
    for name, values in (("item", item), ("wide", wide)):
        torch.testing.assert_close(saved[name], values - torch.tensor(counts[name])[:, None].float())
    assert saved["drawn"].shape == (3, 0, 3)
    with pytest.raises(UserError, match="wants all rows of 'item', which has raw ids"):
        ShardedModel(RAW, model_with({"name": "a", "feature": "item", "dim": 2, "ids": "all"}), LocalCollective(), 1)


def test_a_model_that_leaves_raw_ids_alone_is_saved_whole(tmp_path: Path) -> None:
    model = ShardedModel(RAW, model_with({"name": "user", "feature": "user", "dim": 2}), LocalCollective(), 1)
    assert model.dynamic is None
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow" / "workflow.json").write_text("{}\n")
    folder = local(tmp_path / "model")
    save_model(folder, model, workflow=local(tmp_path / "workflow"), pipeline="p", ds="d", key="k", metrics={})
    assert read_meta(folder)["kind"].endswith("LookupNetwork")


def test_gathered_rows_and_their_gradients() -> None:
    """Each rank's loss weighs all rows by numbers of its own: a row's gradient is what all ranks give it."""
    sizes, weights = (2, 0, 3), torch.arange(15.0).view(3, 5)
    rows = torch.randn(5, 2)
    ends = np.cumsum([0, *sizes])

    def rank(collective: Collective) -> tuple[Tensor, Tensor, int]:
        r = collective.world.rank
        x = rows[ends[r] : ends[r + 1]].clone().requires_grad_()
        model = ShardedModel(SCHEMA, Model(embedding_dim=4), collective, 1)
        inputs = model.inputs_of(torch.zeros(0, 2), torch.zeros(0, 6, dtype=torch.int64))
        _ = inputs.vectors
        everywhere = inputs.all_gather(x)
        (everywhere.sum(1) * weights[r]).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return everywhere.detach(), x.grad, inputs.rank

    results = run_ranks(3, rank)
    assert all(torch.equal(f[0], rows) for f in results)
    assert torch.equal(torch.cat([f[1] for f in results]), weights.sum(0)[:, None].expand(5, 2))
    assert [f[2] for f in results] == [0, 1, 2]
