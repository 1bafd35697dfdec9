"""Times of events: the source's time zone, clocks that are ahead, numbers since 1970, sessions of another time zone."""

from __future__ import annotations

from datetime import datetime, timedelta

from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.ingest_support import COLUMNS, D1, event, jsonl, make_spec, put, run, table

ZONE = "spark.sql.session.timeZone"


def test_landing_day_of_a_time_zone_and_clock_skew(spark: SparkSession, ws: Workspace) -> None:
    """The day of 23 hours on which Berlin goes from UTC+1 to UTC+2, times without an offset, and 30 seconds' skew."""
    ds = "2026-03-29"
    good = {
        "first": "2026-03-27T23:00:00Z",
        "winter": "2026-03-29 00:30:00",
        "summer": "2026-03-29T03:30:00.5",
        "other": "2026-03-29T03:30:00+09:00",
        "date": "2026-03-29",
        "last": "2026-03-29T21:59:59Z",
        "ahead": "2026-03-29T22:00:29Z",
    }
    bad = {"late": "2026-03-27T22:59:59Z", "far ahead": "2026-03-29T22:00:30Z", "next day": "2026-03-30 00:00:30"}
    rows = [event(1, ds, id=name, ts=time) for name, time in (good | bad).items()]
    put(ws, f"in/{ds}/a.json", jsonl(rows))
    spec = make_spec({"timezone": "Europe/Berlin"}, clock_skew_seconds=30)
    checks = run(spec, ws, ds).manifest.facts["expectations"]
    assert {c["name"]: c["ok"] for c in checks} == {"min_rows": True, "max_bad_rate": True}
    times = {r["id"]: r["ts"].isoformat() for r in table(spark, ws, "events")}
    assert times == {
        "first": "2026-03-27T23:00:00",
        "winter": "2026-03-28T23:30:00",
        "summer": "2026-03-29T01:30:00.500000",
        "other": "2026-03-28T18:30:00",
        "date": "2026-03-28T23:00:00",
        "last": "2026-03-29T21:59:59",
        "ahead": "2026-03-29T22:00:29",
    }
    reasons = {r["_raw"].split('"')[3]: r["_reason"].split(" is ")[1] for r in table(spark, ws, "quarantine")}
    assert reasons == {
        "late": "more than 1 day late",
        "far ahead": "after the end of the day",
        "next day": "after the end of the day",
    }


def test_numbers_since_1970(spark: SparkSession, ws: Workspace) -> None:
    start = datetime.fromisoformat(D1)
    seconds = int((start - datetime(1970, 1, 1)).total_seconds())
    columns = [*COLUMNS[:3], COLUMNS[4], {"name": "seen", "type": "timestamp"}]
    good = {
        "whole": (seconds + 1, (seconds + 2) * 1000, start + timedelta(seconds=1), start + timedelta(seconds=2)),
        "fraction": (seconds + 0.25, seconds * 1000 + 7, *(start + timedelta(milliseconds=k) for k in (250, 7))),
        "text": (f"{seconds}.000001", f"{seconds}000.5", *(start + timedelta(microseconds=k) for k in (1, 500))),
        "exponent": (f"{seconds / 1e9:.9f}E9", 1e12, start, datetime(2001, 9, 9, 1, 46, 40)),
        "old": (seconds, -1, start, datetime(1969, 12, 31, 23, 59, 59, 999000)),
        "none": (seconds, None, start, None),
    }
    bad = {
        "milliseconds": (seconds * 1000, 0),
        "iso": (f"{D1}T00:00:00Z", 0),
        "word": (seconds, "now"),
        "huge": (seconds, "1e99"),
        "hex": (seconds, "0x10"),
    }
    times = {name: row[:2] for name, row in good.items()} | bad
    put(ws, f"in/{D1}/a.json", jsonl([{"id": k, "ts": a, "user": 1, "seen": b} for k, (a, b) in times.items()]))
    lines = [f"csv {k},{a},1,{'' if b is None else b}" for k, (a, b) in times.items()]
    put(ws, f"in/{D1}/b.csv", "\n".join(["id,ts,user,seen", *lines]).encode())
    # The time zone has no part in them.
    source = {"timestamps": {"ts": "epoch_seconds", "seen": "epoch_milliseconds"}, "timezone": "Asia/Tokyo"}
    spec = make_spec(source, columns=columns, expectations={"max_bad_rate": 1})
    run(spec, ws, D1)
    expected = {prefix + name: row[2:] for name, row in good.items() for prefix in ("", "csv ")}
    assert {r["id"]: (r["ts"], r["seen"]) for r in table(spark, ws, "events")} == expected
    assert len(table(spark, ws, "quarantine")) == 2 * len(bad)


def test_an_active_session_of_another_time_zone(spark: SparkSession, ws: Workspace) -> None:
    """The session is in UTC for the stage, and afterwards in its own zone."""
    put(ws, f"in/{D1}/a.json", jsonl([event(1, D1, ts=f"{D1} 23:30:00")]))
    spark.conf.set(ZONE, "America/New_York")
    try:
        run(make_spec(), ws, D1)
        assert spark.conf.get(ZONE) == "America/New_York"
    finally:
        spark.conf.set(ZONE, "UTC")
    assert [r["ts"] for r in table(spark, ws, "events")] == [datetime.fromisoformat(f"{D1}T23:30:00")]
