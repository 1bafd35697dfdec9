"""The DAGs in Airflow's own environment: what they are, what they submit, and both of them for a real day."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import load_spec
from headrace.jobs.submit import PROGRAM, spark_home
from headrace.manifest import Manifest
from headrace.publish.postgres import server as warehouse
from headrace.stages import ORDER, STAGES
from headrace.workspace import Workspace, checkout, pipeline_file
from tests.clicks_stages import CLICKS_STAGES

AIRFLOW = checkout() / ".venv-airflow" / "bin" / "python"
DAGS = checkout() / "airflow_dags"
DS, OTHER_DS = "2026-01-04", "2026-01-15"
RETRAIN = [e.name for e in STAGES.values() if e.dag == "retrain"]
SCORE = [e.name for e in STAGES.values() if e.dag == "score"]

pytestmark = pytest.mark.skipif(not AIRFLOW.is_file(), reason="Airflow's environment is not here: run `make airflow`")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Run airflow_side.py with its own database; returns what it says, its log under "log"."""
    home = tmp_path_factory.mktemp("airflow")
    base = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HEADRACE", "PYTHONPATH"))} | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
        "HEADRACE_PYTHON": sys.executable,
    }
    migrated = False

    def call(*args: str, env: Mapping[str, str] | None = None, connection: str | None = "local[2]") -> dict[str, Any]:
        nonlocal migrated
        variables = base | dict(env or {})
        if connection is not None:
            variables["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": connection})
        if args[0] == "run" and not migrated:
            subprocess.run(
                [AIRFLOW.with_name("airflow"), "db", "migrate"], env=variables, check=True, capture_output=True
            )
            migrated = True
        done = subprocess.run(
            [AIRFLOW, Path(__file__).with_name("airflow_side.py"), *args],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            cwd=home,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return {**json.loads(done.stdout), "log": done.stderr}

    return call


#: What the job answers on these days: its exit code at each try.
CODES = {"2026-02-02": [2], "2026-02-03": [1], "2026-02-04": [69], "2026-02-05": [75, 75, 75, 0]}
#: Asked for, and not in the folder of pipelines.
NO_PIPELINES = ("click", "clicks\n", "../pipelines/clicks", str(pipeline_file("clicks")))


def make_recorder(folder: Path) -> Path:
    """A stand-in for spark-submit: it notes its arguments and variables, a line of JSON a call, and ends by CODES."""
    path = folder / "spark-submit"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"with open({str(folder / 'calls')!r}, 'a') as f:\n"
        f"    f.write(json.dumps({{'argv': sys.argv[1:], 'env': dict(os.environ)}}) + '\\n')\n"
        f"ds = sys.argv[sys.argv.index('--ds') + 1]\n"
        f"codes = {CODES}.get(ds, [0])\n"
        f"with open({str(folder / 'answers')!r} + ds, 'a+') as f:\n"
        "    f.write('x')\n"
        "    sys.exit(codes[min(f.tell(), len(codes)) - 1])\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def calls(recorder: Path) -> list[dict[str, Any]]:
    path = recorder.with_name("calls")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def day_of(call: Mapping[str, Any]) -> str:
    argv: list[str] = call["argv"]
    return argv[argv.index("--ds") + 1]


def options(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """(options of spark-submit, the application and its arguments)."""
    start = next(i for i, word in enumerate(argv) if word.endswith(".py"))
    return dict(zip(argv[:start:2], argv[1:start:2], strict=True)), argv[start:]


def test_what_the_dags_are(ask: Ask) -> None:
    seen = ask("look")
    assert seen["errors"] == {}
    assert seen["heavy"] == [], "a DAG file is read every few seconds: it must not import these"
    assert set(seen["dags"]) == {"headrace_retrain", "headrace_score"}
    retrain, score = seen["dags"]["headrace_retrain"], seen["dags"]["headrace_score"]
    assert (*RETRAIN, *SCORE) == ORDER
    assert list(retrain["tasks"]) == [*RETRAIN, "score_this_day"]
    assert list(score["tasks"]) == SCORE
    for dag, stages, last in ((retrain, RETRAIN, "score_this_day"), (score, SCORE, None)):
        assert not dag["catchup"]
        assert dag["max_active_runs"] == 1
        assert dag["timeout"]
        assert dag["params"] == ["ds", "pipeline"]
        for stage, after in zip(stages, [*stages[1:], last], strict=True):
            task = dag["tasks"][stage]
            assert task["submits"]
            assert Path(task["application"]).samefile(PROGRAM)
            assert task["downstream"] == ([after] if after else [])
            assert task["retries"] == 1
            assert task["trigger_rule"] == "none_failed"
            assert task["timeout"]
    assert "CronDataIntervalTimetable" in retrain["timetable"]
    assert score["timetable"] == "NullTimetable"
    last = retrain["tasks"]["score_this_day"]
    assert (last["triggers"], last["trigger_rule"]) == ("headrace_score", "none_failed")


@dataclass(frozen=True)
class Recorded:
    """What runs have submitted."""

    home: Path
    pipelines: Path
    #: What airflow_side.py says of the days of the retraining DAG and of the scoring DAG.
    submitted: list[dict[str, Any]]
    #: Of NO_PIPELINES, and of the days of CODES.
    refused: list[dict[str, Any]]
    answered: list[dict[str, Any]]
    triggered: list[dict[str, Any]]
    log: str
    calls: list[dict[str, Any]]


@pytest.fixture(scope="module")
def recorded(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Runs of which each step is known and nothing is done, in one process of Airflow's."""
    folder = tmp_path_factory.mktemp("recorded")
    home, pipelines, recorder = folder / "home with a blank", folder / "pipelines", make_recorder(folder)
    pipelines.mkdir()
    # The other pipeline has no baseline.
    bare = yaml.safe_load(pipeline_file("clicks").read_text())
    (pipelines / "clicks.yaml").write_text(yaml.safe_dump(bare))
    del bare["baseline"]
    (pipelines / "bare.yaml").write_text(yaml.safe_dump(bare))
    env = {
        "HEADRACE_SPARK_SUBMIT": str(recorder),
        "HEADRACE_HOME": str(home),
        "HEADRACE_PIPELINES": str(pipelines),
        "AIRFLOW_CONN_OTHER": "http://:pw@x",
    }
    submitted: list[tuple[str, dict[str, Any]]] = [
        # Started at the end of the day DS: the run's interval is that day.
        ("headrace_retrain", {"logical_date": "2026-01-05T00:00:00+00:00"}),
        ("headrace_retrain", {"logical_date": "2026-01-20T00:00:00+00:00", "ds": OTHER_DS, "pipeline": "bare"}),
        ("headrace_score", {"ds": DS}),
    ]
    refused = [("headrace_score", {"ds": DS, "pipeline": name}) for name in NO_PIPELINES]
    answered = [("headrace_score", {"ds": ds, "retries": True}) for ds in CODES]
    # What is refused comes last: it stays with the DAG in this process.
    asked = [w for dag, conf in (*submitted, *answered, *refused) for w in (dag, json.dumps(conf))]
    seen = ask("run", *asked, env=env)
    runs, first, last = seen["runs"], len(submitted), len(submitted) + len(answered)
    return Recorded(
        home=home,
        pipelines=pipelines,
        submitted=runs[:first],
        answered=runs[first:last],
        refused=runs[last:],
        triggered=seen["triggered"],
        log=seen["log"],
        calls=calls(recorder),
    )


def test_what_is_submitted(recorded: Recorded) -> None:
    """A day of the retraining DAG for each of two pipelines, and one of the scoring DAG."""
    assert [r["state"] for r in recorded.submitted] == ["success"] * 3, recorded.log[-4000:]
    # Neither pipeline has outcomes, a challenger, a second stage or a gate.
    states = dict.fromkeys([*RETRAIN, "score_this_day"], "success")
    states |= dict.fromkeys(["outcomes", "challenger", "second_stage", "evaluate", "gate"], "skipped")
    assert recorded.submitted[0]["tasks"] == states
    assert recorded.submitted[1]["tasks"] == states | {"baseline": "skipped"}
    # A scoring run of its own for each pipeline and day.
    assert recorded.triggered == [
        {"dag": "headrace_score", "run": f"{pipeline}__{ds}", "conf": {"pipeline": pipeline, "ds": ds}}
        for pipeline, ds in (("clicks", DS), ("bare", OTHER_DS))
    ]
    made = [c for c in recorded.calls if day_of(c) not in CODES]
    retrain = [s for s in RETRAIN if s in CLICKS_STAGES]
    expected = [(s, "clicks", DS) for s in retrain]
    expected += [(s, "bare", OTHER_DS) for s in retrain if s != "baseline"] + [(s, "clicks", DS) for s in SCORE]
    assert len(made) == len(expected)
    for call, (stage, pipeline, ds) in zip(made, expected, strict=True):
        given, application = options(call["argv"])
        assert Path(application[0]).samefile(PROGRAM)
        path = recorded.pipelines / f"{pipeline}.yaml"
        assert application[1:] == [
            *(stage, str(path), "--ds", ds, "--home", str(recorded.home)),
            *("--set", "spark.master=local[2]"),
        ]
        assert given["--master"] == "local[2]"
        assert given["--name"] == f"headrace {stage} {ds}"
        properties = Path(given["--properties-file"]).read_text()
        assert f"spark.pyspark.python={sys.executable}" in properties
        assert "spark.master=local[2]" in properties
        env_seen = call["env"]
        assert env_seen["SPARK_HOME"] == str(spark_home())
        assert env_seen["SPARK_LOCAL_IP"] == "127.0.0.1"
        assert env_seen["PYSPARK_PYTHON"] == env_seen["PYSPARK_DRIVER_PYTHON"] == sys.executable
        assert env_seen["PYTHONPATH"] == ""
        assert env_seen["AIRFLOW_CONN_OTHER"] == ""


def test_what_is_not_set_up_is_said_and_nothing_is_submitted(ask: Ask, tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    env = {"HEADRACE_SPARK_SUBMIT": str(recorder), "HEADRACE_HOME": str(tmp_path / "home")}
    asked = [w for name in ("clicks", "click") for w in ("headrace_score", json.dumps({"ds": DS, "pipeline": name}))]
    seen = ask("run", *asked, env=env, connection=None)
    assert [r["state"] for r in seen["runs"]] == ["failed", "failed"]
    for message in ("define the connection 'spark_default' as JSON", "there are: adult, attribution, beauty, clicks"):
        assert message in seen["log"], seen["log"][-4000:]
    assert calls(recorder) == []


def test_only_pipelines_of_the_folder_may_be_asked_for(recorded: Recorded) -> None:
    assert [r["state"] for r in recorded.refused] == ["failed", "failed", "refused", "refused"]
    for message in ("no pipeline 'click' in", r"no pipeline 'clicks\n' in", "there are: bare, clicks"):
        assert message in recorded.log, recorded.log[-4000:]


def test_what_the_user_must_mend_is_not_tried_again(recorded: Recorded) -> None:
    """Exit code 2. A failure and another run at work (69) are, and a day that is not complete (75) is waited for."""
    assert [r["tasks"]["score"] for r in recorded.answered] == [*["failed"] * 3, "success"], recorded.log[-4000:]
    days = [day_of(c) for c in recorded.calls if "score" in c["argv"]]
    tries = {"2026-02-02": 1, "2026-02-03": 2, "2026-02-04": 2, "2026-02-05": 4}
    assert {ds: days.count(ds) for ds in CODES} == tries


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Workspace]:
    """A pipeline of its own, small enough to train in seconds, with three generated days."""
    folder = tmp_path_factory.mktemp("tiny")
    spec = yaml.safe_load(pipeline_file("clicks").read_text().replace("landing/clicks/", "landing/tiny/"))
    spec |= {
        "pipeline": "tiny",
        "generate": {"rows_per_day": 1500, "users": 150, "items": 40, "files_per_day": 2, "formats": ["jsonl", "csv"]},
    }
    spec["train"] |= {"ranks": 1, "batch_size": 512, "epochs": 1}
    spec["baseline"] = {"rounds": 5, "max_depth": 3, "workers": 1}
    spec["score"]["item"]["limit"] = 20
    spec["spark"] = {"driver_memory": "1g"}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(spec))
    ws = Workspace(folder / "home")
    subprocess.run(
        [Path(sys.executable).with_name("headrace"), "generate", path, "--home", ws.home, "--until", DS], check=True
    )
    assert list(ws.landing("tiny").local_path().glob(f"{DS}/*.gz"))
    return path, ws


def state(path: Path, ws: Workspace) -> dict[str, Any]:
    """All that a second run might change: manifests, Delta commits, rows with their physical places."""
    place = load_spec(path).publish
    assert place is not None
    with warehouse.connect(place.warehouse, ws) as conn:
        rows = conn.execute(
            "SELECT xmin::text, ctid::text, ds::text, user_id, item_id, rank, score FROM tiny_scores "
            "ORDER BY ds, user_id, rank"
        ).fetchall()
        publications = conn.execute("SELECT * FROM headrace_publications").fetchall()
    manifests = {s: ws.manifest("tiny", DS, s).read_bytes() for s in CLICKS_STAGES}
    commits = sorted(str(p) for p in (ws.home / "lake").rglob("_delta_log/*.json"))
    return {"rows": rows, "publications": publications, "manifests": manifests, "commits": commits}


@pytest.mark.timeout(1500)  # fourteen applications of Spark, a dozen seconds each on an idle machine
def test_both_dags_for_a_day_and_again(ask: Ask, tiny: tuple[Path, Workspace]) -> None:
    path, ws = tiny
    conf = json.dumps({"logical_date": f"{DS}T00:00:00+00:00", "pipeline": "tiny", "ds": DS})
    env = {"HEADRACE_HOME": str(ws.home), "HEADRACE_PIPELINES": str(path.parent)}
    day = ("run", "headrace_retrain", conf, "headrace_score", conf)
    seen = ask(*day, env=env)
    assert [r["state"] for r in seen["runs"]] == ["success", "success"], seen["log"][-6000:]
    done = state(path, ws)
    manifest = Manifest.load(ws.manifest("tiny", DS, "score"))
    assert manifest is not None
    assert len(done["rows"]) == manifest.output("delta").rows > 0
    assert {row[2] for row in done["rows"]} == {DS}
    assert ws.report("tiny", DS).is_file()
    again = ask(*day, env=env)
    assert [r["state"] for r in again["runs"]] == ["success", "success"], again["log"][-6000:]
    assert state(path, ws) == done
