"""Expectations and drift, judged from profiles."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.cli.summary import data_lines
from headrace.config import Expectations, Table, load_spec
from headrace.errors import UserError
from headrace.lake.landing import expectations
from headrace.lake.landing.expectations import FileProfile, UnreadableValues
from headrace.quality.report.blocks import Cell, Day, ReportTable
from headrace.quality.report.data import data_quality
from headrace.stage.manifest import Manifest

DS = "2026-01-02"
END = datetime.fromisoformat(DS).replace(tzinfo=UTC) + timedelta(days=1)
TABLE = Table.model_validate(
    {"columns": [{"name": "id", "type": "bigint", "required": True}, {"name": "price", "type": "double"}]}
)


def profile(name: str = "f.gz", **more: Any) -> FileProfile:
    return FileProfile(DS, name, **({"read": 100, "good": 90, "bad": 10} | more))


@pytest.mark.parametrize(
    ("setting", "value", "ok", "message"),
    [
        ({"min_rows": 88}, 88, True, None),
        ({"min_rows": 89}, 88, False, "min_rows: 88 rows, at least 89 wanted"),
        ({"max_rows": 88}, 88, True, None),
        ({"max_rows": 87}, 88, False, "max_rows: 88 rows, at most 87 wanted"),
        ({"max_bad_rate": 0.1}, 0.1, True, None),
        ({"max_bad_rate": 0.09}, 0.1, False, "max_bad_rate: 0.1, at most 0.09 wanted"),
        ({"null_rate": {"price": 0.5}}, 0.5, True, None),
        ({"null_rate": {"price": 0.4}}, 0.5, False, "null_rate.price: 0.5, at most 0.4 wanted"),
        ({"columns": "present"}, 1, False, "columns: 1 of the declared ones are in no file of the day"),
        ({"freshness_hours": 6}, 6.0, True, None),
        (
            {"freshness_hours": 5.5},
            6.0,
            False,
            "the newest event is 6 hours before the end of the day, at most 5.5 wanted",
        ),
    ],
)
def test_each_expectation_at_its_edge(setting: dict[str, Any], value: float, ok: bool, message: str | None) -> None:
    limits = Expectations.model_validate({"max_bad_rate": 1} | setting)
    files = [
        profile(good=45, bad=5, read=50, nulls={"price": 20}, newest=datetime(2026, 1, 2, 12, tzinfo=UTC)),
        profile(good=45, bad=5, read=50, nulls={"price": 25}, newest=datetime(2026, 1, 2, 18, tzinfo=UTC)),
    ]
    files[0].absent, files[1].absent = frozenset({"a", "b"}), frozenset({"b", "c"})
    checks = expectations.check_limits(DS, END, files, 2, limits)
    (name,) = (k for k in setting)
    (check,) = (c for c in checks if c.name.split(".")[0] == name)
    assert (check.value, check.ok) == (value, ok)
    if ok:
        expectations.enforce(checks, [], {})
    else:
        with pytest.raises(UserError) as e:
            expectations.enforce(checks, [], {})
        assert message is not None
        assert message in str(e.value)
        assert f"{DS} breaks 1 of its expectations; nothing of the day was loaded" in str(e.value)


def test_no_event_at_all_is_not_fresh() -> None:
    checks = expectations.check_limits(DS, END, [profile()], 0, Expectations(freshness_hours=1))
    (fresh,) = (c for c in checks if "fresh" in c.name)
    assert not fresh.ok
    with pytest.raises(UserError, match="the newest event is none hours"):
        expectations.enforce([fresh], [], {})


def test_all_breaches_are_told_at_once_with_what_explains_them() -> None:
    files = [profile(nulls={"price": 90}, unreadable={"price": UnreadableValues(10, "12,5")})]
    limits = Expectations(min_rows=1000, max_bad_rate=0.01, null_rate={"price": 0.5})
    drift = expectations.column_drifts(files, TABLE, frozenset())
    with pytest.raises(UserError) as e:
        expectations.enforce(
            expectations.check_limits(DS, END, files, 0, limits), drift, {"b: rare": 1, "a: common": 9}
        )
    lines = str(e.value).splitlines()
    assert lines[0].startswith(f"{DS} breaks 3 of its expectations")
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["min_rows", "max_bad_rate", "null_rate.price"]
    assert lines[4] == "  bad rows: a: common (9), b: rare (1)"
    assert lines[5].startswith("  column 'price' is retyped: ")


def test_drift_of_three_kinds() -> None:
    files = [
        profile("a.gz", extra=frozenset({"color"}), absent=frozenset({"price"}), readable={"id": 90}),
        profile(
            "b.gz",
            extra=frozenset({"color", "size"}),
            readable={"id": 40, "price": 4},
            unreadable={"price": UnreadableValues(5, "12,5"), "id": UnreadableValues(39, "7.5")},
        ),
    ]
    drifts = expectations.column_drifts(files, TABLE, frozenset({"size"}))
    assert [(d.column, d.change) for d in drifts] == [("color", "new"), ("price", "missing"), ("price", "retyped")]
    assert drifts[0].detail == "in a.gz, b.gz"
    assert drifts[1].detail == "in no row of a.gz"
    assert drifts[2].detail == "declared double, but 5 of 9 values are not (string such as '12,5') in b.gz"


def test_a_column_in_no_file_of_the_day() -> None:
    files = [profile("a.gz", absent=frozenset({"price"})), profile("b.gz", absent=frozenset({"price"}))]
    empty = profile("c.gz", read=0, good=0, bad=0)
    (drift,) = expectations.column_drifts([*files, empty], TABLE, frozenset())
    assert drift.detail == "in no file of the day (a.gz, b.gz)"
    # Summary and report show it.
    facts = {"drift": expectations.as_facts([drift])}
    manifest = Manifest(stage="ingest", pipeline="clicks", ds=DS, key="k", spec_hash="", facts=facts)
    assert f"warning: column 'price' is missing: {drift.detail}" in data_lines({"ingest": manifest}, DS)
    blocks = data_quality(Day(load_spec("clicks"), DS, {"ingest": manifest})).blocks
    (table,) = (b for b in blocks if isinstance(b, ReportTable) and b.title == "Schema drift")
    assert table.rows == ((Cell("price", code=True), "missing", drift.detail),)
    checks = expectations.check_limits(DS, END, [*files, empty], 0, Expectations(columns="present", max_bad_rate=1))
    with pytest.raises(UserError, match=r"columns: 1 of the declared ones(.|\n)*column 'price' is missing"):
        expectations.enforce(checks, [drift], {})
    limits = Expectations(columns="present", max_bad_rate=1)
    checks = expectations.check_limits(DS, END, [files[0], profile("b.gz")], 0, limits)
    assert all(c.ok for c in checks)


def test_half_of_the_values_is_not_a_retyped_column() -> None:
    files = [profile(readable={"id": 5, "price": 5}, unreadable={"price": UnreadableValues(5, "x")})]
    assert expectations.column_drifts(files, TABLE, frozenset()) == []


def test_required_column_missing_from_a_file() -> None:
    absent = frozenset({"id", "price"})
    with pytest.raises(UserError, match=r"required column 'id' is missing from all of landing file b\.gz \(100 rows\)"):
        expectations.refuse_columns([profile("a.gz"), profile("b.gz", absent=absent)], TABLE, [])
    # A file with no readable line says nothing about its columns: its rows are bad ones.
    expectations.refuse_columns([profile("b.gz", absent=absent, broken=100)], TABLE, [])


@pytest.mark.parametrize(("policy", "stops"), [("report", False), ("accept", False), ("refuse", True)])
def test_new_columns_by_policy(policy: str, stops: bool) -> None:
    table = TABLE.model_copy(update={"new_columns": policy})
    files = [profile("a.gz", extra=frozenset({"color"}))]
    drift = expectations.column_drifts(files, table, frozenset())
    if stops:
        with pytest.raises(UserError, match=r"new columns on 2026-01-02: 'color' in a\.gz"):
            expectations.refuse_columns(files, table, drift)
    else:
        expectations.refuse_columns(files, table, drift)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"columns": [{"name": "ds"}]}, "'ds' is a reserved name"),
        ({"columns": [{"name": "_line"}]}, "'_line' is a reserved name"),
        ({"columns": [{"name": "a"}], "expectations": {"ranges": {"a": [0, 1]}}}, "column 'a' is string, not a number"),
        (
            {"columns": [{"name": "a", "type": "bigint"}], "event_time": "a"},
            "column 'a' is bigint; declare it timestamp",
        ),
    ],
)
def test_declarations_that_rows_cannot_be_judged_by(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Table.model_validate(table)
