"""Before a run: machines and homes that lack something are told in one line; dry runs say which stages would work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from headrace.cli.run import PlannedStage, dry_run
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.jobs.process import PROGRAM
from headrace.lake.spark.requirements import java_program
from headrace.stage.manifest import Manifest
from tests.cli_support import DS, Yard, make_yard
from tests.support import CLICKS_STAGES, Run, command

DAY = "2026-01-01"
FEW = {"generate.rows_per_day": 50, "generate.users": 10, "generate.items": 5}


def run(line: list[str], **environ: str) -> Run:
    """Run a program whose environment has neither JAVA_HOME nor a workspace's variables but those given."""
    inherited = {k: v for k, v in os.environ.items() if k != "JAVA_HOME" and not k.startswith("HEADRACE_")}
    done = subprocess.run(line, env=inherited | environ, capture_output=True, text=True, check=False, timeout=300)
    return Run(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with the landing files of a day."""
    folder = tmp_path_factory.mktemp("machine") / "home"
    generated = run(command(folder, "generate", "clicks", "--until", DAY, settings=FEW))
    assert generated.code == 0, generated.output
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Mapping[str, dict[str, str]]:
    """Return environments by the program that they lack."""
    (tmp_path / "bin").mkdir()
    old = tmp_path / "jdk8"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "java").write_text("#!/bin/sh\n")
    (old / "bin" / "java").chmod(0o755)
    (old / "release").write_text('IMPLEMENTOR="Any"\nJAVA_VERSION="1.8.0_392"\n')
    return {
        "no java": {"PATH": str(tmp_path / "bin")},
        "wrong JAVA_HOME": {"JAVA_HOME": str(tmp_path / "nowhere")},
        "Java 8": {"JAVA_HOME": str(old)},
        "no bash": {"PATH": str(tmp_path / "bin"), "JAVA_HOME": str(java_program().resolve().parent.parent)},
    }


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no java", "error: Spark needs Java: JAVA_HOME is not set, and PATH has no java. Install a JDK 17 or 21"),
        ("wrong JAVA_HOME", "nowhere, which has no bin/java. Install a JDK 17 or 21"),
        ("Java 8", "jdk8/bin/java is Java 8: set JAVA_HOME to another one"),
        ("no bash", "error: Spark's scripts need bash, and PATH has none"),
    ],
)
@pytest.mark.parametrize("program", ["run", pytest.param("job", marks=pytest.mark.slow)])
def test_what_spark_cannot_start_on(
    home: Path, machine: Mapping[str, dict[str, str]], program: str, fault: str, message: str
) -> None:
    """The command refuses, and so does the program that it starts, which clusters start as well."""
    lines = {
        "run": command(home, "run", "clicks", "--ds", DAY, settings={}),
        "job": [sys.executable, str(PROGRAM), "ingest", "clicks", "--ds", DAY, "--home", str(home)],
    }
    refused = run(lines[program], **machine[fault])
    assert refused.code == EXIT_USER_ERROR, refused.output
    assert message in refused.output
    assert len(refused.output.splitlines()) == 1


@pytest.mark.parametrize("below", ["", pytest.param("deep/er", marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [("run", "clicks", "--ds", DAY), ("generate", "clicks"), ("status", "clicks")])
def test_a_home_that_is_a_file(tmp_path: Path, words: tuple[str, ...], below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    refused = run(command(file / below, *words, settings={}))
    assert (refused.code, refused.output.splitlines()) == (
        EXIT_USER_ERROR,
        [f"error: --home {file / below}: {file} is a file. Name a folder, or move the file away"],
    )
    assert file.read_text() == "mine"


@pytest.mark.parametrize("folder", ["/sys/headrace", "/proc/headrace"])
def test_a_home_that_cannot_be_written_to(home: Path, folder: str) -> None:
    """Nobody, root neither, makes folders there."""
    refused = run(command(Path(folder), "run", "clicks", "--ds", DAY, settings={}), HEADRACE_LAKE=str(home))
    assert refused.code == EXIT_USER_ERROR, refused.output
    (line,) = refused.output.splitlines()
    assert line.startswith(f"error: --home {folder}: no file can be written there (")


@pytest.mark.parametrize("key", ["lake", "store"])
def test_a_root_that_is_a_file(home: Path, tmp_path: Path, key: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    lines = [command(tmp_path / "home", "generate", "clicks", "--until", DAY, settings=FEW)]
    if key == "store":
        lines = [command(home, "run", "clicks", "--ds", DAY, settings={})]
    refused = run(lines[0], **{f"HEADRACE_{key.upper()}": str(file)})
    assert refused.code == EXIT_USER_ERROR, refused.output
    assert refused.output.splitlines()[-1].startswith(f"error: {file}")


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
