"""The command line: verbs, exit codes, what is done and left alone, and what is said at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace import __version__
from headrace.cli import app
from headrace.commands import doctor, screen
from headrace.commands.generate import wanted_days
from headrace.commands.summary import quality_lines
from headrace.config import Spec, load_spec
from headrace.errors import UserError
from headrace.jobs import stages, submit
from headrace.manifest import Input, Manifest, Output
from headrace.stage import Context, Result, run_stage
from headrace.stages import ORDER
from headrace.workspace import Workspace, checkout

DS = "2026-01-03"
AUC = {"train": 0.77, "baseline": 0.74}
SAMPLE = [{"ds": DS, "user_id": 7, "item_id": 30, "rank": 1, "score": 0.5}]


@dataclass
class Fake:
    """A stage that works in this process, as fast as it can."""

    name: str
    version: int = 1
    source: str = "v1"

    @property
    def needs(self) -> tuple[str, ...]:
        """The stage before; `score` can do without a baseline, but not without a model, `train` without a judgement."""
        before = ORDER[: ORDER.index(self.name)][-1:]
        return {"score": ("train", "baseline?"), "train": ("features",)}.get(self.name, before)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        return {"train": spec.train.epochs} if self.name == "train" else {}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        if self.name != "ingest":
            return ()
        if self.source == "gone":
            raise UserError("no landing files of 2026-01-03")
        return (Input(kind="landing", name="landing/clicks/2026-01-03", version=self.source),)

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        return None

    def run(self, ctx: Context) -> Result:
        facts: dict[str, Any] = {"metrics": {"auc": AUC[self.name]}} if self.name in AUC else {}
        if self.name == "publish":
            facts = {"table": "public.clicks_scores", "sample": SAMPLE}
        if self.name == "report":
            ctx.ws.report("clicks", ctx.ds).local_path().parent.mkdir(parents=True, exist_ok=True)
            ctx.ws.report("clicks", ctx.ds).local_path().write_text("page")
        kind = {"train": "model", "baseline": "model", "publish": "postgres"}.get(self.name, "delta")
        output = Output(kind=kind, name=f"lake/clicks/{self.name}", version=ctx.key, rows=1234)
        rows = {"kept": 1234} if self.name == "ingest" else {"train": 1000, "valid": 234}
        return Result((output,), rows=rows, facts=facts, peak_memory_mib={"jvm": 2048.0})


@dataclass
class Yard:
    """Fake stages, a submitter that runs them here, and what it was asked."""

    home: Path
    fakes: dict[str, Fake] = field(default_factory=lambda: {n: Fake(n) for n in ORDER})
    codes: dict[str, int] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    overrides: list[list[str]] = field(default_factory=list)
    interrupt: BaseException | None = None

    def submit(
        self, stage: str, pipeline: str, spec: Spec, ws: Workspace, ds: str, overrides: list[str], echo: Any = None
    ) -> int:
        self.submitted.append(stage)
        self.overrides.append(list(overrides))
        if self.interrupt:
            raise self.interrupt
        if not self.codes.get(stage):
            run_stage(self.fakes[stage], spec, ws, ds)
        return self.codes.get(stage, 0)

    def __call__(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--home", str(self.home)])

    def run(self, *arguments: str) -> Any:
        self.submitted.clear()
        return self("run", "clicks", "--ds", DS, *arguments)


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    yard = Yard(tmp_path / "home")
    monkeypatch.setattr(stages, "load_stage", lambda name: yard.fakes[name])
    monkeypatch.setattr(submit, "submit", yard.submit)
    # Consoles hold the stream that was there when they were made; under test it changes.
    monkeypatch.setattr(screen.out, "_file", None)
    monkeypatch.setattr(screen.out, "_width", 220)
    return yard


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
    assert yard.submitted == list(ORDER)
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for stage in ORDER:
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
    assert result.output.count("already done with the same inputs; nothing to do") == len(ORDER)
    assert "0.7700" in result.output


def test_what_changed_and_what_follows_from_it_runs_again(yard: Yard) -> None:
    yard.run()
    result = yard.run("--set", "train.epochs=9")
    assert yard.submitted == list(ORDER[ORDER.index("train") :])
    assert yard.overrides[-1] == ["train.epochs=9"]
    assert "its inputs or its part of the spec have changed" in result.output
    yard.fakes["ingest"].source = "v2"
    yard.run("--set", "train.epochs=9")
    assert yard.submitted == list(ORDER)


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


@pytest.mark.parametrize(("code", "exit_code"), [(2, 2), (1, 1), (137, 1)])
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


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (submit.Stopped(15), 143)])
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
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_home_in_another_store_is_refused(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, line: list[str], by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if by == "environment":
        monkeypatch.setenv("HEADRACE_HOME", home)
    result = CliRunner().invoke(app, [*line, *(["--home", home] if by == "option" else [])])
    assert result.exit_code == 2
    assert f"--home: '{home}': headrace cannot keep or read files in {home.split(':')[0]}: stores yet" in result.stderr
    assert "what works today is the path of a folder" in result.stderr
    assert yard.submitted == []
    assert list(tmp_path.iterdir()) == []


def test_a_home_may_be_a_file_uri(yard: Yard) -> None:
    line = ["run", "clicks", "--ds", DS, "--to", "ingest", "--home", yard.home.as_uri()]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert (yard.home / "runs" / "clicks" / DS / "ingest.json").is_file()


def test_a_path_in_another_store_is_refused_in_the_spec(yard: Yard) -> None:
    table = "features.prepare=[{join_external: {path: 's3a://b/t', keys: [item_id], add: {x: int}}}]"
    for result in (
        yard.run("--set", "source.path=s3a://b/{ds}/*.gz"),
        CliRunner().invoke(app, ["features", "explain", "clicks", "--set", table]),
    ):
        assert result.exit_code == 2
        assert ": 's3a://b/" in result.stderr
        assert "cannot keep or read files in s3a: stores yet" in result.stderr


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
        ["run"],
        ["status"],
        ["lineage"],
        ["doctor"],
        ["warehouse"],
        ["warehouse", "sample"],
        *([s] for s in ORDER),
    ],
)
def test_every_command_has_help_with_an_example(words: list[str]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output
    if words != ["warehouse"]:
        assert f"headrace {' '.join(words)}".strip() in result.output.split("Options")[-1]


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


# --- status ---------------------------------------------------------------------------------------------------------


def states(output: str) -> dict[str, str]:
    """stage -> the rest of its line."""
    found = {}
    for line in output.splitlines():
        words = line.split()
        if words[:2] == ["clicks", DS]:
            found[words[2]] = " ".join(words[3:])
    return found


def test_status_tells_done_from_stale_and_missing(yard: Yard) -> None:
    yard.run("--to", "baseline")
    found = states(yard("status").output)
    assert list(found) == list(ORDER)
    assert found["ingest"].startswith("done 1,234 kept ")
    assert found["score"].startswith("missing")
    yard.fakes["ingest"].source = "v2"
    assert states(yard("status", "clicks").output)["ingest"].startswith("stale: its inputs or its part of the spec")
    yard.fakes["ingest"].source = "gone"
    assert states(yard("status", "clicks").output)["ingest"].startswith("stale: no landing files")
    yard.fakes["ingest"].source = "v1"
    changed = states(yard("status", "clicks", "--set", "train.epochs=9").output)
    assert changed["features"].startswith("done")
    assert changed["train"].startswith("stale")
    assert states(yard("status", "clicks", "--set", "baseline=null").output).keys() == set(ORDER) - {"baseline"}


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
    with Workspace(yard.home).lock("clicks").lease():
        assert f"clicks: a stage is at work (process {os.getpid()} on " in yard("status").output


def test_lineage_prints_the_tree(yard: Yard) -> None:
    yard.run()
    result = yard("lineage", "lake/clicks/score", "--ds", DS)
    assert result.exit_code == 0
    assert result.output.index("lake/clicks/score") < result.output.index(f"features {DS}")
    leaves = [line.strip("│├└─ ").split()[0] for line in result.output.splitlines()]
    assert "landing/clicks/2026-01-03" in leaves


# --- what the run ends with -----------------------------------------------------------------------------------------


def test_quality_without_ceiling_or_with_ranking_metrics_only() -> None:
    def manifest(stage: str, metrics: Any) -> Manifest:
        return Manifest(stage=stage, pipeline="clicks", ds=DS, key="k", spec_hash="s", facts={"metrics": metrics})

    lines = quality_lines({"train": manifest("train", {"auc": 0.7, "hr_at_k": 0.71, "ndcg_at_k": 0.42})}, None)
    assert lines[-1] == "neural  0.7000  hr_at_k 0.7100, ndcg_at_k 0.4200"
    assert "–" in quality_lines({"train": manifest("train", {"auc": None, "hr_at_k": 0.5})}, 0.8)[2]
    assert quality_lines({}, 0.8) == []
    assert quality_lines({"train": manifest("train", None)}, None) == []


# --- generate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "start", "until", "first", "count"),
    [
        (None, None, None, "2026-01-01", 8),
        (3, None, None, "2026-01-01", 3),
        (None, "2026-01-05", None, "2026-01-05", 8),
        (1, "2026-01-05", None, "2026-01-05", 1),
        (None, None, "2026-01-09", "2026-01-01", 9),
        (2, None, "2026-01-09", "2026-01-08", 2),
        (2, "2026-01-08", "2026-01-09", "2026-01-08", 2),
        (40, "2026-01-20", None, "2026-01-20", 40),
    ],
)
def test_days_to_generate(days: int | None, start: str | None, until: str | None, first: str, count: int) -> None:
    found = wanted_days(load_spec("clicks"), days, start, until)
    assert (found[0], len(found), len(set(found))) == (first, count, count)
    if until:
        assert found[-1] == until


@pytest.mark.parametrize(
    ("days", "start", "until", "message"),
    [
        (5, "2026-01-01", "2026-01-02", "2 days, not 5"),
        (None, "2026-01-03", "2026-01-02", "before the first day"),
        (0, None, None, "at least 1"),
        (None, "soon", None, "not a date"),
    ],
)
def test_days_that_make_no_sense(days: int | None, start: str | None, until: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        wanted_days(load_spec("clicks"), days, start, until)


def test_generate_writes_files_once_and_prints_the_ceiling(yard: Yard) -> None:
    arguments = ["generate", "clicks", "--days", "1", "--rows-per-day", "400"]
    result = yard(*arguments)
    assert result.exit_code == 0, result.output
    truth = json.loads((yard.home / "landing" / "clicks" / "truth" / "2026-01-01.json").read_text())
    row = next(line.split() for line in result.output.splitlines() if line.startswith("2026-01-01 "))
    assert row[1] == "400"
    assert row[-1] == f"{truth['auc_ceiling']:.4f}"
    files = {p: p.stat().st_mtime_ns for p in (yard.home / "landing" / "clicks" / "2026-01-01").iterdir()}
    assert yard(*arguments).exit_code == 0
    assert files == {p: p.stat().st_mtime_ns for p in (yard.home / "landing" / "clicks" / "2026-01-01").iterdir()}


def test_spark_properties_are_written_where_asked(yard: Yard, tmp_path: Path) -> None:
    result = yard("spark-properties", "clicks", "--out", str(tmp_path / "s.properties"))
    assert (result.exit_code, result.output.strip()) == (0, str(tmp_path / "s.properties"))
    assert "spark.sql.extensions=io.delta" in (tmp_path / "s.properties").read_text()
    assert yard("spark-properties", "clicks").output.strip() == str(yard.home / "spark" / "clicks.properties")


# --- doctor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.13" 2024-10-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "11.0.2" 2019', 11),
        ("no such thing", None),
    ],
)
def test_the_major_version_of_java(text: str, major: int | None) -> None:
    assert doctor.java_major(text) == major


def test_what_build_gradle_and_the_requirements_ask_for(tmp_path: Path) -> None:
    gradle = tmp_path / "build.gradle"
    gradle.write_text("dependencies {\n    sparkJars 'io.delta:delta-spark_2.13:4.0.1'\n    rapidsJars 'a:b:1'\n}\n")
    assert doctor.jars(gradle, "sparkJars") == ["delta-spark_2.13-4.0.1.jar"]
    assert doctor.jars(tmp_path / "none", "sparkJars") == []
    wanted = tmp_path / "x.in"
    wanted.write_text("# why\nnumpy==1.26.4\npsycopg[binary]==3.3.9  # driver\nsetuptools<81\nrich\n")
    assert doctor.requirements(wanted) == {"numpy": "==1.26.4", "psycopg": "==3.3.9", "setuptools": "<81", "rich": ""}
    assert doctor.requirements(tmp_path / "none") is None


def test_pins_and_jars_of_this_installation_hold() -> None:
    found = [*doctor.pins(), *doctor.spark(), *doctor.python()]
    assert [f for f in found if f.state != "ok"] == []
    assert {"numpy", "pyarrow", "torch", "petastorm", "jars", "spark-submit"} <= {f.what for f in found}


def test_a_broken_pin_a_missing_jar_and_a_missing_java_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "headrace.in").write_text("numpy==1.0\nno-such-package-here==1\nrich\n")
    (tmp_path / "build.gradle").write_text("    sparkJars 'a:b:1'\n")
    monkeypatch.setattr(doctor, "checkout", lambda: tmp_path)
    monkeypatch.setattr(doctor, "jars_dir", lambda: tmp_path / "jars")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = {f.what: f for f in [*doctor.pins(), *doctor.spark(), *doctor.java()]}
    for what, text in (
        ("numpy", "1.26"),
        ("other pins", "no-such-package-here not installed"),
        ("jars", "b-1.jar"),
        ("Java", "does not run"),
    ):
        assert found[what].state == "missing"
        assert text in found[what].found
        assert found[what].todo


@pytest.mark.parametrize(("state", "code"), [("missing", 1), ("warning", 0), ("optional", 0), ("ok", 0)])
def test_doctor_fails_only_for_what_is_needed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, state: Any, code: int
) -> None:
    findings = [doctor.Finding("Python", "ok", "3.11"), doctor.Finding("this", state, "was found", "do that")]
    monkeypatch.setattr(doctor, "examine", lambda ws, pipeline: iter(findings))
    result = yard("doctor")
    assert result.exit_code == code
    assert "do that" in result.output
    assert ("missing: this" in result.output) == (code == 1)


def test_doctor_tries_the_warehouse_of_a_pipeline(ws: Workspace, tmp_path: Path) -> None:
    text = (checkout() / "conf" / "pipelines" / "clicks.yaml").read_text()
    path = tmp_path / "own.yaml"
    path.write_text(text.replace("publish: {}", "publish: {warehouse: {kind: postgres, host: 127.0.0.1, port: 1}}"))
    (finding,) = doctor.warehouse(ws, str(path))
    assert finding.state == "missing"
    assert "127.0.0.1:1" in finding.found
