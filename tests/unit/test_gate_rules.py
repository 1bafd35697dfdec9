"""Rules of the gate, and conditions over metrics: against Python's own arithmetic, and what is never accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Gate, load_spec
from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.config.gate import MetricExpression, UndefinedMetric
from headrace.errors import UserError
from headrace.quality.gate.predictions import SCORE_BINS, coarse_counts, score_counts
from headrace.quality.gate.rules import PASSED, REFUSED, GateRule, judge, verdict_of

MODEL = {
    "metrics": {"auc": 0.72, "log_loss": 0.45, "calibration": 1.04, "calibration_error": 0.01, "user_auc": None},
    "own_metrics": {"auc": 0.5, "ndcg_at_k": 0.3},
    "finite": 999,
    "known": {"item_id": [1000, 950], "empty": [0, 0]},
    "bytes": 3000,
    "batch_ms": 5.0,
    "rows_per_second": 200_000.0,
}


def evaluated(**more: Any) -> dict[str, Any]:
    champion = {"metrics": {"auc": 0.73, "log_loss": 0.44}, "bytes": 2000}
    differences = {
        "auc": {"value": -0.01, "low": -0.015, "high": -0.005, "p": 0.01},
        "log_loss": {"value": 0.01, "low": 0.004, "high": 0.016, "p": 0.01},
        "user_auc": None,
    }
    slices = [
        {"slice": "country", "value": value, "rows": rows, "differences": {"auc": difference}}
        for value, rows, difference in (
            ("ch", 800, {"value": -0.02, "low": -0.03, "high": -0.01, "p": 0.0}),
            ("li", 20, {"value": -0.5, "low": -0.6, "high": -0.4, "p": 0.0}),
            ("at", 180, None),
        )
    ]
    facts = {"model": MODEL, "champion": champion, "note": "", "rows": 1000, "differences": differences}
    return {**facts, "slices": slices, "score_psi": 0.12, **more}


def only(gate: dict[str, Any], **more: Any) -> list[GateRule]:
    """All rules but that every prediction is a number."""
    drift = {
        "over_limit": 2,
        "columns": [
            {"side": "event", "column": "price", "psi": 0.3, "max_psi": 0.25},
            {"side": "event", "column": "rare", "psi": 9.0, "max_psi": None},
        ],
    }
    results = judge(Gate.model_validate(gate), evaluated(**more), drift)
    return [r for r in results if r.key != "gate.coverage.min_finite"]


@pytest.mark.parametrize(
    ("gate", "value", "margin"),
    [
        ({"metrics": {"auc": {"min": 0.7}}}, 0.72, 0.02),
        ({"metrics": {"auc": {"min": 0.75}}}, 0.72, -0.03),
        ({"metrics": {"log_loss": {"max": 0.5}}}, 0.45, 0.05),
        ({"metrics": {"ndcg_at_k": {"max": 0.2}}}, 0.3, -0.1),
        ({"champion": {"auc": 0.02}}, -0.01, 0.005),
        ({"champion": {"auc": 0.012}}, -0.01, -0.003),
        ({"champion": {"auc": {"by": 0.012, "bound": "value"}}}, -0.01, 0.002),
        ({"champion": {"auc": {"by": 0.006, "bound": "high"}}}, -0.01, 0.001),
        # A lower loss is the better one: its interval is turned over.
        ({"champion": {"log_loss": 0.01}}, -0.01, -0.006),
        ({"champion": {"log_loss": {"by": 0.005, "bound": "high"}}}, -0.01, 0.001),
        ({"calibration": {"max_error": 0.008}}, 0.01, -0.002),
        ({"coverage": {"min_rows": 1001}}, 1000, -1),
        ({"coverage": {"min_known": {"item_id": 0.9}}}, 0.95, 0.05),
        ({"drift": {"max_psi": 0.25}}, 0.3, -0.05),
        ({"drift": {"max_columns": 2}}, 2, 0),
        ({"drift": {"max_score_psi": 0.1}}, 0.12, -0.02),
        ({"size": {"max_bytes": 2999}}, 3000, -1),
        ({"size": {"max_growth": 1.6}}, 1.5, 0.1),
        ({"latency": {"min_rows_per_second": 1e5}}, 2e5, 1e5),
        ({"latency": {"max_batch_ms": 4}}, 5, -1),
    ],
)
def test_a_figure_beside_its_limit(gate: dict[str, Any], value: float, margin: float) -> None:
    (rule,) = only(gate)
    assert (rule.value, rule.margin) == (pytest.approx(value), pytest.approx(margin))
    assert rule.passed == (margin >= 0)
    assert rule.key.split(".")[1] in gate
    assert verdict_of([rule]) == (PASSED if margin >= 0 else REFUSED)
    assert ("below" in rule.text or "wrong side" in rule.text) == (margin < 0)


def test_ratio_has_two_sides() -> None:
    assert [r.passed for r in only({"calibration": {"ratio": [0.9, 1.1]}})] == [True, True]
    assert [r.passed for r in only({"calibration": {"ratio": [1.05, 1.1]}})] == [False, True]


def test_slices_small_ones_left_out() -> None:
    by_value = {r.figure.split(" = ")[1].split()[0]: r for r in only({"slices": {"auc": 0.005}})}
    assert {value: r.passed for value, r in by_value.items()} == {"ch": False, "li": None, "at": None}
    assert by_value["ch"].margin == pytest.approx(-0.005)
    assert "20 rows" in by_value["li"].text
    assert only({"slices": {"auc": {"by": 0.005, "of": ["age"]}}}) == []
    assert verdict_of(only({"slices": {"auc": {"by": 0.011, "min_rows": 10}}})) == REFUSED


def test_predictions_that_are_no_numbers_are_always_refused() -> None:
    (rule,) = judge(Gate(), evaluated(), None)
    assert (rule.key, rule.value, rule.passed) == ("gate.coverage.min_finite", 0.999, False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"champion": None}, "there is no champion yet"),
        ({"note": "it reads 'x'"}, "cannot predict the day's rows: it reads 'x'"),
    ],
)
def test_without_a_champion_what_is_held_against_it_decides_nothing(more: dict[str, Any], message: str) -> None:
    gate = {
        "champion": {"auc": 0},
        "slices": {"auc": 0},
        "drift": {"max_score_psi": 0},
        "size": {"max_growth": 0.1},
        "rules": {"better": "auc > champion.auc", "good": "auc > 0.9"},
    }
    results = only(gate, **more)
    assert [r.passed for r in results] == [None] * 5 + [False]
    assert all(message in r.text for r in results[:5])


REQUESTED = {
    "metrics": {"auc": {"min": 0.5}},
    "champion": {"auc": 0.1},
    "slices": {"auc": 0.1},
    "calibration": {"ratio": [0.5, 2]},
    "rules": {"better": "auc > champion.auc - 1"},
}
NO_FACTS: dict[str, Any] = {"differences": {}, "slices": []}


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    model = MODEL | {"metrics": dict.fromkeys(MODEL["metrics"]), "finite": 0}  # type: ignore[call-overload]
    results = only(REQUESTED, model=model, **NO_FACTS)
    assert {r.key: r.passed for r in results} == {
        "gate.metrics.auc.min": False,
        "gate.champion.auc": False,
        "gate.slices.auc": False,
        "gate.calibration.ratio": False,
        "gate.rules.better": False,
    }
    assert all("undefined" in r.text for r in results)
    with pytest.raises(UserError, match="'acu' was not measured"):
        only({"metrics": {"acu": {"min": 0.5}}}, model=model, **NO_FACTS)


@pytest.mark.parametrize("finite", [0, 7])
def test_a_champion_that_gives_no_numbers_is_nobodys_fault(finite: int) -> None:
    """Or numbers of other rows than the model's alone."""
    champion = {"metrics": {"auc": None, "log_loss": None}, "bytes": 2000, "finite": finite}
    results = only(REQUESTED | {"size": {"max_growth": 2}}, champion=champion, **NO_FACTS)
    passed = {r.key: r.passed for r in results}
    assert (passed["gate.metrics.auc.min"], passed["gate.calibration.ratio"]) == (True, True)
    assert (passed["gate.champion.auc"], passed.get("gate.slices.auc"), passed["gate.rules.better"]) == (None,) * 3
    assert verdict_of(results) == PASSED


