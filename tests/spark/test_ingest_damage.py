"""Days whose data files or commits a power cut has left short, and days for which there is no room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import EXIT_INCOMPLETE, UserError
from headrace.errors.translate import exit_message
from tests.ingest_support import D1, D2, event, ids, jsonl, make_spec, put, run, table

EVENTS = {D1: ["e1", "e2"], D2: ["e3"]}


@pytest.fixture
def loaded(spark: SparkSession, ws: Workspace) -> Workspace:
    put(ws, f"in/{D1}/a.json", jsonl([event(1, D1), event(2, D1), "broken"]))
    put(ws, f"in/{D2}/a.json", jsonl([event(3, D2), "broken too"]))
    run(make_spec(), ws, D2)
    assert ids(ws) == EVENTS
    return ws


def empty_files(ws: Workspace, table_name: str, pattern: str) -> list[Path]:
    files = sorted(ws.table("shop", table_name).local_path().glob(pattern))
    assert files
    for path in files:
        path.write_bytes(b"")
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    return files


@pytest.mark.parametrize(
    ("table_name", "pattern"),
    [
        ("events", f"ds={D1}/*.parquet"),
        ("events", "ds=*/*.parquet"),
        ("quarantine", f"ds={D2}/*.parquet"),
        ("events", "_delta_log/*2.json"),
        ("quarantine", "_delta_log/*1.json"),
    ],
    ids=["a day", "all days", "bad rows", "the last commit", "the commit of bad rows"],
)
def test_what_is_empty_is_loaded_again_and_said(
    table_name: str, pattern: str, spark: SparkSession, loaded: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    rows_before = [(row["ds"], row["_raw"]) for row in table(spark, loaded, "quarantine")]
    first = empty_files(loaded, table_name, pattern)[0]
    rerun = run(make_spec(), loaded, D2)
    assert not rerun.skipped
    assert ids(loaded) == EVENTS
    assert [(row["ds"], row["_raw"]) for row in table(spark, loaded, "quarantine")] == rows_before
    assert f"{first} has 0 bytes, not" in caplog.text or f"{first} is not whole (0 bytes)" in caplog.text
    assert run(make_spec(), loaded, D2).skipped


def test_a_damaged_day_without_its_landing_files_is_refused(spark: SparkSession, loaded: Workspace) -> None:
    file = empty_files(loaded, "events", f"ds={D2}/*.parquet")[0]
    (loaded.home / "in" / D2 / "a.json").unlink()
    with pytest.raises(UserError, match=rf"{D2} must be loaded again \({file} has 0 bytes, not [0-9]+\), but of its"):
        run(make_spec(), loaded, D2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    completed = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if completed.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {completed.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_day_that_finds_no_room_says_so_and_heals(spark: SparkSession, small_disk: Path, tmp_path: Path) -> None:
    """The home is full when the day begins; then room is made, and the same run goes on."""
    ws, calm = Workspace(small_disk), Workspace(tmp_path / "calm")
    rows = jsonl([event(n, D1, note="x" * 50 + str(n)) for n in range(2_000)])
    for home in (ws, calm):
        put(home, f"in/{D1}/a.json", rows)
    run(make_spec(), calm, D1)
    filler, spec = small_disk / "filler", make_spec()
    stats = os.statvfs(small_disk)
    filler.write_bytes(bytes(stats.f_bavail * stats.f_frsize - (48 << 10)))
    with pytest.raises(Exception) as raised:  # noqa: PT011  (Python's, Spark's or ours, by who met it)
        run(spec, ws, D1)
    assert isinstance(raised.value, Exception)
    message, code = exit_message(raised.value, ws.written_folders) or ("", 0)
    assert code == EXIT_INCOMPLETE, repr(raised.value)
    assert "No space left on device" in message
    assert f"bytes are free in {small_disk}" in message
    assert "\n" not in message
    filler.unlink()
    assert not run(spec, ws, D1).skipped
    assert ids(ws) == ids(calm)
