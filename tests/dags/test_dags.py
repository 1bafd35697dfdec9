"""The DAGs in Airflow's own environment: what they are, and a real day of them. Under a scheduler: test_service.py."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.new import write_project
from headrace.config import load_spec
from headrace.config.installation import checkout, pipeline_file
from headrace.config.stages import ORDER, STAGES
from headrace.config.workspace import Workspace
from headrace.jobs.submit import PROGRAM
from headrace.publish.postgres import server as warehouse
from headrace.stage.manifest import Manifest
from tests.dags import stub
from tests.dags.standalone import standalone
from tests.support import CLICKS_STAGES
from tests.users_package import EXAMPLE

AIRFLOW = checkout() / ".venv-airflow" / "bin" / "python"
DAGS = checkout() / "airflow_dags"
DS = "2026-01-04"
#: The stages of the pipeline `clicks`.
RETRAIN = [n for n in CLICKS_STAGES if STAGES[n].dag == "retrain"]
SCORE = [n for n in CLICKS_STAGES if STAGES[n].dag == "score"]

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
        # Only a limit: on a machine whose cores have other work, Airflow's own of 30 s ends the reading, without DAGs.
        "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "900",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
        "HEADRACE_PYTHON": sys.executable,
    }
    migrated = False

    def call(
        *args: str,
        env: Mapping[str, str] | None = None,
        host: str = "local[2]",
        extra: Mapping[str, Any] | None = None,
        hidden: Sequence[Path] = (),
    ) -> dict[str, Any]:
        nonlocal migrated
        variables = base | dict(env or {})
        variables["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": host, "extra": extra})
        if args[0] == "run" and not migrated:
            subprocess.run(
                [AIRFLOW.with_name("airflow"), "db", "migrate"], env=variables, check=True, capture_output=True
            )
            migrated = True
        completed = subprocess.run(
            [*hiding_command(hidden), AIRFLOW, Path(__file__).with_name("airflow_side.py"), *args],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            cwd=home,
        )
        assert completed.returncode == 0, completed.stderr[-4000:]
        return {**json.loads(completed.stdout), "log": completed.stderr}

    return call


def hiding_command(folders: Sequence[Path]) -> list[str]:
    """Return the beginning of a command that runs where folders are empty: in a mount namespace of its own."""
    hide = " && ".join(f"mount -t tmpfs none {shlex.quote(str(f))}" for f in folders)
    return ["unshare", "-m", "sh", "-c", f'{hide} && exec "$@"', "sh"] if folders else []


def pipelines_folder(folder: Path, **specs: dict[str, Any]) -> Path:
    """A folder of pipelines: `clicks` with some sections changed (None: without)."""
    clicks = yaml.safe_load(pipeline_file("clicks").read_text())
    folder.mkdir()
    for name, changed in specs.items():
        spec = {k: v for k, v in (clicks | {"pipeline": name} | changed).items() if v is not None}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    return folder


def after(*names: str | list[str]) -> dict[str, list[str]]:
    """Return each task's successors in a chain; tasks in a list run in parallel."""
    steps = [[n] if isinstance(n, str) else n for n in names]
    return {n: sorted(nexts) for step, nexts in zip(steps, [*steps[1:], []], strict=True) for n in step}


def refused_specs() -> dict[str, tuple[dict[str, Any], str]]:
    """Return changes of `clicks` and headrace's message about each, by name. None of them needs data to be known."""
    clicks = yaml.safe_load(pipeline_file("clicks").read_text())
    features, score = clicks["features"], clicks["score"]

    def with_chain(**chain: Any) -> dict[str, Any]:
        return {"features": features | {"workflow": [*features["workflow"], chain]}}

    return {
        "parameter": (with_chain(columns=["item_price"], ops=[{"log": {"bass": 2}}]), "bass"),
        "column": (with_chain(columns=["prise"], ops=["log"]), "prise"),
        "double": (with_chain(columns=["user_id"], ops=["categorify"]), "user_id"),
        "label": (with_chain(columns=[features["label"]], ops=["categorify"]), features["label"]),
        "rank_key": ({"score": score | {"item": score["item"] | {"key": "rank"}}}, "rank"),
        "unknown_key": ({"train": clicks["train"] | {"batchsize": 3}}, "batchsize"),
    }


