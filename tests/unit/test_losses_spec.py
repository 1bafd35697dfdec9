"""The loss that a spec names: each against loops over rows, over one rank and several, and in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from headrace.comm.base import run_ranks
from headrace.config import Loss, Model, Negatives
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.objective import hardest, spec_loss
from headrace.models.predictor import load_predictor
from headrace.models.sharded_model import all_gather_rows
from headrace.stage.manifest import Manifest
from headrace.train.carried_columns import ListColumn
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, job_of, read_padded

ROWS, DRAWN, ITEMS = 7, 5, 9
RNG = np.random.default_rng(2)
LOGITS, DOTS = RNG.normal(size=ROWS), RNG.normal(size=(ROWS, DRAWN))
LABELS = np.array([1.0, 0, 1, 1, 0, 1, 0])
WEIGHTS = RNG.random(ROWS) + 0.5
TARGETS, IDS = RNG.integers(0, ITEMS, ROWS), RNG.integers(0, ITEMS, (ROWS, DRAWN))
IDS[0, DOTS[0].argmax()] = TARGETS[0]  # the hardest of the first row is its own
LOG_Q = np.log(RNG.random(ITEMS))
QUERIES, VECTORS = RNG.normal(size=(ROWS, 3)), RNG.normal(size=(ROWS, 3))
LISTS = np.array([5, 2, 5, 2, 2, 5, 9])


def inputs_of(rows: slice = slice(None), **more: Any) -> Inputs:
    weights = torch.from_numpy(WEIGHTS[rows])
    return Inputs(
        InputFeatures({}, (), 1),
        torch.zeros(len(weights), 0),
        torch.zeros(len(weights), 0, 1),
        torch.from_numpy(LABELS[rows]),
        weights,
        ids={"item": torch.from_numpy(TARGETS[rows])},
        negatives=torch.from_numpy(IDS[rows]),
        log_share=lambda feature, kind: torch.from_numpy(LOG_Q if kind == "negatives" else LOG_Q / 2),
        lists=torch.from_numpy(LISTS[rows]),
        **more,
    )


def outputs_of(rows: slice = slice(None)) -> dict[str, Tensor]:
    outputs = {"logits": LOGITS, "negatives": DOTS, "queries": QUERIES, "items": VECTORS}
    return {name: torch.from_numpy(x[rows]) for name, x in outputs.items()}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def bce(i: int) -> float:
    p = sigmoid(LOGITS[i])
    return -math.log(p if LABELS[i] else 1 - p)


def focal(i: int) -> float:
    p = sigmoid(LOGITS[i]) if LABELS[i] else 1 - sigmoid(LOGITS[i])
    return -(0.3 if LABELS[i] else 0.7) * (1 - p) ** 1.5 * math.log(p)


def bpr(i: int) -> float:
    chosen = sorted(zip(IDS[i] != TARGETS[i], DOTS[i], strict=True))[-2:]  # the row's own where there are no others
    return LABELS[i] * float(np.mean([-math.log(sigmoid(LOGITS[i] - x)) for _, x in chosen]))


def softmax(i: int) -> float:
    target_logit = LOGITS[i] / 0.5 - LOG_Q[TARGETS[i]]
    negative_logits = [x / 0.5 - LOG_Q[item] for x, item in zip(DOTS[i], IDS[i], strict=True) if item != TARGETS[i]]
    return LABELS[i] * (math.log(math.exp(target_logit) + sum(map(math.exp, negative_logits))) - target_logit)


def cosine(i: int) -> float:
    return LABELS[i] * (1 - LOGITS[i] + 3 * float(np.mean([max(0.0, x - 0.2) for x in DOTS[i]])))


def in_batch(i: int) -> float:
    logits = [
        float(QUERIES[i] @ VECTORS[j]) / 0.7 - LOG_Q[TARGETS[j]] / 2
        for j in range(ROWS)
        if j == i or TARGETS[j] != TARGETS[i]
    ]
    target_logit = float(QUERIES[i] @ VECTORS[i]) / 0.7 - LOG_Q[TARGETS[i]] / 2
    return LABELS[i] * (math.log(sum(map(math.exp, logits))) - target_logit)


def beside_candidates(i: int) -> float:
    return LABELS[i] * sum(-math.log(sigmoid(LOGITS[i] - x)) for x in DOTS[i])


def by_places(i: int, k: int) -> float:
    """A list of one gain, 1, whose ideal is the first place."""
    scores = [LOGITS[i], *DOTS[i]]
    discounts = [1 / math.log2(p + 2) if (p := sum(s > x for s in scores)) < k else 0.0 for x in scores]
    pairs = zip(scores[1:], discounts[1:], strict=True)
    return LABELS[i] * sum(abs(discounts[0] - d) * -math.log(sigmoid(LOGITS[i] - x)) for x, d in pairs)


CASES: list[tuple[dict[str, Any], Callable[[int], float]]] = [
    ({"kind": "bce"}, bce),
    ({"kind": "focal", "gamma": 1.5, "alpha": 0.3}, focal),
    ({"kind": "squared_error"}, lambda i: (LOGITS[i] - LABELS[i]) ** 2),
    ({"kind": "bpr", "hardest": 2}, bpr),
    ({"kind": "sampled_softmax", "temperature": 0.5}, softmax),
    ({"kind": "cosine_contrastive", "margin": 0.2, "negative_weight": 3.0}, cosine),
    ({"kind": "in_batch_softmax", "temperature": 0.7}, in_batch),
    ({"kind": "rank_net"}, beside_candidates),
    ({"kind": "lambda_rank"}, lambda i: by_places(i, 1 + DRAWN)),
    ({"kind": "lambda_rank", "k": 2}, lambda i: by_places(i, 2)),
]


@pytest.mark.parametrize(("options", "loop"), CASES, ids=lambda x: x.get("kind") if isinstance(x, dict) else "")
@pytest.mark.parametrize("ends", [(0, 7), (0, 4, 7), (0, 0, 2, 7)])
def test_losses_are_those_of_loops(
    options: dict[str, Any], loop: Callable[[int], float], ends: tuple[int, ...]
) -> None:
    """The sum over the ranks of what each has of its rows is the loss of all rows; some ranks have none."""
    settings = Loss.model_validate(options)

    def rank(collective: Any) -> float:
        r = collective.world.rank
        rows = slice(ends[r], ends[r + 1])
        inputs = inputs_of(rows, all_gather=lambda x: all_gather_rows(x, collective), rank=r)
        return float(spec_loss(settings, outputs_of(rows), inputs, "item"))

    parts = run_ranks(len(ends) - 1, rank)
    assert sum(parts) == pytest.approx(sum(WEIGHTS[i] * loop(i) for i in range(ROWS)), rel=1e-9)


@pytest.mark.parametrize("kind", ["rank_net", "lambda_rank"])
def test_lists_of_a_column(kind: str) -> None:
    """Rows of one value are a list, wherever they stand, with the mean weight of its rows."""
    loss = spec_loss(Loss(kind=kind, group="query"), outputs_of(), inputs_of())  # type: ignore[arg-type]
    expected = 0.0
    for value in (2, 5, 9):
        rows = [i for i in range(ROWS) if LISTS[i] == value]
        weight = float(np.mean(WEIGHTS[rows]))
        place = {i: sum(LOGITS[j] > LOGITS[i] for j in rows) for i in rows}
        gain = {i: 2 ** LABELS[i] - 1 for i in rows}
        ideal = sum(g / math.log2(p + 2) for p, g in enumerate(sorted(gain.values(), reverse=True)))
        for i in rows:
            for j in rows:
                if LABELS[i] > LABELS[j]:
                    change = 1 / math.log2(place[i] + 2) - 1 / math.log2(place[j] + 2)
                    by = abs((gain[i] - gain[j]) * change) / ideal if kind == "lambda_rank" else 1.0
                    expected += weight * by * -math.log(sigmoid(LOGITS[i] - LOGITS[j]))
    assert float(loss) == pytest.approx(expected, rel=1e-9)


def test_the_hardest_candidates() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, -1.0], [0.0, 0.5, 2.0, 2.5]], requires_grad=True)
    hard_scores, ids = hardest(scores, torch.tensor([10, 11, 12, 13]), 2)
    assert (hard_scores.tolist(), ids.tolist()) == ([[3.0, 3.0], [2.5, 2.0]], [[11, 12], [13, 12]])
    hard_scores.sum().backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert hardest(scores, torch.zeros(2, 4, dtype=torch.int64), 9)[0].shape == (2, 4)
    hard_scores, ids = hardest(scores, torch.tensor([10, 11, 12, 13]), 2, torch.tensor([11, 13]))
    assert (hard_scores.tolist(), ids.tolist()) == ([[3.0, 1.0], [2.0, 0.5]], [[12, 10], [12, 11]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "focal", "k": 3}, "`k` is for lambda_rank, not for `focal`"),
        ({"kind": "bce", "hardest": 2}, "`hardest` is for bpr and sampled_softmax and cosine_contrastive"),
        ({"kind": "hinge"}, "Input should be 'bce', "),
    ],
)
def test_settings_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Loss.model_validate(options)


@pytest.mark.parametrize(
    ("kind", "missing", "message"),
    [
        ("bpr", "negatives", "no output 'negatives', but: logits, queries, items"),
        ("in_batch_softmax", "queries", "there is no 'queries'"),
        ("sampled_softmax", "", "asks which feature is the item"),
    ],
)
def test_outputs_that_a_model_lacks(kind: Any, missing: str, message: str) -> None:
    outputs = {name: x for name, x in outputs_of().items() if name != missing}
    with pytest.raises(UserError, match=message):
        spec_loss(Loss(kind=kind), outputs, inputs_of(), None if not missing else "item")


def test_a_name_alone_and_no_loss_at_all() -> None:
    assert Model.model_validate({"loss": "focal"}).loss == Loss(kind="focal")
    reloaded = Model.model_validate(Model.model_validate({"loss": "bpr"}).model_dump(mode="json", by_alias=True))
    assert reloaded.loss == Loss(kind="bpr")


def test_lists_do_not_reach_beyond_a_streams_rows() -> None:
    column = ListColumn("query", rows_each=3)
    list_numbers = column.list_ids({"query": np.array(["a", "b", None, "a", "a", "b"], object)})
    assert len(set(list_numbers.tolist())) == 5
    assert list_numbers[3] == list_numbers[4] != list_numbers[0]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("losses"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=2_000, valid=500)


def model_of(loss: dict[str, Any] | str, **more: Any) -> Model:
    defaults = {"class": "dcn_v2", "embedding_dim": 4, "args": {"layers": 1, "deep_mlp": [8]}, **more}
    return Model.model_validate({**defaults, "loss": loss})


def predicted(job: Any, features: Manifest, home: Workspace) -> tuple[np.ndarray, np.ndarray]:
    schema: DatasetSchema | None = features.dataset_schema
    assert schema is not None
    table = read_padded(sorted((home.home / features.output("dataset").name / "valid").glob("*.parquet")), schema)
    probabilities = load_predictor(job.saved_model).predict({c: table[c].to_numpy() for c in table.columns})
    return probabilities.astype(np.float64), table["click"].to_numpy()


def test_numbers_are_predicted_and_judged_by_their_errors(home: Workspace, features: Manifest) -> None:
    torch.set_num_threads(1)
    job = job_of(home, features, "numbers", TRAIN.model_copy(update={"epochs": 3}), model_of("squared_error"))
    report = train_local(job)
    values, labels = predicted(job, features, home)
    assert report.metrics["rmse"] == pytest.approx(math.sqrt(np.mean((values - labels) ** 2)), rel=1e-5)
    assert report.metrics["mae"] == pytest.approx(np.mean(np.abs(values - labels)), rel=1e-5)
    assert report.metrics["rmse"] < np.std(labels)
    assert "auc" not in report.metrics
    assert values.min() < 0  # no probability
    best = min(report.evals, key=lambda e: e["rmse"] or math.inf)
    assert report.best_step == best["step"]


@pytest.mark.parametrize("loss", ["focal", {"kind": "lambda_rank", "group": "row"}])
def test_losses_of_rows_and_lists_train(loss: Any, home: Workspace, features: Manifest) -> None:
    torch.set_num_threads(1)
    if isinstance(loss, Mapping):
        loss = {**loss, "group": "query"}  # one value: all rows of a stream's part of a step are a list
    key = loss if isinstance(loss, str) else "lists"
    job = job_of(home, features, key, TRAIN, model_of(loss))
    report = train_local(job)
    assert (report.metrics["auc"] or 0) > 0.6
    sign = 1 if loss == "focal" else -1
    best = min(report.evals, key=lambda e: sign * (e["log_loss" if loss == "focal" else "auc"] or 0))
    assert report.best_step == best["step"]
    two = job_of(home, features, f"{key}-2", TRAIN, model_of(loss))
    for r in run_ranks(2, lambda collective: train(two, collective)):
        np.testing.assert_allclose([p["loss"] for p in r.curve], [p["loss"] for p in report.curve], rtol=1e-4)


def test_candidates_by_the_specs_loss(home: Workspace, features: Manifest) -> None:
    """The class of tests.plugin_models without the loss of its own."""
    negatives = Negatives.model_validate({"column": "item", "as": "candidates", "per_positive": 8})
    settings = TRAIN.model_copy(update={"negatives": negatives})
    shape = Model.model_validate(
        {"class": "tests.plugin_models:Drawn", "embedding_dim": 4, "loss": {"kind": "bpr", "hardest": 3}}
    )
    job = job_of(home, features, "drawn", settings, shape)
    report = train_local(job)
    losses = [p["loss"] for p in report.curve]
    assert np.mean(losses[10:]) < np.mean(losses[:10])
    user_class = Model.model_validate({"class": "tests.plugin_models:Compared", "embedding_dim": 4, "loss": "bpr"})
    with pytest.raises(UserError, match="has a loss of its own; leave it out"):
        train_local(job_of(home, features, "own", settings, user_class))


def test_a_list_column_that_is_not_there(home: Workspace, features: Manifest) -> None:
    job = job_of(home, features, "no-list", TRAIN, model_of({"kind": "rank_net", "group": "session"}))
    with pytest.raises(UserError, match=r"model\.loss\.group: the dataset does not carry 'session'"):
        train_local(job)
