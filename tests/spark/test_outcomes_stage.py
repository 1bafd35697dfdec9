"""The stage outcomes against pandas over the landing files: joins as of arrival, metrics, what is still to come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession
from sklearn.metrics import roc_auc_score

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.errors import RefusedError, UserError
from headrace.lake.delta.day_table import rows_of_day, write_day
from headrace.lake.landing.stage import Ingest
from headrace.quality.outcomes.stage import MeasureOutcomes
from headrace.stage import Context, run_stage
from headrace.stage.manifest import Manifest, Output

#: Lists that are published by now are there before these days are.
FIRST = date(2126, 1, 1)
USERS, ITEMS, K, LATE = 60, 15, 5, 2
WINDOW_DAYS = {"click": 1, "purchase": 3}


def day(number: int) -> str:
    return (FIRST + timedelta(days=number)).isoformat()


def make_spec(**section: Any) -> Spec:
    def columns(**types: str) -> list[dict[str, str]]:
        return [{"name": k, "type": v} for k, v in types.items()]

    outcomes: dict[str, Any] = {
        "labels": {"click": {}, "purchase": {"from": "orders", "within_days": WINDOW_DAYS["purchase"]}},
        "history_days": 3,
        "k": [1, 3],
        "slices": {"country": "country"},
        "bootstrap": {"replicates": 40},
    }
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "landing/shop/{ds}/*.json", "catch_up_days": 8},
            "table": {
                "columns": columns(user="bigint", item="string", ts="timestamp", clicked="int", country="string"),
                "event_time": "ts",
                "late_days": LATE,
                "expectations": {"min_rows": 0},
            },
            "sources": {
                "orders": {
                    "source": {"format": "jsonl", "path": "landing/orders/{ds}/*.json", "catch_up_days": 8},
                    "table": {
                        "columns": columns(user="bigint", item="string", at="timestamp"),
                        "event_time": "at",
                        "late_days": LATE,
                        "expectations": {"min_rows": 0},
                    },
                }
            },
            "features": {
                "label": "clicked",
                "split": {"by": "time", "valid_days": 1},
                "workflow": [{"columns": ["country"], "ops": ["categorify"]}],
            },
            "score": {"user": {"key": "user"}, "item": {"key": "item"}, "top_k": K},
            "outcomes": outcomes | section,
        }
    )


@dataclass
class Shop:
    """Landed events, and the lists that were served."""

    events: pd.DataFrame
    orders: pd.DataFrame
    lists: pd.DataFrame

    @staticmethod
    def make(days: int) -> Shop:
        rng = np.random.default_rng(3)
        lists, events, orders = [], [], []
        for number in range(days):
            start = datetime.combine(FIRST, datetime.min.time(), UTC) + timedelta(days=number + 1)

            def event(user: int, item: str, after: float, start: datetime = start) -> dict[str, Any]:
                moment = start + timedelta(days=after)
                lag = int(rng.choice([0, 1, 2], p=[0.7, 0.2, 0.1]))
                return {
                    "user": user,
                    "item": item,
                    "at": moment,
                    "landed": (moment + timedelta(days=lag)).date().isoformat(),
                }

            for user in range(USERS):
                country = ("DE", "FR", None)[user % 3]
                scores = np.sort(rng.random(K).astype(np.float32))[::-1]
                for rank, (item, score) in enumerate(zip(rng.permutation(ITEMS)[:K], scores, strict=True), 1):
                    name, clicked = f"i{item}", int(rng.random() < score)
                    model = "old" if number < 4 or user % 2 else "new"
                    lists.append(
                        {"ds": day(number), "user": user, "item": name, "rank": rank, "score": score}
                        | {"model_version": model, "arms": None if user < 10 else f"look={'ab'[user % 2]},x=1"}
                    )
                    if rng.random() < 0.8:  # shown
                        happened = event(user, name, rng.random())
                        events.append(happened | {"clicked": clicked, "country": country})
                    if clicked and rng.random() < 0.5:  # some of them after the window of three days
                        orders.append(event(user, name, 4 * rng.random()))
                # What no list had; and an event right at the end of a window, which is outside of it.
                events.append(event(user, "i99", rng.random()) | {"clicked": 1, "country": country})
                edge = event(user, name, 1.0) | {"clicked": 1, "country": country}
                events.append(edge)
        return Shop(pd.DataFrame(events), pd.DataFrame(orders), pd.DataFrame(lists))

    def land(self, ws: Workspace, days: int) -> None:
        for folder, frame, time in (("shop", self.events, "ts"), ("orders", self.orders, "at")):
            for number in range(days):
                path = ws.landing(folder) / day(number)
                day_rows = frame[frame.landed == day(number)]
                rows = [
                    {**{k: v for k, v in r.items() if k not in ("at", "landed")}, time: r["at"].isoformat()}
                    for r in day_rows.to_dict("records")
                ]
                (path / "part.json").put_text("".join(json.dumps(r) + "\n" for r in rows))

    def serve(self, spark: SparkSession, spec: Spec, ws: Workspace, days: int) -> None:
        """The score stage's table and manifests."""
        table = ws.table("shop", "scores")
        for number in range(days):
            day_lists = self.lists[self.lists.ds == day(number)]
            types = "ds string, user bigint, item string, rank int, score float, model_version string, arms string"
            rows = [tuple(None if v is None else v for v in r) for r in day_lists.itertuples(index=False)]
            frame = spark.createDataFrame([(*r[:4], float(r[4]), *r[5:]) for r in rows], types)
            version = write_day(frame, table, Context(spec, ws, day(number), key=f"k{number}"), "score")
            output = Output(
                kind="delta",
                name="lake/shop/scores",
                version=str(version),
                rows=rows_of_day(table, version, day(number)),
            )
            manifest = Manifest(
                stage="score", pipeline="shop", ds=day(number), key=f"k{number}", spec_hash="", outputs=(output,)
            )
            manifest.save(ws.manifest("shop", day(number), "score"))

    def outcomes(self, ds: str, served: list[str]) -> pd.DataFrame:
        """Return the outcomes of the served days that were known on `ds`, by loops over everything."""
        records = []
        for row in self.lists[self.lists.ds.isin(served)].to_dict("records"):
            start = pd.Timestamp(row["ds"], tz="UTC") + pd.Timedelta(days=1)

            def events_within(
                frame: pd.DataFrame, days: int, row: dict[str, Any] = row, start: pd.Timestamp = start
            ) -> pd.DataFrame:
                matching = frame[(frame.user == row["user"]) & (frame.item == row["item"]) & (frame.landed <= ds)]
                return matching[(matching["at"] >= start) & (matching["at"] < start + pd.Timedelta(days=days))]

            impressions = events_within(self.events, 1)
            if len(impressions):
                clicks, orders = (
                    impressions[impressions.clicked > 0],
                    events_within(self.orders, WINDOW_DAYS["purchase"]),
                )
                first = impressions.sort_values("at").iloc[0]
                records.append(
                    row
                    | {"shown_landed": impressions.landed.min(), "slice_country": first.country}
                    | {"click": int(len(clicks) > 0), "purchase": int(len(orders) > 0)}
                    | {"click_landed": clicks.landed.min() if len(clicks) else None}
                    | {"purchase_landed": max(orders.landed.min(), impressions.landed.min()) if len(orders) else None}
                )
        return pd.DataFrame(records)


