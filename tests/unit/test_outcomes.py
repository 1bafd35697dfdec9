"""Outcomes without Spark: what the section refuses, when labels are ripe, delays, limits, metrics of one day."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Outcomes, Spec, load_spec
from headrace.errors import UserError
from headrace.quality.outcomes.measure import Delays, Measure, final_rate
from headrace.quality.outcomes.stage import judge
from headrace.train.evaluation.bootstrap import Bootstrap


def spec(*settings: str) -> Spec:
    return load_spec("clicks", list(settings))


@pytest.mark.parametrize(
    ("settings", "days"),
    [
        (["outcomes={}"], 4),  # within a day, three days late
        (["outcomes.labels={click: {within_days: 7}}"], 10),
        (["outcomes={}", "table.late_days=0"], 1),
        (["outcomes={starts_after_hours: 5}"], 5),  # the window of the last minute ends a day later
        (["outcomes={}", "source.timezone=Europe/Paris"], 5),
        (["outcomes.labels={click: {late_days: 1}}"], 4),  # what was shown lands three days late all the same
        (["outcomes={labels: {click: {late_days: 1}}, shown: all}"], 2),
    ],
)
def test_a_label_is_ripe_when_the_last_event_that_counts_has_landed(settings: list[str], days: int) -> None:
    pipeline = spec(*settings)
    assert pipeline.days_until_ripe("click") == days
    ripe = pipeline.last_ripe_day("click", "2026-03-01")
    assert (date(2026, 3, 1) - date.fromisoformat(ripe)).days == days


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["outcomes={labels: {score: {}}}"], "'score' is the name of a column of the outcomes table"),
        (["outcomes={labels: {a: {}, a_ripe: {}}}"], "'a_ripe' is the name of a column"),
        (["outcomes={labels: {click: {from: orders}}}"], "outcomes.labels.click.from: 'orders' is no source"),
        (["outcomes={labels: {click: {column: cliked}}}"], "did you mean 'clicked'"),
        (["outcomes={live_days: 2}"], "a window is at least as long"),
        (["outcomes={alerts: [{metric: rate}]}"], "an alert has a limit"),
        (["outcomes={alerts: [{metric: ctr, min: 0.1}]}"], "'ctr' is none of rate, auc"),
        (["outcomes={alerts: [{metric: rate, min: 0.1, by: 'slice:age'}]}"], "'age' is none of slices"),
        (["outcomes={}", "score=null", "publish=null"], "outcomes are of lists: add a score section"),
    ],
)
def test_what_does_not_fit_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(UserError) as e:
        spec(*settings)
    assert message in str(e.value)


def test_training_waits_as_long_as_outcomes() -> None:
    base = [
        "table.columns=" + str([c.model_dump(mode="json") for c in spec().table.columns] + [BOUGHT]),
        "features.carried=[event_id, ts, bought]",
        "outcomes={labels: {click: {}, buy: {column: bought, within_days: 7}}}",
    ]
    tasks = "train.tasks={{click: {{}}, buy: {{label: bought, known_after: {{days: {}, event_time: ts}}}}}}"
    assert spec(*base, tasks.format(10)).days_until_ripe("buy") == 10
    with pytest.raises(UserError, match=r"ripe after 10 days \(within_days and late_days\): set it to 10"):
        spec(*base, tasks.format(9.5))


BOUGHT = {"name": "bought", "type": "int"}


@given(
    st.dictionaries(st.integers(0, 9), st.dictionaries(st.integers(1, 6), st.integers(0, 50))),
    st.integers(0, 9),
    st.integers(0, 7),
)
def test_the_share_that_has_come_is_that_of_ripe_days(counts: dict[int, dict[int, int]], last: int, age: int) -> None:
    def day(number: int) -> str:
        return (date(2026, 1, 1) + timedelta(days=number)).isoformat()

    delays = Delays.of_ripe_days({day(n): ages for n, ages in counts.items()}, day(last))
    ages = [a for n, by_age in counts.items() if n <= last for a, k in by_age.items() for _ in range(k)]
    if not ages:
        assert delays.known(age) is None
        return
    assert delays.known(age) == pytest.approx(np.mean(np.array(ages) <= age))
    assert delays.curve()[-1] == pytest.approx(1)
    assert final_rate(0.1, 0.5, 0.8) == pytest.approx(0.16)


def record(served: str, estimate: float | None, ripe: bool = True, **more: Any) -> dict[str, Any]:
    base = {"served_ds": served, "label": "click", "metric": "rate", "dimension": "all", "value": "", "rows": 500}
    return base | {"estimate": estimate, "ripe": ripe} | more


def test_limits_are_of_the_newest_ripe_day() -> None:
    section = Outcomes.model_validate(
        {
            "slices": {"age": "age"},
            "alerts": [
                {"metric": "rate", "min": 0.1, "max_drop": 0.3},
                {"metric": "rate", "max": 0.2, "by": "slice:age"},
            ],
        }
    )
    served = [f"2026-01-0{n}" for n in range(1, 7)]
    days = [record("2026-01-01", 0.2), record("2026-01-02", 0.18), record("2026-01-03", 0.12)]
    young = record("2026-01-04", 0.01, ripe=False)
    (drop,) = judge([*days, young], section, {"click": "2026-01-03"}, served)
    assert (drop.kind, drop.served_ds, drop.key) == ("max_drop", "2026-01-03", "outcomes.alerts[0].max_drop")
    assert drop.figure == pytest.approx(1 - 0.12 / 0.19)
    assert str(drop) == (
        "click rate, served on 2026-01-03, is 36.8 % below the mean of the ripe days before, the limit is 30 % "
        "(outcomes.alerts[0].max_drop)"
    )
    last = {"click": "2026-01-05"}
    low = judge([record("2026-01-05", 0.05)], section, last, served)
    assert [a.kind for a in low] == ["min"]
    # Of few rows no metric is judged, and that there are few is told; as that there are none.
    for records, rows in (([record("2026-01-05", 0.05, rows=99)], 99), ([], 0)):
        alerts = judge([*days, *records], section, last, served)
        assert [(a.kind, a.served_ds, a.figure, a.limit) for a in alerts] == [("min_rows", "2026-01-05", rows, 100)] * 2
        message = f"click: {rows} rows served on 2026-01-05 were shown, fewer than 100 (outcomes.alerts[0].min_rows)"
        assert str(alerts[0]) == message
    assert judge(days, section, last, {"2026-01-03"}) == []
    sliced = [record("2026-01-05", 0.3, dimension="slice:age", value=v, rows=n) for v, n in (("a", 500), ("b", 50))]
    (high,) = judge([*days, record("2026-01-05", 0.12), *sliced], section, last, served)
    assert (high.value, high.limit, high.kind) == ("a", 0.2, "max")
    assert judge([record("2026-01-05", None)], section, last, served) == []


def test_intervals_are_of_users_and_scores_that_are_no_probabilities_only_order() -> None:
    """Users who click all their rows or none: the rate's interval is that of users, not of rows."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(200), 10)
    clicks = np.repeat(rng.random(200) < 0.3, 10).astype(np.int32)
    rows = pa.table(
        {
            "user": users,
            "served_ds": ["2026-01-01"] * len(users),
            "rank": np.tile(np.arange(1, 11), 200).astype(np.int32),
            "score": rng.normal(size=len(users)).astype(np.float32),
            "model_version": ["m"] * len(users),
            "arms": pa.nulls(len(users), pa.string()),
            "click": clicks,
        }
    )
    measure = Measure("user", ("click",), (1, 10), (), 20, Bootstrap(300))
    estimates = {r["metric"]: r for r in measure(rows).to_pylist() if r["dimension"] == "all"}
    assert set(estimates) == {"rate", "auc", "hr_at_1", "hr_at_10"}
    rate = clicks.mean()
    deviation = np.sqrt(rate * (1 - rate) / 200)
    width = estimates["rate"]["high"] - estimates["rate"]["low"]
    assert width == pytest.approx(2 * 1.96 * deviation, rel=0.25)
    assert estimates["hr_at_1"]["estimate"] == estimates["hr_at_10"]["estimate"] == pytest.approx(rate)
