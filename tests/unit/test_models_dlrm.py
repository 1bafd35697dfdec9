"""The DLRM against its definition written out in NumPy, and on ranks against one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import Model, Optimizer
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.models.dlrm import dot_interaction
from headrace.models.layers import pairwise_dots
from headrace.models.saved import load_model, read_card, restore, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import local

CONTINUOUS = tuple(Feature(name=n, kind=Kind.CONTINUOUS, dtype="float32") for n in ("age", "price"))
CATEGORICAL = (
    Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=30, vocabulary="user"),
    Feature(
        name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, vocabulary="tags", length=3, is_list=True
    ),
    Feature(name="item", kind=Kind.CATEGORICAL, dtype="int32", cardinality=20, vocabulary="item"),
    Feature(name="last", kind=Kind.CATEGORICAL, dtype="int32", cardinality=20, vocabulary="item"),
)
LABEL = Feature(name="click", kind=Kind.LABEL, dtype="float32")
SCHEMAS = {
    "both": DatasetSchema(features=(*CONTINUOUS, *CATEGORICAL, LABEL)),
    "codes": DatasetSchema(features=(CATEGORICAL[0], CATEGORICAL[2], LABEL)),
    "numbers": DatasetSchema(features=(*CONTINUOUS, LABEL)),
}
MODEL = Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8, 5))
ROWS = 24


def batch(schema: DatasetSchema, step: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(step)
    slots = [f.cardinality for f in schema.of(Kind.CATEGORICAL) for _ in range(f.length)]
    continuous = rng.normal(size=(rows, len(schema.of(Kind.CONTINUOUS)))).astype(np.float32)
    codes = (rng.random((rows, len(slots))) * np.array(slots)).astype(np.int64)
    labels = (rng.random(rows) < 0.4).astype(np.float32)
    return torch.from_numpy(continuous), torch.from_numpy(codes), torch.from_numpy(labels)


def by_definition(model: ShardedModel, continuous: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Naumov et al. (2019), row by row, in float64."""
    state = {name: t.double().numpy() for name, t in model.dense_state().items()}
    tables, first = {}, 0
    for t in model.embeddings.plan.tables:
        tables[t.name] = model.embeddings.weight[first : first + t.rows].double().numpy()
        first += t.rows

    def mlp(prefix: str, x: np.ndarray, last_relu: bool) -> np.ndarray:
        names = sorted(n for n in state if n.startswith(prefix) and n.endswith("weight"))
        for i, name in enumerate(names):
            x = state[name] @ x + state[name.replace("weight", "bias")]
            if last_relu or i < len(names) - 1:
                x = np.maximum(x, 0)
        return x

    logits = []
    for x, row in zip(continuous, codes, strict=True):
        bottom = mlp("bottom", x, True) if len(x) else state["constant"]
        vectors, slot = [bottom], 0
        for f in model.schema.of(Kind.CATEGORICAL):
            used = [c for c in row[slot : slot + f.length] if not f.is_list or c != 0]
            vectors.append(sum((tables[f.vocabulary][c] for c in used), np.zeros(4)))
            slot += f.length
        dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        logits.append(mlp("top", np.array([*bottom, *dots]), False)[0])
    return np.array(logits)


@pytest.mark.parametrize("name", SCHEMAS)
def test_forward_is_the_paper(name: str) -> None:
    model = ShardedModel(SCHEMAS[name], MODEL, LocalCollective(), seed=3)
    # The start of the embeddings is small: enlarge it, so that the products matter.
    model.embeddings.weight.mul_(20)
    continuous, codes, _ = batch(SCHEMAS[name], 0)
    logits = model(continuous, codes)
    assert logits.shape == (ROWS,)
    expected = by_definition(model, continuous.numpy(), codes.numpy())
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_pairs_are_in_order() -> None:
    x = torch.tensor([[[1.0, 0.0], [2.0, 1.0], [3.0, 5.0]]])
    assert pairwise_dots(x).tolist() == [[2.0, 3.0, 11.0]]


