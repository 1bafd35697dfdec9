"""Refusals of ingest: sources, declarations, and rows by constraints of the table."""

from __future__ import annotations

import os
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing import load
from headrace.stage.manifest import Manifest
from tests.ingest_support import COLUMNS, D1, D2, D3, D4, NAMES, event, ids, jsonl, make_spec, put, run, table, version


def test_expectations_stop_the_day_before_anything_of_it_is_committed(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(n, D1) for n in range(14, 24)]))
    late = [event(n, D1, note=None) for n in range(100, 106)]
    put(ws, f"in/{D2}/a.json.gz", jsonl([*late, event(106, D1), "bad", "bad", "bad"]))
    strict = {"min_rows": 8, "max_bad_rate": 0.2, "null_rate": {"note": 0.5}, "freshness_hours": 12}
    spec = make_spec(expectations=strict)
    with pytest.raises(UserError) as e:
        run(spec, ws, D2)
    lines = str(e.value).splitlines()
    assert lines[0] == f"{D2} breaks 4 of its expectations; nothing of the day was loaded:"
    assert lines[1:5] == [
        "  min_rows: 7 rows, at least 8 wanted",
        "  max_bad_rate: 0.3, at most 0.2 wanted",
        "  null_rate.note: 0.857143, at most 0.5 wanted",
        "  freshness_hours: the newest event is 37.5 hours before the end of the day, at most 12 wanted",
    ]
    assert lines[5] == "  bad rows: not a JSON object (3)"
    # The day before it was fine, and is loaded.
    assert list(ids(ws)) == [D1]
    assert table(spark, ws, "quarantine") == []
    assert Manifest.load(ws.manifest("shop", D2, "ingest")) is None
    # Looser limits are another run; stricter ones are asked of a day that is loaded already, too.
    loose = make_spec(expectations={"max_bad_rate": 0.3, "null_rate": {"note": 0.9}})
    facts = run(loose, ws, D2).manifest.facts
    assert [(c["name"], c["value"], c["limit"], c["ok"]) for c in facts["expectations"] if c["ds"] == D2] == [
        ("min_rows", 7, 1, True),
        ("max_bad_rate", 0.3, 0.3, True),
        ("null_rate.note", 0.857143, 0.9, True),
    ]
    assert len(ids(ws)[D2]) == 7
    with pytest.raises(UserError, match="max_rows: 7 rows, at most 6 wanted"):
        run(make_spec(expectations={"max_bad_rate": 1, "max_rows": 6}), ws, D2)
    assert len(ids(ws)[D2]) == 7


@pytest.mark.parametrize("policy", ["report", "accept", "refuse"])
def test_drift_by_name_under_each_policy(spark: SparkSession, ws: Workspace, policy: str) -> None:
    spec = make_spec(new_columns=policy, columns=COLUMNS[:5], event_time=None, keys=[])
    put(ws, f"in/{D1}/a.json.gz", jsonl([{k: event(n, D1)[k] for k in NAMES[:5]} for n in range(3)]))
    rows = [{"id": f"e{n}", "ts": f"{D2} 00:00:00", "user": n, "hour": f"{n}h", "color": "red"} for n in range(4)]
    rows[0] |= {"hour": 1, "color": {"rgb": [255, 0, 0]}}
    put(ws, f"in/{D2}/a.json.gz", jsonl(rows))
    put(ws, f"in/{D2}/b.csv", b"id,ts,user,price,hour,size\nc1,2026-03-02,1,2.5,3,XL\nc2,2026-03-02,1,2.5,3,\n")
    if policy == "refuse":
        with pytest.raises(UserError) as e:
            run(spec, ws, D2)
        assert "new columns on 2026-03-02" in str(e.value)
        assert f"'color' in in/{D2}/a.json.gz; 'size' in in/{D2}/b.csv" in str(e.value)
        assert list(ids(ws)) == [D1]
        return
    manifest = run(spec, ws, D2).manifest
    drift = [(d["ds"], d["column"], d["change"]) for d in manifest.facts["drift"]]
    assert drift == [(D2, "color", "new"), (D2, "size", "new"), (D2, "price", "missing"), (D2, "hour", "retyped")]
    details = [d["detail"] for d in manifest.facts["drift"]]
    assert details[2] == f"in no row of in/{D2}/a.json.gz"
    expected = f"declared int, but 3 of 4 values are not (string such as '1h') in in/{D2}/a.json.gz"
    assert details[3] == expected
    events = {(r["ds"], r["id"]): r for r in table(spark, ws, "events")}
    assert [(r["_source_line"], r["_reason"]) for r in table(spark, ws, "quarantine")] == [
        (n + 1, f"hour: '{n}h' is not an int") for n in (1, 2, 3)
    ]
    if policy == "report":
        assert "color" not in events[D2, "e0"]
        return
    assert events[D1, "e1"]["color"] is None
    assert events[D2, "e0"]["color"] == '{"rgb":[255,0,0]}'
    assert [events[D2, c]["size"] for c in ("e0", "c1", "c2")] == [None, "XL", None]
    # The table has them now: the next day they are no news, and a day without them is fine.
    put(ws, f"in/{D3}/a.csv", b"id,ts,user,price,hour,color\nd1,2026-03-03,1,2.5,3,blue\n")
    assert run(spec, ws, D3).manifest.facts["drift"] == []
    (row,) = (r for r in table(spark, ws, "events") if r["ds"] == D3)
    assert (row["color"], row["size"]) == ("blue", None)
    # A name that the table cannot take.
    put(ws, f"in/{D4}/a.csv", b"id,ts,user,price,hour,Color\nd1,2026-03-04,1,2.5,3,blue\n")
    with pytest.raises(UserError, match="new column 'Color' cannot be added to the table"):
        run(spec, ws, D4)


