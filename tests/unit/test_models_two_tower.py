"""Two towers beside their papers' formulas, written row by row in float64; on one rank and on two."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from headrace.comm.base import run_ranks
from headrace.config import Evaluation, Model, Negatives
from headrace.config.model_args import TwoTowerArgs
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.sharded_model import all_gather_rows
from headrace.models.two_tower import TwoTower
from headrace.stage.manifest import Manifest
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, job_of

USERS, ITEMS, D, ROWS, DRAWN = 6, 9, 4, 8, 5
TAGS = {"user": ("user",), "age": ("user",), "item": ("item",), "price": ("item",), "brand": ("item",)}
FEATURES = InputFeatures(
    {"age": 1, "price": 2},
    ("user", "item", "brand"),
    D,
    cardinality={"user": USERS, "item": ITEMS, "brand": 3},
    first_code=dict.fromkeys(("user", "item", "brand"), 2),
    tags=TAGS,
)
BASE: dict[str, Any] = {"item": "item", "user_mlp": (7,), "item_mlp": (5, 6), "dim": 3, "temperature": 0.5}
ID_ALONE: dict[str, Any] = {**BASE, "item_features": ("item",)}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "in batch": (BASE, False),
    "without correction": ({**BASE, "log_q": False, "normalize": False}, False),
    "mixed": ({**ID_ALONE, "drawn": True}, True),
    "mixed, for each row": ({**ID_ALONE, "drawn": True}, False),
    "drawn alone": ({**ID_ALONE, "drawn": True, "in_batch": False}, False),
    "hard": ({**ID_ALONE, "drawn": True, "hard": 2}, False),
    "hard of shared": ({**ID_ALONE, "drawn": True, "hard": 2, "in_batch": False}, True),
}


class Batch:
    """A step's rows, and the tables that they look up, the same on all ranks."""

    def __init__(self, shared: bool) -> None:
        rng = np.random.default_rng(3)
        self.ids = {n: rng.integers(0, c or 0, ROWS) for n, c in FEATURES.cardinality.items()}
        self.ids["item"][:3] = 4  # an item of several rows
        self.drawn = rng.integers(2, ITEMS, DRAWN if shared else (ROWS, DRAWN))
        self.drawn.flat[0] = self.ids["item"][0]  # a drawn one that is the row's own
        self.numbers = rng.normal(size=(ROWS, 3)).astype(np.float32)
        self.labels = np.array([1, 1, 0, 1, 1, 1, 0, 1], np.float32)
        self.weights = (rng.random(ROWS) + 0.5).astype(np.float32)
        self.tables = {n: rng.normal(size=(c or 0, D)).astype(np.float32) for n, c in FEATURES.cardinality.items()}
        shares = {draw: rng.random(ITEMS) for draw in ("positives", "negatives")}
        self.log_q = {draw: np.log(x / x.sum()).astype(np.float32) for draw, x in shares.items()}

    def inputs(self, network: TwoTower, tables: dict[str, Tensor], local_rows: slice, **ranks: Any) -> Inputs:
        ids = {n: torch.from_numpy(x[local_rows]) for n, x in self.ids.items()}
        drawn = torch.from_numpy(self.drawn if self.drawn.ndim == 1 else self.drawn[local_rows])
        embeddings = {
            w.name: tables[w.feature][drawn if w.ids == "negatives" else ids[w.feature]] for w in network.lookups
        }
        return Inputs(
            FEATURES,
            torch.from_numpy(self.numbers[local_rows]),
            torch.zeros(0),
            torch.from_numpy(self.labels[local_rows]),
            torch.from_numpy(self.weights[local_rows]),
            embeddings=embeddings,
            ids=ids,
            negatives=drawn,
            log_share=lambda feature, draw: torch.from_numpy(self.log_q[draw]),
            **ranks,
        )


def network_of(args: dict[str, Any]) -> TwoTower:
    torch.manual_seed(0)
    return TwoTower(FEATURES, TwoTowerArgs.model_validate(args))


