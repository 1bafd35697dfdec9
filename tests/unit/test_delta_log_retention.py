"""Removal of old log files of a Delta table: every kept version reads the same, in headrace and in others.

A kill at any call harms nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulated_days import day, write_rows
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.log_files import erasure_text
from headrace.lake.delta.retention import checkpoints_to_keep, remove_days_before, unused_log_files
from headrace.storage import Location, local

#: Later than any file.
LATER = 2**62
DAYS_KEPT = 25


def files_at(table: Location, version: int) -> set[str]:
    """Return the paths of a version's files, read by delta-rs."""
    return set(DeltaTable(str(table), version=version).file_uris())


def ours_at(table: Location, version: int) -> set[str] | None:
    state = DeltaLog(table).state(version)
    return None if state is None else {str(table / add["path"]) for add in state.adds}


def sliding(table: Location, days: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Write days and remove those of `DAYS_KEPT` days ago; yield after each its number and the versions of all days."""
    versions: dict[str, int] = {}
    for n in range(days):
        versions[day(n)] = write_rows(table, day(n), [n])
        remove_days_before(table, day(max(0, n - DAYS_KEPT + 1)))
        yield n, versions


def test_a_table_that_keeps_more_days_than_a_checkpoint_apart(tmp_path: Path) -> None:
    """Two commits a day, a checkpoint every ten: the days that are kept lie before the newest two checkpoints."""
    table, log = local(tmp_path / "table"), DeltaLog(local(tmp_path / "table"))
    expected: dict[int, set[str]] = {}
    commits, checkpoints = [], []
    for n, versions in sliding(table, 3 * DAYS_KEPT):
        first = day(max(0, n - DAYS_KEPT + 1))
        pinned = {v for ds, v in versions.items() if ds >= first}
        newest = log.version
        assert newest is not None
        expected |= {v: files_at(table, v) for v in (versions[day(n)], newest)}
        for file in unused_log_files(table, pinned, first, LATER):
            file.remove()
        versions_left = log.versions()
        assert versions_left == set(range(min(versions_left), newest + 1))  # no gap
        commits.append(len(versions_left))
        checkpoints.append(len(list(Path(table / "_delta_log").glob("*.checkpoint.parquet"))))
        assert unused_log_files(table, pinned, first, LATER) == []
        if n % 9 == 0:
            for version in {*pinned, newest}:
                assert files_at(table, version) == ours_at(table, version) == expected[version]
    # Two commits for each kept day, and at most a fourth more, to a checkpoint.
    assert max(commits) <= 2 * DAYS_KEPT + (2 * DAYS_KEPT) // 4 + 11
    assert max(commits[-DAYS_KEPT:]) <= max(commits[DAYS_KEPT : 2 * DAYS_KEPT + 1]) + 1
    assert max(checkpoints) <= 10


def test_an_erasure_is_told_for_as_long_as_its_days(tmp_path: Path) -> None:
    table, log = local(tmp_path / "table"), DeltaLog(local(tmp_path / "table"))
    for n in range(DAYS_KEPT):
        write_rows(table, day(n), [n])
    erasure = write_rows(table, day(3), [], erasure_text("request", {day(3): 1}))
    for n in range(DAYS_KEPT, 3 * DAYS_KEPT):
        newest = write_rows(table, day(n), [n])
    for file in unused_log_files(table, {newest}, day(3), LATER):
        file.remove()
    assert erasure in log.versions()
    remove_days_before(table, day(2 * DAYS_KEPT))
    newest = write_rows(table, day(3 * DAYS_KEPT), [0])
    for file in unused_log_files(table, {newest}, day(2 * DAYS_KEPT), LATER):
        file.remove()
    assert min(log.versions()) > erasure


def test_what_a_reader_has_listed_stays_a_while(tmp_path: Path) -> None:
    """Whoever began before the removal goes on: of versions since a moment nothing goes that they rest on."""
    table = local(tmp_path / "table")
    for n, _ in sliding(table, 60):
        for file in Path(table / "_delta_log").iterdir():  # a day is a minute
            if file.stat().st_mtime > 10_000:
                os.utime(file, (60 * n, 60 * n))
    log, folder = DeltaLog(table), table / "_delta_log"
    newest = log.version
    assert newest is not None
    moment = 60 * 30 * 10**9
    recent = [v for v in log.versions() if log.committed_ns(v) >= moment]
    assert len(recent) == 60
    held = {e.name for e in folder.entries()}
    removable = {e.name for e in unused_log_files(table, (), day(59), moment)}
    assert removable
    for version in recent:
        chosen = max(int(n[:20]) for n in held if ".checkpoint" in n and int(n[:20]) <= version)
        needs = {f"{v:020d}.json" for v in range(chosen + 1, version + 1)} | {f"{chosen:020d}.checkpoint.parquet"}
        assert needs <= held
        assert not needs & removable
    # Of a table that keeps all of its days checkpoints go when they are so old, and commits never do.
    all_days = [e.name for e in unused_log_files(table, (), None, moment)]
    assert all_days
    assert all(".checkpoint" in name and int(name[:20]) < min(recent) for name in all_days)


def test_the_checkpoint_where_readers_begin_stays(tmp_path: Path) -> None:
    table = local(tmp_path / "table")
    for _ in sliding(table, 40):
        pass
    folder = table / "_delta_log"
    third = sorted(int(e.name[:20]) for e in folder.entries() if e.name.endswith(".checkpoint.parquet"))[-3]
    pointer = folder / "_last_checkpoint"
    pointer.put_text(json.dumps(json.loads(pointer.read_text()) | {"version": third}))
    newest = DeltaLog(table).version
    assert newest is not None
    expected = files_at(table, newest)
    for file in unused_log_files(table, (), None, LATER):
        file.remove()
    assert (folder / f"{third:020d}.checkpoint.parquet").is_file()
    assert files_at(table, newest) == expected


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_log(data: st.DataObject) -> None:
    """Days written in any order and again, removals, checkpoints anywhere, versions pinned; then killed anywhere."""
    folder = Path(tempfile.mkdtemp())
    try:
        table, log = local(folder / "table"), DeltaLog(local(folder / "table"))
        write_rows(table, day(0), [0])
        for n in data.draw(
            st.lists(st.integers(0, 9), min_size=5, max_size=30), label="days, and removals before them"
        ):
            if n < 7:
                write_rows(table, day(n), [n])
            else:
                remove_days_before(table, day(n - 5))
            if data.draw(st.integers(0, 4)) == 0:
                DeltaTable(str(table)).create_checkpoint()
        newest = log.version
        assert newest is not None
        first = data.draw(st.one_of(st.none(), st.integers(0, 8).map(day)), label="first day")
        pinned = data.draw(st.sets(st.integers(0, newest), max_size=3), label="pinned")
        expected = {v: files_at(table, v) for v in range(newest + 1)}
        needed = {*pinned, newest} if first is not None else set(expected)
        for commit in log.commits():
            days = {(a.partition or {}).get("ds") or "" for a in (*commit.adds, *commit.removes)}
            if first is not None and any(ds >= first for ds in days):
                needed |= set(range(commit.version, newest + 1))
        removable = unused_log_files(table, pinned, first, LATER)
        assert unused_log_files(table, set(expected), first, LATER) == unused_log_files(table, {0}, first, LATER)
        killed = data.draw(st.integers(0, len(removable)), label="files that are removed before it is killed")
        for ends in (killed, len(removable)):
            for file in removable[:ends]:
                file.remove()
            for version in needed:
                assert ours_at(table, version) == expected[version], version
                assert files_at(table, version) == expected[version], version
            # What is left is found again.
            remaining = unused_log_files(table, pinned, first, LATER)
            assert {f.name for f in remaining} == {f.name for f in removable[ends:]}
    finally:
        shutil.rmtree(folder)


@given(interval=st.integers(1, 12), window=st.integers(1, 150), step=st.integers(1, 3))
def test_checkpoints_slide_with_what_is_needed(interval: int, window: int, step: int) -> None:
    """However often it is asked, the log goes back no further than a fourth more than is needed, by few checkpoints."""
    checkpoints: set[int] = set()
    first = 0
    for newest in range(0, 5 * window + 60, step):
        if newest // interval > (newest - step) // interval and newest:
            checkpoints.add(newest)
        needed = max(0, newest - window)
        first = max((c for c in checkpoints if c <= needed), default=first)
        checkpoints = checkpoints_to_keep(sorted(checkpoints), first, needed, newest)
        assert needed - first < window // 4 + interval + 2 * step
        assert len(checkpoints) <= 2 * 4 + 5
        assert first == 0 or first in checkpoints


@pytest.mark.parametrize("damage", ["a commit is gone", "no checkpoint of the first"])
def test_a_log_that_is_not_whole_keeps_its_checkpoints(tmp_path: Path, damage: str) -> None:
    table = local(tmp_path / "table")
    for _ in sliding(table, 40):
        pass
    log, folder = DeltaLog(table), table / "_delta_log"
    for version in [35] if damage == "a commit is gone" else range(5):
        (folder / f"{version:020d}.json").remove()
    newest = log.version
    assert newest is not None
    expected = files_at(table, newest)
    assert unused_log_files(table, (), None, LATER) == []
    assert files_at(table, newest) == expected
