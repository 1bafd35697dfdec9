"""Table operators by Arrow against plain Python, and what they refuse."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import build_spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.table_ops.preparation import ExternalReader, pin, prepared_columns
from headrace.features.workflow.workflow import Workflow
from headrace.score.columns import check_columns
from tests.arrow_table_ops import by_arrow
from tests.arrow_table_ops.joins import read
from tests.tables_support import (
    DAY,
    JOINS_ASOF,
    NOWHERE,
    PAST,
    PROBES,
    ROWS,
    START,
    Row,
    as_table,
    assert_same_rows,
    by_identity,
    expected_past,
    external,
    number,
    past_of,
    perturbed,
    prepare,
    same,
)


@settings(max_examples=40, deadline=None)
@given(ROWS, PROBES)
def test_the_past_is_what_a_loop_over_all_rows_finds(rows: list[Row], queries: list[str | None]) -> None:
    rows = [{**r, "__query": p} for r, p in zip(number(rows), queries, strict=False)]
    actual = by_identity(by_arrow(prepare(*PAST), as_table(rows, query=True), NOWHERE))
    expected = expected_past(rows)
    assert actual.keys() == expected.keys()
    for key, row in expected.items():
        for name, value in row.items():
            assert same(actual[key][name], value), (key, name, actual[key][name], value)
    # Rows are of one session where, and only where, the loop gives them the same user and start.
    groups: dict[Any, set[int]] = {}
    for r in rows:
        f = actual[(r["_source_file"], r["_source_line"])]
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
    actual = by_identity(by_arrow(p, as_table(rows), NOWHERE))
    users = frame.groupby("user")
    for s, suffix in ((1, ""), (2, "_2"), (150, "_150")):
        expected = (frame.n - users.n.shift(s)).astype(object)
        passed = ((frame.ts - users.ts.shift(s)) / timedelta(minutes=1)).astype(object)
        assert expected.notna().sum() == sum(max(0, len(g) - s) for _, g in users) > 0
        for i, r in enumerate(rows):
            f = actual[(r["_source_file"], r["_source_line"])]
            assert f[f"user_n_difference{suffix}"] == (None if pd.isna(expected[i]) else expected[i])
            assert f[f"user_since{suffix}"] == (None if pd.isna(passed[i]) else passed[i])
    for _, group in users:
        for position, i in enumerate(group.index):
            r = rows[i]
            f = actual[(r["_source_file"], r["_source_line"])]
            assert f["n_history"] == group.n[:position].tail(150).tolist()


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
    *JOINS_ASOF,
    {"dropna": {"subset": ["user", "item"], "how": "all"}},
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ExternalReader:
    return external(tmp_path_factory.mktemp("tables"))


@settings(max_examples=40, deadline=None)
@given(ROWS, ROWS, st.integers(0, 15))
def test_no_future_row_changes_a_past_row(
    reader: ExternalReader, rows: list[Row], other_rows: list[Row], quarter: int
) -> None:
    instant = START + quarter * DAY / 4
    p = prepare(*JOINS, *PAST)
    now, then = perturbed(rows, other_rows, instant)
    assert_same_rows(
        past_of(by_arrow(p, as_table(now), reader), instant), past_of(by_arrow(p, as_table(then), reader), instant)
    )


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_joins_are_what_a_loop_finds(reader: ExternalReader, rows: list[Row]) -> None:
    rows = number(rows)
    items = read(reader, prepare(JOINS[1]).externals[0]).to_pylist()
    prices = read(reader, prepare(JOINS[2]).externals[0]).to_pylist()
    actual = by_identity(by_arrow(prepare(*JOINS[1:4]), as_table(rows), reader))
    assert len(actual) == len(rows)
    for r in rows:
        f = actual[(r["_source_file"], r["_source_line"])]
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
    added = {"x": {"expression": "concat(item, ' click', \"click\")", "type": "string"}}
    assert [c.name for c in prepare({"lambda": {"add": added}}).columns][-1] == "x"


def test_files_that_changed_after_they_were_pinned_are_refused(tmp_path: Path) -> None:
    csv = {"path": "t.csv", "format": "csv", "keys": ["item"], "add": {"x": "int"}}
    p = prepare({"join_external": csv})
    (tmp_path / "t.csv").write_text("item,x\na,1\n")
    pinned = pin(Workspace(tmp_path), p.externals)
    reader = ExternalReader.pinned_by(Workspace(tmp_path), p.externals, pinned)
    reader.check_unchanged()
    (tmp_path / "t.csv").write_text("item,x\na,22\n")
    with pytest.raises(UserError, match=r"t\.csv have changed since the features stage looked"):
        reader.check_unchanged()
    ExternalReader.pinned_by(Workspace(tmp_path), p.externals, pin(Workspace(tmp_path), p.externals)).check_unchanged()
    with pytest.raises(UserError, match=r"names no version of the csv table t\.csv"):
        ExternalReader.pinned_by(Workspace(tmp_path), p.externals, [])


def test_external_files_are_missing(tmp_path: Path) -> None:
    p = prepare({"join_external": {"path": "tables/none", "keys": ["item"], "add": {"x": "int"}}})
    with pytest.raises(UserError, match="there is no delta table"):
        by_arrow(p, as_table([]), ExternalReader(Workspace(tmp_path)))
    assert isinstance(as_table([]), pa.Table)


def test_a_label_that_lambda_makes_leaks_through_none_of_its_columns() -> None:
    spec: dict[str, Any] = {
        "pipeline": "census",
        "source": {"format": "csv", "path": "in.csv"},
        "table": {"columns": [{"name": "age", "type": "int"}, {"name": "Income"}, {"name": "tax", "type": "double"}]},
        "features": {
            "label": "rich",
            "prepare": [{"lambda": {"add": {"rich": {"expression": "income = '>50K tax'", "type": "int"}}}}],
            "workflow": [{"columns": ["age", "tax"], "ops": ["fill_missing"]}],
            "split": {"by": "position"},
        },
    }
    workflow = Workflow.from_spec(build_spec(spec))
    assert (workflow.label_column, workflow.input_columns) == ("rich", ("age", "tax"))
    spec["features"]["workflow"] = [{"columns": ["Income"], "ops": ["categorify"]}]
    with pytest.raises(UserError, match=r"features.workflow\[0\].columns: the label 'rich' is made of 'Income'"):
        Workflow.from_spec(build_spec(spec))
    # As well the label of another task.
    added = {"taxed": {"expression": "tax > 0", "type": "int"}}
    features = spec["features"] | {
        "prepare": [*spec["features"]["prepare"], {"lambda": {"add": added}}],
        "carried": ["taxed"],
        "workflow": [{"columns": ["tax"], "ops": ["fill_missing"]}],
    }
    taxed = spec | {"features": features, "train": {"tasks": {"rich": {}, "taxed": {"label": "taxed"}}}}
    with pytest.raises(UserError, match=r"features.workflow\[0\].columns: the label 'taxed' is made of 'tax'"):
        Workflow.from_spec(build_spec(taxed))
