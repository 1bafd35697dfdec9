"""Each collaborative model beside its paper's formulas, written row by row in float64: losses and all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, run_ranks
from headrace.config import Model
from headrace.config.model_args import LightGCNArgs, MatrixFactorizationArgs, MultVAEArgs, NeuMFArgs, SimpleXArgs
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.embeddings.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.collaborative import MatrixFactorization, MultVAE, NeuMF, SimpleX
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lightgcn import LightGCN
from headrace.models.retrieval import query_vectors
from headrace.models.sharded_model import ShardedModel

USERS, ITEMS, D, ROWS = 6, 9, 4, 7
NAMES = ("user", "item", "history")
FEATURES = InputFeatures(
    {},
    NAMES,
    D,
    ("history",),
    {"user": USERS, "item": ITEMS, "history": ITEMS},
    dict.fromkeys(NAMES, 2),
    {"user": "user", "item": "item", "history": "item"},
)
UI = {"user": "user", "item": "item"}
Tables = dict[str, Tensor]
Weights = Mapping[str, Tensor]


class Batch:
    """Ids, labels and tables of a batch, and the Inputs that a trainer would make of them."""

    def __init__(self, network: nn.Module, *, shared: bool = False, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.user, self.item = rng.integers(0, USERS, ROWS), rng.integers(0, ITEMS, ROWS)
        self.lists = [rng.integers(1, ITEMS, n) for n in (3, 0, 1, 5, 2, 2, 4)]
        self.negatives = rng.integers(0, ITEMS, 5 if shared else (ROWS, 5))
        self.negatives.flat[:5] = self.item[:5]  # some are the row's own
        self.labels, self.weights = (np.arange(ROWS) % 3 > 0).astype(float), rng.random(ROWS) + 0.5
        self.tables: Tables = {}
        for w in network.lookups:  # type: ignore[union-attr]
            rows = USERS if w.feature == "user" else ITEMS
            self.tables.setdefault(self.table(w), torch.from_numpy(rng.normal(size=(rows, w.dim))).requires_grad_())
        self.network = network

    @staticmethod
    def table(w: Any) -> str:
        return f"{FEATURES.vocabulary[w.feature]}.{w.table or ''}"

    def vectors_of(self, side: str, table: str = "") -> Tensor:
        return self.tables[f"{side}.{table}"]

    def drawn(self, row: int) -> list[int]:
        return (self.negatives if self.negatives.ndim == 1 else self.negatives[row]).tolist()

    def inputs(self) -> Inputs:
        lengths = torch.tensor([len(x) for x in self.lists])
        history = JaggedTensor.of_lengths(torch.from_numpy(np.concatenate(self.lists)), lengths)
        ids = {"user": torch.from_numpy(self.user), "item": torch.from_numpy(self.item), "history": history}
        negatives, embeddings = torch.from_numpy(self.negatives), {}
        for w in self.network.lookups:  # type: ignore[union-attr]
            table = self.tables[self.table(w)].float()
            if w.ids == "all":
                embeddings[w.name] = table
            elif w.ids == "negatives":
                embeddings[w.name] = table[negatives]
            elif w.feature == "history":
                vectors = JaggedTensor(table[history.values], history.offsets)
                embeddings[w.name] = vectors if w.pooling == "none" else vectors.pooled(w.pooling)
            else:
                embeddings[w.name] = table[ids[w.feature]]
        empty = torch.zeros(ROWS, 0)
        labels, weights = (torch.from_numpy(x).float() for x in (self.labels, self.weights))
        return Inputs(FEATURES, empty, empty, labels, weights, embeddings=embeddings, ids=ids, negatives=negatives)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a @ a).sqrt() / (b @ b).sqrt()


def by_kind(kind: str, batch: Batch, row: int, score: Callable[[int], Tensor]) -> Tensor:
    """Return what a row adds to a loss, from its user's score of any item."""
    z, y = score(int(batch.item[row])), batch.labels[row]
    negative_scores = [score(int(n)) for n in batch.drawn(row)]
    if kind == "bce":
        return softplus(z) - y * z
    if kind == "bpr":
        return y * sum((softplus(s - z) for s in negative_scores), torch.zeros(())) / len(negative_scores)
    other_scores = [s for s, n in zip(negative_scores, batch.drawn(row), strict=True) if n != batch.item[row]]
    return y * (torch.log(sum((torch.exp(s) for s in [z, *other_scores]), torch.zeros(()))) - z)


