"""A range of days in one run: which days, in which order, and what the command line says of them."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.commands.dry_run import PlannedStage, dry_run
from headrace.config import load_spec
from headrace.errors import UserError
from headrace.jobs.day_range import days_of, turns
from headrace.jobs.submit import command
from headrace.workspace import Workspace
from tests.cli_support import DS, Yard, make_yard
from tests.clicks_stages import CLICKS_STAGES


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


def test_the_days_of_a_range() -> None:
    spec = load_spec("clicks")
    assert days_of(spec, "2026-02-27", "2026-03-01") == ("2026-02-27", "2026-02-28", "2026-03-01")
    assert days_of(spec, "2026-02-27", None) == days_of(spec, "2026-02-27", "2026-02-27") == ("2026-02-27",)
    with pytest.raises(UserError, match="2026-02-26 is before 2026-02-27"):
        days_of(spec, "2026-02-27", "2026-02-26")
    with pytest.raises(UserError, match="'2026-2-1' is not a date"):
        days_of(spec, "2026-02-27", "2026-2-1")
    with pytest.raises(UserError, match="the source of 'criteo' is one snapshot"):
        days_of(load_spec("criteo"), "2026-02-27", "2026-02-28")


@given(st.integers(1, 40), st.integers(0, 12))
def test_days_are_loaded_in_few_passes_and_all_else_follows_in_order(count: int, catch_up: int) -> None:
    spec = load_spec("clicks", [f"source.catch_up_days={catch_up}"])
    first = date(2026, 1, 1)
    days = days_of(spec, first.isoformat(), (first + timedelta(days=count - 1)).isoformat())
    found = list(turns(["ingest", "features", "train"], days, spec))
    assert [turn for turn in found if turn[0] != "ingest"] == [(s, ds) for s in ("features", "train") for ds in days]
    loading = [ds for stage, ds in found if stage == "ingest"]
    assert found[: len(days)] == [("ingest", ds) for ds in loading]
    assert sorted(loading) == list(days)
    # Runs that load something: the first day's, and as few as cover the rest; no day before one that is loaded later.
    loaded: set[str] = set()
    passes = 0
    for ds in loading:
        covered = {(date.fromisoformat(ds) - timedelta(days=k)).isoformat() for k in range(catch_up + 1)} & {*days}
        if covered - loaded:
            passes += 1
            assert min(covered - loaded) > max(loaded, default="")
            loaded |= covered
    assert loaded == {*days}
    assert passes == 1 + -(-(count - 1) // (catch_up + 1))


def test_an_application_is_told_the_range(ws: Workspace) -> None:
    line = command(["ingest"], "clicks", DS, ws, ["train.epochs=1"], until="2026-01-05")
    assert line[line.index("--ds") : line.index("--ds") + 2] == ["--ds", DS]
    assert line[line.index("--until") + 1] == "2026-01-05"
    assert "--until" not in command(["ingest"], "clicks", DS, ws)


def test_a_range_runs_stage_by_stage(yard: Yard) -> None:
    shown = yard.run("--until", "2026-01-04", "--to", "features")
    assert shown.exit_code == 0, shown.output
    assert yard.applications == [("ingest", "features")]
    assert list(zip(yard.submitted, yard.days, strict=True)) == [
        ("ingest", DS),
        ("ingest", "2026-01-04"),
        ("features", DS),
        ("features", "2026-01-04"),
    ]
    assert "[2/2] features of 2026-01-04" in shown.output
    assert yard.run("--until", "2026-01-05", "--to", "features").exit_code == 0
    assert list(zip(yard.submitted, yard.days, strict=True)) == [("ingest", "2026-01-05"), ("features", "2026-01-05")]
    assert yard.run("--until", "2026-01-05", "--to", "features").exit_code == 0
    assert yard.applications == []
    # What fails is told of its day.
    yard.codes["train"] = 9
    failed = yard.run("--until", "2026-01-05", "--to", "train")
    assert failed.exit_code == 1
    assert f"logs/clicks/{DS}/train.log" in failed.output.replace("\n", "")


def test_a_dry_run_of_a_range_says_what_would_run_and_in_which_order(yard: Yard) -> None:
    assert yard.run("--to", "features").exit_code == 0
    found = planned(yard, "train")
    shown = yard.run("--until", "2026-01-05", "--to", "train", "--dry-run")
    assert (shown.exit_code, yard.submitted) == (0, [])
    assert f"clicks, {DS} to 2026-01-05: 10 of 12 stages would run" in shown.output
    assert [(p.stage, p.ds) for p in found if not p.runs] == [("ingest", DS), ("features", DS)]
    assert next(p for p in found if p.stage == "features" and p.ds == "2026-01-04").reads == ("what ingest makes",)
    # In this order.
    assert yard.run("--until", "2026-01-05", "--to", "train").exit_code == 0
    assert list(zip(yard.submitted, yard.days, strict=True)) == [(p.stage, p.ds) for p in found if p.runs]
    assert not any(p.runs for p in planned(yard, "train"))
    # A day that is done stays so as far as it can be known: another day's model may be what it begins with.
    Workspace(yard.home).manifest("clicks", "2026-01-04", "train").local_path().unlink()
    of_train = {p.ds: (p.runs, p.why) for p in planned(yard, "train") if p.stage == "train"}
    assert of_train == {
        DS: (False, "done with the same inputs"),
        "2026-01-04": (True, "not yet run for this date"),
        "2026-01-05": (False, "done, unless what train makes for 2026-01-04 changes its inputs"),
    }
    assert yard.run("--until", "2026-01-02", "--dry-run").exit_code == 2


def planned(yard: Yard, last: str) -> list[PlannedStage]:
    return dry_run("clicks", Workspace(yard.home), DS, [], CLICKS_STAGES[0], last, until="2026-01-05")
