"""Experiments: their settings in the spec, and the arms of users."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.quality.experiments.comparison import (
    Arm,
    ArmDifference,
    always_valid_interval,
    always_valid_p,
    chi_square_tail,
    difference,
    sample_ratio_p,
)
from headrace.score.assignment import arms, bucket
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

USERS = pa.array(range(200_000), pa.int64())
HALVES = {"a": 0.5, "b": 0.5}


def test_arms_have_their_shares_and_are_independent_between_experiments() -> None:
    codes = arms(USERS, "one", {"a": 0.2, "b": 0.3, "c": 0.5}, 100)
    counts = np.bincount(codes)
    assert stats.chisquare(counts, np.array([0.2, 0.3, 0.5]) * len(USERS)).pvalue > 1e-4
    two = arms(USERS, "two", HALVES, 100)
    table = np.array([[((codes == i) & (two == j)).sum() for j in range(2)] for i in range(3)])
    assert stats.chi2_contingency(table).pvalue > 1e-4
    assert (codes == arms(USERS, "one", {"a": 0.2, "b": 0.3, "c": 0.5}, 100)).all()


def test_a_ramp_keeps_everybody_in_his_arm() -> None:
    steps = [arms(USERS, "look", HALVES, percent) for percent in (0, 1, 10, 50, 100)]
    assert (steps[0] == -1).all()
    for earlier, later in itertools.pairwise(steps):
        assigned = earlier >= 0
        assert (later[assigned] == earlier[assigned]).all()
    assert [(s >= 0).mean() for s in steps] == pytest.approx([0, 0.01, 0.1, 0.5, 1], abs=0.003)
    # Who takes part says nothing about the arm.
    assert (steps[2][steps[2] >= 0] == 0).mean() == pytest.approx(0.5, abs=0.02)


def test_places_are_those_of_sparks_hash_of_both_columns() -> None:
    seed = xxhash64_strings(pa.array(["salt"] * 3))
    assert bucket(pa.array([1, 2, -3]), "salt").tolist() == [
        int(h) % 10_000 for h in xxhash64_integers(np.array([1, 2, -3]), seed)
    ]
    texts = pa.array(["u1", "u2", "é"])
    assert bucket(texts, "salt").tolist() == [int(h) % 10_000 for h in xxhash64_strings(texts, seed)]


@given(st.floats(0, 500), st.integers(1, 30))
def test_the_tail_is_that_of_chi_square(x: float, degrees: int) -> None:
    assert chi_square_tail(x, degrees) == pytest.approx(stats.chi2.sf(x, degrees), rel=1e-9, abs=1e-300)


def test_a_sample_ratio_that_is_off_is_seen() -> None:
    assert sample_ratio_p([5000, 5100], [0.5, 0.5]) == pytest.approx(stats.chisquare([5000, 5100]).pvalue)
    assert sample_ratio_p([50_000, 51_000], [0.5, 0.5]) < 0.002
    assert sample_ratio_p([2000, 3000, 5000], [0.2, 0.3, 0.5]) == 1
    assert sample_ratio_p([0, 0], [0.5, 0.5]) == 1


def test_a_difference_of_means_is_welchs() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(1, 2, 500), rng.normal(1.3, 3, 700)
    result = difference(Arm(a), Arm(b))
    welch = stats.ttest_ind(b, a, equal_var=False)
    assert result.estimate == pytest.approx(b.mean() - a.mean())
    assert result.estimate / math.sqrt(result.variance) == pytest.approx(welch.statistic)
    low, high = result.interval()
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(result.variance), rel=1e-5)
    assert result.variance_ratio == 1
    with pytest.raises(ValueError, match="two users"):
        difference(Arm(a[:1]), Arm(b))


def _visits(rng: np.random.Generator, n: int, effect: float) -> tuple[Arm, np.ndarray]:
    """Draw users with rates of their own and 1 to 30 impressions; their earlier clicks tell of their rates."""
    rate = rng.beta(2, 8, n)
    views, earlier = rng.integers(1, 30, n), rng.integers(5, 30, n)
    clicks = rng.binomial(views, np.clip(rate + effect, 0, 1)).astype(np.float64)
    known_rate = rng.binomial(earlier, rate) / earlier
    return Arm(clicks, views.astype(np.float64), known_rate), rate


def test_ratios_vary_as_their_variance_says_and_less_with_what_was_known() -> None:
    rng = np.random.default_rng(2)
    plain, adjusted, variances, ratios = [], [], [], []
    for _ in range(400):
        (a, _), (b, _) = _visits(rng, 400, 0.0), _visits(rng, 400, 0.02)
        first, second = difference(Arm(a.above, a.below), Arm(b.above, b.below)), difference(a, b)
        plain.append(first.estimate)
        adjusted.append(second.estimate)
        variances.append((first.variance, second.variance))
        ratios.append(second.variance_ratio)
    claimed = np.mean(variances, axis=0)
    assert np.var(plain) == pytest.approx(claimed[0], rel=0.25)
    assert np.var(adjusted) == pytest.approx(claimed[1], rel=0.25)
    assert np.mean(adjusted) == pytest.approx(0.02, abs=4 * math.sqrt(claimed[1] / 400))
    assert np.mean(ratios) < 0.8
    assert np.mean(ratios) == pytest.approx(claimed[1] / claimed[0], rel=0.05)


@given(st.floats(-1, 1), st.floats(1e-6, 1), st.floats(1e-3, 1))
def test_the_interval_has_no_effect_that_is_rejected(estimate: float, variance: float, scale: float) -> None:
    result = ArmDifference(0.0, estimate, estimate, variance, 1.0)
    low, high = always_valid_interval(result, scale)
    p = always_valid_p(result, scale)
    if abs(p - 0.05) > 1e-9:
        assert (low <= 0 <= high) == (p > 0.05)
    assert low < result.interval()[0]
    assert high > result.interval()[1]


def test_false_alarms_of_daily_looks_stay_below_five_per_cent() -> None:
    """1,000 tests without an effect, looked at on each of 12 days; users come back, each with a rate of his own.

    The interval of one look, looked at as often, is wrong far more often.
    """
    rng = np.random.default_rng(3)
    runs, days, users = 1000, 12, 150
    alarms = naive = 0
    for _ in range(runs):
        rate = rng.beta(2, 8, (2, users))
        # Each comes on a third of the days, and is shown ten items.
        views = 10.0 * (rng.random((days, 2, users)) < 1 / 3)
        clicks = np.cumsum(rng.binomial(views.astype(np.int64), rate), axis=0).astype(np.float64)
        views = np.cumsum(views, axis=0)
        looks = []
        for day in range(days):
            has_views = [views[day, arm] > 0 for arm in range(2)]
            arms_of_day = [Arm(clicks[day, arm][has_views[arm]], views[day, arm][has_views[arm]]) for arm in range(2)]
            looks.append(difference(*arms_of_day))
        alarms += min(always_valid_p(look, 0.02) for look in looks) < 0.05
        naive += any(not look.interval()[0] <= 0 <= look.interval()[1] for look in looks)
    noise = 3 * math.sqrt(0.05 * 0.95 / runs)
    assert alarms / runs <= 0.05 + noise
    assert naive / runs > 0.1


def test_an_effect_is_found_and_sooner_when_it_is_larger() -> None:
    rng = np.random.default_rng(4)
    stopped = {}
    for effect in (0.03, 0.08):
        first = []
        for _ in range(40):
            rates = [rng.beta(20, 80, 4000), rng.beta(20, 80, 4000) + effect]
            values = [rng.binomial(10, r) / 10 for r in rates]
            looks = [difference(Arm(values[0][:n]), Arm(values[1][:n])) for n in range(200, 4001, 200)]
            first.append(next((i for i, d in enumerate(looks) if always_valid_p(d, 0.05) < 0.05), 99))
        stopped[effect] = float(np.median(first))
    assert stopped[0.08] < stopped[0.03] < 99


ARMS = "arms: {champion: {}, weak: {model: baseline}}"


def test_defaults_are_equal_shares_of_everybody_against_the_first_arm() -> None:
    spec = load_spec("clicks", ["outcomes={}", f"experiments={{ranker: {{{ARMS}}}}}"])
    assert spec.experiments is not None
    experiment = spec.experiments["ranker"]
    assert (experiment.shares, experiment.control_arm, experiment.treatments) == (
        {"champion": 0.5, "weak": 0.5},
        "champion",
        ("weak",),
    )
    assert experiment.has_models
    assert experiment.live("1999-01-01")
    assert spec.scored_by("baseline").score.model == "baseline"  # type: ignore[union-attr]
    assert spec.scored_by("baseline").experiments is None


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ("{arms: {a: {}}}", "at least 2 items"),
        ("{arms: {a: {share: 0.5}, b: {}}}", "give each arm a share, or none of them"),
        ("{arms: {a: {share: 0.5}, b: {share: 0.4}}}", "the shares' sum is 0.9, not 1"),
        ("{arms: {a: {share: 0.99999}, b: {share: 0.00001}}}", "shares are kept to 0.0001"),
        ("{arms: {a: {}, B: {}}}", "'B' must match"),
        (f"{{{ARMS}, control: strong}}", "control: 'strong' is none of arms"),
        (f"{{{ARMS}, start: 2026-01-09, end: 2026-01-08}}", "end is 2026-01-08, before start"),
        (f"{{{ARMS}, start: yesterday}}", "is not a date"),
        (f"{{{ARMS}, label: clik}}", "'clik' is none of outcomes.labels (click); did you mean 'click'?"),
        ("{arms: {a: {}, b: {model: second_stage}}}", "arms.b.model: score.model is 'second_stage', and there is no"),
        ("{arms: {a: {}, b: {model: best one}}}", "arms.b.model"),
    ],
)
def test_faults_are_named(experiment: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_spec("clicks", ["outcomes={}", f"experiments={{ranker: {experiment}}}"])
    assert message in str(error.value)


def test_other_sections_must_fit() -> None:
    with pytest.raises(UserError, match="add the section `outcomes`"):
        load_spec("clicks", [f"experiments={{ranker: {{{ARMS}}}}}"])
    with pytest.raises(UserError, match="'ranker' is the salt of 'ranker'"):
        load_spec("clicks", ["outcomes={}", f"experiments={{ranker: {{{ARMS}}}, other: {{{ARMS}, salt: ranker}}}}"])
