"""Outcomes of lists, published and served, against pandas."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Outcomes, Spec, build_spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.generate.site import site_path
from headrace.quality.outcomes.measure import Delays, Measure, final_rate
from headrace.quality.outcomes.served import ServedPublication, Window, live, served_days
from headrace.quality.outcomes.stage import judge
from headrace.stage import Context
from headrace.stage.manifest import Manifest, Output
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


NAME = "lake/clicks/published"


def calendar() -> Spec:
    """A pipeline whose days are those of the calendar; its labels are ripe after a day."""
    data = load_spec("clicks", ["outcomes={history_days: 3}", "table.late_days=0"]).model_dump(mode="json")
    return build_spec({k: v for k, v in data.items() if k != "generate"})


class Lake:
    """The log of the published lists, commit by commit, and the manifests."""

    def __init__(self, ws: Workspace) -> None:
        self.ws, self.version = ws, -1

    def commit(self, ds: str, time: str, metadata: str | None = "key", **add: Any) -> str:
        self.version += 1
        folder, path = self.ws.locate(NAME), f"ds={ds}/{self.version}.parquet"
        (folder / path).put_text("x")
        moment = int(datetime.fromisoformat(f"{time}+00:00").timestamp() * 1000)
        info = {"timestamp": moment} | ({} if metadata is None else {"userMetadata": metadata})
        file = {"path": path, "partitionValues": {"ds": ds}, "size": 1, "stats": json.dumps({"numRecords": 7}), **add}
        removals = [{"remove": {"path": f"ds={ds}/{v}.parquet"}} for v in range(self.version)]
        first = [{"protocol": {"minReaderVersion": 1}}, {"metaData": {"configuration": {}}}] if not self.version else []
        actions = [{"commitInfo": info}, *first, *removals, {"add": file}]
        (folder / "_delta_log" / f"{self.version:020d}.json").put_text("".join(json.dumps(a) + "\n" for a in actions))
        return str(self.version)

    def publish(self, ds: str, time: str) -> str:
        version = self.commit(ds, time)
        output = Output(kind="delta", name=NAME, version=version, rows=7)
        manifest = Manifest(stage="publish", pipeline="clicks", ds=ds, key="k", spec_hash="", outputs=(output,))
        manifest.save(self.ws.manifest("clicks", ds, "publish"))
        return version

    def served(self, spec: Spec, ds: str) -> tuple[dict[str, str], list[str]]:
        served = served_days(Context(spec=spec, ws=self.ws, ds=ds, upstream={}))
        return {day.ds: day.table.version for day in served.days}, served.late


def test_lists_made_when_visitors_had_left_are_nobody_s(ws: Workspace) -> None:
    spec, lake = calendar(), Lake(ws)
    first = lake.publish("2026-03-02", "2026-03-03 02:00")
    lake.publish("2026-03-01", "2026-03-03 03:00")  # a backfill: shown on the 2nd
    third = lake.publish("2026-03-03", "2026-03-04 02:00")
    expected = {"2026-03-02": first, "2026-03-03": third}, ["2026-03-01"]
    assert lake.served(spec, "2026-03-04") == expected
    # After a rollback, the day's lists are made again by another model; and rows are rewritten, or deleted by hand.
    lake.publish("2026-03-02", "2026-03-05 09:00")
    lake.commit("2026-03-03", "2026-03-04 03:00", dataChange=False)
    lake.commit("2026-03-03", "2026-03-04 03:30", metadata=None)
    assert lake.served(spec, "2026-03-04") == expected
    # Mended an hour after they were published: shown for the rest of the day.
    mended = lake.publish("2026-03-03", "2026-03-04 04:00")
    assert lake.served(spec, "2026-03-04")[0]["2026-03-03"] == mended


def test_lists_that_were_shown_and_are_gone_are_not_those_that_came_after(
    ws: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    spec, lake = calendar(), Lake(ws)
    version = lake.publish("2026-03-02", "2026-03-03 02:00")
    lake.publish("2026-03-02", "2026-03-08 02:00")
    (ws.locate(NAME) / f"ds=2026-03-02/{version}.parquet").remove()
    assert lake.served(spec, "2026-03-04") == ({}, [])
    assert "the lists of 2026-03-02 that were shown are gone" in caplog.text


def test_days_of_a_generated_log_are_those_of_its_site(ws: Workspace) -> None:
    """The site of the 2nd shows what was published when it was simulated, whatever the calendar says."""
    spec, lake = load_spec("clicks", ["outcomes={history_days: 3}", "table.late_days=0"]), Lake(ws)
    two_days_ago = (datetime.now() - timedelta(days=2)).isoformat(" ", "seconds")
    after = (datetime.now() + timedelta(days=2)).isoformat(" ", "seconds")
    version = lake.publish("2026-03-01", two_days_ago)
    site_path(ws.landing("clicks"), "2026-03-02").put_text("{}")
    lake.publish("2026-03-01", after)
    random = lake.publish("2026-03-02", after)  # no site: a random log followed
    site_path(ws.landing("clicks"), "2026-03-04").put_text("{}")
    lake.publish("2026-03-03", after)
    assert lake.served(spec, "2026-03-04") == ({"2026-03-01": version, "2026-03-02": random}, ["2026-03-03"])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(5, 20), st.integers(0, 8))
def test_the_version_that_was_there_the_longest(times: list[int], start: int, length: int) -> None:
    versions = [
        ServedPublication(time, Output(kind="delta", name="x", version=str(i))) for i, time in enumerate(sorted(times))
    ]
    live_versions = [
        next((v for v in reversed(versions) if v.published_ms <= t), None) for t in range(start, start + length)
    ]
    result = live(versions, Window(start, start + length))
    if length == 0:
        assert result == next((v for v in reversed(versions) if v.published_ms < start), None)
    elif result is None:
        assert set(live_versions) == {None}
    else:
        assert live_versions.count(result) == max(live_versions.count(v) for v in versions)
    assert live(versions, None) == versions[-1]