def test_required_column_missing_from_a_file(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    put(ws, f"in/{D1}/b.json.gz", jsonl([{k: v for k, v in event(2, D1).items() if k != "user"}, "broken"]))
    with pytest.raises(
        UserError, match=rf"required column 'user' is missing from all of landing file in/{D1}/b.json.gz"
    ):
        run(make_spec(), ws, D1)
    assert ids(ws) == {}


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        ("truncated", r"it ends in the middle \(truncated\)"),
        ("flipped", "its gzip data are damaged"),
        ("not gzip", "it ends in the middle|its gzip data are damaged"),
    ],
)
def test_damaged_gzip_is_named_and_days_before_are_loaded(
    spark: SparkSession, ws: Workspace, capfd: pytest.CaptureFixture[str], damage: str, cause: str
) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    put(ws, f"in/{D2}/a.json.gz", jsonl([event(2, D2)]))
    path = put(ws, f"in/{D2}/b c%20.json.gz", jsonl([event(n, D2) for n in range(10, 3000)]))
    body = bytearray(path.read_bytes())
    if damage == "flipped":
        body[len(body) // 2] ^= 0xFF
    path.write_bytes({"truncated": bytes(body[: len(body) // 2]), "flipped": bytes(body), "not gzip": b"{}\n"}[damage])
    capfd.readouterr()
    with pytest.raises(UserError, match=rf"landing file in/{D2}/b c%20\.json\.gz cannot be read: ({cause})"):
        run(make_spec(), ws, D2)
    assert "Exception" not in capfd.readouterr().err
    assert ids(ws) == {D1: ["e1"]}


@pytest.mark.parametrize("body", [b"", b"\n\n", b"id,ts,user\n"], ids=["empty", "blank lines", "header alone"])
def test_empty_day_names_the_glob(spark: SparkSession, ws: Workspace, body: bytes) -> None:
    put(ws, f"in/{D1}/a.csv", body)
    with pytest.raises(UserError, match=rf"the 1 landing files of {D1} hold no rows \({ws.home}/in/{D1}/\*"):
        run(make_spec(), ws, D1)


def test_empty_day_may_be_allowed(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", b"")
    spec = make_spec(expectations={"min_rows": 0})
    assert run(spec, ws, D1).manifest.rows == {"read": 0, "kept": 0, "quarantined": 0, "duplicates": 0}
    assert run(spec, ws, D1).skipped


def test_unknown_ending_and_bad_headers(spark: SparkSession, ws: Workspace) -> None:
    path = put(ws, f"in/{D1}/a.xml", b"<a/>")
    with pytest.raises(UserError, match=rf"landing file in/{D1}/a\.xml: its name ends in neither \.json nor \.csv"):
        run(make_spec(), ws, D1)
    path.unlink()
    put(ws, f"in/{D1}/a.csv", b"id,id\n1,2\n")
    with pytest.raises(UserError, match=rf"landing file in/{D1}/a\.csv: its header names column 'id' twice"):
        run(make_spec(), ws, D1)


def test_blanks_around_fields_and_a_column_without_a_name(spark: SparkSession, ws: Workspace) -> None:
    """Text as people write it by hand, or pandas with its index."""
    body = ', id , hour, note\n0, a 1, 7, ?\n1,b , 8 ,"  x, ""y"" "\n2, c, ?, ? \n3,"d",9, z z \n'
    put(ws, f"in/{D1}/a.txt", body.encode())
    columns = [{"name": n, "type": t} for n, t in (("column0", "int"), ("id", "string"), ("hour", "bigint"))]
    columns.append({"name": "note", "type": "string"})
    spec = make_spec(
        {"format": "csv", "trim": True, "null_value": "?"}, columns=columns, event_time=None, expectations={}
    )
    assert run(spec, ws, D1).manifest.rows["quarantined"] == 0
    expected = [(0, "a 1", 7, None), (1, "b", 8, '  x, "y" '), (2, "c", None, None), (3, "d", 9, "z z")]
    assert [(r["column0"], r["id"], r["hour"], r["note"]) for r in table(spark, ws, "events")] == expected


def test_file_that_changes_while_it_is_read(
    spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    assess = load.assess_day

    def meanwhile(*args: Any) -> Any:
        os.utime(path, ns=(0, 0))
        return assess(*args)

    monkeypatch.setattr(load, "assess_day", meanwhile)
    with pytest.raises(UserError, match=rf"landing file in/{D1}/a\.json\.gz changed while it was read"):
        run(make_spec(), ws, D1)
    assert ids(ws) == {}
    assert table(spark, ws, "quarantine") == []


def test_declared_type_that_the_table_does_not_have(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    run(make_spec(), ws, D1)
    columns = [c | {"type": "string"} if c["name"] == "user" else c for c in COLUMNS]
    with pytest.raises(UserError, match=r"declares 'user' as string, but .* has 'user' as bigint"):
        run(make_spec(columns=columns), ws, D1)
    # A column that is declared later is added, and the day that the run is for gets its values.
    more = [*COLUMNS, {"name": "color", "type": "array<bigint>"}]
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1, color=[1, 2])]))
    run(make_spec(columns=more), ws, D1)
    assert [r["color"] for r in table(spark, ws, "events")] == [[1, 2]]
    assert run(make_spec(columns=more), ws, D1).skipped


def test_rows_that_break_a_constraint_stop_their_day(spark: SparkSession, ws: Workspace) -> None:
    spec = make_spec()
    events = ws.table("shop", "events")
    columns = spec.table.spark_schema.replace("`note` string", "`note` string NOT NULL")
    assert "NOT NULL" in columns
    place = "_source_file string, _source_line bigint, ds string"
    spark.sql(f"CREATE TABLE delta.`{events}` ({columns}, {place}) USING delta PARTITIONED BY (ds)")
    put(ws, f"in/{D1}/a.jsonl", jsonl([event(i, D1) for i in range(4)]))
    run(spec, ws, D1)
    spark.sql(f"ALTER TABLE delta.`{events}` ADD CONSTRAINT cheap CHECK (price < 100 AND ds > '2026')")
    version_before = version(ws)
    good = [event(i, D2) for i in range(10, 14)]
    for bad, message in (
        (event(20, D2, price=100), "2 rows of 2026-03-02 break the constraint 'cheap'"),
        # As in Delta a comparison that is null is not true.
        (event(20, D2, price=None), "2 rows of 2026-03-02 break the constraint 'cheap'"),
        (event(20, D2, note=None), "2 rows of 2026-03-02 break the constraint 'note is not null'"),
    ):
        put(ws, f"in/{D2}/a.jsonl", jsonl([*good, bad, bad | {"id": "e21"}]))
        with pytest.raises(UserError, match=message):
            run(spec, ws, D2)
        assert version(ws) == version_before
        assert list(ids(ws)) == [D1]
    put(ws, f"in/{D2}/a.jsonl", jsonl(good))
    run(spec, ws, D2)
    assert ids(ws)[D2] == [f"e{i}" for i in range(10, 14)]
    # Delta itself has refused what ingest did, of the same table.
    schema = spark.read.format("delta").load(str(events)).schema
    broken = spark.createDataFrame(table(spark, ws, "events"), schema).selectExpr("* EXCEPT (price)", "200D AS price")
    with pytest.raises(Exception, match="CHECK constraint cheap"):
        broken.write.format("delta").mode("append").save(str(events))
    # A table to which rows may only be added takes new days, and none again.
    spark.sql(f"ALTER TABLE delta.`{events}` SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    put(ws, f"in/{D3}/a.jsonl", jsonl([event(30, D3)]))
    run(spec, ws, D3)
    put(ws, f"in/{D3}/b.jsonl", jsonl([event(31, D3)]))
    with pytest.raises(UserError, match=r"delta\.appendOnly"):
        run(spec, ws, D3)
    assert ids(ws)[D3] == ["e30"]
    assert DeltaLog(events).files(version(ws) or 0)
