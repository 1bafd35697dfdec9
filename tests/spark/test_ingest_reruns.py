"""Ingest run again: changed, late and purged landing files, kills, and rows that others have deleted."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import IncompleteError, UserError
from headrace.lake.landing import load, stage
from headrace.stage.manifest import Manifest
from tests.ingest_support import COLUMNS, D1, D2, D3, D4, event, ids, jsonl, make_spec, put, run, table, version


def test_changed_file_replaces_its_day_and_never_doubles(spark: SparkSession, ws: Workspace) -> None:
    spec = make_spec()
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1), event(2, D1), "broken"]))
    put(ws, f"in/{D1}/b.json.gz", jsonl([event(3, D1)]))
    put(ws, f"in/{D2}/a.json.gz", jsonl([event(4, D2), event(2, D2, ts=f"{D1}T01:00:00Z")]))
    first = run(spec, ws, D2)
    assert ids(ws) == {D1: ["e1", "e2", "e3"], D2: ["e4"]}
    # D1 is delivered again without e2, whose copy on D2 had been dropped as a duplicate: no event may be lost.
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1), event(5, D1)]))
    second = run(spec, ws, D2)
    assert not second.skipped
    assert "changed" in second.reason
    assert ids(ws) == {D1: ["e1", "e5", "e3"], D2: ["e4", "e2"]}
    assert table(spark, ws, "quarantine") == []
    assert second.manifest.facts["days"] == [D1, D2]
    # The first manifest's version still reads as it did.
    assert ids(ws, int(first.manifest.output("delta").version)) == {D1: ["e1", "e2", "e3"], D2: ["e4"]}
    assert run(spec, ws, D2).skipped


def test_days_arriving_out_of_order(spark: SparkSession, ws: Workspace) -> None:
    """A day that comes after the next one is loaded without doubling what that one has."""
    spec = make_spec()
    put(ws, f"in/{D2}/a.json.gz", jsonl([event(1, D1), event(2, D2)]))
    run(spec, ws, D2)
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1), event(3, D1)]))
    put(ws, f"in/{D4}/a.json.gz", jsonl([event(2, D4), event(4, D4)]))
    manifest = run(spec, ws, D4).manifest
    # e2 of D4 is two days after D2's, beyond late_days: another event as far as anybody can tell.
    assert ids(ws) == {D1: ["e3"], D2: ["e1", "e2"], D4: ["e2", "e4"]}
    assert manifest.facts["days"] == [D1, D4]
    assert manifest.rows == {"read": 4, "kept": 3, "quarantined": 0, "duplicates": 1}


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("place", ["between the two commits", "between the days", "before the manifest"])
def test_killed_run_heals(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    spec = make_spec()
    days = {D1: [event(1, D1), event(2, D1), "bad", event(1, D1)], D2: [event(2, D1), event(3, D2), "bad too"]}
    for ds, rows in days.items():
        put(ws, f"in/{ds}/a.json.gz", jsonl(rows))
    replace, calls = load.commit_files, 0

    def dying(*args: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > {"between the two commits": 1, "between the days": 2, "before the manifest": 9}[place]:
            raise Killed
        replace(*args, **more)

    def no_result(self: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(load, "commit_files", dying)
        if place == "before the manifest":
            patch.setattr(stage, "result", no_result)
        with pytest.raises(Killed):
            run(spec, ws, D2)
    assert Manifest.load(ws.manifest("shop", D2, "ingest")) is None
    expected = {"between the two commits": {}, "between the days": {D1: ["e1", "e2"]}}
    assert ids(ws) == expected.get(place, {D1: ["e1", "e2"], D2: ["e3"]})
    manifest = run(spec, ws, D2).manifest
    assert ids(ws) == {D1: ["e1", "e2"], D2: ["e3"]}
    bad = [(r["ds"], r["_source_line"], r["_raw"]) for r in table(spark, ws, "quarantine")]
    assert bad == [(D1, 3, "bad"), (D2, 3, "bad too")]
    # Exactly what an undisturbed run says.
    assert manifest.facts["days"] == [D1, D2]
    assert manifest.rows == {"read": 7, "kept": 3, "quarantined": 2, "duplicates": 2}
    assert manifest.facts["reasons"] == {"not a JSON object": 2}
    assert run(spec, ws, D2).skipped


def test_kill_after_a_replaced_day_still_reloads_those_that_follow(
    spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1), event(2, D1)]))
    put(ws, f"in/{D2}/a.json.gz", jsonl([event(2, D1), event(3, D2)]))
    run(spec, ws, D2)
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    replace, calls = load.commit_files, 0

    def dying(*args: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Killed
        replace(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(load, "commit_files", dying)
        with pytest.raises(Killed):
            run(spec, ws, D2)
    assert ids(ws) == {D1: ["e1"], D2: ["e3"]}
    # Even a run for the earlier day alone owes the later one its event.
    run(spec, ws, D1)
    assert ids(ws) == {D1: ["e1"], D2: ["e2", "e3"]}


def test_snapshot_is_loaded_as_the_runs_day(spark: SparkSession, ws: Workspace) -> None:
    spec = make_spec({"path": "in/*.json"})
    put(ws, "in/a.json", jsonl([event(1, "2020-01-01"), event(1, "2020-01-01"), event(2, D2), event(3, D3)]))
    first = run(spec, ws, D2).manifest
    second = run(spec, ws, D3).manifest
    # Old rows are no late ones, rows from after the day are not known yet; days of a snapshot do not share events.
    assert ids(ws) == {D2: ["e1", "e2"], D3: ["e1", "e2", "e3"]}
    assert first.rows == {"read": 4, "kept": 2, "quarantined": 1, "duplicates": 1}
    assert second.rows == {"read": 4, "kept": 3, "quarantined": 0, "duplicates": 1}


def test_plain_files_larger_than_a_split_keep_their_line_numbers(spark: SparkSession, ws: Workspace) -> None:
    rows = [event(n, D1) if n % 7 else "bad" for n in range(500)]
    for name in ("a", "b"):
        put(
            ws,
            f"in/{D1}/{name}.json",
            jsonl([r | {"id": f"{name}-{r['id']}"} if isinstance(r, dict) else r for r in rows]),
        )
    key = "spark.sql.files.maxPartitionBytes"
    setting_before = spark.conf.get(key)
    spark.conf.set(key, "4096")
    try:
        run(make_spec(), ws, D1)
        assert spark.conf.get(key) == "4096"
    finally:
        spark.conf.set(key, setting_before)
    positions = [(r["id"], r["_source_line"]) for r in table(spark, ws, "events")]
    assert positions == [(f"{name}-e{n}", n + 1) for name in "ab" for n in range(500) if n % 7]
    bad = [(r["_source_file"], r["_source_line"]) for r in table(spark, ws, "quarantine")]
    assert bad == [(f"in/{D1}/{name}.json", n + 1) for name in "ab" for n in range(0, 500, 7)]


def test_deleted_rows_stay_deleted(spark: SparkSession, ws: Workspace) -> None:
    """A person is erased by DELETE; neither runs nor reloads of the day bring the rows back."""
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1), event(2, D1), event(6, D1, hour=50)]))
    put(ws, f"in/{D2}/a.json.gz", jsonl([event(2, D1), event(3, D2)]))
    run(make_spec(), ws, D2)
    assert ids(ws) == {D1: ["e1", "e2"], D2: ["e3"]}
    spark.sql(f"DELETE FROM delta.`{ws.table('shop', 'events')}` WHERE id = 'e2'")
    erased = f"DELETE at version {version(ws)}"
    rerun = run(make_spec(), ws, D2)
    assert ids(ws) == {D1: ["e1"], D2: ["e3"]}
    # What is built from the day's version must be built again.
    assert rerun.reason == f"rows of lake/shop/events were deleted or changed by {erased}"
    assert rerun.manifest.facts["changed_by_others"] == [{"ds": D1, "rows": -1, "by": [erased]}]
    assert (rerun.manifest.output("delta").version, rerun.manifest.output("delta").rows) == (str(version(ws)), 2)
    assert run(make_spec(), ws, D2).skipped
    # A late file: its rows come; the deleted one stays out, and so does its copy on the day after.
    put(ws, f"in/{D1}/late.json.gz", jsonl([event(5, D1)]))
    late = run(make_spec(), ws, D2).manifest
    assert ids(ws) == {D1: ["e1", "e5"], D2: ["e3"]}
    assert late.rows == {"read": 6, "kept": 3, "quarantined": 1, "duplicates": 0, "deleted": 2}
    # Another declaration, by which a row from the quarantine is a good one.
    wider = make_spec(expectations={"max_bad_rate": 1, "ranges": {"hour": [0, 99]}})
    assert run(wider, ws, D2).manifest.rows["deleted"] == 2
    assert ids(ws) == {D1: ["e1", "e6", "e5"], D2: ["e3"]}
    assert run(wider, ws, D2).skipped


def test_a_rerun_of_a_day_says_what_it_said(spark: SparkSession, ws: Workspace) -> None:
    """Whatever was loaded after it, and whether its landing files were touched or purged."""
    path = put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1), event(2, D1, hour=99)]))
    first = run(make_spec(), ws, D1).manifest
    put(ws, f"in/{D2}/a.json.gz", jsonl([event(2, D2), event(3, D2, hour=99)]))
    second = run(make_spec(), ws, D2).manifest
    os.utime(path, ns=(0, 0))
    ws.manifest("shop", D1, "ingest").remove()
    rerun = run(make_spec(), ws, D1).manifest
    assert (rerun.key, rerun.inputs, rerun.outputs, rerun.rows) == (first.key, first.inputs, first.outputs, first.rows)
    assert second.output("delta").version == str(version(ws))
    path.unlink()
    for ds in (D1, D2):
        assert run(make_spec(), ws, ds).skipped
    ws.manifest("shop", D1, "ingest").remove()
    assert run(make_spec(), ws, D1).manifest.outputs == first.outputs
    assert ids(ws) == {D1: ["e1"], D2: ["e2"]}


def test_a_day_is_taken_when_it_is_complete(
    spark: SparkSession, ws: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    """A watermark and a control file complete a day: the run's own day waits, an earlier one is left out, another is
    loaded.
    """
    columns = [*COLUMNS, {"name": "seen", "type": "timestamp"}]
    complete = {"watermark": {"column": "seen"}, "control": {"path": "count/{ds}.json", "key": "rows"}}
    spec = make_spec({"complete": complete}, columns=columns)

    def rows(ds: str, numbers: range, seen: str) -> list[dict[str, Any]]:
        return [event(n, ds, seen=f"{ds}T10:00:00Z") for n in numbers] + [event(numbers.stop, ds, seen=seen)]

    for ds, count in ((D1, 4), (D2, 4), (D3, 4)):
        put(ws, f"count/{ds}.json", json.dumps({"rows": count}).encode())
    put(ws, f"in/{D1}/a.json", jsonl(rows(D1, range(3), f"{D2}T00:00:00Z")))
    put(ws, f"in/{D2}/a.json", jsonl(rows(D2, range(10, 13), f"{D2}T23:59:59Z")))
    put(ws, f"in/{D3}/a.json", jsonl(rows(D3, range(20, 23), f"{D3}T23:59:59Z")))
    with pytest.raises(IncompleteError, match=rf"{D3} is not complete yet: 'seen' has reached {D3}T23:59:59"):
        run(spec, ws, D3)
    assert f"{D2} is left out" in caplog.text
    assert {ds: len(event_ids) for ds, event_ids in ids(ws).items()} == {D1: 4}
    version_before = version(ws)
    # A repeated row is counted as one that was delivered. Others than the control file says: nothing is committed.
    put(ws, f"in/{D3}/b.json", jsonl([event(20, D3, seen=f"{D4}T00:00:00Z"), event(24, D3)]))
    with pytest.raises(UserError, match=r"6 rows were read, and the control file says 4"):
        run(spec, ws, D3)
    assert version(ws) == version_before
    put(ws, f"count/{D3}.json", b'{"rows": 6}')
    put(ws, f"in/{D2}/b.json", jsonl([event(14, D2, seen=f"{D3}T00:00:00Z")]))
    put(ws, f"count/{D2}.json", b'{"rows": 5}')
    manifest = run(spec, ws, D3).manifest
    assert {ds: len(event_ids) for ds, event_ids in ids(ws).items()} == {D1: 4, D2: 5, D3: 5}
    assert {"name": "control_rows", "value": 6, "limit": 6, "ok": True, "ds": D3} in manifest.facts["expectations"]
    assert run(spec, ws, D3).skipped
