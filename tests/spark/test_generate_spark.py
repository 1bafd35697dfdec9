"""Spark's tasks and this process's threads write the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from pyspark.sql import SparkSession

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.lake.generate import DayTruth, GenerationProgress, generate, truth_path
from headrace.storage import Location

DAYS = ["2026-01-01", "2026-01-03"]
OVERRIDES = ["generate.rows_per_day=5000", "generate.files_per_day=5", "generate.malformed=0.02"]


def test_spark_writes_what_the_local_writer_writes(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec("clicks", OVERRIDES)
    local, by_spark = Workspace(tmp_path / "local"), Workspace(tmp_path / "spark")
    generate(spec, local, DAYS, spark=False)

    # The driver must not make a file itself.
    def never(*args: object) -> None:
        raise AssertionError("written by the driver")

    monkeypatch.setattr("headrace.lake.generate.landing_files.write_gzip", never)
    seen: list[GenerationProgress] = []
    truths: list[DayTruth] = generate(spec, by_spark, DAYS, spark=True, progress=seen.append)
    for truth, ds in zip(truths, DAYS, strict=True):
        folders = [w.landing("clicks").local_path() / ds for w in (local, by_spark)]
        files = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
        assert files[0] == files[1]
        assert len(files[0]) == 5
        texts = [truth_path(w.landing("clicks"), ds).read_text() for w in (local, by_spark)]
        assert texts[0] == texts[1]
        assert truth == DayTruth.load(truth_path(by_spark.landing("clicks"), ds))
    assert (seen[-1].days_done, seen[-1].rows_done) == (2, 10_000)
    assert sorted(p.name for p in by_spark.landing("clicks").local_path().iterdir()) == [*DAYS, "truth"]


def test_a_task_that_fails_leaves_no_day(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody can make a file there.
    monkeypatch.setattr(
        Location, "begin", lambda location, token, *_: replace(location, path=PurePosixPath("/proc/no"))
    )
    with pytest.raises(Exception, match="FileNotFoundError"):
        generate(load_spec("clicks", OVERRIDES), ws, DAYS[:1], spark=True)
    assert not ws.landing("clicks").exists()
