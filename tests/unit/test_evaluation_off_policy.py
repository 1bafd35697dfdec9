"""Values of a policy against plain loops, and against the true value of generated logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.comm.base import run_ranks
from headrace.config.evaluation import OffPolicy
from headrace.config.schema import Feature, Kind
from headrace.dataset.layout import RowGroup, SplitLayout
from headrace.errors import UserError
from headrace.storage import local
from headrace.train.evaluation.bootstrap import Bootstrap
from headrace.train.evaluation.policy import Actions, Choices, Policy, find_actions, off_policy_metrics
from headrace.train.evaluation.ranks import Dimension, Ranks, ScoredRows, sigmoid
from tests.evaluation_support import on_any_ranks, rows_of

ACTIONS = Actions("item", np.array([2, 3, 5, 9]))
BOOTSTRAP = Bootstrap(replicates=30, seed=2)


def policy(**settings: Any) -> Policy:
    return Policy(OffPolicy(propensity="p", action="item", **settings), ACTIONS)


def test_estimators_equal_plain_loops_on_any_number_of_ranks() -> None:
    rng = np.random.default_rng(0)
    n = 200
    p, reward, q = rng.uniform(0.05, 1, n), rng.integers(0, 3, n).astype(float), rng.random(n)
    choices = Choices(rng.random(n) * (rng.random(n) < 0.8), rng.random(n))
    users, part = rng.integers(0, 25, n), rng.integers(-1, 2, n)
    rows = rows_of(q, np.zeros(n), users, [part, np.arange(n)])

    def evaluate(ranks: Ranks, local_rows: ScoredRows) -> Any:
        codes, row = local_rows.slices
        return off_policy_metrics(
            ranks,
            Choices(choices.chosen[row], choices.expected[row]),
            p[row],
            reward[row],
            q[row],
            max_weight=4.0,
            users=local_rows.users,
            slices=[codes],
            dimensions=[Dimension("part", ("a", "b"))],
            bootstrap=BOOTSTRAP,
        )

    overall, sliced = on_any_ranks(rows, evaluate)
    for values, column, chosen in [(overall, 0, part > -2), (sliced, 0, part == 0), (sliced, 1, part == 1)]:
        for replicate in (0, 1, 30):
            times = BOOTSTRAP.counts(users, replicate)
            total = dict.fromkeys(("n", "r", "w", "wr", "ww", "dm", "dr"), 0.0)
            for i in np.flatnonzero(chosen):
                for _ in range(times[i]):
                    w = min(choices.chosen[i] / p[i], 4.0)
                    total["n"] += 1
                    total["r"] += reward[i]
                    total["w"] += w
                    total["ww"] += w * w
                    total["wr"] += w * reward[i]
                    total["dm"] += choices.expected[i]
                    total["dr"] += choices.expected[i] + w * (reward[i] - q[i])
            expected = {
                "logged_value": total["r"] / total["n"],
                "ips": total["wr"] / total["n"],
                "snips": total["wr"] / total["w"],
                "dm": total["dm"] / total["n"],
                "dr": total["dr"] / total["n"],
                "effective_sample_size": total["w"] ** 2 / total["ww"],
            }
            assert {m: v[replicate, column] for m, v in values.items()} == pytest.approx(expected, rel=1e-9)


def generated(n: int, seed: int, wrong: float = 0.0) -> tuple[float, Choices, np.ndarray, np.ndarray, np.ndarray]:
    """Return a log of a known policy, the true value of another, and the choices of that one.

    wrong: how far the model's logits are from the true ones.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    taste = np.array([0.8, -0.5, 0.1, 1.5])
    true = sigmoid(x[:, None] * taste - 0.5)
    logging = np.exp(0.5 * x[:, None] * taste[::-1])
    logging /= logging.sum(1, keepdims=True)
    drawn = (rng.random(n)[:, None] > logging.cumsum(1)).sum(1)
    reward = (rng.random(n) < true[np.arange(n), drawn]).astype(float)
    logits = x[:, None] * taste - 0.5 + wrong * np.array([1.0, -1.0, 0.5, 0.0])
    by_code = dict(zip(ACTIONS.codes.tolist(), logits.T, strict=True))
    choices = policy(temperature=0.5).choose(ACTIONS.codes[drawn], lambda values: by_code[values["item"]])
    share = np.exp(logits / 0.5)
    share /= share.sum(1, keepdims=True)
    truth = float((share * true).sum(1).mean())
    return truth, choices, logging[np.arange(n), drawn], reward, sigmoid(logits)[np.arange(n), drawn]


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_estimators_hold_the_true_value_within_their_intervals(wrong: float) -> None:
    bootstrap = Bootstrap(replicates=100, seed=1, confidence=0.99)
    truth, choices, p, reward, q = generated(20_000, seed=4, wrong=wrong)
    (estimates,) = off_policy_metrics(Ranks(), choices, p, reward, q, users=np.arange(len(p)), bootstrap=bootstrap)
    for name in ("ips", "snips", "dr"):
        ends = bootstrap.interval(estimates[name][:, 0])
        assert ends is not None
        assert ends[0] < truth < ends[1], name
        assert ends[1] - ends[0] < 0.05
    # With the true reward model the direct method has the value itself; with a wrong one it is off, and dr is not.
    assert (abs(estimates["dm"][0, 0] - truth) < 1e-12) == (wrong == 0)
    assert abs(estimates["dr"][0, 0] - truth) < 0.02
    assert estimates["logged_value"][0, 0] == pytest.approx(reward.mean())
    widths = {n: np.ptp(np.quantile(estimates[n][1:, 0], [0.05, 0.95])) for n in ("ips", "dr")}
    assert widths["dr"] < widths["ips"]


