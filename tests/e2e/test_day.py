"""A whole day by the command line: what it prints, what it leaves, and what running again changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.generate import DayTruth, truth_path
from headrace.stages import ORDER, STAGES
from headrace.workspace import Workspace
from tests.support import DAY, NEXT_DAY, Run, assert_same, everything, headrace, manifests, read_delta


@pytest.fixture(scope="module")
def two_days(finished_day: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the finished day's workspace in which the next day has run too, as far as it is asked about."""
    home = tmp_path_factory.mktemp("two") / "home"
    shutil.copytree(finished_day[0], home, ignore=shutil.ignore_patterns("postgres"))
    try:
        for first, last in (("ingest", "train"), ("score", "publish")):  # without XGBoost and the report
            run = headrace(home, "run", "clicks", "--ds", NEXT_DAY, "--from", first, "--to", last)
            assert run.code == 0, run.output
        yield home
    finally:
        headrace(home, "warehouse", "stop", settings={})


def test_every_stage_is_done_and_shown(finished_day: tuple[Path, Run]) -> None:
    home, run = finished_day
    assert list(manifests(home)) == list(ORDER)
    for word in (*ORDER, "ceiling", "AUC", str(Workspace(home).report("clicks", DAY)), "user_id"):
        assert word in run.output, f"{word!r} is not in:\n{run.output}"


def test_row_counts_equal_the_generators(finished_day: tuple[Path, Run], spark: SparkSession) -> None:
    home, _ = finished_day
    ws = Workspace(home)
    days = ["2026-01-01", "2026-01-02", DAY]
    truths = [DayTruth.load(truth_path(ws.landing("clicks"), ds)) for ds in days]
    events = read_delta(spark, ws.table("clicks", "events"))
    kept = events.groupby("ds").size()
    assert kept.to_dict() == {t.ds: t.rows for t in truths if t}
    assert not events.duplicated("event_id").any()
    rows = manifests(home)["ingest"].rows
    assert rows["read"] == sum(t.lines for t in truths if t)
    assert rows["read"] == rows["kept"] + rows["quarantined"] + rows["duplicates"]


def test_running_again_changes_nothing(finished_day: tuple[Path, Run], spark: SparkSession) -> None:
    home, _ = finished_day
    before = {stage: m.model_dump() for stage, m in manifests(home).items()}
    everything_before = everything(spark, home)
    again = headrace(home, "run", "clicks", "--ds", DAY)
    assert again.code == 0, again.output
    assert {stage: m.model_dump() for stage, m in manifests(home).items()} == before
    assert_same(everything_before, everything(spark, home))


def test_the_next_day_keeps_codes_and_starts_warm(
    finished_day: tuple[Path, Run], two_days: Path, spark: SparkSession
) -> None:
    keys = ["name", "value"]
    old = read_delta(spark, Workspace(finished_day[0]).table("clicks", "vocabulary")).set_index(keys)["code"]
    new = read_delta(spark, Workspace(two_days).table("clicks", "vocabulary")).set_index(keys)["code"]
    assert len(new) > len(old)
    pd.testing.assert_series_equal(new.loc[old.index], old)
    train = manifests(two_days, NEXT_DAY)["train"].facts
    assert train["warm_start"] == manifests(two_days, DAY)["train"].output("model").name


def test_both_days_are_published(two_days: Path, spark: SparkSession) -> None:
    published = read_delta(spark, Workspace(two_days).table("clicks", "published"))
    assert set(published["ds"].astype(str)) >= {NEXT_DAY}
    assert not published.duplicated(["ds", "user_id", "rank"]).any()


def test_status_and_lineage(finished_day: tuple[Path, Run]) -> None:
    home, _ = finished_day
    status = headrace(home, "status", "clicks", settings={})
    assert status.code == 0
    assert all(stage in status.output for stage in ORDER)
    lineage = headrace(home, "lineage", "clicks_scores", settings={})
    assert lineage.code == 0, lineage.output
    made = manifests(home)
    # Where `run --dry-run` says that a stage writes is where it wrote.
    for stage, manifest in made.items():
        words = {"pipeline": "clicks", "ds": DAY, "key": manifest.key, "scores": "public.clicks_scores"}
        places = [place.format(**words).removesuffix(" in the warehouse") for place in STAGES[stage].writes]
        assert all(o.name.startswith(tuple(places)) for o in manifest.outputs), (stage, manifest.outputs)
    for piece in (made["train"].key, made["features"].key, f"landing/clicks/{DAY}"):
        assert piece in lineage.output, f"{piece!r} is not in:\n{lineage.output}"


def test_malformed_commands_exit_with_2(finished_day: tuple[Path, Run]) -> None:
    home, _ = finished_day
    for words, message in [
        (("run", "clikcs", "--ds", DAY), "did you mean 'clicks'"),
        (("run", "clicks", "--ds", "2026-1-3"), "is not a date"),
        (("run", "clicks", "--ds", DAY, "--set", "train.epoch=1"), "did you mean 'epochs'"),
        (("run", "clicks", "--ds", DAY, "--from", "trian"), "train"),
        (("run", "clicks", "--ds", "2030-01-01"), "landing/clicks/2030-01-01"),
    ]:
        run = headrace(home, *words)
        assert run.code == 2, f"{words}: {run.output}"
        assert message in run.output
        assert "Traceback" not in run.output