@pytest.mark.parametrize(
    ("batch", "count", "width"),
    [(0, 3, 4), (3, 1, 4), (2, 7, 5), (1, 15, 16), (4, 16, 17), (4, 17, 80), (5, 26, 64), (1500, 2, 8)],
)
def test_the_loop_of_the_interaction_is_that_of_torch(batch: int, count: int, width: int) -> None:
    """Forward and gradients, to the rounding of sums in another order, against torch in double precision."""
    generator = torch.Generator().manual_seed(batch + count)
    bottom = torch.randn(batch, width, generator=generator, requires_grad=True)
    features = torch.randn(batch, count, width, generator=generator, requires_grad=True)
    got = dot_interaction(bottom, features)
    gradient = torch.randn(got.shape, generator=generator)
    gradients = torch.autograd.grad(got, [bottom, features], gradient)
    assert got.grad_fn is not None
    assert "DotInteraction" in got.grad_fn.name()
    wide = [x.detach().double().requires_grad_() for x in (bottom, features)]
    expected = dot_interaction(*wide)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(gradients, torch.autograd.grad(expected, wide, gradient.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    recomputed = dot_interaction(bottom, features)
    assert torch.equal(got, recomputed)
    if batch > 1:  # a sample's bits are its own
        assert torch.equal(dot_interaction(bottom[1:], features[1:]), got[1:])


def test_no_features_is_refused() -> None:
    with pytest.raises(UserError, match="no features"):
        ShardedModel(DatasetSchema(features=(LABEL,)), MODEL, LocalCollective(), seed=1)


def test_a_feature_without_vocabulary_is_refused() -> None:
    raw = Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32")
    with pytest.raises(UserError, match="'user' has no cardinality"):
        ShardedModel(DatasetSchema(features=(raw, LABEL)), MODEL, LocalCollective(), seed=1)


def test_features_of_one_vocabulary_share_a_table() -> None:
    plan = ShardedModel(SCHEMAS["both"], MODEL, LocalCollective(), seed=1).embeddings.plan
    assert [(t.name, t.rows) for t in plan.tables] == [("user", 30), ("tags", 9), ("item", 20)]
    assert [x.table for x in plan.lookups] == ["user", "tags", "item", "item"]


def test_the_seed_alone_decides_the_start() -> None:
    torch.manual_seed(1)
    first = ShardedModel(SCHEMAS["both"], MODEL, LocalCollective(), seed=3).dense_state()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = ShardedModel(SCHEMAS["both"], MODEL, LocalCollective(), seed=3).dense_state()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[n], second[n]) for n in first)
    third = ShardedModel(SCHEMAS["both"], MODEL, LocalCollective(), seed=4).dense_state()
    assert not any(torch.equal(first[n], third[n]) for n in first)


def train(c: Collective, name: str, shares: list[int], steps: int = 10) -> tuple[list[float], ShardedModel]:
    """Steps on the rank's share (rows by rank) of each global batch. The losses of the global batches."""
    model = ShardedModel(SCHEMAS[name], MODEL, c, seed=3)
    model.embeddings.configure_optimizer(Optimizer(kind="adagrad", learning_rate=0.1))
    dense = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        continuous, codes, labels = (t.split(shares)[c.world.rank] for t in batch(SCHEMAS[name], step))
        loss = binary_cross_entropy_with_logits(model(continuous, codes), labels, reduction="sum") / ROWS
        dense.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        c.all_reduce_sum([total, *(p.grad for p in model.dense_parameters())])
        dense.step()
        model.embeddings.step()
        losses.append(float(total))
    return losses, model


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("shares", [[12, 12], [24, 0], [5, 0, 19], [6, 6, 6, 6]])
def test_ranks_equal_one_process(name: str, shares: list[int]) -> None:
    one_rank_losses, one_rank_model = train(LocalCollective(), name, [ROWS])
    assert one_rank_losses[-1] != one_rank_losses[0]
    for losses, model in run_ranks(len(shares), lambda c: train(c, name, shares)):
        np.testing.assert_allclose(losses, one_rank_losses, rtol=1e-5)
        for key, value in one_rank_model.dense_state().items():
            torch.testing.assert_close(model.dense_state()[key], value, rtol=1e-3, atol=1e-5)


