"""`dropna`, `rename`, and conditions of `filter` against SQLite."""

from __future__ import annotations

import math
import sqlite3

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.features.table_ops.predicate import Predicate
from headrace.features.types import declared
from tests.arrow_table_ops import by_arrow
from tests.tables_support import COLUMNS, DAY, NOWHERE, ROWS, START, TYPES, Row, as_table, by_identity, number, prepare


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from(["any", "all"]))
def test_dropna_and_rename(rows: list[Row], how: str) -> None:
    rows = number(rows)
    p = prepare({"dropna": {"subset": ["price", "tags"], "how": how}}, {"rename": {"to": {"n": "big", "big": "n"}}})
    actual = by_identity(by_arrow(p, as_table(rows), NOWHERE))
    join = any if how == "any" else all
    remaining = [r for r in rows if not join([r["price"] is None or math.isnan(r["price"]), not r["tags"]])]
    assert {k: (r["n"], r["big"]) for k, r in actual.items()} == {
        (r["_source_file"], r["_source_line"]): (r["big"], r["n"]) for r in remaining
    }


# Conditions, against SQLite: another implementation of SQL's logic.

_NUMBERS = st.sampled_from(["n", "big", "price", "click", "0", "1", "-2", "0.5", "4611686018427387904"])
_TEXTS = st.sampled_from(["item", "'a'", "'é'", "'it''s'", "''"])
_SIGNS = st.sampled_from(["=", "==", "!=", "<>", "<", "<=", ">", ">="])


def _has_column(parts: tuple[str, ...]) -> bool:
    return any(p in TYPES for p in parts)


_LEAVES = st.one_of(
    st.tuples(_NUMBERS, _SIGNS, _NUMBERS).filter(_has_column).map(" ".join),
    st.tuples(_TEXTS, _SIGNS, _TEXTS).filter(_has_column).map(" ".join),
    st.tuples(st.sampled_from(["n", "item", "price", "tags"]), st.sampled_from(["is null", "is not null"])).map(
        " ".join
    ),
    st.sampled_from(
        [
            "n in (1, 2, -3)",
            "item not in ('a', '')",
            "n between -1 and 2",
            "price not between 0.0 and 1",
            "flag",
            "flag = true",
            "NOT flag",
        ]
    ),
)
_CONDITIONS = st.recursive(
    _LEAVES,
    lambda c: st.one_of(
        st.tuples(c, st.sampled_from([" and ", " OR "]), c).map("".join), c.map("not ({})".format), c.map("({})".format)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(ROWS, _CONDITIONS)
def test_conditions_are_sql(rows: list[Row], condition: str) -> None:
    rows = number(rows)
    with sqlite3.connect(":memory:") as db:
        db.execute("create table t (place text, n, big, price real, click, item text, flag, tags)")
        for r in rows:
            place = f"{r['_source_file']}:{r['_source_line']}"
            price = None if r["price"] is None or math.isnan(r["price"]) else r["price"]
            tags = None if r["tags"] is None else str(r["tags"])
            values = (place, r["n"], r["big"], price, r["click"], r["item"], r["flag"], tags)
            db.execute("insert into t values (?, ?, ?, ?, ?, ?, ?, ?)", values)
        expected = {place for (place,) in db.execute(f"select place from t where {condition}")}
    db.close()
    actual = by_arrow(prepare({"filter": {"where": condition}}), as_table(rows), NOWHERE)
    assert {f"{f}:{n}" for f, n in by_identity(actual)} == expected


def test_conditions_on_times_and_odd_names() -> None:
    rows = number([{"ts": START, "day": START.date(), "odd.na`me": 1.5}, {"ts": START + DAY, "day": None, "n": 2}])
    columns = {c.name: as_table(rows).column(c.name).combine_chunks() for c in COLUMNS}
    for condition, expected in (
        ("ts >= '2026-01-02'", [1]),
        ("ts < '2026-01-02 00:00:00.000001' and ts > '2026-01-01T00:00:00+00:00'", [1]),
        ("day = '2026-01-01'", [0]),
        ("`odd.na``me` > 1", [0]),
        ("day <> '2025-12-31' or n=2", [0, 1]),
    ):
        keep = Predicate(condition, {c.name: declared(c) for c in COLUMNS}).arrow(columns.__getitem__).to_pylist()
        assert [i for i, k in enumerate(keep) if k] == expected, condition
