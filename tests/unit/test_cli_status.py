"""`headrace status` and `headrace lineage` of the outputs of fake stages; the last lines of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.summary import quality_lines
from headrace.manifest import Manifest
from headrace.stage import run_lock
from headrace.workspace import Workspace
from tests.cli_support import DS, Yard, make_yard
from tests.clicks_stages import CLICKS_STAGES


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


def states(output: str) -> dict[str, str]:
    """Return the rest of each stage's line, by stage."""
    states_by_stage = {}
    for line in output.splitlines():
        words = line.split()
        if words[:2] == ["clicks", DS]:
            states_by_stage[words[2]] = " ".join(words[3:])
    return states_by_stage


def test_status_tells_done_from_stale_and_missing(yard: Yard) -> None:
    yard.run("--to", "baseline")
    by_stage = states(yard("status").output)
    assert list(by_stage) == list(CLICKS_STAGES)
    assert by_stage["ingest"].startswith("done 1,234 kept ")
    assert by_stage["score"].startswith("missing")
    yard.fakes["ingest"].source = "v2"
    assert states(yard("status", "clicks").output)["ingest"].startswith("stale: its inputs or its part of the spec")
    yard.fakes["ingest"].source = "gone"
    assert states(yard("status", "clicks").output)["ingest"].startswith("stale: no landing files")
    yard.fakes["ingest"].source = "v1"
    changed = states(yard("status", "clicks", "--set", "train.epochs=9").output)
    assert changed["features"].startswith("done")
    assert changed["train"].startswith("stale")
    assert states(yard("status", "clicks", "--set", "baseline=null").output).keys() == set(CLICKS_STAGES) - {"baseline"}


def test_status_of_a_pipeline_whose_file_is_unknown_goes_by_the_manifests(yard: Yard, tmp_path: Path) -> None:
    yard.run("--to", "train")
    runs = yard.home / "runs"
    (runs / "clicks").rename(runs / "elsewhere")
    output = yard("status").output.replace("elsewhere", "clicks")
    assert states(output)["train"].startswith("done")
    path = runs / "elsewhere" / DS / "features.json"
    path.write_text(path.read_text().replace('"key": "', '"key": "0'))
    output = yard("status").output.replace("elsewhere", "clicks")
    assert states(output)["train"].startswith("stale: features has been run again")


def test_status_shows_the_newest_days_and_a_run_at_work(yard: Yard) -> None:
    for ds in ("2026-01-01", "2026-01-02", DS):
        assert yard("ingest", "clicks", "--ds", ds).exit_code == 0
    output = yard("status", "--last", "2").output
    assert "2026-01-01" not in output
    assert "2026-01-02" in output
    assert "at work" not in output
    assert "2026-01-01" in yard("status", "--last", "0").output
    for lock in (None, "train"):
        with run_lock(Workspace(yard.home), "clicks", lock):
            assert f"clicks: a stage is at work (process {os.getpid()} on " in yard("status").output


def test_lineage_prints_the_tree(yard: Yard) -> None:
    yard.run()
    result = yard("lineage", "lake/clicks/score", "--ds", DS)
    assert result.exit_code == 0
    assert result.output.index("lake/clicks/score") < result.output.index(f"features {DS}")
    leaves = [line.strip("│├└─ ").split()[0] for line in result.output.splitlines()]
    assert "landing/clicks/2026-01-03" in leaves


def test_quality_without_ceiling_or_with_ranking_metrics_only() -> None:
    def manifest(stage: str, metrics: Any) -> Manifest:
        return Manifest(stage=stage, pipeline="clicks", ds=DS, key="k", spec_hash="s", facts={"metrics": metrics})

    lines = quality_lines({"train": manifest("train", {"auc": 0.7, "hr_at_k": 0.71, "ndcg_at_k": 0.42})}, None)
    assert lines[-1] == "neural  0.7000  hr_at_k 0.7100, ndcg_at_k 0.4200"
    assert "–" in quality_lines({"train": manifest("train", {"auc": None, "hr_at_k": 0.5})}, 0.8)[2]
    assert quality_lines({}, 0.8) == []
    assert quality_lines({"train": manifest("train", None)}, None) == []