def test_a_perfect_reward_model_makes_dr_the_models_value() -> None:
    rng = np.random.default_rng(1)
    q = rng.random(50)
    choices = Choices(rng.random(50), rng.random(50))
    (estimates,) = off_policy_metrics(Ranks(), choices, np.full(50, 0.3), q, q)
    assert estimates["dr"][0, 0] == pytest.approx(estimates["dm"][0, 0], abs=1e-15)
    # The policy that logged has its own value, by each estimator.
    (same,) = off_policy_metrics(Ranks(), Choices(np.full(50, 0.3), q), np.full(50, 0.3), q, q)
    assert [same[m][0, 0] for m in ("ips", "snips")] == pytest.approx([q.mean()] * 2)
    assert same["effective_sample_size"][0, 0] == pytest.approx(50)


def test_choices_of_policies() -> None:
    logits = {2: [0.0, 1.0, -800.0], 3: [0.0, 1.0, 800.0], 5: [-1.0, 1.0, 0.0], 9: [0.0, 1.0, 0.0]}
    logged = np.array([2, 9, 4])  # 4 is no known action
    greedy = policy(policy="greedy").choose(logged, lambda v: np.array(logits[v["item"]]))
    assert greedy.chosen.tolist() == [1, 0, 0]  # of equal ones the first
    assert greedy.expected == pytest.approx([0.5, sigmoid(np.array(1.0)), 1.0])
    soft = policy(temperature=2.0).choose(logged, lambda v: np.array(logits[v["item"]]))
    assert soft.chosen == pytest.approx([1 / (3 + np.exp(-0.5)), 0.25, 0.0])
    assert len(greedy.chosen) == len(policy().choose(np.zeros(3, np.int64), lambda v: np.zeros(3)).chosen)
    empty = policy().choose(np.zeros(0, np.int64), lambda v: np.zeros(0, np.float32))
    assert (len(empty.chosen), len(empty.expected)) == (0, 0)


@pytest.mark.parametrize(
    ("p", "r", "message"), [(0.0, 1.0, "in 1 of 3 rows"), (1.5, 1.0, "not above 0"), (0.5, np.nan, "not finite in 1")]
)
def test_rows_that_have_no_weight_are_refused(p: float, r: float, message: str) -> None:
    ones = np.ones(3)
    with pytest.raises(UserError, match=message):
        off_policy_metrics(Ranks(), Choices(ones, ones), np.array([0.5, p, 1]), np.array([0.0, r, 1]), ones)


def test_expectations_that_are_not_finite_are_refused() -> None:
    ones = np.ones(3)
    with pytest.raises(UserError, match="1 of 3 predictions are not finite"):
        off_policy_metrics(Ranks(), Choices(ones, np.array([0.5, np.nan, 1])), ones, ones, ones)


def split_of(folder: Path, parts: list[dict[str, list[Any]]]) -> SplitLayout:
    groups = []
    for i, part in enumerate(parts):
        pq.write_table(
            pa.table({n: np.array(v, np.float32 if n == "price" else np.int32) for n, v in part.items()}),
            folder / f"{i}.parquet",
        )
        groups.append(RowGroup(i, local(folder / f"{i}.parquet"), 0, len(part["item"])))
    return SplitLayout("train", tuple(g.path for g in groups), tuple(groups))


def test_actions_of_the_split_train_and_what_follows_from_them(tmp_path: Path) -> None:
    item = Feature(name="item", kind=Kind.CATEGORICAL, dtype="int32", cardinality=12)
    price = Feature(name="price", kind=Kind.CONTINUOUS, dtype="float32")
    brand = Feature(name="brand", kind=Kind.CATEGORICAL, dtype="int32", cardinality=4)
    layout = split_of(
        tmp_path,
        [
            {"item": [9, 1, 9, 4], "price": [0.1, 7, 0.1, -2.5], "brand": [3, 1, 3, 2]},
            {"item": [0, 4, 1], "price": [0, -2.5, 8], "brand": [0, 2, 1]},
            {"item": [9, 11], "price": [0.1, np.nan], "brand": [3, 0]},
        ],
    )
    for size in (1, 2, 4):
        for actions in run_ranks(size, lambda c: find_actions(Ranks(c), layout, item, [price, brand])):
            assert actions.codes.tolist() == [4, 9, 11]  # 0 and 1 are no values
            assert actions.values(9) == {"item": 9, "price": pytest.approx(np.float32(0.1)), "brand": 3}
            assert actions.values(4) == {"item": 4, "price": -2.5, "brand": 2}
            assert np.isnan(actions.values(11)["price"])
    differing = split_of(tmp_path, [{"item": [9, 1], "price": [1, 1]}, {"item": [2, 9], "price": [1, 2]}])
    for size in (1, 2):
        with pytest.raises(UserError, match="'price' differs among rows with the same 'item'"):
            run_ranks(size, lambda c: find_actions(Ranks(c), differing, item, [price]))