@pytest.fixture(scope="module")
def seen(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fifty pipelines, one of them on a GPU, one without a warm start and most sections, and two faulty files.

    Also six whose specs are refused. Under "first" is what was seen before any of them was known.
    """
    gpu = {"spark": {"profile": "gpu"}}
    train = yaml.safe_load(pipeline_file("clicks").read_text())["train"]
    bare = {"baseline": None, "drift": None, "train": train | {"warm_start": False}}
    pipelines: dict[str, dict[str, Any]] = {f"clicks{n}": {} for n in range(48)}
    pipelines |= {name: changed for name, (changed, _) in refused_specs().items()}
    folder = pipelines_folder(tmp_path_factory.mktemp("many") / "pipelines", **pipelines, gpu=gpu, bare=bare)
    (folder / "torn.yaml").write_text("pipeline: [")
    (folder / "twice.yaml").write_text((folder / "bare.yaml").read_text())
    first = ask("look", env={"HEADRACE_PIPELINES": str(folder)})
    # A reading takes 20 s at most: on a machine whose cores have other work, the next one asks about the others.
    for _ in range(4):
        later = ask("look", env={"HEADRACE_PIPELINES": str(folder)})
        if not later["begun"]:
            break
    return later | {"first": first}


def test_refused_specs_are_told_when_dags_are_read(seen: dict[str, Any]) -> None:
    """One process checks all files that are new, and says each fault in one line; other pipelines keep their DAGs."""
    first = seen["first"]
    assert first["begun"].count("subprocess.Popen") == 1
    assert first["heavy"] == []
    for name, (_, message) in refused_specs().items():
        fault = seen["dags"][f"headrace_{name}_retrain"]["fault"]
        assert message in fault, (name, fault)
        assert "\n" not in fault
        assert f"{name}.yaml: " in fault


def test_reading_fifty_pipelines_reads_each_file_once_and_starts_nothing(seen: dict[str, Any]) -> None:
    """A DAG file is read every few seconds: what that costs is each pipeline's YAML, and no stack comes with it."""
    assert seen["errors"] == {}
    assert seen["heavy"] == []
    assert len(seen["opened"]) == 58
    assert set(seen["opened"].values()) == {1}
    assert seen["begun"] == []


def test_the_dag_file_of_headrace_new_has_the_dags_of_its_own_folder(ask: Ask, tmp_path: Path) -> None:
    write_project("shop", tmp_path / "shop")
    folders = {"AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "shop" / "dags"), "PYTHONPATH": str(DAGS)}
    seen = ask("look", env=folders)
    assert seen["errors"] == {}
    assert set(seen["dags"]) == {f"headrace_shop_{kind}" for kind in ("retrain", "score", "backfill", "maintain")}
    assert set(seen["opened"]) == {str(tmp_path / "shop" / "pipelines" / "shop.yaml")}


def test_the_process_of_a_task_makes_its_own_dag_alone(seen: dict[str, Any]) -> None:
    requested, dag_ids = seen["of_task"]
    assert dag_ids == [requested]


def test_each_pipeline_has_its_dags(seen: dict[str, Any]) -> None:
    names = [*(f"clicks{n}" for n in range(48)), "gpu", "bare"]
    kinds = ("retrain", "score", "backfill", "maintain")
    faulty = {f"headrace_{name}_retrain" for name in ("torn", "twice", *refused_specs())}
    assert set(seen["dags"]) == {f"headrace_{name}_{kind}" for name in names for kind in kinds} | faulty
    for name in faulty:
        assert list(seen["dags"][name]["tasks"]) == ["pipeline_file"]
    for dag in seen["dags"].values():
        assert (dag["catchup"], dag["max_active_runs"], dag["timeout"]) == (False, 1, True)


def test_what_the_dags_are(seen: dict[str, Any]) -> None:
    dags = {kind: seen["dags"][f"headrace_clicks1_{kind}"] for kind in ("retrain", "score", "backfill", "maintain")}
    assert {kind: dag["timetable"] for kind, dag in dags.items()} == {
        "retrain": "CronDataIntervalTimetable",
        "score": "PartitionedAssetTimetable",
        "backfill": "NullTimetable",
        "maintain": "CronDataIntervalTimetable",
    }
    parallel = [name for name in RETRAIN if STAGES[name].lease]
    assert parallel == ["train", "baseline"]
    steps: list[str | list[str]] = [n for n in RETRAIN if n not in parallel]
    steps.insert(RETRAIN.index("train"), parallel)
    edges = {kind: {t: task["downstream"] for t, task in dag["tasks"].items()} for kind, dag in dags.items()}
    assert edges["retrain"] == after("complete", *steps, "model_event")
    assert edges["score"] == after(*SCORE)
    assert edges["backfill"] == after("range", *steps, "trained", *SCORE, "next_day")
    assert edges["maintain"] == {"gc": []}
    path = dags["maintain"]["tasks"]["gc"]["words"][1]
    assert dags["maintain"]["tasks"]["gc"]["words"] == ["gc", path, "--delete"]
    for kind, stages in (("retrain", RETRAIN), ("score", SCORE), ("backfill", [*RETRAIN, *SCORE])):
        for stage in stages:
            task = dags[kind]["tasks"][stage]
            assert task["submits"]
            assert Path(task["application"]).samefile(PROGRAM)
            assert (task["retries"], task["trigger_rule"], task["pool"]) == (2, "none_failed", "headrace")
            assert task["timeout"] == STAGES[stage].hours * 3600
            # A backfill's own runs are in order already.
            assert task["depends_on_past"] == (kind == "retrain" and stage == "train")


def test_a_pipeline_has_the_tasks_of_its_sections(seen: dict[str, Any]) -> None:
    tasks = seen["dags"]["headrace_bare_retrain"]["tasks"]
    assert [t for t in tasks if t in ORDER] == [n for n in RETRAIN if n not in ("drift", "baseline")]
    assert not tasks["train"]["depends_on_past"]


def test_stages_of_a_package_are_tasks(ask: Ask, tmp_path: Path) -> None:
    """Airflow's environment lacks the package: the pipelines' one describes its stages, or a DAG says it cannot."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{EXAMPLE}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    stages = {"counts": {"class": "acme.row_counts:RowCounts"}}
    folder = pipelines_folder(tmp_path / "pipelines", more={"stages": stages, "gate": {}}, plain={})
    env = {"HEADRACE_PIPELINES": str(folder), "HEADRACE_PYTHON": str(python)}
    seen = ask("look", env=env)
    assert (seen["errors"], seen["heavy"]) == ({}, [])
    task = seen["dags"]["headrace_more_retrain"]["tasks"]["counts"]
    assert (task["submits"], task["downstream"], task["pool"], task["timeout"]) == (True, ["drift"], "headrace", 7200)
    assert seen["dags"]["headrace_more_retrain"]["tasks"]["features"]["downstream"] == ["counts"]
    assert "counts" not in seen["dags"]["headrace_plain_retrain"]["tasks"]
    requested, dag_ids = seen["of_task"]
    assert dag_ids == [requested]
    seen = ask("look", env=env | {"HEADRACE_PYTHON": str(tmp_path / "nowhere")})
    assert "its `stages` are of other packages" in seen["dags"]["headrace_more_retrain"]["fault"]
    assert next(iter(seen["dags"]["headrace_plain_retrain"]["tasks"])) == "complete"


def test_one_job_at_a_time_has_the_gpu(seen: dict[str, Any]) -> None:
    tasks = seen["dags"]["headrace_gpu_retrain"]["tasks"]
    pools = {name: tasks[name]["pool"] for name in RETRAIN if name in tasks}
    assert pools == {n: "headrace_gpu" if STAGES[n].spark else "headrace" for n in pools}
    declared = json.loads((DAGS / "pools.json").read_text())
    assert declared["headrace_gpu"] == {**declared["headrace_gpu"], "slots": 1, "include_deferred": True}


def test_a_pod_is_what_the_pipeline_says(ask: Ask, tmp_path: Path) -> None:
    """Kubernetes' own models read the pods; only the stage that trains asks for a GPU."""
    properties = {
        "spark.kubernetes.namespace": "days",
        "spark.kubernetes.container.image": "registry.example.org/headrace:7",
        "spark.kubernetes.container.image.pullSecrets": "registry-login",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "headrace",
        "spark.kubernetes.driver.request.cores": "2",
        "spark.kubernetes.driver.limit.cores": 4,
        "spark.driver.memoryOverhead": "12g",
        "spark.driver.resource.gpu.amount": "1",
        "spark.kubernetes.driver.volumes.persistentVolumeClaim.home.mount.path": "/data/headrace",
        "spark.kubernetes.driver.volumes.persistentVolumeClaim.home.options.claimName": "headrace-home",
        "spark.kubernetes.driver.volumes.emptyDir.shm.mount.path": "/dev/shm",
        "spark.kubernetes.driver.volumes.emptyDir.shm.options.medium": "Memory",
        "spark.kubernetes.node.selector.pool": "batch",
        "spark.kubernetes.driver.label.team": "ads",
        "spark.kubernetes.driverEnv.TZ": "UTC",
        "spark.kubernetes.driver.secretKeyRef.MLFLOW_TRACKING_TOKEN": "mlflow:token",
    }
    publish = {"warehouse": {"host": "x", "password_env": "WAREHOUSE_PASSWORD"}}
    spec = {"train": {"device": "cuda"}, "spark": {"driver_memory": "4g", "properties": properties}, "publish": publish}
    folder = pipelines_folder(tmp_path / "pipelines", a_pipeline=spec)
    env = {
        "HEADRACE_PIPELINES": str(folder),
        "HEADRACE_HOME": "/data/headrace",
        "AIRFLOW_CONN_HEADRACE_WAREHOUSE": json.dumps({"conn_type": "postgres", "password": "hidden-word"}),
    }
    conf = {"spark.kubernetes.namespace": "other", "spark.kubernetes.container.image.pullPolicy": "Always"}
    seen = ask(
        "pods", "a_pipeline", "ingest", "train", env=env, host="k8s", extra={"deploy-mode": "cluster", "conf": conf}
    )
    pod = seen["pods"]["train"]
    [container] = pod["spec"].pop("containers")
    words = ["run", str(folder / "a_pipeline.yaml"), "--ds", "2026-02-01", "--from", "train", "--to", "train"]
    assert container["args"] == [*words, "--home", "/data/headrace"]
    assert container["command"] == [str(Path(sys.executable).with_name("headrace"))]
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example.org/headrace:7", "Always")
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "16384Mi"},
        "limits": {"cpu": "4", "memory": "16384Mi", "nvidia.com/gpu": "1"},
    }
    assert "nvidia.com/gpu" not in seen["pods"]["ingest"]["spec"]["containers"][0]["resources"]["limits"]
    assert container["volumeMounts"] == [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "home", "mountPath": "/data/headrace"},
    ]
    assert container["env"] == [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "TZ", "value": "UTC"},
        {"name": "MLFLOW_TRACKING_TOKEN", "valueFrom": {"secretKeyRef": {"name": "mlflow", "key": "token"}}},
    ]
    assert container["envFrom"] == [{"secretRef": {"name": "headrace-a-pipeline-fd5c7492-env"}}]
    assert pod["spec"]["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "home", "persistentVolumeClaim": {"claimName": "headrace-home"}},
    ]
    assert pod["spec"]["nodeSelector"] == {"pool": "batch"}
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry-login"}]
    assert (pod["spec"]["serviceAccountName"], pod["spec"]["restartPolicy"]) == ("headrace", "Never")
    assert (pod["metadata"]["namespace"], pod["metadata"]["labels"]["team"]) == ("days", "ads")
    assert pod["metadata"]["name"].startswith("headrace-a-pipeline-train-")
    assert "hidden-word" not in json.dumps(seen["pods"]) + seen["log"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_worker_that_reaches_neither_store_nor_environment(ask: Ask, tmp_path: Path) -> None:
    """Airflow's tasks and triggers see an empty workspace and no environment of the pipelines.

    The drivers of a real standalone master have them; stages take no time (stub.py).
    """
    python, home = stub.make(tmp_path), tmp_path / "home"
    home.mkdir()
    (home / "here").touch()
    hidden = (home, python.parent)
    sees = subprocess.run([*hiding_command(hidden), "ls", "-A", *hidden], capture_output=True, text=True, check=False)
    if sees.returncode:
        pytest.skip(f"no mount namespaces here: {sees.stderr.strip()}")
    assert "here" not in sees.stdout
    assert "headrace" not in sees.stdout.replace(str(tmp_path), "").split()
    folder = pipelines_folder(
        tmp_path / "pipelines", far={"gate": {}, "drift": None, "baseline": None, "outcomes": None}
    )
    stub.order(tmp_path, "far", DS, "gate", "3")
    env = {
        "HEADRACE_PYTHON": str(python),
        "HEADRACE_HOME": str(home),
        "HEADRACE_PIPELINES": str(folder),
        "HEADRACE_POLL_SECONDS": "1",
    }
    (tmp_path / "spark").mkdir()
    with standalone(tmp_path / "spark") as place:
        extra = {"deploy-mode": "cluster", "rest-port": place.rest, "webui-port": place.web}
        seen = ask("run", "headrace_far_retrain", DS, env=env, host=place.url, extra=extra, hidden=hidden)
    [run] = seen["runs"]
    assert run["state"] == "success", seen["log"][-6000:]
    # What a driver's log says is known: the gate's exit code 3.
    assert run["tasks"].pop("promote") == "skipped"
    assert set(run["tasks"].values()) == {"success"}
    stages = [name for name in run["tasks"] if name in STAGES]
    assert {p.name for p in (home / "made" / "far").iterdir()} == {f"{DS}.{name}" for name in stages}
    assert not list((home).glob("*.properties"))


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


@pytest.mark.jvm
@pytest.mark.service
@pytest.mark.slow
@pytest.mark.timeout(1500)  # fourteen applications of Spark, a dozen seconds each on an idle machine
def test_a_real_day_and_again(ask: Ask, tiny: tuple[Path, Workspace]) -> None:
    """Again by the command line, which finds that all is done, and by the shorter one of the DAGs."""
    path, ws = tiny
    env = {"HEADRACE_HOME": str(ws.home), "HEADRACE_PIPELINES": str(path.parent)}
    day = ("run", "headrace_tiny_retrain", DS, "headrace_tiny_score", DS)
    seen = ask(*day, env=env)
    assert [r["state"] for r in seen["runs"]] == ["success", "success"], seen["log"][-6000:]
    final_state = state(path, ws)
    manifest = Manifest.load(ws.manifest("tiny", DS, "score"))
    assert manifest is not None
    assert len(final_state["rows"]) == manifest.output("delta").rows > 0
    assert {row[2] for row in final_state["rows"]} == {DS}
    assert ws.report("tiny", DS).is_file()
    # The master is the connection's; the report shows it among the settings.
    words = ["run", path, "--ds", DS, "--home", ws.home, "--set", "spark.master=local[2]"]
    completed = subprocess.run([Path(sys.executable).with_name("headrace"), *words], check=True, capture_output=True)
    assert completed.stdout.count(b"already done") == len(CLICKS_STAGES), completed.stdout
    rerun = ask("run", "headrace_tiny_score", DS, env=env)
    assert [r["state"] for r in rerun["runs"]] == ["success"], rerun["log"][-6000:]
    assert state(path, ws) == final_state
