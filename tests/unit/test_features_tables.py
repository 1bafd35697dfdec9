"""Table operators by their Arrow implementations, against loops over all pairs of rows; and what they refuse."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.features.table_ops.base import TrainRange
from headrace.features.table_ops.external import ExternalReader, pin
from headrace.features.table_ops.predicate import Predicate
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import declared
from headrace.score.pair_features import check_columns
from headrace.udfs.xxhash64 import xxhash64_strings
from headrace.workspace import Workspace
from tests.arrow_table_ops import by_arrow
from tests.arrow_table_ops.external import read
from tests.arrow_table_ops.predicate import predicate
from tests.tables_support import (
    COLUMNS,
    DAY,
    PAST,
    ROW_OF_CLICKS,
    ROWS,
    START,
    TYPES,
    Row,
    as_table,
    assert_same_rows,
    by_identity,
    check_negatives,
    expected_past,
    external,
    micros,
    number,
    past_of,
    perturbed,
    prepare,
    same,
)

NOWHERE = ExternalReader(Workspace(Path("/nonexistent")))
PROBES = st.lists(st.sampled_from([None, None, None, "asks"]), min_size=40, max_size=40)


@settings(max_examples=40, deadline=None)
@given(ROWS, PROBES)
def test_the_past_is_what_a_loop_over_all_rows_finds(rows: list[Row], queries: list[str | None]) -> None:
    rows = [{**r, "__query": p} for r, p in zip(number(rows), queries, strict=False)]
    found = by_identity(by_arrow(prepare(*PAST), as_table(rows, query=True), NOWHERE))
    wanted = expected_past(rows)
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        for name, value in row.items():
            assert same(found[key][name], value), (key, name, found[key][name], value)
    # Rows are of one session where, and only where, the loop gives them the same user and start.
    groups: dict[Any, set[int]] = {}
    for r in rows:
        f = found[(r["_source_file"], r["_source_line"])]
        if r["user"] is None or r["ts"] is None:
            assert f["session_id"] is None
        else:
            groups.setdefault((r["user"], r["ts"].timestamp() * 1e6 - f["session_age"] * 1e6), set()).add(
                f["session_id"]
            )
    assert all(len(ids) == 1 for ids in groups.values())
    assert len({i for ids in groups.values() for i in ids}) == len(groups)


def test_lag_and_history_against_pandas() -> None:
    """A thousand events of five users: shifts and lists as long as pandas' shift and tail make them."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"user": rng.integers(0, 5, 1_000), "n": rng.integers(-99, 99, 1_000)})
    frame = frame.sort_values("user", kind="stable").reset_index(drop=True)
    frame["ts"] = [START + timedelta(minutes=7 * int(i)) for i in frame.groupby("user").cumcount()]
    lags = [{"lag": {"keys": ["user"], "values": ["n"], "since": "minutes", "shift": s}} for s in (1, 2, 150)]
    rows = number(frame.to_dict("records"))
    p = prepare(*lags, {"history": {"keys": ["user"], "values": ["n"], "length": 150}})
    found = by_identity(by_arrow(p, as_table(rows), NOWHERE))
    users = frame.groupby("user")
    for s, suffix in ((1, ""), (2, "_2"), (150, "_150")):
        wanted = (frame.n - users.n.shift(s)).astype(object)
        passed = ((frame.ts - users.ts.shift(s)) / timedelta(minutes=1)).astype(object)
        assert wanted.notna().sum() == sum(max(0, len(g) - s) for _, g in users) > 0
        for i, r in enumerate(rows):
            f = found[(r["_source_file"], r["_source_line"])]
            assert f[f"user_n_difference{suffix}"] == (None if pd.isna(wanted[i]) else wanted[i])
            assert f[f"user_since{suffix}"] == (None if pd.isna(passed[i]) else passed[i])
    for _, group in users:
        for at, i in enumerate(group.index):
            r = rows[i]
            f = found[(r["_source_file"], r["_source_line"])]
            assert f["n_history"] == group.n[:at].tail(150).tolist()


