"""The command line: arguments, help, completion, JSON output, exit codes and messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from headrace import __version__
from headrace.cli import app, doctor, plan
from headrace.cli.root import Panel
from headrace.config.installation import checkout
from headrace.config.stages import ORDER, STAGES
from headrace.config.workspace import Workspace
from headrace.jobs.gpu_plan.gate import LOG, StepPlans
from headrace.jobs.process import StopSignal
from headrace.stage import run_lock
from headrace.stage.manifest import Manifest
from tests.cli_support import DS, Yard, make_yard
from tests.support import CLICKS_STAGES


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


def test_overlays_come_before_sets(yard: Yard, tmp_path: Path) -> None:
    overlay = tmp_path / "best.yaml"
    overlay.write_text("train: {epochs: 5, dense: {learning_rate: 0.01}}")
    yard.run("--overlay", str(overlay), "--set", "train.epochs=7", "--to", "ingest")
    assert yard.overrides == [["train.epochs=5", "train.dense.learning_rate=0.01", "train.epochs=7"]]


def test_a_day_runs_in_order_and_ends_with_what_a_person_wants_to_know(yard: Yard) -> None:
    truth = yard.home / "landing" / "clicks" / "truth" / f"{DS}.json"
    truth.parent.mkdir(parents=True)
    truth.write_text(json.dumps({"auc_ceiling": 0.8}))
    result = yard.run()
    assert result.exit_code == 0, result.output
    assert yard.submitted == list(CLICKS_STAGES)
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for stage in CLICKS_STAGES:
        assert any(line.startswith(f"{stage} done ") for line in lines), stage
    assert any(line.startswith("ingest done 1,234 kept") and line.endswith("2.0 GiB") for line in lines)
    assert "neural 0.7700 90.0 % of the way from 0.5 to the ceiling" in lines
    assert "XGBoost 0.7400 80.0 % of the way from 0.5 to the ceiling" in lines
    assert any(line.startswith("ceiling 0.8000") for line in lines)
    assert f"report {yard.home / 'reports' / 'clicks' / f'{DS}.html'}" in lines
    assert "SELECT * FROM public.clicks_scores WHERE ds = '2026-01-03' LIMIT 1;" in lines
    assert "(1 row)" in lines


def test_a_second_run_starts_nothing_and_says_so(yard: Yard) -> None:
    yard.run()
    result = yard.run()
    assert (result.exit_code, yard.submitted) == (0, [])
    assert result.output.count("already done with the same inputs; nothing to do") == len(CLICKS_STAGES)
    assert "0.7700" in result.output


def test_what_changed_and_what_follows_from_it_runs_again(yard: Yard) -> None:
    yard.run()
    result = yard.run("--set", "train.epochs=9")
    assert yard.submitted == list(CLICKS_STAGES[CLICKS_STAGES.index("train") :])
    assert yard.overrides[-1] == ["train.epochs=9"]
    assert "its inputs or its part of the spec have changed" in result.output
    yard.fakes["ingest"].source = "v2"
    yard.run("--set", "train.epochs=9")
    assert yard.submitted == list(CLICKS_STAGES)


def test_stages_share_an_application_unless_they_are_isolated(yard: Yard) -> None:
    two_slots = ["--set", "spark.master=local[2]"]
    assert yard.run(*two_slots).exit_code == 0
    assert yard.applications == [CLICKS_STAGES]
    # What is done before the first that has work to do needs no application; what is done after it is left alone there.
    again = yard.run(*two_slots, "--set", "train.epochs=9")
    assert yard.applications == [CLICKS_STAGES[CLICKS_STAGES.index("train") :]]
    assert again.output.count("nothing to do") >= CLICKS_STAGES.index("train")
    Workspace(yard.home).manifest("clicks", DS, "ingest").local_path().unlink()
    again = yard.run(*two_slots, "--set", "train.epochs=9", "--to", "drift")
    assert (yard.applications, yard.submitted) == ([("ingest", "features", "drift")], ["ingest"])
    assert "[2/3] features: already done with the same inputs; nothing to do" in again.output
    yard.run("--isolated", *two_slots, "--set", "train.epochs=3")
    assert yard.applications == [(stage,) for stage in CLICKS_STAGES[CLICKS_STAGES.index("train") :]]
    # Ranks need slots that the others were not given.
    yard.run("--set", "spark.master=local[1]", "--set", "train.epochs=4")
    assert yard.applications == [("train", "baseline", "promote"), CLICKS_STAGES[CLICKS_STAGES.index("score") :]]


def test_a_failure_in_the_middle_of_an_application_is_its_stages(yard: Yard) -> None:
    yard.codes["score"] = 137
    result = yard.run("--set", "spark.master=local[2]")
    assert (result.exit_code, yard.applications, yard.submitted[-1]) == (1, [CLICKS_STAGES], "score")
    assert "score did not finish: killed by signal 9 (out of memory?)" in " ".join(result.output.split())
    yard.codes.clear()
    assert yard.run("--set", "spark.master=local[2]").exit_code == 0
    assert yard.applications == [CLICKS_STAGES[CLICKS_STAGES.index("score") :]]


def test_from_and_to_bound_the_run(yard: Yard) -> None:
    assert yard.run("--to", "features").exit_code == 0
    assert yard.submitted == ["ingest", "features"]
    assert yard.run("--from", "train", "--to", "baseline").exit_code == 0
    assert yard.submitted == ["train", "baseline"]
    assert yard("score", "clicks", "--ds", DS).exit_code == 0
    assert yard.submitted[-1] == "score"
    for arguments, message in (
        (["--from", "trian"], "no stage 'trian'"),
        (["--from", "score", "--to", "train"], "stage 'score' comes after 'train'"),
    ):
        result = yard.run(*arguments)
        assert (result.exit_code, yard.submitted) == (2, [])
        assert message in result.stderr


def test_a_stage_that_the_pipeline_lacks_is_left_out_but_refused_by_name(yard: Yard) -> None:
    assert yard.run("--set", "baseline=null").exit_code == 0
    assert "baseline" not in yard.submitted
    result = yard("baseline", "clicks", "--ds", DS, "--set", "baseline=null")
    assert result.exit_code == 2
    assert "has no 'baseline' section" in result.stderr


@pytest.mark.parametrize(("code", "exit_code"), [(2, 2), (1, 1), (137, 1), (69, 69), (75, 75)])
def test_a_stage_that_fails_ends_the_run_and_names_its_log(yard: Yard, code: int, exit_code: int) -> None:
    yard.codes["train"] = code
    result = yard.run()
    assert (result.exit_code, yard.submitted[-1]) == (exit_code, "train")
    assert str(Workspace(yard.home).log("clicks", DS, "train")) in result.output.replace("\n", "")
    yard.codes.clear()
    assert yard.run().exit_code == 0
    assert yard.submitted[0] == "train"


def test_what_the_user_can_mend_is_told_before_anything_starts(yard: Yard) -> None:
    yard.fakes["ingest"].source = "gone"
    result = yard.run()
    assert (result.exit_code, yard.submitted) == (2, [])
    assert result.stderr == "error: no landing files of 2026-01-03\n"
    needs = yard("run", "clicks", "--ds", DS, "--from", "train")
    assert needs.exit_code == 2
    assert "needs stage 'features'" in needs.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "clicks"], "say which: --ds YYYY-MM-DD"),
        (["run", "clicks", "--ds", "2026-13-01"], "'2026-13-01' is not a date"),
        (["run", "clikcs", "--ds", DS], "did you mean 'clicks'"),
        (["run", "clicks", "--ds", DS, "--set", "train.epcohs=1"], "unknown key 'train.epcohs'"),
        (["run", "clicks", "--ds", DS, "--set", "train.epochs"], "write key=value"),
        (["status"], "nothing has run"),
        (["lineage", "clicks"], "nothing has been made yet"),
        (["warehouse", "sample", "clicks"], "has published nothing yet"),
        (["generate", "clicks", "--days", "0"], "at least 1"),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(yard: Yard, arguments: list[str], message: str) -> None:
    result = yard(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not yard.submitted


@pytest.mark.parametrize("arguments", [["cook"], ["run"], ["run", "clicks", "--day", DS], ["status", "--last", "x"]])
def test_usage_errors_are_exit_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (StopSignal(15), 143)])
def test_an_interrupted_run_says_how_to_go_on(yard: Yard, cause: BaseException, code: int) -> None:
    yard.interrupt = cause
    result = yard.run()
    assert result.exit_code == code
    assert "the same command goes on from here" in result.stderr


def test_a_snapshot_needs_no_day(yard: Yard, tmp_path: Path) -> None:
    text = (checkout() / "conf" / "pipelines" / "clicks.yaml").read_text()
    path = tmp_path / "snapshot.yaml"
    path.write_text(text + f"\nds: {DS}\n")
    assert yard("run", str(path), "--to", "ingest").exit_code == 0
    assert (yard.home / "runs" / "clicks" / DS / "ingest.json").is_file()


@pytest.mark.parametrize("home", ["s3a://bucket/home", "hdfs://name:8020/home"])
@pytest.mark.parametrize("line", [["run", "clicks", "--ds", DS], ["status"], ["generate", "clicks", "--days", "1"]])
@pytest.mark.parametrize("set_by", ["option", "environment"])
def test_a_home_in_another_store_is_refused(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, line: list[str], set_by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if set_by == "environment":
        monkeypatch.setenv("HEADRACE_HOME", home)
    result = CliRunner().invoke(app, [*line, *(["--home", home] if set_by == "option" else [])])
    assert result.exit_code == 2
    assert f"--home: '{home}' is a URI, and this takes a path on a file system" in result.stderr
    assert "URIs are taken by lake, store, source.path, source.complete" in result.stderr
    assert yard.submitted == []
    assert list(tmp_path.iterdir()) == []


def test_a_home_may_be_a_file_uri(yard: Yard) -> None:
    line = ["run", "clicks", "--ds", DS, "--to", "ingest", "--home", yard.home.as_uri()]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert (yard.home / "runs" / "clicks" / DS / "ingest.json").is_file()


def test_a_uri_is_refused_where_the_spec_takes_a_path(yard: Yard) -> None:
    for key in ("scratch=s3a://b/scratch", "publish.warehouse={kind: parquet, path: 's3a://b/table'}"):
        result = yard.run("--set", key)
        assert result.exit_code == 2
        assert ": 's3a://b/" in result.stderr
        assert "is a URI, and this takes a path on a file system" in result.stderr
    table = "features.prepare=[{join_external: {path: 's3a://me:word@b/t', keys: [item_id], add: {x: int}}}]"
    result = CliRunner().invoke(app, ["features", "explain", "clicks", "--set", table])
    assert result.exit_code == 2
    assert "a secret does not belong in a URI" in result.stderr
    assert "word" not in result.stderr


def test_home_comes_from_the_environment(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(yard.home))
    assert CliRunner().invoke(app, ["run", "clicks", "--ds", DS, "--to", "ingest"]).exit_code == 0
    assert (yard.home / "runs" / "clicks" / DS / "ingest.json").is_file()


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"headrace {__version__}\n")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["generate"],
        ["init"],
        ["reference"],
        ["run"],
        ["status"],
        ["lineage"],
        ["doctor"],
        ["warehouse"],
        ["warehouse", "sample"],
        *([s] for s in CLICKS_STAGES),
    ],
)
def test_every_command_has_help_with_an_example(words: list[str]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output
    if words != ["warehouse"]:
        assert f"headrace {' '.join(words)}".strip() in result.output.split("Options")[-1]


def test_help_groups_all_commands_within_80_columns() -> None:
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    assert max(map(len, output.splitlines())) <= 80
    panels: dict[str, list[str]] = {}
    for line in output.splitlines():
        if title := re.match("╭─ (.+?) ─", line):
            panels[title[1]] = []
        elif command := re.match(r"│ ([a-z_-]+) ", line):
            list(panels.values())[-1].append(command[1])
    assert list(panels) == ["Options", *Panel]
    listed = [name for panel in Panel for name in panels[panel]]
    assert sorted(listed) == sorted(c.name for c in get_command(app).commands.values() if not c.hidden)  # type: ignore[attr-defined]
    assert panels[Panel.STAGES] == [name for name in STAGES if name in panels[Panel.STAGES]]
    assert set(ORDER) <= set(panels[Panel.STAGES])


def test_help_and_misspelt_keys_load_no_stack() -> None:
    """They answer at once because nothing heavy is imported."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from headrace.cli import app\n"
        "for a in (['--help'], ['run', '--help'], ['run', 'clicks', '--set', 'x=1', '--ds', '2026-01-01']):\n"
        "    CliRunner().invoke(app, a)\n"
        "heavy = {'pyspark', 'torch', 'mlflow', 'xgboost', 'matplotlib', 'pandas', 'psycopg', 'horovod', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_day_that_is_not_complete_is_exit_code_75(tmp_path: Path) -> None:
    """Found out here, before a JVM is started."""
    marker = "source.complete={marker: 'landing/{ds}.done'}"
    result = CliRunner().invoke(app, ["run", "clicks", "--ds", DS, "--home", str(tmp_path), "--set", marker])
    assert result.exit_code == 75
    assert f"{DS} is not complete yet: the marker" in " ".join(result.output.split())


