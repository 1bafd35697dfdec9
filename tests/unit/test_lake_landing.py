"""Which landing files there are: globs, days, identities."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.config import Source
from headrace.errors import UserError
from headrace.lake import landing
from headrace.storage import local
from headrace.workspace import Workspace, checkout


def source(path: str, **more: object) -> Source:
    return Source.model_validate({"format": "clicks", "path": path, **more})


def put(ws: Workspace, *names: str) -> None:
    for name in names:
        path = ws.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names(day: landing.LandingDay) -> list[str]:
    return [f.name for f in day.files]


def test_files_of_a_day_by_name(ws: Workspace) -> None:
    put(ws, "landing/p/2026-01-02/b.gz", "landing/p/2026-01-02/a.gz", "landing/p/2026-01-03/a.gz")
    day = landing.find(source("landing/p/{ds}/*.gz"), ws, "2026-01-02")
    assert names(day) == ["landing/p/2026-01-02/a.gz", "landing/p/2026-01-02/b.gz"]
    assert day.size == 2


def test_what_is_not_data(ws: Workspace) -> None:
    put(
        ws,
        "landing/p/2026-01-02/a.gz",
        "landing/p/2026-01-02/.a.gz",
        "landing/p/2026-01-02/_SUCCESS.gz",
        "landing/p/2026-01-02/b.gz.partial",
        "landing/p/truth/2026-01-02.json",
        "landing/p/2026-01-02/d.gz/inner.gz",
    )
    assert names(landing.find(source("landing/p/{ds}/*"), ws, "2026-01-02")) == ["landing/p/2026-01-02/a.gz"]
    # A wide glob would find the truth by its day; a folder of that name above the landing area is fine.
    assert names(landing.find(source("landing/p/**/*{ds}*"), ws, "2026-01-02")) == []
    inside = Workspace(ws.home / "truth" / "home")
    put(inside, "in/2026-01-02.json")
    assert names(landing.find(source("in/{ds}.json"), inside, "2026-01-02")) == ["in/2026-01-02.json"]


def test_home_with_glob_characters(tmp_path: Path) -> None:
    ws = Workspace(tmp_path / "a[1] *b")
    put(ws, "in/x.csv")
    assert names(landing.find(source("in/*.csv"), ws, "2026-01-01")) == ["in/x.csv"]


def test_absolute_and_checkout_paths(ws: Workspace, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere" / "x.csv"
    outside.parent.mkdir()
    outside.write_text("x")
    assert names(landing.find(source(str(outside)), ws, "2026-01-01")) == [str(outside)]
    found = landing.find(source("pyproject.tom?"), ws, "2026-01-01")
    assert [f.path for f in found.files] == [local(checkout() / "pyproject.toml")]
    put(ws, "pyproject.toml")
    assert names(landing.find(source("pyproject.tom?"), ws, "2026-01-01")) == ["pyproject.toml"]


def test_days_catch_up_oldest_first(ws: Workspace) -> None:
    put(ws, *(f"in/{ds}/a.gz" for ds in ("2025-12-30", "2026-01-01", "2026-01-03", "2026-01-04")))
    found = landing.days(source("in/{ds}/*.gz", catch_up_days=3), ws, "2026-01-03")
    assert [d.ds for d in found] == ["2026-01-01", "2026-01-03"]
    found = landing.days(source("in/{ds}/*.gz", catch_up_days=0), ws, "2026-01-03")
    assert [d.ds for d in found] == ["2026-01-03"]


def test_snapshot_is_one_day(ws: Workspace) -> None:
    put(ws, "in/a.csv", "in/b.csv")
    (day,) = landing.days(source("in/*.csv"), ws, "2026-01-03")
    assert (day.ds, names(day)) == ("2026-01-03", ["in/a.csv", "in/b.csv"])


def test_no_files_names_the_glob(ws: Workspace) -> None:
    put(ws, "in/2026-01-01/a.gz")
    with pytest.raises(UserError) as e:
        landing.days(source("in/{ds}/*.gz"), ws, "2026-01-02")
    assert str(e.value).startswith(f"no landing files for 2026-01-02 match {ws.home}/in/2026-01-02/*.gz nor ")
    with pytest.raises(UserError, match=r"no landing files match /nowhere/\*\.csv; put them there"):
        landing.days(source("/nowhere/*.csv"), ws, "2026-01-02")


def test_version_follows_every_part_of_the_identity(ws: Workspace) -> None:
    put(ws, "in/a.gz")
    spec, path = source("in/*.gz"), ws.home / "in/a.gz"
    first = landing.find(spec, ws, "2026-01-01")
    assert landing.find(spec, ws, "2026-01-01").version == first.version
    assert first.files[0].unchanged()
    assert landing.same_files(first.files, {"files": [list(first.files[0].identity)]})
    os.utime(path, ns=(0, first.files[0].mtime_ns + 1))
    touched = landing.find(spec, ws, "2026-01-01")
    assert not first.files[0].unchanged()
    assert not landing.same_files(touched.files, {"files": [list(first.files[0].identity)]})
    path.rename(ws.home / "in/b.gz")
    renamed = landing.find(spec, ws, "2026-01-01")
    assert not touched.files[0].unchanged()
    put(ws, "in/c.gz")
    more = landing.find(spec, ws, "2026-01-01")
    assert len({first.version, touched.version, renamed.version, more.version}) == 4