def mf(args: MatrixFactorizationArgs) -> Callable[[Weights, Batch, int], tuple[Tensor, Tensor]]:
    def row(w: Weights, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        p = batch.vectors_of("user")[batch.user[row]]

        def score(item: int) -> Tensor:
            q = batch.vectors_of("item")[item]
            if args.similarity == "cosine":
                return cosine(p, q) / args.temperature
            return p @ q[:D] / args.temperature + (q[D] if args.item_bias else 0)

        return score(int(batch.item[row])), by_kind(args.loss, batch, row, score)

    return row


def mlp(w: Weights, x: Tensor, layers: int) -> Tensor:
    for i in range(layers):
        x = torch.clamp(w[f"mlp.{2 * i}.weight"] @ x + w[f"mlp.{2 * i}.bias"], min=0)
    return x


def neumf(args: NeuMFArgs) -> Callable[[Weights, Batch, int], tuple[Tensor, Tensor]]:
    def row(w: Weights, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        u, i = batch.user[row], batch.item[row]
        parts = []
        if args.part != "mlp":
            parts.append(batch.vectors_of("user", "gmf")[u] * batch.vectors_of("item", "gmf")[i])
        if args.part != "gmf":
            parts.append(
                mlp(
                    w,
                    torch.cat([batch.vectors_of("user", "mlp")[u], batch.vectors_of("item", "mlp")[i]]),
                    len(args.mlp),
                )
            )
        z = (w["head.weight"] @ torch.cat(parts) + w["head.bias"])[0]
        return z, softplus(z) - batch.labels[row] * z

    return row


def simplex(args: SimpleXArgs) -> Callable[[Weights, Batch, int], tuple[Tensor, Tensor]]:
    def row(w: Weights, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        user, items = batch.vectors_of("user")[batch.user[row]], batch.vectors_of("item")
        if args.history is not None:
            seen = [items[i] for i in batch.lists[row]]
            mean = sum(seen, torch.zeros(D, dtype=torch.float64)) / max(1, len(seen))
            user = args.user_share * user + (1 - args.user_share) * (w["of_history.weight"] @ mean)
        z = cosine(user, items[batch.item[row]])
        excess = [torch.clamp(cosine(user, items[n]) - args.margin, min=0) for n in batch.drawn(row)]
        total = 1 - z + args.negative_weight * sum(excess, torch.zeros(())) / len(excess)
        return z, batch.labels[row] * total

    return row


def mult_vae(args: MultVAEArgs) -> Callable[[Weights, Batch, int], tuple[Tensor, Tensor]]:
    """Compute Mult-VAE without dropout and noise."""

    def row(w: Weights, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        x = torch.zeros(ITEMS, dtype=torch.float64)
        for i in batch.lists[row]:
            x[i] += 1
        # Of a list without repeats: x / |x|.
        h = (x / math.sqrt(max(1, len(batch.lists[row])))) @ batch.vectors_of("item", "encoder")
        h = torch.tanh(h + w["first_bias"])
        for layer in range(len(args.hidden) - 1):
            h = torch.tanh(w[f"encoder.{2 * layer}.weight"] @ h + w[f"encoder.{2 * layer}.bias"])
        latent = w["latent.weight"] @ h + w["latent.bias"]
        divergence = torch.zeros((), dtype=torch.float64)
        z = latent[:D]
        if args.variational:
            for mean, log_variance in zip(latent[:D], latent[D:], strict=True):
                divergence = divergence + 0.5 * (mean**2 + torch.exp(log_variance) - 1 - log_variance)
        for layer in range(len(args.hidden)):
            z = torch.tanh(w[f"decoder.{2 * layer}.weight"] @ z + w[f"decoder.{2 * layer}.bias"])
        scores = batch.vectors_of("item", "decoder") @ torch.cat([z, torch.ones(1, dtype=torch.float64)])
        log_shares = scores - torch.log(torch.exp(scores[2:]).sum())
        likelihood = sum((log_shares[i] for i in batch.lists[row] if i >= 2), torch.zeros(()))
        return scores[batch.item[row]], args.kl_weight * divergence - likelihood

    return row


EDGES = [(2, 2), (2, 3), (3, 3), (4, 8), (5, 2), (2, 7), (0, 5)]


def lightgcn(args: LightGCNArgs) -> Callable[[Weights, Batch, int], tuple[Tensor, Tensor]]:
    """Compute LightGCN by a dense matrix of both sides."""
    a = torch.zeros(USERS + ITEMS, USERS + ITEMS, dtype=torch.float64)
    for u, i in EDGES:
        a[u, USERS + i] = a[USERS + i, u] = 1
    degrees = a.sum(1).clamp(min=1)
    a = a / degrees.sqrt()[:, None] / degrees.sqrt()[None, :]

    def row(w: Weights, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        x = torch.cat([batch.vectors_of("user"), batch.vectors_of("item")])
        x = sum((torch.linalg.matrix_power(a, k) @ x for k in range(args.layers + 1)), torch.zeros(())) / (
            args.layers + 1
        )
        p = x[batch.user[row]]

        def score(item: int) -> Tensor:
            q = x[USERS + item]
            return (cosine(p, q) if args.similarity == "cosine" else p @ q) / args.temperature

        return score(int(batch.item[row])), by_kind(args.loss, batch, row, score)

    return row


class Observed:
    """Rows as `observe` is given them."""

    def __init__(self, edges: list[tuple[int, int]], labels: list[float]) -> None:
        pairs = torch.tensor(edges)
        self.rows = Inputs(
            FEATURES,
            torch.zeros(len(edges), 0),
            torch.zeros(len(edges), 0),
            torch.tensor(labels),
            ids={"user": pairs[:, 0], "item": pairs[:, 1]},
        )


def observed_lightgcn(features: InputFeatures, args: LightGCNArgs) -> LightGCN:
    network = LightGCN(features, args)
    half = len(EDGES) // 2
    first, second = EDGES[half:], [*EDGES[:half], EDGES[-1], (5, 8)]  # one twice, one of label 0
    network.observe(
        [Observed(first, [1.0] * len(first)).rows, Observed(second, [1.0] * (len(second) - 1) + [0.0]).rows]
    )
    return network


CASES: dict[str, tuple[Callable[..., nn.Module], Any, Callable[..., Any]]] = {
    "mf bce": (MatrixFactorization, MatrixFactorizationArgs(**UI, loss="bce"), mf),
    "mf bpr": (MatrixFactorization, MatrixFactorizationArgs(**UI), mf),
    "mf bpr without bias": (MatrixFactorization, MatrixFactorizationArgs(**UI, item_bias=False), mf),
    "mf softmax": (MatrixFactorization, MatrixFactorizationArgs(**UI, loss="softmax", temperature=0.7), mf),
    "mf cosine": (
        MatrixFactorization,
        MatrixFactorizationArgs(**UI, loss="softmax", similarity="cosine", temperature=0.3),
        mf,
    ),
    "neumf": (NeuMF, NeuMFArgs(**UI, mlp_dim=3, mlp=(5, 4)), neumf),
    "gmf": (NeuMF, NeuMFArgs(**UI, part="gmf"), neumf),
    "mlp": (NeuMF, NeuMFArgs(**UI, part="mlp", mlp=(6,)), neumf),
    "simplex": (SimpleX, SimpleXArgs(**UI, history="history", user_share=0.3, margin=0.1, negative_weight=2), simplex),
    "simplex without a history": (SimpleX, SimpleXArgs(**UI, margin=0.0), simplex),
    "mult_dae": (
        MultVAE,
        MultVAEArgs(item="item", history="history", hidden=(5,), dropout=0, variational=False),
        mult_vae,
    ),
    "lightgcn bpr": (observed_lightgcn, LightGCNArgs(**UI, layers=2), lightgcn),
    "lightgcn softmax": (
        observed_lightgcn,
        LightGCNArgs(**UI, loss="softmax", similarity="cosine", temperature=0.5),
        lightgcn,
    ),
    "lightgcn bce": (observed_lightgcn, LightGCNArgs(**UI, loss="bce", layers=1), lightgcn),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_papers(name: str, shared: bool) -> None:
    make, args, formula = CASES[name]
    torch.manual_seed(1)
    network = make(FEATURES, args)
    batch = Batch(network, shared=shared)
    check(network, batch, formula(args))


def check(network: nn.Module, batch: Batch, formula: Callable[..., tuple[Tensor, Tensor]]) -> None:
    inputs = batch.inputs()
    outputs = network(inputs)
    loss: Tensor = network.loss(outputs, inputs) if hasattr(network, "loss") else _bce(outputs["logits"], inputs)
    parameters = dict(network.named_parameters())
    leaves = [*parameters.values(), *batch.tables.values()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)

    w = {k: v.detach().double().requires_grad_() for k, v in parameters.items()}
    rows = [formula(w, batch, r) for r in range(ROWS)]
    total = sum((batch.weights[r] * rows[r][1] for r in range(ROWS)), torch.zeros(()))
    expected = torch.autograd.grad(total, [*w.values(), *batch.tables.values()], allow_unused=True)

    np.testing.assert_allclose(
        outputs["logits"].detach(), torch.stack([z for z, _ in rows]).detach(), rtol=1e-4, atol=1e-5
    )
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert any(e is not None and bool(e.any()) for e in expected)
    for name, a, b in zip([*parameters, *batch.tables], gradients, expected, strict=True):
        zeros = np.zeros(parameters[name].shape if name in parameters else batch.tables[name].shape)
        np.testing.assert_allclose(
            zeros if a is None else a, zeros if b is None else b, rtol=2e-4, atol=2e-5, err_msg=name
        )


def _bce(logits: Tensor, inputs: Inputs) -> Tensor:
    assert inputs.weights is not None
    return (inputs.weights * (softplus(logits) - inputs.labels * logits)).sum()


def test_a_vaes_noise_is_normal_and_its_divergence_anneals(monkeypatch: pytest.MonkeyPatch) -> None:
    args = MultVAEArgs(item="item", history="history", hidden=(5, 3), dropout=0, kl_weight=0.4, anneal_steps=10)
    torch.manual_seed(1)
    network = MultVAE(FEATURES, args)
    batch = Batch(network)
    for step, factor in ((1, 0.04), (5, 0.2), (10, 0.4), (999, 0.4)):
        network.begin_step(step)
        assert float(network.kl_weight) == pytest.approx(factor)
    # Without noise it is the formula; with it, twice the noise is twice as far away.
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    check(network, batch, mult_vae(args))
    inputs = batch.inputs()
    network.eval()
    still = network(inputs)["logits"]
    monkeypatch.undo()
    assert torch.equal(network(inputs)["logits"], still)
    network.train()
    drawn = torch.stack([network._encoded(inputs)[0] for _ in range(3000)])
    mean, deviation = drawn.mean(0), drawn.std(0)
    network.eval()
    encoded = network._encoded(inputs)[0]
    np.testing.assert_allclose(mean.detach(), encoded.detach(), atol=0.1)
    assert bool((deviation > 0.3).all())


def test_a_vae_drops_items_of_lists() -> None:
    args = MultVAEArgs(item="item", history="history", hidden=(5,), dropout=0.5, variational=False)
    network = MultVAE(FEATURES, args)
    inputs = Batch(network).inputs()
    outputs = torch.stack([network(inputs)["logits"] for _ in range(20)])
    changes = outputs.std(0) > 0
    assert changes.tolist() == [True, False, True, True, True, True, True]  # the second list is empty


def test_queries_and_items_are_the_logits() -> None:
    for make, args, _ in CASES.values():
        network = make(FEATURES, args).eval()
        if not hasattr(network, "queries"):
            continue
        inputs = Batch(network).inputs()
        logits = network(inputs)["logits"]
        torch.testing.assert_close((network.queries(inputs) * network.items(inputs)).sum(1), logits)
        if hasattr(network, "all_items"):
            all_vectors = network.all_items(inputs)
            assert len(all_vectors) == ITEMS
            torch.testing.assert_close(all_vectors[inputs.ids(network.item)], network.items(inputs))


def test_a_graph_is_saved_and_another_one_taken() -> None:
    args = LightGCNArgs(**UI, layers=2)
    network = observed_lightgcn(FEATURES, args)
    assert sorted(zip(network.graph_users.tolist(), network.graph_items.tolist(), strict=True)) == sorted(EDGES)
    inputs = Batch(network).inputs()
    with torch.no_grad():
        network.eval()
        logits = network(inputs)["logits"]
        network.train()
        other_rows = Observed([(2, 2)], [1.0]).rows
        network.observe([other_rows])
        network.eval()
        assert not torch.allclose(network(inputs)["logits"], logits)


class Counted:
    """A collective, and its messages that nobody has waited for."""

    def __init__(self, inner: Collective) -> None:
        self._inner, self.under_way = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start_all_to_all(self, *args: Any) -> Callable[[], Any]:
        wait = self._inner.start_all_to_all(*args)
        self.under_way += 1

        def waited() -> Any:
            self.under_way -= 1
            return wait()

        return waited


def test_a_graph_that_was_propagated_leaves_no_message_behind() -> None:
    code = {"kind": Kind.CATEGORICAL, "dtype": "int32"}
    schema = DatasetSchema(
        features=(
            Feature(name="user", cardinality=USERS, **code),
            Feature(name="item", cardinality=ITEMS, **code),
            Feature(name="click", kind=Kind.LABEL, dtype="float32"),
        )
    )
    shape = Model.model_validate({"class": "lightgcn", "embedding_dim": D, "args": {**UI, "loss": "bce"}})
    codes = torch.tensor([[2, 3], [4, 8], [2, 2]])

    def rank(collective: Collective) -> tuple[int, list[Tensor]]:
        counted = Counted(collective)
        model = ShardedModel(schema, shape, counted, 1).eval()
        model.network.observe([Observed(EDGES, [1.0] * len(EDGES)).rows])  # type: ignore[operator]
        with torch.no_grad():
            results = [model(torch.zeros(3, 0), codes) for _ in range(3)]
        results.append((query_vectors(model, torch.zeros(3, 0), CategoricalBatch(codes)) * 0).sum(1) + results[0])
        return counted.under_way, results

    for under_way, outputs in run_ranks(2, rank):
        assert under_way == 0
        assert all(torch.equal(x, outputs[0]) for x in outputs)


def test_pretrained_parts_are_mixed() -> None:
    torch.manual_seed(2)
    gmf = NeuMF(FEATURES, NeuMFArgs(**UI, part="gmf"))
    mlp_part = NeuMF(FEATURES, NeuMFArgs(**UI, part="mlp", mlp=(6, 3)))
    network = NeuMF(FEATURES, NeuMFArgs(**UI, mlp=(6, 3), alpha=0.3))
    network.start_from({"gmf": gmf.state_dict(), "mlp": mlp_part.state_dict()})
    batch = Batch(network)
    inputs = batch.inputs()
    expected = 0.3 * gmf(inputs)["logits"] + 0.7 * mlp_part(inputs)["logits"]
    torch.testing.assert_close(network(inputs)["logits"], expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: LightGCN(f, LightGCNArgs()), "looks at every value of feature 'user_id'"),
        (lambda f: MultVAE(f, MultVAEArgs(item="item", history="user")), "only where both have one vocabulary"),
        (lambda f: LightGCN(f, LightGCNArgs(user="history", item="item")), "args: 'history' is no categorical feature"),
        (lambda f: MultVAE(f, MultVAEArgs(item="history", history="history")), "feature, of one id a row"),
        (lambda f: MatrixFactorization(f, MatrixFactorizationArgs(user="user", item="history")), "of one id a row"),
    ],
)
def test_features_that_do_not_fit(make: Callable[[InputFeatures], nn.Module], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(FEATURES)
