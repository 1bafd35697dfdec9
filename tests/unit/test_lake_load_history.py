"""The load history in a Delta table's log, and what a run must load. Logs are written by hand, to the protocol."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.files import find_files
from headrace.lake.landing.load_history import DayState, LoadHistory, LoadRecord
from headrace.lake.landing.plan import LoadPlan, covered_days, declaration, plan_load
from headrace.lake.landing.source_context import SourceContext, source_contexts
from headrace.stage import Context
from headrace.stage.manifest import fingerprint
from headrace.storage import local
from tests.unit.test_lake_log import add, commit, remove

D1, D2, D3 = "2026-03-01", "2026-03-02", "2026-03-03"


def context(ws: Workspace, ds: str, **table: Any) -> SourceContext:
    spec = build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "clicks", "path": "in/{ds}/*"},
            "table": {"columns": [{"name": "id"}], "keys": ["id"], "late_days": 1, **table},
            "features": {"label": "id", "workflow": [], "split": {"by": "position"}},
        }
    )
    (source,) = source_contexts(Context(spec, ws, ds))
    return source


def deliver(ws: Workspace, ds: str, text: str = "x", name: str = "a.json") -> Path:
    path = ws.home / "in" / ds / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Lake:
    """An events' table whose loads and changes are commits written by hand."""

    def __init__(self, ws: Workspace) -> None:
        self.ws, self.folder, self.version = ws, ws.table("shop", "events").local_path(), 0
        commit(self.folder, 0, {"metaData": {"schemaString": '{"fields": []}'}})

    def commit(self, operation: str, *actions: dict[str, Any], metadata: str | None = None) -> int:
        self.version += 1
        info = {"operation": operation} | ({} if metadata is None else {"userMetadata": metadata})
        commit(self.folder, self.version, {"commitInfo": info}, *actions)
        return self.version

    def load(self, ds: str, **more: Any) -> int:
        """Commit what a load of a day's landing files commits: one data file of five rows."""
        ctx = context(self.ws, ds)
        day = find_files(ctx.source, self.ws, ds)
        record = LoadRecord(
            **{
                "ds": ds,
                "key": "k",
                "declared": declaration(ctx.source, ctx.table, 1),
                "judged": fingerprint(ctx.table.model_dump(mode="json")),
                "files": [[f.name, f.size, f.sha256()] for f in day.files],
                "modified": {f.name: f.mtime_ns for f in day.files},
                "rows": {"kept": 5},
                **more,
            }
        )
        live = [f for f in DeltaLog(local(self.folder)).files(self.version) or [] if f.partition["ds"] == ds]
        removes = [remove(f.path.below(local(self.folder)), ds) for f in live]
        return self.commit("WRITE", self.add(ds, 5), *removes, metadata=record.metadata())

    def add(self, ds: str, rows: int, name: str = "") -> dict[str, Any]:
        return add(self.folder, f"ds={ds}/{name or self.version + 1}.parquet", ds, rows)

    @property
    def history(self) -> LoadHistory:
        return LoadHistory(DeltaLog(local(self.folder)))

    def plan(self, ds: str, **table: Any) -> LoadPlan:
        ctx, history = context(self.ws, ds, **table), self.history
        return plan_load(ctx, history, covered_days(ctx, history), 1)

    def days(self, ds: str, **table: Any) -> list[str]:
        return [d.ds for d in self.plan(ds, **table).days]

    def versions(self, ds: str) -> list[str]:
        return [d.version for d in covered_days(context(self.ws, ds), self.history)]


@pytest.fixture
def lake(ws: Workspace) -> Lake:
    """Two days delivered and loaded, as versions 1 and 2."""
    for ds in (D1, D2):
        deliver(ws, ds)
    loaded_lake = Lake(ws)
    loaded_lake.load(D1)
    loaded_lake.load(D2)
    return loaded_lake


def test_newest_record_counts_and_others_commits_are_ignored(lake: Lake) -> None:
    lake.load(D1, key="k2")
    lake.commit("WRITE", metadata="not ours")
    lake.commit("WRITE", metadata='{"theirs": 1}')
    assert {ds: (r.key, r.version) for ds, r in lake.history.records.items()} == {D1: ("k2", 3), D2: ("k", 2)}
    assert lake.history.state(D1) == DayState(5)


