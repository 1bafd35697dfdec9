"""`headrace run --dry-run`: the stages that a run would work at, why, on what; and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headrace.cli.run import PlannedStage, dry_run
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.workspace import Workspace, checkout
from tests.cli_support import DS, Yard, make_yard
from tests.clicks_stages import CLICKS_STAGES


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


def planned(yard: Yard, first: str = CLICKS_STAGES[0], last: str = CLICKS_STAGES[-1]) -> dict[str, PlannedStage]:
    return {p.stage: p for p in dry_run("clicks", Workspace(yard.home), DS, [], first, last)}


def test_before_the_first_run_all_would_run(yard: Yard) -> None:
    result = yard.run("--dry-run")
    assert result.exit_code == 0, result.output
    assert f"clicks, {DS}: 9 of 9 stages would run" in result.output
    assert (yard.submitted, yard.home.exists()) == ([], False)
    plans = planned(yard)
    assert {p.reason for p in plans.values()} == {"not yet run for this date"}
    assert plans["ingest"].reads == (f"landing/clicks/{DS} (landing, version v1)",)
    assert plans["ingest"].writes == ("lake/clicks/events", "lake/clicks/quarantine")
    assert plans["features"].reads == ("what ingest makes",)
    assert plans["publish"].writes == ("lake/clicks/published", "clicks_scores in the warehouse")
    assert plans["report"].writes == (f"reports/clicks/{DS}.html",)


def test_what_is_done_stays_and_what_changed_runs(yard: Yard) -> None:
    yard.run()
    plans = planned(yard)
    assert not any(p.runs for p in plans.values())
    manifest = Manifest.load(Workspace(yard.home).manifest("clicks", DS, "train"))
    assert manifest is not None
    assert plans["train"].writes == (f"lake/clicks/train (model, version {manifest.key})",)
    yard.fakes["ingest"].source = "v2"
    plans = planned(yard)
    assert all(p.runs for p in plans.values())
    assert plans["ingest"].reason == "its inputs or its part of the spec have changed"
    assert plans["features"].reason == "if what ingest makes is new"
    # What would run is what does run.
    assert yard.run().exit_code == 0
    assert yard.submitted == list(CLICKS_STAGES)


def test_keys_are_those_that_the_run_will_have(yard: Yard) -> None:
    yard.run("--to", "features")
    path = planned(yard, "train", "train")["train"].writes[0]
    yard.run("--from", "train", "--to", "train")
    manifest = Manifest.load(Workspace(yard.home).manifest("clicks", DS, "train"))
    assert manifest is not None
    assert path == f"models/clicks/{DS}/{manifest.key}"


def test_it_refuses_what_a_run_refuses(yard: Yard) -> None:
    assert yard.run("--dry-run", "--from", "train").exit_code == 2
    with pytest.raises(UserError, match="needs stage 'features'"):
        planned(yard, "train")
    assert yard.run("--dry-run", "--from", "report", "--to", "train").exit_code == 2


def test_tables_of_other_sources_are_named_and_tables_are_not_copied(yard: Yard, tmp_path: Path) -> None:
    data = yaml.safe_load((checkout() / "conf" / "pipelines" / "clicks.yaml").read_text())
    columns = [{"name": "user_id", "type": "bigint"}, {"name": "at", "type": "timestamp"}]
    files = {"source": {"format": "csv", "path": "landing/bought/{ds}.csv"}, "table": {"columns": columns}}
    data["sources"] = {"bought": files}
    data["source"] = {"format": "delta", "path": "/lake/clicks", "day": {"partition": "ds"}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    ingest, *_ = dry_run(str(path), Workspace(yard.home), DS, [], "ingest", "ingest")
    assert ingest.writes == ("lake/clicks/quarantine", "lake/clicks/bought", "lake/clicks/bought_quarantine")