def of_rank(original: TwoTower, batch: Batch, collective: Any = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients of a rank; alone, or of its half of the rows."""
    network = copy.deepcopy(original)
    tables = {n: torch.from_numpy(x).clone().requires_grad_() for n, x in batch.tables.items()}
    local_rows, ranks = slice(0, ROWS), {}
    if collective is not None:
        local_rows = slice(0, 6) if collective.world.rank == 0 else slice(6, ROWS)
        ranks = {"all_gather": partial(all_gather_rows, collective=collective), "rank": collective.world.rank}
    inputs = batch.inputs(network, tables, local_rows, **ranks)
    outputs = network(inputs)
    loss = network.loss(outputs, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in network.named_parameters()} | {n: t.grad for n, t in tables.items()}
    table_gradients = {n: torch.zeros(0) if g is None else g for n, g in gradients.items()}
    return outputs["logits"].detach(), loss.detach(), table_gradients


def tower(w: dict[str, Tensor], name: str, x: Tensor, args: TwoTowerArgs) -> Tensor:
    layers = len(args.user_mlp if name == "user_tower" else args.item_mlp)
    for i in range(layers + 1):
        x = w[f"{name}.layers.{2 * i}.weight"] @ x + w[f"{name}.layers.{2 * i}.bias"]
        x = torch.clamp(x, min=0) if i < layers else x
    return x / (x @ x).sqrt() if args.normalize else x


def by_rows(args: dict[str, Any], batch: Batch) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """The same in float64, one row and one compared item at a time."""
    settings, network = TwoTowerArgs.model_validate(args), network_of(args)
    w = {n: p.detach().double().requires_grad_() for n, p in network.named_parameters()}
    tables = {n: torch.from_numpy(x).double().requires_grad_() for n, x in batch.tables.items()}
    numbers = torch.from_numpy(batch.numbers).double()
    has_item_features = "item_features" in args

    def user(row: int) -> Tensor:
        return tower(w, "user_tower", torch.cat([numbers[row, :1], tables["user"][batch.ids["user"][row]]]), settings)

    def item(row: int) -> Tensor:
        parts = [tables["item"][batch.ids["item"][row]]]
        if not has_item_features:
            parts = [numbers[row, 1:], *parts, tables["brand"][batch.ids["brand"][row]]]
        return tower(w, "item_tower", torch.cat(parts), settings)

    positives = [r for r in range(ROWS) if batch.labels[r]]

    def correction(code: int) -> float:
        if not settings.log_q:
            return 0.0
        expected = len(positives) * math.exp(batch.log_q["positives"][code]) if settings.in_batch else 0.0
        return math.log(expected + (DRAWN * math.exp(batch.log_q["negatives"][code]) if settings.drawn else 0.0))

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return a @ b / settings.temperature

    total = torch.zeros((), dtype=torch.float64)
    for r in positives:
        target, q = int(batch.ids["item"][r]), user(r)
        first = dot(q, item(r)) - correction(target)
        negative_logits = []
        if settings.in_batch:
            codes = [(o, int(batch.ids["item"][o])) for o in positives]
            negative_logits += [dot(q, item(o)) - correction(c) for o, c in codes if c != target]
        if settings.drawn:
            codes = (batch.drawn if batch.drawn.ndim == 1 else batch.drawn[r]).tolist()
            scored = [
                dot(q, tower(w, "item_tower", tables["item"][c], settings)) - correction(c)
                for c in codes
                if c != target
            ]
            negative_logits += sorted(scored, key=lambda x: -x.item())[: settings.hard]
        total = total + float(batch.weights[r]) * (torch.stack([first, *negative_logits]).logsumexp(0) - first)
    total.backward()
    logits = [dot(user(r), item(r)).item() for r in range(ROWS)]
    return logits, total.detach(), {n: t.grad for n, t in (w | tables).items() if t.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_outputs_loss_and_gradients_equal_a_loop_on_one_rank_and_two(case: str) -> None:
    args, shared = CASES[case]
    batch = Batch(shared)
    logits, loss, gradients = by_rows(args, batch)
    network = network_of(args)
    one_rank = of_rank(network, batch)
    halves = run_ranks(2, lambda collective: of_rank(network, batch, collective))
    two = (torch.cat([h[0] for h in halves]), halves[0][1] + halves[1][1])
    for result in (one_rank[:2], two):
        torch.testing.assert_close(result[0].double(), torch.tensor(logits).double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result[1].double(), loss, rtol=1e-5, atol=1e-5)
    for name, expected in gradients.items():
        torch.testing.assert_close(one_rank[2][name].double(), expected, rtol=1e-4, atol=1e-5, msg=f"{case}: {name}")
        summed = sum((h[2][name] for h in halves if len(h[2][name])), torch.zeros(()))
        torch.testing.assert_close(summed.double(), expected, rtol=1e-4, atol=1e-5, msg=f"{case}, 2 ranks: {name}")


def test_a_step_without_positive_rows_adds_nothing() -> None:
    batch = Batch(shared=False)
    batch.labels[:] = 0
    assert float(of_rank(network_of(BASE), batch)[1]) == 0


def test_features_are_those_that_are_tagged() -> None:
    network = network_of(BASE)
    assert network.item_features == ("item", "price", "brand")
    assert (network.user_tower.continuous, network.user_tower.categorical) == (["age"], ["user"])
    assert [w.name for w in network.lookups] == ["user", "item", "brand"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({**BASE, "drawn": True}, "drawn items are known by their code alone, and items here have price, brand too"),
        ({**BASE, "user_features": ("usr",)}, "no feature 'usr'; did you mean 'user'"),
    ],
)
def test_towers_that_cannot_be_built_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        network_of(args)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValidationError, match="nothing to compare"):
        TwoTowerArgs(in_batch=False)
    with pytest.raises(ValidationError, match="`hard` is of drawn items"):
        TwoTowerArgs(hard=3)
    with pytest.raises(UserError, match=r"model\.args\.item: 'item' is no categorical feature, of one id a row"):
        TwoTower(replace(FEATURES, lists=("item",)), TwoTowerArgs(**BASE))
    with pytest.raises(UserError, match="tag them"):
        TwoTower(InputFeatures({}, ("item",), 4), TwoTowerArgs(item="item"))


def test_it_learns_what_users_like(tmp_path: Any, make_dataset: Callable[..., Manifest]) -> None:
    """The model learns on one rank and on two: clicked items rank better than by chance."""
    home = Workspace(tmp_path)
    features = make_dataset(home, train=3_000, valid=600, groups=16)
    args = {"item": "item", "user_features": ["user"], "item_mlp": [8], "user_mlp": [8], "drawn": True}
    model = Model.model_validate({"class": "two_tower", "embedding_dim": 8, "args": args})
    conf = TRAIN.model_copy(
        update={
            "epochs": 3,
            "monitor": "ndcg_at_10_full",
            "negatives": Negatives.model_validate(
                {"column": "item", "as": "candidates", "per_positive": 20, "shared": True}
            ),
            "evaluation": Evaluation.model_validate({"full_ranking": {"k": 10}}),
        }
    )
    one_rank = train_local(job_of(home, features, "one", conf, model))
    two_ranks = run_ranks(2, lambda collective: train(job_of(home, features, "two", conf, model), collective))
    assert one_rank.metrics["hr_at_10_full"] is not None
    assert one_rank.metrics["hr_at_10_full"] > 0.33  # 10 of 38 by chance
    assert [p["loss"] for p in two_ranks[0].curve] == pytest.approx([p["loss"] for p in one_rank.curve], rel=1e-3)
    assert two_ranks[0].metrics["ndcg_at_10_full"] == pytest.approx(one_rank.metrics["ndcg_at_10_full"], abs=0.02)
