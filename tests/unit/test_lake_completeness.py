"""Completeness of a day of a source: markers, control files, watermarks, and the messages until then."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import LandingSource, TableSource, parse_duration
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_INCOMPLETE, IncompleteError, UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.files import find_files
from headrace.lake.landing.load_history import LoadHistory
from headrace.lake.landing.plan import covered_days, declared_source
from headrace.lake.landing.source_context import (
    behind_watermark,
    declared_rows,
    missing_markers,
    required_watermark,
    source_contexts,
)
from headrace.stage import Context
from headrace.storage.local_store import LocalStore
from tests.ingest_support import D1, D2, make_spec


def source(complete: dict[str, Any] | None, path: str = "in/{ds}/*", **more: Any) -> LandingSource:
    return LandingSource.model_validate({"format": "clicks", "path": path, "complete": complete, **more})


def put(ws: Workspace, name: str, text: str = "x") -> None:
    path = ws.home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_markers(ws: Workspace) -> None:
    assert missing_markers(source(None), ws, D1) == []
    landing_source = source({"success_file": "_SUCCESS", "marker": "done/{ds}.ok"}, path="in/{ds}/part*/*.gz")
    first, second = missing_markers(landing_source, ws, D1)
    assert first.startswith("_SUCCESS is not in ")
    assert f"/in/{D1}" in first
    assert f"/done/{D1}.ok or " in second
    put(ws, f"in/{D1}/_SUCCESS")
    put(ws, f"done/{D2}.ok")
    assert missing_markers(landing_source, ws, D1) == [second]
    put(ws, f"done/{D1}.ok", "")
    assert missing_markers(landing_source, ws, D1) == []


@pytest.mark.parametrize(
    ("control", "text", "rows"),
    [
        ({}, "12\n", 12),
        ({}, "\ufeff 0", 0),
        ({"key": "counts.rows"}, '{"counts": {"rows": 7}}', 7),
        ({"key": "counts['a.b']"}, '{"counts": {"a.b": "8"}}', 8),
        ({"column": "n"}, 'file,n\na.gz,3\n"b,c.gz",4\n', 7),
        ({"column": "n"}, "file,n\n", 0),
        ({}, "many", None),
        ({}, "-1", None),
        ({"key": "rows"}, '{"row": 7}', None),
        ({"key": "rows"}, '{"rows": 7.5}', None),
        ({"key": "rows"}, '{"rows": true}', None),
        ({"key": "rows"}, "[7]", None),
        ({"column": "m"}, "file,n\na,3\n", None),
    ],
)
def test_control_files(ws: Workspace, control: dict[str, str], text: str, rows: int | None) -> None:
    landing_source = source({"control": {"path": "in/{ds}.count", **control}})
    assert "the control file" in missing_markers(landing_source, ws, D1)[0]
    put(ws, f"in/{D1}.count", "")
    assert missing_markers(landing_source, ws, D1)[0].endswith("is still empty")
    put(ws, f"in/{D1}.count", text)
    assert missing_markers(landing_source, ws, D1) == []
    if rows is None:
        with pytest.raises(UserError, match=r"control file .*\.count: .* is no number of rows"):
            declared_rows(landing_source, ws, D1)
    else:
        assert declared_rows(landing_source, ws, D1) == rows


def test_what_is_removed_between_two_looks_is_not_there(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    present, removed_paths = f"in/{D1}/a.json", [ws.home / f"in/{D1}/b.json", ws.home / f"{D1}.count"]
    landing_source = source({"control": {"path": "{ds}.count"}})
    look, listing = LocalStore.is_file, LocalStore.glob

    def removed(store: LocalStore, path: PurePosixPath) -> bool:
        status = look(store, path)
        if Path(path) in removed_paths:
            Path(path).unlink()
        return status

    def listed(store: LocalStore, pattern: PurePosixPath) -> list[PurePosixPath]:
        entries = listing(store, pattern)
        for path in removed_paths:
            if PurePosixPath(path) in entries:
                path.unlink()
        return entries

    monkeypatch.setattr(LocalStore, "is_file", removed)
    monkeypatch.setattr(LocalStore, "glob", listed)
    for ask, expected in (
        (lambda: [f.name for f in find_files(landing_source, ws, D1).files], [present]),
        (lambda: missing_markers(landing_source, ws, D1), [f"the control file {ws.home / f'{D1}.count'}"]),
    ):
        for path in (present, f"in/{D1}/b.json", f"{D1}.count"):
            put(ws, path, "7")
        answer = ask()
        assert len(answer) == 1
        assert answer[0].startswith(expected[0])
    put(ws, f"{D1}.count", "7")
    with pytest.raises(UserError, match=r"the control file .*\.count.* is gone$"):
        declared_rows(landing_source, ws, D1)


def test_a_marker_among_the_files_is_no_data(ws: Workspace) -> None:
    for name in ("a.json", "all.done", "rows.json"):
        put(ws, f"in/{D1}/{name}")
    landing_source = source({"marker": "in/{ds}/all.done", "control": {"path": "in/{ds}/rows.json"}})
    assert [f.name for f in find_files(landing_source, ws, D1).files] == [f"in/{D1}/a.json"]


def test_watermarks(ws: Workspace) -> None:
    landing_source = source({"watermark": {"column": "seen"}}, timezone="Europe/Berlin")
    # The day of 23 hours.
    assert required_watermark(landing_source, "2026-03-29") == datetime(2026, 3, 29, 22, tzinfo=UTC)
    assert behind_watermark(landing_source, "2026-03-29", datetime(2026, 3, 29, 22, tzinfo=UTC)) is None
    assert "'seen' has reached 2026-03-29T21:59:59+00:00" in str(
        behind_watermark(landing_source, "2026-03-29", datetime(2026, 3, 29, 21, 59, 59, tzinfo=UTC))
    )
    assert "has reached nothing" in str(behind_watermark(landing_source, "2026-03-29", None))
    later = source({"watermark": {"column": "seen", "at_least": "1d2h"}})
    assert required_watermark(later, D1) == datetime(2026, 3, 2, 2, tzinfo=UTC)
    assert [parse_duration(t).total_seconds() for t in ("36h", "23h30m", "90s", "1d")] == [129_600, 84_600, 90, 86_400]


@pytest.mark.parametrize(
    ("complete", "message"),
    [
        ({}, "say how"),
        ({"success_file": "a/b"}, "is no file's name"),
        ({"watermark": {"column": "a", "at_least": "soon"}}, "'soon' is no duration"),
        ({"control": {"path": "x", "key": "a", "column": "b"}}, "give one of them"),
        ({"success_file": "_SUCCESS"}, "has no folder for each day"),
    ],
)
def test_what_is_no_declaration(complete: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        source(complete, path="in/*/{ds}.json")
    with pytest.raises(ValidationError, match="is of files in folders"):
        TableSource.model_validate({"table": "a.b", "complete": {"success_file": "_SUCCESS"}})


def test_the_runs_own_day_waits_and_days_before_are_left_out(ws: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec({"complete": {"marker": "done/{ds}"}, "catch_up_days": 1})
    history = LoadHistory(DeltaLog(ws.table("shop", "events")))

    def days() -> list[str]:
        (context,) = source_contexts(Context(spec, ws, D2))
        return [d.ds for d in covered_days(context, history)]

    with pytest.raises(IncompleteError, match=rf"{D2} is not complete yet: the marker .*/done/{D2} .*try again later"):
        days()
    assert IncompleteError.exit_code == EXIT_INCOMPLETE == 75
    put(ws, f"in/{D1}/a.json")
    put(ws, f"in/{D2}/a.json")
    put(ws, f"done/{D2}")
    with caplog.at_level(logging.WARNING, "headrace.lake"):
        assert days() == [D2]
    assert f"{D1} is left out as it is not complete" in caplog.text
    put(ws, f"done/{D1}")
    assert days() == [D1, D2]
    # When a day is taken says nothing of its rows.
    assert declared_source(spec.source) == declared_source(make_spec({"catch_up_days": 1}).source)