def test_what_is_loaded(lake: Lake, ws: Workspace) -> None:
    assert lake.days(D2) == []
    deliver(ws, D3)
    assert lake.days(D3) == [D3]
    more = {"columns": [{"name": "id"}, {"name": "b"}]}
    assert lake.days(D2, **more) == [D1, D2]
    # Expectations that only stop a day are checked for the run's own day alone.
    assert lake.days(D2, expectations={"min_rows": 3}) == [D2]
    (lake.folder / f"ds={D1}/1.parquet").unlink()
    assert lake.days(D2) == [D1, D2]


def test_no_files_names_the_glob(lake: Lake, ws: Workspace) -> None:
    with pytest.raises(UserError) as e:
        lake.days(D3)
    assert str(e.value).startswith(f"no landing files for {D3} match {ws.home}/in/{D3}/* nor ")
    daily = context(ws, D3)
    snapshot = replace(daily, source=daily.source.model_copy(update={"path": "/nowhere/*.csv"}))
    with pytest.raises(UserError, match=r"no landing files match /nowhere/\*\.csv; put them there"):
        covered_days(snapshot, lake.history)


def test_a_touched_file_is_the_same_and_another_content_is_not(lake: Lake, ws: Workspace) -> None:
    versions = lake.versions(D2)
    os.utime(ws.home / "in" / D1 / "a.json", ns=(0, 1))
    assert lake.days(D2) == []
    assert lake.versions(D2) == versions
    # Of the same size.
    deliver(ws, D1, "y")
    assert lake.days(D2) == [D1, D2]
    assert [a == b for a, b in zip(lake.versions(D2), versions, strict=True)] == [False, True]


def test_records_of_older_releases_name_files_by_their_time(lake: Lake, ws: Workspace) -> None:
    path = ws.home / "in" / D2 / "a.json"
    stat = path.stat()
    lake.load(D2, files=[[f"in/{D2}/a.json", stat.st_size, stat.st_mtime_ns]], modified={})
    assert lake.days(D2) == []
    os.utime(path, ns=(0, 1))
    assert lake.days(D2) == [D2]


def test_a_purged_day_stays_as_it_was_loaded(lake: Lake, ws: Workspace) -> None:
    deliver(ws, D1, name="b.json")
    lake.load(D1)
    versions = lake.versions(D2)
    (ws.home / "in" / D1 / "a.json").unlink()
    assert lake.days(D2) == []
    assert lake.versions(D2) == versions
    (ws.home / "in" / D1 / "b.json").unlink()
    (ws.home / "in" / D2 / "a.json").unlink()
    assert lake.days(D2) == []
    assert lake.versions(D2) == versions
    # It cannot be loaded by another declaration: an error for the run's own day, a warning for days before.
    deliver(ws, D3)
    more = {"columns": [{"name": "id"}, {"name": "b"}]}
    assert lake.days(D3, **more) == [D3]
    with pytest.raises(UserError, match=rf"{D2} must be loaded again \(its declaration changed\), but .* are gone"):
        lake.days(D2, **more)
    # Delivered again, it is.
    deliver(ws, D2, "new")
    assert lake.days(D2) == [D2]


def test_a_kill_between_a_replaced_day_and_those_to_load_again(lake: Lake) -> None:
    lake.load(D1, then=[D2])
    assert lake.days(D1) == [D2]
    assert lake.days(D2) == [D2]
    lake.load(D2)
    assert lake.days(D2) == []


def test_deleted_rows_are_no_damage(lake: Lake, ws: Workspace) -> None:
    """A DELETE rewrites a file, or marks rows in a deletion vector: the day is not loaded again."""
    lake.commit("DELETE", remove(f"ds={D1}/1.parquet", D1), lake.add(D1, 3, "rest"))
    assert lake.history.state(D1) == DayState(3, ("DELETE at version 3",))
    assert lake.days(D2) == []
    vector = {"storageType": "u", "pathOrInlineDv": "abc", "offset": 1, "sizeInBytes": 4, "cardinality": 2}
    marked = lake.add(D2, 5, "2")
    marked["add"]["deletionVector"] = vector
    lake.commit("DELETE", marked, remove(f"ds={D2}/2.parquet", D2))
    assert lake.history.state(D2) == DayState(3, ("DELETE at version 4",))
    # Compacted since.
    lake.commit("OPTIMIZE", remove(f"ds={D1}/rest.parquet", D1, changes=False), rewritten(lake.add(D1, 3, "small")))
    assert lake.history.state(D1) == DayState(3, ("DELETE at version 3",))
    assert lake.days(D2) == []
    # When the day is loaded again, its rows that are not in the table stay out; those of its neighbours, too.
    deliver(ws, D1, name="late.json")
    plan = lake.plan(D2)
    assert [d.ds for d in plan.days] == [D1, D2]
    assert (plan.withhold, plan.erased) == ({D1, D2}, {D1, D2})
    assert plan.files[0].unchanged == {f"in/{D1}/a.json"}
    # Gone for good: that cannot be healed without bringing deleted rows back.
    (lake.folder / f"ds={D1}/small.parquet").unlink()
    (ws.home / "in" / D1 / "late.json").unlink()
    with pytest.raises(UserError, match=r"is damaged .*small\.parquet is gone.*were deleted before \(DELETE at ver"):
        lake.days(D2)


