"""Days in paths against Python's own strftime, and the paths that a spec refuses."""

from __future__ import annotations

import re
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import LandingSource, TableSource
from headrace.config.section import day_groups, day_regex, names_day, path_of_day
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.landing.files import day_folders, find_files
from headrace.lake.tables.folder import FolderSnapshot
from headrace.storage import local

DAYS = st.dates(date(1970, 1, 1), date(2399, 12, 31))
FORMATS = ["%Y/%m/%d", "%Y%m%d", "%Y-%-m-%-d", "year=%Y/month=%-m/day=%-d", "y%Y.m%m.d%d", "%d.%m.%Y", "100%%"]


def strftime(day: date, format_: str) -> str:
    # C's directives without zeros are not everywhere.
    plain = format_.replace("%-m", str(day.month)).replace("%-d", str(day.day))
    return plain.replace("%Y", f"{day.year:04d}").replace("%m", f"{day.month:02d}").replace("%d", f"{day.day:02d}")


@given(
    day=DAYS,
    format_=st.sampled_from(FORMATS[:-1]),
    prefix=st.sampled_from(["", "a+b/", "*/"]),
    suffix=st.sampled_from(["", "/*.csv", "-x.gz", ".parquet"]),
)
def test_paths_are_those_of_strftime(day: date, format_: str, prefix: str, suffix: str) -> None:
    path = f"{prefix}{{ds:{format_}}}{suffix}"
    assert names_day(path)
    spelled = path_of_day(path, day.isoformat())
    assert spelled == f"{prefix}{strftime(day, format_)}{suffix}"
    file = f"{spelled.replace('*', 'any-1')}"
    match = re.match(day_regex(path, lambda text: text), file)
    assert match is not None
    assert date(*(int(match[group]) for group in day_groups(path))) == day


def test_a_day_without_format() -> None:
    assert path_of_day("landing/{ds}/{ds}.csv", "2026-01-08") == "landing/2026-01-08/2026-01-08.csv"
    assert path_of_day("y={ds:%Y}/m={ds:%-m}/d={ds:%-d}/*", "2026-01-08") == "y=2026/m=1/d=8/*"
    assert not names_day("landing/*.csv")


@pytest.mark.parametrize("path", ["l/{ds:%Y/%m}/*", "l/{ds:%Y/%j}/*", "l/{ds:%y%m%d}.csv"])
def test_formats_that_are_refused(path: str) -> None:
    with pytest.raises(
        ValueError, match=r"so a path is of several days|a day's format knows %Y, %m, %d, %-m, %-d, not"
    ):
        LandingSource.model_validate({"format": "csv", "path": path})


def test_what_a_table_may_say() -> None:
    def day(**settings: object) -> None:
        TableSource.model_validate({"format": "parquet", "path": "t", "day": settings})

    day(partition=["year", "month", "day"])
    day(path="*/{ds:%Y%m%d}")
    for settings, message in (
        ({"partition": ["year", "month"]}, "three that are year, month and day"),
        ({"partition": ["a", "A", "b"]}, "three that are year, month and day"),
        ({"path": "2026/*"}, "has no day"),
        ({"path": "{ds}", "time": "ts"}, "name one of"),
    ):
        with pytest.raises(ValueError, match=message):
            day(**settings)
    with pytest.raises(ValueError, match=r"day\.path is of files in folders"):
        TableSource.model_validate({"format": "delta", "path": "t", "day": {"path": "{ds}"}})


def test_landing_files_by_folders_of_a_day(tmp_path: Path) -> None:
    ws = Workspace(tmp_path)
    days = [date(2026, 1, 6) + timedelta(days=k) for k in range(3)]
    for day in days:
        for hour in ("00", "13"):
            folder = tmp_path / f"{day:%Y/%m/%d}" / hour
            folder.mkdir(parents=True)
            (folder / "batch-1.json").write_text("{}")
    source = LandingSource.model_validate({"format": "jsonl", "path": "{ds:%Y/%m/%d}/*/*.json"})
    assert source.daily
    for day in days:
        paths = [f.name for f in find_files(source, ws, day.isoformat()).files]
        assert paths == [f"{day:%Y/%m/%d}/00/batch-1.json", f"{day:%Y/%m/%d}/13/batch-1.json"]
    complete = {"success_file": "_SUCCESS"}
    source = LandingSource.model_validate({"format": "jsonl", "path": source.path, "complete": complete})
    assert next(str(f) for f in day_folders(source, ws, "2026-01-08")) == f"{tmp_path}/2026/01/08"
    with pytest.raises(ValueError, match="has no folder for each day before its first wildcard"):
        LandingSource.model_validate({"format": "jsonl", "path": "all/*/{ds:%Y/%m/%d}/x", "complete": complete})


def test_files_whose_paths_name_no_day(tmp_path: Path) -> None:
    for name in ("2026/01/08/a.parquet", "2026/1/9/b.parquet", "2026/02/31/c.parquet", "other/d.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"PAR1 PAR1")
        source = TableSource.model_validate(
            {"format": "parquet", "path": str(tmp_path), "day": {"path": "{ds:%Y/%m/%d}"}}
        )
        if name[:6] in ("2026/0", "2026/1") and "31" not in name:
            files = FolderSnapshot(source, local(tmp_path), "parquet").files
            assert files[-1].first == files[-1].last
            continue
        with pytest.raises(UserError, match=rf"source\.day\.path: the file {name} of parquet .* is not as"):
            _ = FolderSnapshot(source, local(tmp_path), "parquet").files
        (tmp_path / name).unlink()