def test_rules_of_ones_own() -> None:
    results = {
        r.key: r for r in only({"rules": {"a": "auc >= champion.auc - 0.02 and bytes < 1e6", "b": "user_auc > 0"}})
    }
    assert [r.passed for r in results.values()] == [True, False]
    assert "champion.auc is 0.73" in results["gate.rules.a"].text
    assert "user_auc is undefined" in results["gate.rules.b"].text
    with pytest.raises(UserError, match=r"gate\.rules\.c: 'acu' was not measured; did you mean 'auc'"):
        only({"rules": {"c": "acu > 0"}})
    with pytest.raises(UserError, match=r"gate\.metrics\.hr_at_k: 'hr_at_k' was not measured"):
        only({"metrics": {"hr_at_k": {"min": 0}}})
    (undefined,) = only({"metrics": {"user_auc": {"min": 0.1}}})
    assert (undefined.value, undefined.passed) == (None, False)


@given(st.sampled_from(list(HIGHER_IS_BETTER)), st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_bound_that_asks_for_more_refuses_more(metric: str, value: float, half: float, by: float) -> None:
    difference = {"value": value, "low": value - half, "high": value + half, "p": None}
    passed = [
        only({"champion": {metric: {"by": by, "bound": bound}}}, differences={metric: difference})[0].passed
        for bound in ("low", "value", "high")
    ]
    assert passed == sorted(passed, key=bool)
    worse = -value if HIGHER_IS_BETTER[metric] else value
    assert passed[1] == (by - worse >= 0)


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=300), st.integers(0, 10**6))
def test_bins_of_scores_are_in_their_order(values: list[float], seed: int) -> None:
    scores = np.array(values, np.float32)
    counts = score_counts(scores)
    assert (len(counts), counts.sum()) == (SCORE_BINS, len(scores))
    # The bins of ascending scores ascend: cumulative counts are ranks wherever bins differ.
    bins = [int(np.flatnonzero(score_counts(np.array([v], np.float32)))[0]) for v in sorted(values)]
    assert bins == sorted(bins)
    sample = np.random.default_rng(seed).permutation(scores)[: max(1, len(scores) // 2)]
    expected, actual = coarse_counts(counts, score_counts(sample), 5)
    assert (sum(expected), sum(actual)) == (len(scores), len(sample))
    assert len(expected) <= 5
    assert coarse_counts(counts, counts)[0] == coarse_counts(counts, counts)[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gate={champion: {base_rate: 0.1}}"], "tells no better model"),
        (["gate={metrics: {auc: {}}}"], "`min`, `max` or both"),
        (["gate={metrics: {auc: {min: 2, max: 1}}}"], "nothing passes"),
        (["gate={rules: {x: 'auc'}}"], "is no condition"),
        (["gate={rules: {x: 'open(1) > 0'}}"], "is not taken here"),
        (["gate={model: second_stage}"], "there is no such section"),
        (["gate={model: baseline}"], "score.model is 'neural', and gate.model 'baseline'"),
        (["gate={}", "score.model=best"], "a gate has one champion"),
        (["gate={split: test}"], "gate.split is 'test'"),
        (["gate={drift: {max_psi: 0.1}}", "drift=null"], "add the section `drift`"),
        (["gate={champion: {auc: 0.1}}", "train.evaluation={}"], "set train.evaluation.user"),
        (["gate={champion: {recall_at_k: {by: 0.1, bound: value}}}", "train.rank_group=null"], "set train.rank_group"),
        (["gate={slices: {auc: {by: 0.1, bound: value}}}", "train.evaluation={}"], "there are no slices"),
        (
            ["gate={slices: {auc: {by: 0.1, of: [x], bound: value}}}", "train.evaluation={slices: {y: user_id}}"],
            "no slice",
        ),
        (["gate={calibration: {ratio: [2, 1]}}"], "has nothing between"),
    ],
    ids=str,
)
def test_what_a_spec_may_not_ask(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_spec("clicks", overrides)


def test_a_spec_with_a_gate() -> None:
    spec = load_spec("clicks", ["gate={champion: {auc: {by: 0.1, bound: value}}}", "score.model=today"])
    assert spec.gate is not None
    assert (spec.gate.stage, spec.gate.metric_names()) == ("train", ["auc"])


_NAMES = ("auc", "log_loss", "ndcg_at_k", "champion.auc", "champion.log_loss")
_numbers = st.one_of(
    st.sampled_from(_NAMES), st.integers(-3, 9).map(str), st.floats(-2, 2, allow_nan=False).map(lambda x: f"{x:.3f}")
)


def _arithmetic(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda x: f"abs({x})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        inner.map(lambda x: f"(-{x})"),
    )


def _logic(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    return st.one_of(joined, inner.map(lambda x: f"(not {x})"))


_terms = st.recursive(_numbers, _arithmetic, max_leaves=5)
_compared = st.tuples(_terms, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _terms).map(" ".join)
_conditions = st.recursive(_compared, _logic, max_leaves=4)


class _Champion:
    """`champion.auc`, for Python."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self.__dict__.update(metrics)


@given(_conditions, st.lists(st.floats(-1, 1, allow_nan=False), min_size=5, max_size=5))
def test_a_condition_means_what_python_means(text: str, values: list[float]) -> None:
    metrics = dict(zip(("auc", "log_loss", "ndcg_at_k"), values, strict=False))
    champion_metrics = dict(zip(("auc", "log_loss"), values[3:], strict=False))
    functions = {"min": min, "max": max, "abs": abs, "champion": _Champion(champion_metrics), "__builtins__": {}}
    expected = eval(text, {**functions, **metrics})  # the texts are made above
    expression = MetricExpression.parse(text)
    assert expression.holds(metrics, champion_metrics) == expected
    assert set(expression.names) == {n for n in metrics if n in text.replace(f"champion.{n}", "")}
    assert set(expression.champion_names) == {n for n in champion_metrics if f"champion.{n}" in text}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "auc",
        "auc >=",
        "1 + auc",
        "(auc > 0.5) > 0.5",
        "auc > 0.5 if log_loss < 1 else False",
        "__import__('os').system('true') == 0",
        "auc.__class__ == 1",
        "champion.auc.real > 0",
        "other.auc > 0",
        "champion > 0",
        "auc in [1]",
        "auc is 1",
        "auc > 'a'",
        "auc > True",
        "auc ** 9 > 1",
        "auc // 2 > 1",
        "[x for x in (1,)] > 1",
        "(lambda: 1)() > 0",
        "abs(auc, 1) > 0",
        "max(auc) > 0",
        "min(*auc, 1) > 0",
        "abs(x=auc) > 0",
        "open(auc, 1) > 0",
        "(y := auc) > 0",
        "f'{auc}' > 0",
        "auc > 0; log_loss > 0",
        "auc > 1j",
        f"auc > {'(' * 5000}1{')' * 5000}",
        f"auc > 0{' + 1' * 900}",
    ],
)
def test_nothing_else_is_accepted(text: str) -> None:
    if text == "champion > 0":  # a metric of that name, which nobody measures
        assert MetricExpression.parse(text).names == ("champion",)
        return
    with pytest.raises(ValueError, match=r"expression|condition|taken|number|letters"):
        MetricExpression.parse(text)


def test_a_metric_without_a_value_is_told() -> None:
    rule = MetricExpression.parse("auc >= champion.auc - 0.001 and log_loss < 0.5")
    with pytest.raises(UndefinedMetric) as raised:
        rule.holds({"auc": 0.7, "log_loss": None}, {"auc": 0.7})
    assert raised.value.args[0] == "log_loss"
    with pytest.raises(UndefinedMetric) as raised:
        rule.holds({"auc": 0.7, "log_loss": 0.4}, {})
    assert raised.value.args[0] == "champion.auc"
    assert not rule.holds({"auc": 0.6, "log_loss": None}, {"auc": 0.7})
    with pytest.raises(ZeroDivisionError):
        MetricExpression.parse("auc / log_loss > 1").holds({"auc": 1.0, "log_loss": 0.0}, {})
