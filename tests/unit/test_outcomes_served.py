"""The version of a day's lists that users were shown, by the times at which versions were published."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Spec, build_spec, load_spec
from headrace.generate.site import site_path
from headrace.manifest import Manifest, Output
from headrace.quality.outcomes.served import ServedPublication, Window, live, served_days
from headrace.stage import Context
from headrace.workspace import Workspace

NAME = "lake/clicks/published"


def calendar() -> Spec:
    """A pipeline whose days are those of the calendar; its labels are ripe after a day."""
    data = load_spec("clicks", ["outcomes={history_days: 3}", "table.late_days=0"]).model_dump(mode="json")
    return build_spec({k: v for k, v in data.items() if k != "generate"})


class Lake:
    """The log of the published lists, commit by commit, and the manifests."""

    def __init__(self, ws: Workspace) -> None:
        self.ws, self.version = ws, -1

    def commit(self, ds: str, time: str, metadata: str | None = "key", **add: Any) -> str:
        self.version += 1
        folder, path = self.ws.locate(NAME), f"ds={ds}/{self.version}.parquet"
        (folder / path).put_text("x")
        moment = int(datetime.fromisoformat(f"{time}+00:00").timestamp() * 1000)
        info = {"timestamp": moment} | ({} if metadata is None else {"userMetadata": metadata})
        file = {"path": path, "partitionValues": {"ds": ds}, "size": 1, "stats": json.dumps({"numRecords": 7}), **add}
        removals = [{"remove": {"path": f"ds={ds}/{v}.parquet"}} for v in range(self.version)]
        first = [{"protocol": {"minReaderVersion": 1}}, {"metaData": {"configuration": {}}}] if not self.version else []
        actions = [{"commitInfo": info}, *first, *removals, {"add": file}]
        (folder / "_delta_log" / f"{self.version:020d}.json").put_text("".join(json.dumps(a) + "\n" for a in actions))
        return str(self.version)

    def publish(self, ds: str, time: str) -> str:
        version = self.commit(ds, time)
        output = Output(kind="delta", name=NAME, version=version, rows=7)
        manifest = Manifest(stage="publish", pipeline="clicks", ds=ds, key="k", spec_hash="", outputs=(output,))
        manifest.save(self.ws.manifest("clicks", ds, "publish"))
        return version

    def served(self, spec: Spec, ds: str) -> tuple[dict[str, str], list[str]]:
        served = served_days(Context(spec=spec, ws=self.ws, ds=ds, upstream={}))
        return {day.ds: day.table.version for day in served.days}, served.late


def test_lists_made_when_visitors_had_left_are_nobody_s(ws: Workspace) -> None:
    spec, lake = calendar(), Lake(ws)
    first = lake.publish("2026-03-02", "2026-03-03 02:00")
    lake.publish("2026-03-01", "2026-03-03 03:00")  # a backfill: shown on the 2nd
    third = lake.publish("2026-03-03", "2026-03-04 02:00")
    expected = {"2026-03-02": first, "2026-03-03": third}, ["2026-03-01"]
    assert lake.served(spec, "2026-03-04") == expected
    # After a rollback, the day's lists are made again by another model; and rows are rewritten, or deleted by hand.
    lake.publish("2026-03-02", "2026-03-05 09:00")
    lake.commit("2026-03-03", "2026-03-04 03:00", dataChange=False)
    lake.commit("2026-03-03", "2026-03-04 03:30", metadata=None)
    assert lake.served(spec, "2026-03-04") == expected
    # Mended an hour after they were published: shown for the rest of the day.
    mended = lake.publish("2026-03-03", "2026-03-04 04:00")
    assert lake.served(spec, "2026-03-04")[0]["2026-03-03"] == mended


def test_lists_that_were_shown_and_are_gone_are_not_those_that_came_after(
    ws: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    spec, lake = calendar(), Lake(ws)
    version = lake.publish("2026-03-02", "2026-03-03 02:00")
    lake.publish("2026-03-02", "2026-03-08 02:00")
    (ws.locate(NAME) / f"ds=2026-03-02/{version}.parquet").remove()
    assert lake.served(spec, "2026-03-04") == ({}, [])
    assert "the lists of 2026-03-02 that were shown are gone" in caplog.text


def test_days_of_a_generated_log_are_those_of_its_site(ws: Workspace) -> None:
    """The site of the 2nd shows what was published when it was simulated, whatever the calendar says."""
    spec, lake = load_spec("clicks", ["outcomes={history_days: 3}", "table.late_days=0"]), Lake(ws)
    two_days_ago = (datetime.now() - timedelta(days=2)).isoformat(" ", "seconds")
    after = (datetime.now() + timedelta(days=2)).isoformat(" ", "seconds")
    version = lake.publish("2026-03-01", two_days_ago)
    site_path(ws.landing("clicks"), "2026-03-02").put_text("{}")
    lake.publish("2026-03-01", after)
    random = lake.publish("2026-03-02", after)  # no site: a random log followed
    site_path(ws.landing("clicks"), "2026-03-04").put_text("{}")
    lake.publish("2026-03-03", after)
    assert lake.served(spec, "2026-03-04") == ({"2026-03-01": version, "2026-03-02": random}, ["2026-03-03"])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(5, 20), st.integers(0, 8))
def test_the_version_that_was_there_the_longest(times: list[int], start: int, length: int) -> None:
    versions = [
        ServedPublication(time, Output(kind="delta", name="x", version=str(i))) for i, time in enumerate(sorted(times))
    ]
    live_versions = [
        next((v for v in reversed(versions) if v.published_ms <= t), None) for t in range(start, start + length)
    ]
    result = live(versions, Window(start, start + length))
    if length == 0:
        assert result == next((v for v in reversed(versions) if v.published_ms < start), None)
    elif result is None:
        assert set(live_versions) == {None}
    else:
        assert live_versions.count(result) == max(live_versions.count(v) for v in versions)
    assert live(versions, None) == versions[-1]
