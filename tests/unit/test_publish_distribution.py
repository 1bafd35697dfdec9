"""The audit beside an earlier day, in SQL, against NumPy and pandas over the same rows."""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.warehouse import Audit, AuditRule
from headrace.errors import UserError
from headrace.publish.audit import Expected, Limits, check_within, count_day, day_checks, own_checks
from headrace.publish.target import Check, PublishedDay


@dataclass
class Staged:
    """A staged day in SQLite."""

    db: sqlite3.Connection
    rows: int
    previous: PublishedDay | None
    ds: str = "2026-01-02"
    key: str = "k"
    label: str = "staged"
    queries: list[str] = field(default_factory=list)
    relation: str = "staged"
    day: str = "'2026-01-02'"

    def quote(self, name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        self.queries.append(sql)
        return self.db.execute(sql).fetchall()


def staged(today: pd.DataFrame, previous: pd.DataFrame | None) -> Staged:
    db = sqlite3.connect(":memory:")
    today.to_sql("staged", db, index=False)
    if previous is None:
        return Staged(db, len(today), None)
    previous.to_sql("published", db, index=False)
    relation = "(SELECT * FROM published) AS published"
    return Staged(db, len(today), PublishedDay("2026-01-01", len(previous), relation))


def lists(rng: np.random.Generator, users: int, items: int, power: float = 0.0, shift: float = 0.0) -> pd.DataFrame:
    weights = np.arange(1, items + 1, dtype=float) ** -power
    item = np.concatenate([rng.choice(items, 3, replace=False, p=weights / weights.sum()) for _ in range(users)])
    score = np.clip(rng.beta(2, 5, users * 3) + shift, 0, 1).round(2)
    return pd.DataFrame(
        {
            "ds": "2026-01-02",
            "user id": np.repeat(np.arange(users), 3),
            "item": item,
            "rank": np.tile([1, 2, 3], users),
            "score": score,
        }
    )


def checks_of(day: Staged, limits: Audit, candidates: int | None = None, users: int | None = None) -> dict[str, Check]:
    held = Limits("user id", "item", ("user id", "item", "rank", "score"), 3, day.rows, 1, None, by_score=False)
    checks = day_checks(day, held, limits, candidates, users)
    return {c.name: c for c in checks if c.name.startswith(("PSI", "share"))}


def plain_psi(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float:
    e = np.maximum(expected / expected.sum(), 1e-4)
    a = np.maximum(actual / actual.sum(), 1e-4)
    return float(((a - e) * np.log(a / e)).sum())


def score_psi(previous: pd.DataFrame, today: pd.DataFrame) -> float:
    """The tenths' first scores by position in the sorted scores: the first n % 10 tenths have one row more."""
    ordered = np.sort(previous["score"].to_numpy())
    parts = [p for p in np.array_split(ordered, 10) if len(p)]
    firsts = np.unique([p[0] for p in parts])
    edges = firsts[1:] if len(firsts) > 1 else firsts
    counts = [
        np.bincount(np.searchsorted(edges, d["score"], "right"), minlength=len(edges) + 1) for d in (previous, today)
    ]
    return plain_psi(*counts)


def item_psi(previous: pd.DataFrame, today: pd.DataFrame, top: int) -> float:
    counted = previous["item"].value_counts().reset_index().sort_values(["count", "item"], ascending=[False, True])
    head = counted.head(top)["item"]
    rest = [len(d) - d["item"].isin(head).sum() for d in (previous, today)]
    now = today["item"].value_counts().reindex(head, fill_value=0).to_numpy()
    return plain_psi(np.append(counted.head(top)["count"], rest[0]), np.append(now, rest[1]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 60), st.floats(0, 2), st.floats(-0.3, 0.3))
def test_distances_are_those_of_numpy(seed: int, n: int, m: int, power: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    previous, today = lists(rng, n, 30), lists(rng, m, 40, power, shift)
    limits = Audit(max_score_psi=0.1, max_item_psi=0.2, top_items=7, max_new_items=0.1, min_coverage=0.5, min_users=0.9)
    checks = checks_of(staged(today, previous), limits, candidates=50, users=m + 2)
    new = (~today["item"].isin(previous["item"])).mean()
    expected = {
        "PSI of the scores": (score_psi(previous, today), 0.1),
        "PSI of the items": (item_psi(previous, today, 7), 0.2),
        "share of rows with a new item": (new, 0.1),
    }
    for name, (value, limit) in expected.items():
        assert checks[name].value == pytest.approx(value, abs=1e-4)
        assert checks[name].ok == (value <= limit)
    coverage, users = today["item"].nunique() / 50, m / (m + 2)
    assert checks["share of the candidate items given"].value == pytest.approx(coverage, abs=1e-4)
    assert checks["share of the candidate items given"].ok == (coverage >= 0.5)
    assert checks["share of the scored users with a list"].value == pytest.approx(users, abs=1e-4)
    assert checks["share of the scored users with a list"].ok == (users >= 0.9)


def test_the_staged_rows_are_read_once_and_once_more_by_items() -> None:
    previous, today = (lists(np.random.default_rng(seed), 40, 30) for seed in (0, 1))
    all_limits = Audit(max_new_items=1, min_coverage=0, min_users=0)
    for past, limits, statements in (
        (previous, all_limits, 2),
        (None, all_limits, 2),
        (previous, Audit(max_item_psi=None), 1),
    ):
        day = staged(today, past)
        checks_of(day, limits, candidates=50, users=50)
        assert sum(sql.count("FROM staged") for sql in day.queries) == statements
        assert sum("FROM staged" in sql for sql in day.queries) == statements


def some_rows(seed: int, rows: int) -> pd.DataFrame:
    """Rows of every fault."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "ds": rng.choice(["2026-01-02", "2026-01-01"], rows, p=[0.9, 0.1]),
            "user id": rng.integers(0, 6, rows).astype(float),
            "item": rng.integers(0, 5, rows).astype(float),
            "rank": rng.integers(0, 5, rows).astype(float),
            "score": rng.uniform(-0.2, 1.2, rows).round(2),
        }
    )
    return frame.mask(rng.random(frame.shape) < 0.05)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 60), st.lists(st.floats(0, 1), max_size=4, unique=True))
def test_counts_are_those_of_pandas(seed: int, rows: int, edges: list[float]) -> None:
    frame, edges = some_rows(seed, rows), sorted(edges)
    day = staged(frame, None)
    counts = count_day(day, Expected("user id", "item", ("ds", "user id", "score"), 4), edges)
    by_user = frame.groupby("user id", dropna=False)
    ranks = by_user["rank"].agg(["min", "max", "nunique", "size"])
    known = ranks[ranks["min"].notna()]
    broken = (known["min"] != 1) | (known["max"] != known["nunique"])
    pairs = {c: frame.groupby(["user id", c], dropna=False).size() for c in ("rank", "item")}
    score = frame["score"]
    cuts = [-math.inf, *edges, math.inf]
    # Null is below no edge.
    by_score = [int(((score >= low) & (score < high)).sum()) for low, high in itertools.pairwise(cuts)]
    by_score[-1] += int(score.isna().sum())
    got = (counts.rows, counts.users, counts.nulls, counts.other_days, counts.outside)
    assert got == (
        rows,
        frame["user id"].nunique(),
        int(frame[["ds", "user id", "score"]].isna().any(axis=1).sum()),
        int((frame["ds"] == "2026-01-01").sum()),
        int(((score < 0) | (score > 1)).sum()),
    )
    assert (counts.repeated_ranks, counts.repeated_items) == tuple(int((p > 1).sum()) for p in pairs.values())
    assert (counts.broken_ranks, counts.too_long) == (int(broken.sum()), int((ranks["size"] > 4).sum()))
    assert counts.by_score == tuple(by_score)


def test_the_same_day_is_at_no_distance_and_another_is() -> None:
    rng = np.random.default_rng(0)
    previous = lists(rng, 300, 30)
    same = checks_of(staged(previous, previous), Audit(max_new_items=0))
    assert {c.name: (c.value, c.ok) for c in same.values()} == dict.fromkeys(same, (0.0, True))
    shifted = checks_of(staged(lists(rng, 300, 30, power=2, shift=0.3), previous), Audit())
    assert [c.ok for c in shifted.values()] == [False, False]
    assert "2026-01-01" in str(shifted["PSI of the items"])
    constant = previous.assign(score=0.5)
    assert checks_of(staged(constant, constant), Audit())["PSI of the scores"].value == 0


def test_the_first_day_is_compared_with_none() -> None:
    day = staged(lists(np.random.default_rng(0), 5, 10), None)
    checks = checks_of(day, Audit(max_new_items=0, min_coverage=1, min_users=1))
    assert [(c.ok, c.detail) for c in checks.values()] == [(True, "no earlier day")] * 3


@pytest.mark.parametrize(
    ("sql", "value", "ok"),
    [
        ("SELECT count(*) FROM {staged} WHERE rank = 1", 5.0, True),
        ("SELECT avg(score) FROM {staged} WHERE rank > 3", math.nan, False),
        ("SELECT 7 - length('{{}}') * 3", 1.0, False),
    ],
)
def test_a_rule_in_the_warehouse_s_sql(sql: str, value: float, ok: bool) -> None:
    day = staged(lists(np.random.default_rng(0), 5, 10), None)
    (check,) = own_checks(None, day, {"mine": AuditRule(sql=sql, min=2, max=5)})  # type: ignore[arg-type]
    assert (check.ok, check.limit) == (ok, "at least 2 and at most 5")
    assert check.value == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT 1 FROM {stagd}", "stagd.* is none of"),
        ("SELECT rank FROM {staged}", "15 rows of 1 columns"),
        ("SELECT 'many'", "'many', not a number"),
        ("SELECT {", "double a brace"),
    ],
)
def test_a_rule_that_gives_no_number(sql: str, message: str) -> None:
    day = staged(lists(np.random.default_rng(0), 5, 10), None)
    with pytest.raises(UserError, match=message):
        list(own_checks(None, day, {"mine": AuditRule(sql=sql, min=0)}))  # type: ignore[arg-type]


def test_a_rule_against_the_earlier_day_holds_without_one() -> None:
    day = staged(lists(np.random.default_rng(0), 5, 10), None)
    rules: Mapping[str, AuditRule] = {"mine": AuditRule(sql="SELECT count(*) FROM {previous}", min=1)}
    assert [c.ok for c in own_checks(None, day, rules)] == [True]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys", [{"expr": "1"}, {"max": 1}, {"expr": "1", "sql": "1", "max": 1}, {"expr": "1", "min": 2, "max": 1}]
)
def test_rules_that_can_be_none(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give one of|give min|is above"):
        AuditRule(**keys)


def test_a_figure_just_over_its_limit_is_shown_as_such() -> None:
    assert check_within("x", 0.25000001, None, 0.25).value != 0.25
    assert not check_within("x", 0.25000001, None, 0.25).ok
    assert check_within("x", 0.25, 0.25, 0.25).ok