def test_a_deletion_is_remembered_by_later_loads(lake: Lake, ws: Workspace) -> None:
    """A load from other files remembers it, too; afterwards a day nearby may have the deleted rows as duplicates."""
    lake.load(D1, rows={"kept": 5, "deleted": 2}, erased=True)
    assert lake.history.state(D1) == DayState(5)
    deliver(ws, D2, name="late.json")
    plan = lake.plan(D2)
    assert (plan.withhold, plan.erased) == ({D2}, set())
    deliver(ws, D1, "all new")
    plan = lake.plan(D2)
    assert (plan.withhold, plan.erased) == ({D2}, {D1})


def test_whole_day_deleted(lake: Lake) -> None:
    lake.commit("DELETE", remove(f"ds={D1}/1.parquet", D1))
    assert lake.history.state(D1) == DayState(0, ("DELETE at version 3",))
    assert lake.days(D2) == []


def test_compacted_restored_and_foreign_rows(lake: Lake) -> None:
    lake.commit("OPTIMIZE", remove(f"ds={D1}/1.parquet", D1, changes=False), rewritten(lake.add(D1, 5, "big")))
    assert lake.history.state(D1) == DayState(5)
    # Rows that somebody adds to a day are taken away by loading it again, as before.
    lake.commit("WRITE", lake.add(D2, 2, "theirs"))
    assert lake.history.state(D2).damage == "rows were added by WRITE at version 4"
    assert lake.days(D2) == [D2]
    lake.commit("RESTORE", remove(f"ds={D2}/theirs.parquet", D2))
    assert lake.history.state(D2) == DayState(5)
    lake.commit("DELETE", remove(f"ds={D2}/2.parquet", D2), lake.add(D2, 1, "rest"))
    lake.commit("RESTORE", remove(f"ds={D2}/rest.parquet", D2), lake.add(D2, 5, "2"))
    assert lake.history.state(D2) == DayState(5)
    # To before the load.
    lake.commit("RESTORE", remove(f"ds={D2}/2.parquet", D2))
    assert lake.history.state(D2).damage == "the load was undone by RESTORE at version 8"
    assert lake.days(D2) == [D2]


def test_the_version_of_a_day_is_the_last_that_changed_it_or_days_before(lake: Lake) -> None:
    history = lake.history
    assert (history.last_change("2026-02-28"), history.last_change(D1), history.last_change(D2)) == (0, 1, 2)
    assert history.last_change(D3) == 2
    lake.load(D3, rows={"kept": 0})
    lake.commit("SET TBLPROPERTIES", {"metaData": {"schemaString": '{"fields": []}'}})
    history = lake.history
    assert (history.last_change(D2), history.last_change(D3)) == (2, 3)
    lake.commit("DELETE", remove(f"ds={D1}/1.parquet", None))
    history = lake.history
    assert (history.last_change(D1), history.last_change(D3), history.last_change(D2)) == (5, 5, 5)
    assert history.removed_by_others(2, D2) == "DELETE at version 5"
    assert history.removed_by_others(5, D2) is None
    assert history.removed_by_others(2, "2026-02-28") is None


def test_another_value_of_a_key_is_another_declaration(ws: Workspace) -> None:
    plain, skewed = context(ws, D1), context(ws, D1, clock_skew_seconds=5)
    assert declaration(skewed.source, skewed.table, 1) != declaration(plain.source, plain.table, 1)


def rewritten(action: dict[str, Any]) -> dict[str, Any]:
    """An `add` of rows that were there."""
    return {"add": json.loads(json.dumps(action["add"])) | {"dataChange": False}}