def read(spark: SparkSession, ws: Workspace, manifest: Manifest, name: str) -> pd.DataFrame:
    (output,) = [o for o in manifest.outputs if o.name == f"lake/shop/{name}"]
    reader = spark.read.format("delta").option("versionAsOf", output.version)
    frame = reader.load(str(ws.table("shop", name))).where(f"ds = '{manifest.ds}'").toPandas()
    assert len(frame) == output.rows
    return frame


def test_lists_meet_what_followed_as_it_had_landed(spark: SparkSession, ws: Workspace) -> None:
    spec, days = make_spec(), 9
    shop = Shop.make(days)
    shop.land(ws, days)
    stage = MeasureOutcomes()
    run_stage(Ingest(), spec, ws, day(0))
    first = run_stage(stage, spec, ws, day(0)).manifest
    assert (first.outputs, first.rows["days"]) == ((), 0)
    shop.serve(spark, spec, ws, days)
    # A purchase within three days lands up to two days late: ripe after five. Three ripe days are looked at besides.
    assert (spec.days_until_ripe("click"), spec.days_until_ripe("purchase")) == (3, 5)
    ds, served = day(8), [day(n) for n in range(1, 8)]
    run_stage(Ingest(), spec, ws, day(5))
    early = run_stage(stage, spec, ws, day(5)).manifest
    run_stage(Ingest(), spec, ws, ds)
    manifest = run_stage(stage, spec, ws, ds).manifest
    assert [i.version for i in manifest.inputs if i.name == "lake/shop/scores"] == [str(n) for n in range(1, 8)]

    keys = ["ds", "user", "item"]
    expected = shop.outcomes(ds, served).sort_values(keys, ignore_index=True)
    rows = read(spark, ws, manifest, "outcomes").drop(columns="ds").rename(columns={"served_ds": "ds"})
    rows = rows.sort_values(keys, ignore_index=True)
    for column in expected.columns:
        left, right = rows[column].astype(object), expected[column].astype(object)
        assert left.where(left.notna(), None).tolist() == right.where(right.notna(), None).tolist(), column
    assert (rows.click_ripe == (rows.ds <= day(5))).all()
    assert (rows.purchase_ripe == (rows.ds <= day(3))).all()
    assert rows.propensity.isna().all()
    assert 0 < rows.click.sum() < len(rows)
    assert rows.purchase.sum() > 0

    metrics = read(spark, ws, manifest, "outcome_metrics")
    check_metrics(metrics, expected)
    check_still_to_come(metrics, expected, ds)
    known = {r["label"]: r for r in manifest.facts["days"] if r["served_ds"] == day(7) and r["metric"] == "rate"}
    assert 0 < known["click"]["known"] < 1
    assert manifest.facts["last_ripe_day"] == {"click": day(5), "purchase": day(3)}

    # The earlier run's day, run again with all that has landed since, says what it said.
    ws.manifest("shop", day(5), "outcomes").remove()
    rerun = run_stage(stage, spec, ws, day(5)).manifest
    assert (rerun.key, rerun.facts, rerun.rows) == (early.key, early.facts, early.rows)
    pd.testing.assert_frame_equal(
        *[
            read(spark, ws, m, "outcomes").sort_values(["served_ds", "user", "item"], ignore_index=True)
            for m in (early, rerun)
        ]
    )
    expected = shop.outcomes(day(5), [day(n) for n in range(5)])
    assert early.rows["shown"] == len(expected)
    # The rows of the other run are still there.
    assert len(read(spark, ws, manifest, "outcomes")) == len(rows)
    assert run_stage(stage, spec, ws, ds).skipped

    check_alerts(ws, ds)


