"""A range of days in one run: which days, in which order, and what the command line says of them."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.run import PlannedStage, dry_run
from headrace.config import load_spec
from headrace.config.stages import STAGES
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.stages import days_of, execution_order, submissions
from headrace.jobs.submit import command
from headrace.stage import Context, Result
from tests.cli_support import DS, Fake, Yard, make_yard
from tests.support import CLICKS_STAGES


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
    order = list(execution_order(["ingest", "features", "train"], days, spec))
    assert [step for step in order if step[0] != "ingest"] == [(s, ds) for s in ("features", "train") for ds in days]
    loading = [ds for stage, ds in order if stage == "ingest"]
    assert order[: len(days)] == [("ingest", ds) for ds in loading]
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


class Judging(Fake):
    """A stage that the tests' pipeline has not."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("train",)

    def run(self, ctx: Context) -> Result:
        return Result(facts={"verdict": "passed"})


@pytest.mark.parametrize("section", ["gate={}", "challenger={}"])
def test_a_gate_has_each_day_trained_and_judged_before_the_next(yard: Yard, section: str) -> None:
    """A day starts from the model of the day before that was not refused: that one's verdict comes first."""
    days, first = ("2026-01-03", "2026-01-04"), ["ingest", "features"]
    spec = load_spec("clicks", [section])
    later = [s for s in ("train", "challenger", "evaluate", "gate", "promote", "score") if STAGES[s].applies(spec)]
    for_all = [(s, ds) for s in first for ds in days]
    expected = [*for_all, *((s, ds) for ds in days for s in later)]
    assert list(execution_order([*first, *later], days, spec)) == expected
    # As well where they need several applications: what stands on nothing later is done for all days at once.
    for groups in ([[*first, later[0]], later[1:]], [[s] for s in (*first, *later)]):
        jobs = list(submissions(groups, days, spec))
        assert [step for group, group_days in jobs for step in execution_order(group, group_days, spec)] == expected
        assert [group_days for group, group_days in jobs if "train" in group] == [("2026-01-03",), ("2026-01-04",)]
        assert all(group_days == days for group, group_days in jobs if group[0] in first)
    assert list(submissions([[*first, *later]], days, spec)) == [((*first, *later), days)]
    assert list(submissions([first, later], days[:1], spec)) == [(tuple(first), days[:1]), (tuple(later), days[:1])]

    # Without either, all days are trained one after another.
    plain = load_spec("clicks")
    groups = [first, ["train", "promote"]]
    assert list(submissions(groups, days, plain)) == [(tuple(group), days) for group in groups]
    assert list(execution_order(["train", "promote"], days, plain)) == [
        (s, ds) for s in ("train", "promote") for ds in days
    ]

    yard.fakes |= {name: Judging(name) for name in ("challenger", "evaluate", "gate")}
    result = yard.run("--until", "2026-01-04", "--from", "ingest", "--to", "promote", "--isolated", "--set", section)
    assert result.exit_code == 0, result.output
    positions = {step: i for i, step in enumerate(zip(yard.submitted, yard.days, strict=True))}
    assert positions["promote", DS] < positions["train", "2026-01-04"]
    assert positions["features", "2026-01-04"] < positions["train", DS]


def test_an_application_is_told_the_range(ws: Workspace) -> None:
    line = command(["ingest"], "clicks", DS, ws, ["train.epochs=1"], until="2026-01-05")
    assert line[line.index("--ds") : line.index("--ds") + 2] == ["--ds", DS]
    assert line[line.index("--until") + 1] == "2026-01-05"
    assert "--until" not in command(["ingest"], "clicks", DS, ws)


def test_a_range_runs_stage_by_stage(yard: Yard) -> None:
    result = yard.run("--until", "2026-01-04", "--to", "features")
    assert result.exit_code == 0, result.output
    assert yard.applications == [("ingest", "features")]
    assert list(zip(yard.submitted, yard.days, strict=True)) == [
        ("ingest", DS),
        ("ingest", "2026-01-04"),
        ("features", DS),
        ("features", "2026-01-04"),
    ]
    assert "[2/2] features of 2026-01-04" in result.output
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
    plan = planned(yard, "train")
    result = yard.run("--until", "2026-01-05", "--to", "train", "--dry-run")
    assert (result.exit_code, yard.submitted) == (0, [])
    assert f"clicks, {DS} to 2026-01-05: 10 of 12 stages would run" in result.output
    assert [(p.stage, p.ds) for p in plan if not p.runs] == [("ingest", DS), ("features", DS)]
    assert next(p for p in plan if p.stage == "features" and p.ds == "2026-01-04").reads == ("what ingest makes",)
    # In this order.
    assert yard.run("--until", "2026-01-05", "--to", "train").exit_code == 0
    assert list(zip(yard.submitted, yard.days, strict=True)) == [(p.stage, p.ds) for p in plan if p.runs]
    assert not any(p.runs for p in planned(yard, "train"))
    # A day that is done stays so as far as it can be known: another day's model may be what it begins with.
    Workspace(yard.home).manifest("clicks", "2026-01-04", "train").local_path().unlink()
    of_train = {p.ds: (p.runs, p.reason) for p in planned(yard, "train") if p.stage == "train"}
    assert of_train == {
        DS: (False, "done with the same inputs"),
        "2026-01-04": (True, "not yet run for this date"),
        "2026-01-05": (False, "done, unless what train makes for 2026-01-04 changes its inputs"),
    }
    assert yard.run("--until", "2026-01-02", "--dry-run").exit_code == 2


def planned(yard: Yard, last: str) -> list[PlannedStage]:
    return dry_run("clicks", Workspace(yard.home), DS, [], CLICKS_STAGES[0], last, until="2026-01-05")
