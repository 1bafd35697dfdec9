"""The landing files of a day: globs, days, identities."""

from __future__ import annotations

import hashlib
import os
from datetime import datetime
from pathlib import Path

import pytest

from headrace.config import LandingSource
from headrace.config.formats import FILE_FORMATS
from headrace.config.installation import checkout
from headrace.config.source import days_of_run, following, midnight
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.landing.files import LandingDay, LandingFile, find_files
from headrace.lake.landing.formats import LandingReader, reader_of
from headrace.storage import local


def source(path: str, **more: object) -> LandingSource:
    return LandingSource.model_validate({"format": "clicks", "path": path, **more})


def put(ws: Workspace, *names: str) -> None:
    for name in names:
        path = ws.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names(day: LandingDay) -> list[str]:
    return [f.name for f in day.files]


def test_files_of_a_day_by_name(ws: Workspace) -> None:
    put(ws, "landing/p/2026-01-02/b.gz", "landing/p/2026-01-02/a.gz", "landing/p/2026-01-03/a.gz")
    day = find_files(source("landing/p/{ds}/*.gz"), ws, "2026-01-02")
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
    assert names(find_files(source("landing/p/{ds}/*"), ws, "2026-01-02")) == ["landing/p/2026-01-02/a.gz"]
    # A wide glob would find the truth by its day; a folder of that name above the landing area is fine.
    assert names(find_files(source("landing/p/**/*{ds}*"), ws, "2026-01-02")) == []
    inside = Workspace(ws.home / "truth" / "home")
    put(inside, "in/2026-01-02.json")
    assert names(find_files(source("in/{ds}.json"), inside, "2026-01-02")) == ["in/2026-01-02.json"]


def test_home_with_glob_characters(tmp_path: Path) -> None:
    ws = Workspace(tmp_path / "a[1] *b")
    put(ws, "in/x.csv")
    assert names(find_files(source("in/*.csv"), ws, "2026-01-01")) == ["in/x.csv"]


def test_absolute_and_checkout_paths(ws: Workspace, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere" / "x.csv"
    outside.parent.mkdir()
    outside.write_text("x")
    assert names(find_files(source(str(outside)), ws, "2026-01-01")) == [str(outside)]
    listing = find_files(source("pyproject.tom?"), ws, "2026-01-01")
    assert [f.path for f in listing.files] == [local(checkout() / "pyproject.toml")]
    put(ws, "pyproject.toml")
    assert names(find_files(source("pyproject.tom?"), ws, "2026-01-01")) == ["pyproject.toml"]


def test_days_covered_oldest_first() -> None:
    assert days_of_run(source("in/{ds}/*.gz", catch_up_days=2), "2026-01-01") == [
        "2025-12-30",
        "2025-12-31",
        "2026-01-01",
    ]
    assert days_of_run(source("in/{ds}/*.gz", catch_up_days=0), "2026-01-03") == ["2026-01-03"]
    assert days_of_run(source("in/*.csv"), "2026-01-03") == ["2026-01-03"]


def test_checksum_is_of_the_content(ws: Workspace) -> None:
    put(ws, "in/a.gz")
    path = ws.home / "in/a.gz"
    (first,) = find_files(source("in/*.gz"), ws, "2026-01-01").files
    assert first.sha256() == hashlib.sha256(b"x").hexdigest()
    os.utime(path, ns=(0, first.mtime_ns + 1))
    assert not first.unchanged()
    (touched,) = find_files(source("in/*.gz"), ws, "2026-01-01").files
    assert touched.sha256() == first.sha256()
    path.write_bytes(b"y")
    os.utime(path, ns=(0, first.mtime_ns + 2))
    (written,) = find_files(source("in/*.gz"), ws, "2026-01-01").files
    assert written.sha256() != first.sha256()
    path.unlink()
    with pytest.raises(UserError, match=r"landing file in/a\.gz cannot be read: No such file"):
        LandingFile("in/a.gz", local(path), 1, 5).sha256()


@pytest.mark.parametrize(
    ("zone", "ds", "begin", "hours"),
    [
        ("UTC", "2026-03-29", "2026-03-29T00:00+00:00", 24),
        ("Europe/Berlin", "2026-03-29", "2026-03-28T23:00+00:00", 23),
        ("Europe/Berlin", "2026-10-25", "2026-10-24T22:00+00:00", 25),
        ("America/Los_Angeles", "2026-01-01", "2026-01-01T08:00+00:00", 24),
        # At midnight the clock goes to one: the day begins at one.
        ("Asia/Beirut", "2026-03-29", "2026-03-28T22:00+00:00", 23),
    ],
)
def test_landing_days_of_a_time_zone(zone: str, ds: str, begin: str, hours: int) -> None:
    spec = source("in/{ds}/*", timezone=zone)
    first, last = midnight(spec, ds), midnight(spec, following(ds))
    assert first == datetime.fromisoformat(begin)
    assert (last - first).total_seconds() == hours * 3600


def test_every_format_has_a_reader() -> None:
    for name in FILE_FORMATS.names:
        assert isinstance(reader_of(source("in/{ds}/*", format=name)), LandingReader)


def test_links_give_each_file_once(ws: Workspace) -> None:
    """A link to the folder above, two beside each other, one to itself: each real file has one of its names."""
    put(ws, "in/2026-01-01/a.csv", "in/2026-01-01/sub/b.csv", "elsewhere/c.csv", "in/2026-01-02/other.csv")
    day = ws.home / "in" / "2026-01-01"
    (day / "up").symlink_to("..")
    (day / "again").symlink_to("up")
    (day / "sub" / "top").symlink_to(day)
    (day / "down").symlink_to("sub")
    (day / "x").symlink_to(ws.home / "elsewhere")
    (day / "y").symlink_to(ws.home / "elsewhere")
    (day / "loop").symlink_to("loop")
    (day / "0.csv").symlink_to("a.csv")
    (day / "gone.csv").symlink_to("nowhere")
    os.link(day / "a.csv", day / "hard.csv")
    expected = ["a.csv", "hard.csv", "sub/b.csv", "x/c.csv"]
    listing = find_files(source("in/{ds}/**/*.csv"), ws, "2026-01-01")
    assert names(listing) == [f"in/2026-01-01/{name}" for name in expected]
    assert sorted(local(day).infos()) == ["0.csv", *expected]
    # Without `**` links are followed as far as the pattern says.
    assert names(find_files(source("in/{ds}/*.csv"), ws, "2026-01-01")) == [
        "in/2026-01-01/a.csv",
        "in/2026-01-01/hard.csv",
    ]


def test_a_name_that_is_not_utf8_is_refused(ws: Workspace) -> None:
    put(ws, "in/a.csv")
    Path(os.fsdecode(os.fsencode(ws.home / "in") + b"/b\xff.csv")).write_bytes(b"")
    with pytest.raises(UserError, match=r"in/b\\xff\.csv: its name is not UTF-8 text"):
        find_files(source("in/*.csv"), ws, "2026-01-01")
