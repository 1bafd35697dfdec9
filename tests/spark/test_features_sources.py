"""Operators that look at a named source: what pandas says of each row, and nothing of the future."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import OpSpec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.functions.timestamps import spark_micros
from headrace.features.table_ops.base import SourceRead, SourceTable
from headrace.features.table_ops.preparation import ExternalReader, Preparation
from headrace.features.table_ops.spark_windows import EVENT_MICROS
from headrace.features.types import ValueType, declared
from tests.spark.test_features_tables import as_frame
from tests.tables_support import (
    COLUMNS,
    DAY,
    HOUR,
    ROWS,
    START,
    TIMES,
    Row,
    as_table,
    assert_same_rows,
    by_identity,
    micros,
    number,
    past_of,
    perturbed,
    same,
)

BOUGHT = {"buyer": "bigint", "thing": "string", "at": "timestamp", "amount": "double", "n": "int"}
_TYPES = {n: declared(TableColumn(name=n, type=t)) for n, t in BOUGHT.items()}  # type: ignore[arg-type]
SOURCES = {"bought": SourceTable(_TYPES, "at"), "plans": SourceTable(_TYPES)}
PURCHASES = st.lists(
    st.fixed_dictionaries(
        {
            "buyer": st.sampled_from([None, 1, 1, 1, 2, 2**53 + 1]),
            "thing": st.sampled_from([None, "a", "é", "日本", ""]),
            "at": st.one_of(TIMES, TIMES, TIMES, st.none()),
            "amount": st.none() | st.sampled_from([0.5, -1.25, math.nan, math.inf, 3e-7]) | st.floats(-9, 9),
            "n": st.none() | st.integers(-3, 3),
        }
    ),
    max_size=30,
)
_BY = {"from": "bought", "keys": {"user": "buyer"}}
OPS: list[dict[str, Any]] = [
    {"trailing": {**_BY, "windows": [1, "all"], "values": ["amount"], "stats": ["count", "sum", "mean"]}},
    {"trailing": {**_BY, "keys": {"item": "thing"}, "windows": [2.5], "where": "n > 0", "delay_hours": 6}},
    {"trailing": {"keys": ["user"], "windows": [1]}},
    {"history": {**_BY, "values": ["thing", "n"], "length": 3}},
    {"history": {**_BY, "values": ["n"], "length": 2, "newest": "first", "delay_hours": 6, "suffix": "recent"}},
    {"target_encoding_past": {**_BY, "target": "n", "delay_hours": 6, "smoothing": 1.5}},
    {"target_encoding_past": {**_BY, "target": "n", "delay_hours": 0, "prior": 0.5, "prefix": "p"}},
    {"join_asof": {**_BY, "add": ["thing", "amount"], "prefix": "last_", "tolerance_days": 2}},
    {"join_asof": {**_BY, "add": {"n": "int"}, "prefix": "before_", "at": "before"}},
    {"join_asof": {**_BY, "from": "plans", "valid_from": "at", "add": ["n"], "prefix": "plan_"}},
    # What was before in the events themselves is as it is without sources.
    {"history": {"keys": ["user"], "values": ["item"], "length": 2}},
]


def prepared(*ops: dict[str, Any], sources: dict[str, SourceTable] | None = None) -> Preparation:
    specs = [OpSpec(op=name, params=params) for op in ops for name, params in op.items()]
    return Preparation(specs, COLUMNS, "click", "ts", True, SOURCES if sources is None else sources)


def reading(spark: SparkSession, bought: list[Row]) -> Callable[[SourceRead], DataFrame]:
    ddl = ", ".join([*(f"{n} {t}" for n, t in BOUGHT.items()), "_source_file string", "_source_line bigint"])
    rows = [tuple(r[n] for n in [*BOUGHT, "_source_file", "_source_line"]) for r in bought]
    frame = spark.createDataFrame(rows, ddl).withColumn(EVENT_MICROS, spark_micros(F.col("at"), ValueType("timestamp")))
    return lambda read: frame


def run(spark: SparkSession, rows: list[Row], bought: list[Row]) -> dict[tuple[str, int], Row]:
    nowhere = ExternalReader(Workspace("/nonexistent"))  # type: ignore[arg-type]
    frame = prepared(*OPS).spark(as_frame(spark, as_table(rows)), nowhere, sources=reading(spark, bought))
    return by_identity(frame.toArrow())


class PandasHistory:
    """Purchases before a row, by pandas."""

    def __init__(self, bought: list[Row]) -> None:
        columns = [*BOUGHT, "_source_file", "_source_line"]
        self.all = pd.DataFrame({c: pd.Series([r[c] for r in bought], dtype=object) for c in columns})
        self.all["us"] = [None if r["at"] is None else micros(r["at"]) for r in bought]
        self.all = self.all[self.all["us"].notna()]

    def purchases_before(
        self, row: Row, key: tuple[str, str], delay: int = 0, window: int | None = None
    ) -> pd.DataFrame:
        if row["ts"] is None or row[key[0]] is None:
            return self.all.iloc[:0]
        t = micros(row["ts"]) - delay
        purchases = self.all[(self.all[key[1]] == row[key[0]]) & (self.all["us"] < t)]
        purchases = purchases if window is None else purchases[purchases["us"] >= t - window]
        order = purchases.assign(f=purchases["_source_file"].map(lambda f: f.encode()))
        return order.sort_values(["us", "f", "_source_line"], kind="stable")

    def features_of(self, row: Row) -> Row:
        e: Row = {}
        by, day, six = ("user", "buyer"), DAY // DAY.resolution, 6 * HOUR // HOUR.resolution
        for name, window in (("1d", day), ("all", None)):
            purchases = self.purchases_before(row, by, window=window)
            e[f"user_bought_count_{name}"] = len(purchases)
            finite = [v for v in purchases["amount"] if v is not None and math.isfinite(v)]
            total = sum(round(v * 2**20) for v in finite) / 2**20
            e[f"user_bought_amount_sum_{name}"] = float(total)
            e[f"user_bought_amount_mean_{name}"] = total / len(finite) if finite else None
        purchases = self.purchases_before(row, ("item", "thing"), six, 5 * day // 2)
        e["item_bought_count_2.5d"] = sum(n is not None and n > 0 for n in purchases["n"])
        purchases = self.purchases_before(row, by)
        e["bought_thing_history"] = [v for v in purchases["thing"] if v is not None][-3:]
        e["bought_n_history"] = [v for v in purchases["n"] if v is not None][-3:]
        purchases = self.purchases_before(row, by, six)
        known = [v for v in purchases["n"] if v is not None]
        e["bought_n_recent"] = known[-2:][::-1]
        prior = None
        if row["ts"] is not None:
            midnight = micros(row["ts"]) // day * day
            earlier = [v for v in self.all[self.all["us"] + six < midnight]["n"] if v is not None]
            prior = sum(earlier) / len(earlier) if earlier else None
        smooth = (sum(known) + 1.5 * prior) / (len(known) + 1.5) if prior is not None else None
        e["user_bought_target"] = smooth if prior is not None else sum(known) / len(known) if known else None
        known = [v for v in self.purchases_before(row, by)["n"] if v is not None]
        e["p_target"] = (sum(known) + 20 * 0.5) / (len(known) + 20)
        last = self.purchases_before({**row, "ts": row["ts"] and row["ts"] + DAY.resolution}, by)
        near = last[-1:] if row["ts"] is None else last[last["us"] > micros(row["ts"]) - 2 * day][-1:]
        for c in ("thing", "amount"):
            e[f"last_{c}"] = None if near.empty else near.iloc[0][c]
        purchases = self.purchases_before(row, by)
        e["before_n"] = None if purchases.empty else purchases.iloc[-1]["n"]
        e["plan_n"] = None if last.empty else last.iloc[-1]["n"]
        return e


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS, PURCHASES)
def test_what_was_before_in_another_source(spark: SparkSession, rows: list[Row], bought: list[Row]) -> None:
    rows, bought = number(rows), number(bought)
    actual, history = run(spark, rows, bought), PandasHistory(bought)
    assert len(actual) == len(rows)
    for row in rows:
        actual_row = actual[row["_source_file"], row["_source_line"]]
        for name, value in history.features_of(row).items():
            assert same(actual_row[name], value), (row, name, actual_row[name], value)
        for name, value in row.items():
            assert same(actual_row[name], value), (row, name)


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS, ROWS, PURCHASES, PURCHASES, st.integers(1, 13))
def test_nothing_of_a_sources_future_is_seen(
    spark: SparkSession, rows: list[Row], other_rows: list[Row], bought: list[Row], changed: list[Row], quarter: int
) -> None:
    """Purchases and events from an instant on are others, as many and as few as may be: rows before it are the same."""
    instant: datetime = START + quarter * DAY / 4
    past = [r for r in number(bought) if r["at"] is not None and r["at"] < instant]
    future = [
        {**r, "at": max(r["at"] or instant, instant), "_source_file": "new", "_source_line": i}
        for i, r in enumerate(changed)
    ]
    original, changed_rows = perturbed(rows, other_rows, instant)
    pasts = []
    for events, purchases in ((original, number(bought)), (changed_rows, [*future, *past])):
        nowhere = ExternalReader(Workspace("/nonexistent"))  # type: ignore[arg-type]
        frame = prepared(*OPS).spark(as_frame(spark, as_table(events)), nowhere, sources=reading(spark, purchases))
        pasts.append(past_of(frame.toArrow(), instant))
    assert_same_rows(*pasts)


def labels(
    spark: SparkSession, rows: list[Row], bought: list[Row], op: dict[str, Any], until: datetime | None = None
) -> dict[tuple[str, int], tuple[int, bool]]:
    columns = [c for c in COLUMNS if c.name != "click"]
    p = Preparation([OpSpec(op="attribution", params=op)], columns, "click", "ts", True, SOURCES)
    nowhere = ExternalReader(Workspace("/nonexistent"))  # type: ignore[arg-type]
    frame = as_frame(spark, as_table(rows)).drop("click")
    seen = None if until is None else micros(until)
    labelled = p.spark(frame, nowhere, sources=reading(spark, bought), seen_until=seen).toArrow()
    assert labelled.num_rows == len(rows)
    return {key: (r["click"], r["__label_known"]) for key, r in by_identity(labelled).items()}


_LABEL = {"from": "bought", "keys": {"user": "buyer"}, "add": "click"}
LABELS: list[dict[str, Any]] = [
    {**_LABEL, "within": "6 hours", "wait": "1 hour"},
    {**_LABEL, "within": "1.5 days", "where": "n > 0", "credit": "last"},
    {**_LABEL, "within": "36 hours", "credit": "first"},
]
WINDOWS = (6 * HOUR, 36 * HOUR, 36 * HOUR)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS, PURCHASES)
def test_labels_are_what_follows_in_another_source(spark: SparkSession, rows: list[Row], bought: list[Row]) -> None:
    rows, bought = number(rows), number(bought)
    impressions = pd.DataFrame([{"user": r["user"], "ts": r["ts"]} for r in rows if r["user"] and r["ts"]] or None)
    for op, window in zip(LABELS, WINDOWS, strict=True):
        actual = labels(spark, rows, bought, op)
        # To whom each purchase is credited: (user, instant).
        credited = set()
        for b in bought:
            if b["buyer"] is None or b["at"] is None or impressions.empty:
                continue
            if "where" in op and not (b["n"] is not None and b["n"] > 0):
                continue
            matching = impressions[
                (impressions["user"] == b["buyer"])
                & (impressions["ts"] <= b["at"])
                & (impressions["ts"] > b["at"] - window)
            ]["ts"]
            if matching.empty:
                continue
            chosen = {"last": [matching.max()], "first": [matching.min()]}.get(str(op.get("credit")), list(matching))
            credited |= {(b["buyer"], t) for t in chosen}
        times = [r["ts"] for r in rows if r["ts"]] + [b["at"] for b in bought if b["at"]]
        wait = window + (HOUR if "wait" in op else 0 * HOUR)
        for r in rows:
            known = r["ts"] is not None and r["ts"] + wait < max(times)
            label = int((r["user"], r["ts"]) in credited)
            assert actual[r["_source_file"], r["_source_line"]] == (label, known), (op, r)


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS, ROWS, PURCHASES, PURCHASES, st.integers(4, 13))
def test_a_known_label_never_changes(
    spark: SparkSession, rows: list[Row], other_rows: list[Row], bought: list[Row], changed: list[Row], quarter: int
) -> None:
    """Whatever comes from the end of the day on: a row that a dataset of that day may have keeps its label."""
    instant: datetime = START + quarter * DAY / 4
    past = [r for r in number(bought) if r["at"] is not None and r["at"] < instant]
    future = [{**r, "at": max(r["at"] or instant, instant), "_source_file": "new"} for r in number(changed)]
    original, changed_rows = perturbed(rows, other_rows, instant)
    for op in LABELS:
        results = [
            labels(spark, r, b, op, instant) for r, b in ((original, number(bought)), (changed_rows, [*future, *past]))
        ]
        known = [{key: label for key, (label, known) in labels_by_row.items() if known} for labels_by_row in results]
        assert known[0] == known[1]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ({**_LABEL, "within": "soon"}, "write a number and a unit"),
        ({**_LABEL, "within": "1 day", "add": "clicked"}, "adds 'clicked', which is not the label"),
        ({**_LABEL, "within": "1 day", "from": "plans"}, "set sources.plans.table.event_time"),
        ({**_LABEL, "within": "1 day", "where": "price > 1"}, "price"),
    ],
)
def test_what_makes_no_label_is_said(op: dict[str, Any], message: str) -> None:
    columns = [c for c in COLUMNS if c.name != "click"]
    with pytest.raises(UserError, match=r"features\.prepare\[0\] \(attribution\)") as e:
        Preparation([OpSpec(op="attribution", params=op)], columns, "click", "ts", True, SOURCES)
    assert message in str(e.value)


def test_earlier_labels_are_waited_for() -> None:
    columns = [c for c in COLUMNS if c.name != "click"]

    def with_label(*ops: dict[str, Any]) -> Preparation:
        specs = [OpSpec(op=name, params=params) for op in ops for name, params in op.items()]
        return Preparation(specs, columns, "click", "ts", True, SOURCES)

    label = {"attribution": LABELS[0]}
    ops: tuple[dict[str, Any], ...] = (
        {"trailing": {"keys": ["item"], "windows": [1], "values": ["click"], "stats": ["rate"]}},
        {"history": {"keys": ["user"], "values": ["item"], "where": "click = 1"}},
        {"target_encoding_past": {"keys": ["user"], "delay_hours": 0}},
    )
    for op in ops:
        ((name, params),) = op.items()
        with pytest.raises(UserError, match=r"known 7 hours after an event.*set delay_hours"):
            with_label(label, {name: {**params, "delay_hours": 6.9}})
        with_label(label, {name: {**params, "delay_hours": 7}})
    with pytest.raises(UserError, match="put it before trailing: the label comes first"):
        with_label({"trailing": {"keys": ["item"], "windows": [1]}}, label)
    assert with_label(label).label_wait == 7 * HOUR // HOUR.resolution


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ({"trailing": {**_BY, "from": "bougth", "windows": [1]}}, "no source 'bougth'; did you mean 'bought'"),
        ({"trailing": {**_BY, "from": "plans", "windows": [1]}}, "set sources.plans.table.event_time"),
        ({"trailing": {**_BY, "keys": {"item": "buyer"}, "windows": [1]}}, "'item' is string, but 'buyer' of source"),
        ({"trailing": {**_BY, "windows": [1], "values": ["price"], "stats": ["sum"]}}, "column 'price' is not there"),
        ({"trailing": {"keys": {"user": "item"}, "windows": [1]}}, "the events have one name for each"),
        ({"trailing": {**_BY, "form": "x", "windows": [1]}}, "unknown parameter 'form'; did you mean 'from'"),
        ({"history": {**_BY, "values": ["thing"], "where": "price > 0"}}, "price"),
        ({"target_encoding_past": {**_BY, "delay_hours": 1}}, "give `target`: the column of source 'bought'"),
        ({"join_asof": {**_BY, "path": "x", "add": ["n"]}}, "give `path`, or `from`"),
        ({"join_asof": {"path": "x", "keys": ["user"], "valid_from": "at", "add": ["n"]}}, "say the type of 'n'"),
        ({"join_asof": {"path": "x", "keys": ["user"], "add": {"z": "int"}}}, "give `valid_from`"),
        ({"join_asof": {**_BY, "add": {"n": "string"}}}, "'n' of source 'bought' is declared int, but string is"),
        ({"join_asof": {**_BY, "add": ["ammount"]}}, "column 'ammount' is not there"),
        ({"join_asof": {**_BY, "valid_from": "n", "add": ["amount"]}}, "column 'n' is int, not one of timestamp, date"),
    ],
)
def test_what_a_source_cannot_give_is_said(op: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"features\.prepare\[0\]") as e:
        prepared(op)
    assert message in str(e.value)


def test_without_sources(spark: SparkSession) -> None:
    with pytest.raises(UserError, match="the pipeline has no `sources`"):
        prepared(OPS[0], sources={})
    # The events are read as far back as their own operators look.
    assert prepared(*OPS).lookback_days == 1
    reads = [s.op.source() for s in prepared(*OPS).steps]
    assert [r and (r.use, r.lookback and r.lookback / 3.6e9) for r in reads] == [
        ("events", None),
        ("events", 66),
        None,
        *[("events", None)] * 4,
        ("versions", 48),
        ("versions", None),
        ("versions", None),
        None,
    ]