def test_it_learns_what_only_a_product_says() -> None:
    # The label is 1 where two features agree: neither alone tells anything.
    schema = DatasetSchema(
        features=(
            Feature(name="a", kind=Kind.CATEGORICAL, dtype="int32", cardinality=6, vocabulary="a"),
            Feature(name="b", kind=Kind.CATEGORICAL, dtype="int32", cardinality=6, vocabulary="b"),
            LABEL,
        )
    )
    model = ShardedModel(schema, Model(embedding_dim=8, top_mlp=(16,)), LocalCollective(), seed=1)
    model.embeddings.configure_optimizer(Optimizer(kind="adagrad", learning_rate=0.1))
    dense = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        codes = torch.randint(0, 6, (128, 2), generator=generator)
        labels = (codes[:, 0] == codes[:, 1]).float()
        loss = binary_cross_entropy_with_logits(model(torch.empty(128, 0), codes), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        model.embeddings.step()
    # Knowing nothing but the base rate of 1/6 costs 0.45.
    assert loss.item() < 0.05


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset" / "workflow"
    (folder / "vocabulary").mkdir(parents=True)
    (folder / "workflow.json").write_text('{"chains": []}')
    (folder / "vocabulary" / "user.parquet").write_bytes(b"PAR1...PAR1")
    return folder


def saved_by(ranks: int, name: str, folder: Path, workflow: Path) -> Tensor:
    """Train and save on some ranks; the model's answers to one batch."""

    def rank_main(c: Collective) -> Tensor:
        _, model = train(c, name, [ROWS // ranks] * ranks, steps=3)
        save_model(
            local(folder),
            model,
            workflow=local(workflow),
            pipeline="clicks",
            ds="2026-01-02",
            key="abc",
            metrics={"auc": 0.75, "hr_at_k": None},
        )
        model.eval()
        with torch.no_grad():
            return model(*batch(SCHEMAS[name], 77)[:2])

    return run_ranks(ranks, rank_main)[0]


@pytest.mark.parametrize("name", SCHEMAS)
def test_saved_on_two_answers_alike_on_one_and_three(tmp_path: Path, workflow: Path, name: str) -> None:
    folder = tmp_path / "model"
    expected = saved_by(2, name, folder, workflow)

    def answer(c: Collective) -> Tensor:
        model = load_model(local(folder), c)
        assert not model.training
        with torch.no_grad():
            return model(*batch(SCHEMAS[name], 77)[:2])

    for got in [answer(LocalCollective()), *run_ranks(3, answer)]:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    card = read_card(local(folder))
    assert (card.kind, card.pipeline, card.ds, card.key) == ("dlrm", "clicks", "2026-01-02", "abc")
    assert card.metrics == {"auc": 0.75, "hr_at_k": None}
    assert card.dataset_schema == SCHEMAS[name]
    assert card.model == MODEL
    assert (folder / "workflow" / "vocabulary" / "user.parquet").read_bytes() == b"PAR1...PAR1"


@pytest.mark.parametrize(
    "part",
    [
        "dense.safetensors",
        "embeddings/weight-00001-00000.safetensors",
        "workflow/vocabulary/user.parquet",
        "workflow/workflow.json",
        "embeddings/index.json",
        "model.json",
    ],
)
def test_a_damaged_part_is_refused_by_name(tmp_path: Path, workflow: Path, part: str) -> None:
    folder = tmp_path / "model"
    saved_by(2, "both", folder, workflow)
    load_model(local(folder))
    path = folder / part
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=path.name):
        load_model(local(folder))
    path.unlink()
    with pytest.raises(UserError, match=path.name):
        load_model(local(folder))


def test_tomorrows_model_starts_from_todays(tmp_path: Path, workflow: Path) -> None:
    folder = tmp_path / "model"
    saved_by(2, "codes", folder, workflow)
    user, item, label = SCHEMAS["codes"].features
    grown = DatasetSchema(features=(user.model_copy(update={"cardinality": 33}), item, label))
    model = ShardedModel(grown, MODEL, LocalCollective(), seed=8)
    start = model.embeddings.weight.clone()
    model.embeddings.configure_optimizer(Optimizer(kind="adagrad", learning_rate=0.1))
    restored = restore(model, folder, with_optimizer=True)
    today = load_model(local(folder))
    assert restored.new_rows == {"user": 3}
    assert torch.equal(model.embeddings.weight[30:33], start[30:33])
    assert torch.equal(model.embeddings.weight[:30], today.embeddings.weight[:30])
    assert model.embeddings.steps == 3
    codes = batch(SCHEMAS["codes"], 5)[1]
    with torch.no_grad():
        assert torch.equal(model.eval()(torch.empty(ROWS, 0), codes), today(torch.empty(ROWS, 0), codes))


def test_another_shape_is_explained(tmp_path: Path, workflow: Path) -> None:
    saved_by(1, "both", tmp_path / "model", workflow)
    other_model = ShardedModel(SCHEMAS["both"], MODEL.model_copy(update={"top_mlp": (9,)}), LocalCollective(), seed=1)
    with pytest.raises(UserError, match=r"'top\.0\.bias' is \[8\] there and \[9\] here"):
        restore(other_model, tmp_path / "model", with_optimizer=False)
    with pytest.raises(UserError, match="no workflow folder"):
        saved_by(1, "both", tmp_path / "model2", tmp_path / "nothing")
    assert not (tmp_path / "model2").exists()