JOINS: list[dict[str, Any]] = [
    {"filter": {"where": "price < 5 or price is null"}},
    {
        "join_external": {
            "path": "tables/items",
            "format": "parquet",
            "keys": {"item": "id"},
            "add": {"brand": "string"},
        }
    },
    {
        "join_asof": {
            "path": "tables/prices",
            "format": "parquet",
            "keys": ["item"],
            "valid_from": "since",
            "add": {"list_price": "double", "tier": "string"},
            "tolerance_days": 4,
        }
    },
    {
        "join_asof": {
            "path": "tables/prices",
            "format": "parquet",
            "keys": ["item"],
            "valid_from": "since",
            "add": {"list_price": "double"},
            "at": "before",
            "prefix": "earlier_",
        }
    },
    {"dropna": {"subset": ["user", "item"], "how": "all"}},
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ExternalReader:
    return external(tmp_path_factory.mktemp("tables"))


@settings(max_examples=40, deadline=None)
@given(ROWS, ROWS, st.integers(0, 15))
def test_no_future_row_changes_a_past_row(
    reader: ExternalReader, rows: list[Row], others: list[Row], quarter: int
) -> None:
    at = START + quarter * DAY / 4
    p = prepare(*JOINS, *PAST)
    now, then = perturbed(rows, others, at)
    assert_same_rows(past_of(by_arrow(p, as_table(now), reader), at), past_of(by_arrow(p, as_table(then), reader), at))


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_joins_are_what_a_loop_finds(reader: ExternalReader, rows: list[Row]) -> None:
    rows = number(rows)
    items = read(reader, prepare(JOINS[1]).externals[0]).to_pylist()
    prices = read(reader, prepare(JOINS[2]).externals[0]).to_pylist()
    found = by_identity(by_arrow(prepare(*JOINS[1:4]), as_table(rows), reader))
    assert len(found) == len(rows)
    for r in rows:
        f = found[(r["_source_file"], r["_source_line"])]
        assert f["brand"] == next((x["brand"] for x in items if r["item"] is not None and x["id"] == r["item"]), None)
        if r["ts"] is None:
            assert f["list_price"] is f["tier"] is f["earlier_list_price"] is None
            continue
        upto = [x for x in prices if x["item"] == r["item"] is not None and x["since"] <= r["ts"]]
        newest = max(upto, key=lambda x: x["since"], default=None)
        fresh = newest if newest is not None and newest["since"] > r["ts"] - 4 * DAY else {}
        assert (f["list_price"], f["tier"]) == (fresh.get("list_price"), fresh.get("tier"))
        earlier = max((x for x in upto if x["since"] < r["ts"]), key=lambda x: x["since"], default={})
        assert f["earlier_list_price"] == earlier.get("list_price")


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from(["any", "all"]))
def test_dropna_and_rename(rows: list[Row], how: str) -> None:
    rows = number(rows)
    p = prepare({"dropna": {"subset": ["price", "tags"], "how": how}}, {"rename": {"to": {"n": "big", "big": "n"}}})
    found = by_identity(by_arrow(p, as_table(rows), NOWHERE))
    join = any if how == "any" else all
    kept = [r for r in rows if not join([r["price"] is None or math.isnan(r["price"]), not r["tags"]])]
    assert {k: (r["n"], r["big"]) for k, r in found.items()} == {
        (r["_source_file"], r["_source_line"]): (r["big"], r["n"]) for r in kept
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
def test_conditions_are_sql(rows: list[Row], where: str) -> None:
    rows = number(rows)
    with sqlite3.connect(":memory:") as db:
        db.execute("create table t (place text, n, big, price real, click, item text, flag, tags)")
        for r in rows:
            place = f"{r['_source_file']}:{r['_source_line']}"
            price = None if r["price"] is None or math.isnan(r["price"]) else r["price"]
            tags = None if r["tags"] is None else str(r["tags"])
            values = (place, r["n"], r["big"], price, r["click"], r["item"], r["flag"], tags)
            db.execute("insert into t values (?, ?, ?, ?, ?, ?, ?, ?)", values)
        wanted = {place for (place,) in db.execute(f"select place from t where {where}")}
    db.close()
    found = by_arrow(prepare({"filter": {"where": where}}), as_table(rows), NOWHERE)
    assert {f"{f}:{n}" for f, n in by_identity(found)} == wanted


def test_conditions_on_times_and_odd_names() -> None:
    rows = number([{"ts": START, "day": START.date(), "odd.na`me": 1.5}, {"ts": START + DAY, "day": None, "n": 2}])
    for where, wanted in (
        ("ts >= '2026-01-02'", [1]),
        ("ts < '2026-01-02 00:00:00.000001' and ts > '2026-01-01T00:00:00+00:00'", [1]),
        ("day = '2026-01-01'", [0]),
        ("`odd.na``me` > 1", [0]),
        ("day <> '2025-12-31' or n=2", [0, 1]),
    ):
        keep = predicate(Predicate(where, {c.name: declared(c) for c in COLUMNS}), as_table(rows)).to_pylist()
        assert [i for i, k in enumerate(keep) if k] == wanted, where


# Negatives.


@settings(max_examples=40, deadline=None)
@given(
    st.lists(ROW_OF_CLICKS, min_size=1, max_size=60),
    st.booleans(),
    st.sampled_from(
        [
            *({"method": "popularity", "alpha": a} for a in (0.25, 0.5, 0.75, 1.0)),
            {"method": "in_batch", "batch": 2},
            {"method": "in_batch", "batch": 8},
        ]
    ),
)
def test_negatives_keep_what_they_promise(rows: list[Row], exclude_seen: bool, drawn: dict[str, Any]) -> None:
    rows = number(rows)
    params = {
        "item": "item",
        "item_columns": ["price", "tags"],
        "user": "user",
        "exclude_seen": exclude_seen,
        "per_positive": 3,
        "tries": 3,
        **drawn,
    }
    range_ = (START + DAY / 2, START + 3 * DAY)
    p = prepare({"negatives": params}, {"trailing": {"keys": ["item"], "windows": [2]}})
    check_negatives(by_arrow(p, as_table(rows), NOWHERE, TrainRange(*map(micros, range_))), rows, params, range_)


def _many(n: int) -> list[Row]:
    """Item i happens i + 1 times as often as item 0, all before the first click."""
    shown = [{"user": 0, "item": f"i{i}", "ts": START, "click": 0} for i in range(5) for _ in range((i + 1) ** 2)]
    return number([*shown, *({"user": j, "item": "i0", "ts": START + DAY, "click": 1} for j in range(n))])


def test_negatives_are_drawn_as_often_as_their_weights_say() -> None:
    rows, train = _many(4000), TrainRange(micros(START), micros(START + DAY))
    for more, weights in (
        ({"method": "uniform"}, [1, 1, 1, 1]),
        ({"method": "popularity", "alpha": 0.5}, [2, 3, 4, 5]),
        ({"method": "popularity", "alpha": 1.0}, [4, 9, 16, 25]),
    ):
        p = prepare({"negatives": {"item": "item", "per_positive": 2, "tries": 8, **more}})
        found = by_arrow(p, as_table(rows), NOWHERE, train)
        drawn = Counter(r["item"] for r in found.to_pylist() if r["__query"] is not None)
        assert sum(drawn.values()) > 7950
        for i, weight in enumerate(weights, 1):
            # Five standard deviations of a draw of 8,000; the draws are hashes, so this passes always or never.
            share = weight / sum(weights)
            assert abs(drawn[f"i{i}"] / 8000 - share) < 5 * math.sqrt(share * (1 - share) / 8000), (more, drawn)
        assert by_arrow(p, as_table(rows[::-1]), NOWHERE, train).num_rows == found.num_rows


def test_negatives_of_the_batch_are_items_of_its_positives() -> None:
    """As often as they are there, where all are one batch; else of those whose hash fell on the same batch."""
    clicked = [{"user": i, "item": f"i{min(i % 10, 3)}", "ts": START, "click": 1} for i in range(400)]
    later = [{"user": j, "item": "new", "ts": START + DAY, "click": 1} for j in range(2000)]
    shown = [{"user": 0, "item": "shown", "ts": START, "click": 0}] * 50
    rows, train = number([*clicked, *shown, *later]), TrainRange(micros(START), micros(START + DAY))
    for batch, batches in ((400, 1), (4, 100)):
        params = {"item": "item", "per_positive": 2, "tries": 8, "method": "in_batch", "batch": batch}
        found = by_arrow(prepare({"negatives": params}), as_table(rows), NOWHERE, train).to_pylist()
        pools: dict[int, Counter[str]] = {}
        for r in rows:
            if r["click"] == 1 and r["ts"] == START:
                pools.setdefault(_batch_of(r["_source_file"], r["_source_line"], batches), Counter())[r["item"]] += 1
        drawn = Counter[str]()
        for r in found:
            if r["__query"] is not None:
                of = r["_source_file"].split("#")[0]
                assert r["item"] in pools[_batch_of(of, r["_source_line"], batches)]
                drawn[r["item"]] += 1
        if batches == 1:
            assert drawn.keys() == {"i0", "i1", "i2", "i3"}
            for item, weight in pools[0].items():
                share = weight / 400
                assert abs(drawn[item] / 4000 - share) < 5 * math.sqrt(share * (1 - share) / 4000), drawn
        else:
            assert 2000 < sum(drawn.values()) < 4000  # positives whose batch is empty have none


def _batch_of(file: str, line: int, batches: int) -> int:
    return int(xxhash64_strings(pa.array([f"{file}:{line}:batch:0"]))[0]) % batches


def test_negatives_of_another_seed_are_others() -> None:
    rows, train = _many(200), TrainRange(micros(START), micros(START + DAY))
    drawn = []
    for seed in (0, 0, 1):
        p = prepare({"negatives": {"item": "item", "per_positive": 2, "seed": seed}})
        found = by_identity(by_arrow(p, as_table(rows), NOWHERE, train))
        drawn.append([r["item"] for _, r in sorted(found.items()) if r["__query"] is not None])
    assert drawn[0] == drawn[1] != drawn[2]


def test_negatives_before_the_range_ends_do_not_know_what_follows() -> None:
    """Popularity and clicks are those of the training range; nothing after it changes a negative in it."""
    rows = [{"user": i % 7, "item": f"i{i * i % 11}", "ts": START + i * DAY / 8, "click": i % 2} for i in range(60)]
    others = [{**r, "user": 3, "item": "i5", "click": 1} for r in rows]
    end = START + 6 * DAY
    params = {"item": "item", "item_columns": ["price"], "user": "user", "exclude_seen": True, "method": "popularity"}
    p, train = prepare({"negatives": params}), TrainRange(micros(START), micros(end))
    now, then = perturbed(rows, others, end)
    a, b = (past_of(by_arrow(p, as_table(r), NOWHERE, train), end) for r in (now, then))
    assert sum(r["__query"] is not None for r in a.values()) > 20
    assert_same_rows(a, b)


# What is refused.


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ({"trailling": {}}, r"features.prepare\[0\]: no table operator 'trailling'; did you mean 'trailing'"),
        ({"trailing": {"keys": ["user"], "window": [1]}}, "unknown parameter 'window'; did you mean 'windows'"),
        ({"trailing": {"keys": ["user"]}}, "parameter 'windows' is missing"),
        ({"trailing": {"keys": ["usr"], "windows": [1]}}, "column 'usr' is not there"),
        ({"trailing": {"keys": ["price"], "windows": [1]}}, "key 'price' is double"),
        ({"trailing": {"keys": ["user"], "windows": [0]}}, "a window is a number of days above 0"),
        ({"trailing": {"keys": ["user"], "windows": [1], "stats": ["mean"]}}, "need `values`"),
        ({"trailing": {"keys": ["user"], "windows": [1], "values": ["item"], "stats": ["sum"]}}, "'item' is string"),
        ({"trailing": {"keys": ["user"], "windows": [1], "where": "n = 'a'"}}, "compares bigint with string"),
        ({"lag": {"keys": ["user"], "values": ["click"]}}, "the row's own would be in the difference"),
        ({"lag": {"keys": ["user"]}}, "give `values`"),
        ({"lag": {"keys": ["user"], "values": ["n"], "shift": -1}}, "shift"),
        ({"history": {"keys": ["user"], "values": ["n"], "length": 4097}}, "length"),
        ({"history": {"keys": ["user"], "values": ["tags"]}}, "'tags' is array<string>"),
        ({"sessions": {"keys": ["flag"]}}, "key 'flag' is boolean"),
        ({"target_encoding_past": {"keys": ["user"]}}, "'delay_hours' is missing"),
        ({"target_encoding_past": {"keys": ["click"], "delay_hours": 0}}, "leaks"),
        ({"filter": {"where": "n = "}}, "ends too early"),
        ({"filter": {"where": "n"}}, "compare it with something"),
        ({"filter": {"where": "1 = 1"}}, "one of them must be a column"),
        ({"filter": {"where": "n = 1 2"}}, "not expected here"),
        ({"filter": {"where": "(n = 1"}}, r"a '\)' is missing"),
        ({"filter": {"where": "n = 1; drop"}}, "not understood"),
        ({"filter": {"where": "ts > 'noon'"}}, "is no timestamp"),
        ({"filter": {"where": "tags = 'a'"}}, "only `is null`"),
        ({"filter": {"where": "n = 9223372036854775808"}}, "does not fit 64 bits"),
        ({"filter": {"where": " "}}, "empty"),
        ({"rename": {"to": {"click": "y"}}}, "is the label"),
        ({"rename": {"to": {"ts": "when"}}}, "is the event's time"),
        ({"rename": {"to": {"n": "item"}}}, "two columns would be named 'item'"),
        ({"rename": {"to": {"n": "_n"}}}, "reserved"),
        ({"dropna": {"subset": ["x"]}}, "column 'x' is not there"),
        ({"lambda": {"add": {"x": {"expression": "click + 1", "type": "int"}}}}, "leaks"),
        ({"lambda": {"add": {"x": {"expression": "`click`", "type": "int"}}}}, "leaks"),
        ({"lambda": {"add": {"x": {"expression": "CLICK * 1.0", "type": "double"}}}}, "leaks"),
        ({"lambda": {"add": {"x": {"expression": "`cLiCk`", "type": "int"}}}}, "leaks"),
        ({"lambda": {"add": {"Click": {"expression": "n", "type": "int"}}}}, "already there as 'click'"),
        ({"rename": {"to": {"n": "Click"}}}, "two columns would be named 'click'"),
        ({"rename": {"to": {"n": "DS"}}}, "reserved name"),
        ({"lambda": {"add": {"x": {"expression": "hash(*)", "type": "int"}}}}, "name the columns"),
        ({"lambda": {"add": {"x": {"expression": "rand()", "type": "double"}}}}, "answers otherwise"),
        ({"lambda": {"add": {"x": {"expression": "current_date", "type": "date"}}}}, "answers otherwise"),
        ({"lambda": {"add": {"x": {"expression": "(select 1)", "type": "int"}}}}, "no function of one row"),
        ({"lambda": {"add": {"n": {"expression": "1", "type": "int"}}}}, "already there"),
        ({"lambda": {"add": {"x": {"expression": "1", "type": "money"}}}}, "add.x.type"),
        ({"join_external": {"path": "t", "keys": ["item"], "add": {"n": "int"}}}, "already there"),
        ({"join_external": {"path": "t", "keys": ["item"], "add": {"x": "int"}, "on_duplicate": "first"}}, "`order`"),
        (
            {
                "join_external": {
                    "path": "t",
                    "keys": ["item"],
                    "add": {"x": "double"},
                    "on_duplicate": "first",
                    "order": ["x"],
                }
            },
            "order: 'x' is double",
        ),
        ({"join_asof": {"path": "t", "keys": ["item"], "valid_from": "item", "add": {"x": "int"}}}, "is a key"),
        ({"negatives": {"item": "item", "exclude_seen": True}}, "exclude_seen needs `user`"),
        ({"negatives": {"item": "item", "alpha": 0.6}}, "roots are the same"),
        ({"negatives": {"item": "item", "item_columns": ["ts"]}}, "'ts' is not of the item"),
    ],
)
def test_mistakes_are_explained(op: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        prepare(op)


def test_a_text_is_no_label_in_an_expression() -> None:
    made = {"x": {"expression": "concat(item, ' click', \"click\")", "type": "string"}}
    assert [c.name for c in prepare({"lambda": {"add": made}}).columns][-1] == "x"


def test_order_and_place() -> None:
    with pytest.raises(UserError, match="put it before history"):
        prepare({"history": {"keys": ["user"], "values": ["item"]}}, {"negatives": {"item": "item"}})
    with pytest.raises(UserError, match="by must be time or column"):
        prepare({"negatives": {"item": "item"}}, knows_train=False)
    p = prepare({"trailing": {"keys": ["user"], "windows": [0.5, 7, "all"], "delay_hours": 3}})
    assert p.lookback_days == 8
    leading, rest = prepare({"negatives": {"item": "item"}}, {"dropna": {"subset": ["n"]}}, *PAST[:2]).split(
        serving=True
    )
    assert [s.op.name for s in leading.steps] == ["dropna"]
    assert [s.op.name for s in rest.steps] == ["trailing", "trailing"]


def spec_with(prepare_: list[Any], **score: Any) -> Any:
    import yaml

    overrides = [f"features.prepare={yaml.safe_dump(prepare_, default_flow_style=True)}"]
    return load_spec("clicks", [*overrides, *(f"score.{k}={v}" for k, v in score.items())])


def test_names_of_a_pipeline() -> None:
    ops = [
        {"trailing": {"keys": ["user_id", "item_id"], "windows": [7]}},
        {"sessions": {"keys": ["user_id"]}},
        {"history": {"keys": ["session_id"], "values": ["item_id"]}},
        {"rename": {"to": {"device": "screen"}}},
    ]
    spec = spec_with(ops)
    # The chain still names the column that was renamed.
    assert "screen" in {c.name for c in prepared_columns(spec_with(ops, **{"user.columns": "[user_age]"}))}
    with pytest.raises(UserError, match=r"score\.user: column 'device' is neither declared"):
        prepared_columns(spec)
    columns = "[user_age, user_country, user_activity, device, item_id_history]"
    good = spec_with(ops[:3], **{"user.columns": columns})
    check_columns(good, good.score)
    columns = "[user_age, user_country, user_activity, device, user_id_item_id_count_7d]"
    bad = spec_with(ops[:3], **{"user.columns": columns})
    with pytest.raises(UserError, match="of which item_id is not the user's"):
        check_columns(bad, bad.score)


def test_files_that_changed_after_they_were_pinned_are_refused(tmp_path: Path) -> None:
    csv = {"path": "t.csv", "format": "csv", "keys": ["item"], "add": {"x": "int"}}
    p = prepare({"join_external": csv})
    (tmp_path / "t.csv").write_text("item,x\na,1\n")
    pinned = pin(Workspace(tmp_path), p.externals)
    reader = ExternalReader.of(Workspace(tmp_path), p.externals, pinned)
    reader.check_unchanged()
    (tmp_path / "t.csv").write_text("item,x\na,22\n")
    with pytest.raises(UserError, match=r"t\.csv have changed since the features stage looked"):
        reader.check_unchanged()
    ExternalReader.of(Workspace(tmp_path), p.externals, pin(Workspace(tmp_path), p.externals)).check_unchanged()
    with pytest.raises(UserError, match=r"names no version of the csv table t\.csv"):
        ExternalReader.of(Workspace(tmp_path), p.externals, [])


def test_external_files_are_missing(tmp_path: Path) -> None:
    p = prepare({"join_external": {"path": "tables/none", "keys": ["item"], "add": {"x": "int"}}})
    with pytest.raises(UserError, match="there is no delta table"):
        by_arrow(p, as_table([]), ExternalReader(Workspace(tmp_path)))
    assert isinstance(as_table([]), pa.Table)
