"""Conditions over metrics: against Python's own arithmetic, and what is never accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.gate import MetricExpression, UndefinedMetric

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