_HEADRACE = Path(sys.executable).with_name("headrace")


def completed(words: str, shell: str, folder: Path) -> list[str]:
    """Return the completions of the last word, by the shell's own protocol."""
    environment = {"_HEADRACE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
    environment |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    ran = subprocess.run(
        [_HEADRACE], env=os.environ | environment, cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout.split()


def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    """The script as bash runs it: commands, stages, shipped pipelines, files and folders."""
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "more").mkdir()
    lines = ["headrace sta", "headrace run --from b", "headrace run cri", "headrace run m"]
    script = f"""
        PATH={_HEADRACE.parent}:$PATH
        eval "$(_HEADRACE_COMPLETE=source_bash headrace)"
        complete -p headrace
        while read -r line; do
            COMP_WORDS=($line); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
            _headrace_completion headrace
            echo "${{COMPREPLY[*]}}"
        done
    """
    ran = subprocess.run(
        ["bash", "-c", script], input="\n".join(lines) + "\n", cwd=tmp_path, capture_output=True, text=True, check=True
    )
    hook, *words = ran.stdout.splitlines()
    assert hook.endswith("-F _headrace_completion headrace")
    assert words == ["status", "baseline", "criteo", "mine.yaml more/ movielens"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_the_same(shell: str, tmp_path: Path) -> None:
    assert "talkingdata" in " ".join(completed("headrace run talk", shell, tmp_path))
    stages = " ".join(completed("headrace run --to ", shell, tmp_path))
    assert all(stage in stages for stage in ORDER)


PAGE = (checkout() / "docs" / "commands.md").read_text()


def document(result: Any) -> Any:
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)


def promised(heading: str) -> set[str]:
    """Return the fields in backquotes of the page's table below a heading."""
    section = PAGE.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def fields(value: Any, prefix: str = "") -> set[str]:
    """Return the paths of a document's fields; a list's entries are `name[]`, a mapping by data has no fields."""
    paths: set[str] = set()
    for name, inner in value.items() if isinstance(value, dict) else ():
        path = f"{prefix}{name}"
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            paths.add(f"{path}[]")
            for entry in inner:
                paths |= fields(entry, f"{path}[].")
        else:
            paths.add(path)
    return paths


def test_status(yard: Yard) -> None:
    yard.run("--to", "train")
    yard.fakes["ingest"].source = "v2"
    with run_lock(Workspace(yard.home), "clicks"):
        status = document(yard("status", "clicks", "--json"))
    assert fields(status) == promised("status")
    assert status["home"] == str(yard.home)
    assert [s["stage"] for s in status["stages"]] == list(CLICKS_STAGES)
    ingest, *_, report = status["stages"]
    manifest = Manifest.load(Workspace(yard.home).manifest("clicks", DS, "ingest"))
    assert manifest is not None
    assert (ingest["state"], ingest["key"], ingest["rows"]) == ("stale", manifest.key, {"kept": 1234})
    assert (report["state"], report["key"], report["started"]) == ("missing", None, None)
    assert [a["pipeline"] for a in status["at_work"]] == ["clicks"]


def test_lineage(yard: Yard) -> None:
    yard.run("--to", "train")
    lineage = document(yard("lineage", "clicks", "--json"))
    nodes: dict[str, Any] = {}

    def walk(node: dict[str, Any]) -> None:
        assert node.keys() <= promised("lineage"), node
        nodes[node.get("stage") or node["kind"]] = node
        for inner in node["inputs"]:
            walk(inner)

    walk(lineage)
    assert {"model", "train", "features", "ingest", "landing"} <= nodes.keys()
    manifest = Manifest.load(Workspace(yard.home).manifest("clicks", DS, "train"))
    assert manifest is not None
    assert (lineage["kind"], lineage["version"]) == ("model", manifest.key)
    assert nodes["train"]["outputs"] == [o.model_dump() for o in manifest.outputs]
    assert nodes["landing"]["version"] == "v1"


def test_sharding_plan(yard: Yard) -> None:
    sharding = document(yard("plan", "--sharding", "--tables", "mlperf", "--world", "8", "--json"))
    assert fields(sharding) == promised("plan --sharding")
    assert len(sharding["by_rank"]) == sharding["ranks"] == 8
    assert sharding["step_ms"] == max(r["ms"] for r in sharding["by_rank"])
    assert sum(t["rows"] for t in sharding["tables"]) > 10**8


def test_gpu_plan() -> None:
    steps = [StepPlans("operator log", "transform", ()), StepPlans("x", "fit", (), "no plan"), StepPlans("x", LOG, ())]
    report = {"on_gpu": False, "steps": [plan.step_record(s) for s in steps]}
    assert fields(report) == promised("plan --gpu")
    assert [s["on_gpu"] for s in report["steps"]] == [True, False, None]  # type: ignore[index]
    assert report["steps"][1]["faults"] == ["no plan"]  # type: ignore[index]


def test_doctor(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [doctor.Finding("Python", "ok", "3.11"), doctor.Finding("Java", "missing", "none", "install a JDK")]
    monkeypatch.setattr(doctor, "examine", lambda ws, pipeline: iter(findings))
    result = yard("doctor", "--json")
    report = document(result)
    assert result.exit_code == 1
    assert fields(report) == promised("doctor")
    assert report == {"findings": [asdict(f) for f in findings], "missing": ["Java"]}


def test_errors_are_text_on_the_other_stream(tmp_path: Path, yard: Yard) -> None:
    result = yard("status", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nothing has run" in result.stderr