def check_metrics(metrics: pd.DataFrame, rows: pd.DataFrame) -> None:
    """Each group's figures by other code."""
    rows = rows.assign(model=rows.model_version, all="")
    rows["arm:look"] = rows.arms.str.extract("look=(.)")[0]
    rows["arm:x"] = rows.arms.str.extract("x=(.)")[0]
    rows["slice:country"] = rows.slice_country.fillna("(null)")
    dimensions = ["all", "model", "arm:look", "arm:x", "slice:country"]
    assert sorted(metrics.dimension.unique()) == sorted(dimensions)
    seen = 0
    for dimension in dimensions:
        for (served, value), group in rows.groupby(["ds", dimension]):
            for label in WINDOW_DAYS:
                actual = metrics[
                    (metrics.served_ds == served)
                    & (metrics.label == label)
                    & (metrics.dimension == dimension)
                    & (metrics.value == value)
                ].set_index("metric")
                y, p = group[label].to_numpy(), group.score.to_numpy(np.float64)
                expected = {"rate": y.mean(), "auc": roc_auc_score(y, p)}
                for k in (1, 3):
                    by_user = group[label].where(group["rank"] <= k, 0).groupby(group.user).max()
                    expected[f"hr_at_{k}"] = by_user.mean()
                if label == "click":
                    q = np.clip(p, 1e-7, 1 - 1e-7)
                    expected["calibration"] = p.sum() / y.sum()
                    expected["log_loss"] = -(y * np.log(q) + (1 - y) * np.log(1 - q)).mean()
                assert set(actual.index) == set(expected)
                for name, figure in expected.items():
                    assert actual.estimate[name] == pytest.approx(figure, rel=1e-6), (dimension, value, label, name)
                    # Zeros of all users are zeros in every replicate.
                    assert actual.low[name] <= actual.estimate[name] <= actual.high[name], (
                        dimension,
                        value,
                        label,
                        name,
                    )
                assert (actual.rows == len(group)).all()
                assert (actual.users == group.user.nunique()).all()
                assert (actual.positives == y.sum()).all()
                seen += len(actual)
    assert seen == len(metrics)


def check_still_to_come(metrics: pd.DataFrame, rows: pd.DataFrame, ds: str) -> None:
    """Shares that have come, from the delays of ripe days."""

    def age(landed: pd.Series, served: pd.Series) -> pd.Series:
        return (pd.to_datetime(landed) - pd.to_datetime(served)).dt.days

    for label, last in (("click", day(5)), ("purchase", day(3))):
        ripe = rows[rows.ds <= last]
        positives = age(ripe[f"{label}_landed"], ripe.ds)[ripe[label] == 1]
        impression_age = age(ripe.shown_landed, ripe.ds)
        rates = metrics[(metrics.label == label) & (metrics.metric == "rate")]
        for r in rates.itertuples():
            days_since = (date.fromisoformat(ds) - date.fromisoformat(r.served_ds)).days
            known = 1.0 if r.served_ds <= last else (positives <= days_since).mean()
            part = 1.0 if r.served_ds <= last else (impression_age <= days_since).mean()
            assert r.known == pytest.approx(known)
            assert r.expected == pytest.approx(r.estimate * part / known)
            assert r.ripe == (r.served_ds <= last)


def check_alerts(ws: Workspace, ds: str) -> None:
    """Limits warn; asked to, they stop the day and leave no manifest."""
    limits = [{"metric": "rate", "max": 0.01}, {"metric": "auc", "min": 0.01}]
    warned = run_stage(MeasureOutcomes(), make_spec(alerts=limits), ws, ds).manifest
    (alert,) = warned.facts["alerts"]
    assert (alert["served_ds"], alert["kind"], alert["key"]) == (day(5), "max", "outcomes.alerts[0].max")
    assert warned.rows["alerts"] == 1
    stops = make_spec(alerts=[{"metric": "rate", "max": 0.01, "action": "stop"}])
    with pytest.raises(RefusedError, match=r"click rate, served on 2126-01-06, is 0\.\d+, above 0\.01"):
        run_stage(MeasureOutcomes(), stops, ws, ds)
    with pytest.raises(UserError, match="nowhere"):
        run_stage(MeasureOutcomes(), make_spec(slices={"a": "nowhere + 1"}), ws, ds)
