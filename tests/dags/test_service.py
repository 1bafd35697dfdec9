"""Days of the DAGs under a real scheduler, triggerer and API server, with stages that take no time (stub.py)."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import pytest
import yaml

from headrace.config.installation import checkout
from headrace.config.stages import STAGES
from tests.dags import kubernetes_api, stub
from tests.dags.service import AIRFLOW, Service

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(not AIRFLOW.is_file(), reason="Airflow's environment is not here: run `make airflow`"),
]

DAYS = ("2026-02-01", "2026-02-02", "2026-02-03")
DS = DAYS[0]
PASSWORD, KEY, HOOK_TOKEN = "hidden-warehouse-word", "hidden-store-word", "hidden-hook-word"
KUBERNETES_TOKEN = "kubernetes-token"
_LEAN = {"source": {"format": "clicks", "path": "landing/x/{ds}/*"}, "score": {}, "publish": {"warehouse": {}}}
_FULL = _LEAN | {"drift": {}, "baseline": {}, "second_stage": {}, "outcomes": {}, "gate": {}}
_LEAN["publish"] = {"warehouse": {"password_env": "WAREHOUSE_PASSWORD"}}
#: A pipeline each.
PIPELINES: dict[str, dict[str, Any]] = {
    "good": _FULL,
    "late": _LEAN,
    "refusing": _LEAN | {"gate": {}},
    "mend": _LEAN,
    "broken": _LEAN,
    "killed": _LEAN,
    "daily": _LEAN,
    "past": _LEAN,
    "remote": _LEAN,
    # In pods, and "mend", too.
    "pods": _LEAN | {"gate": {}},
}
PODS = {
    "conn_type": "spark",
    "host": "k8s",
    "extra": {
        "deploy-mode": "cluster",
        "conf": {"spark.kubernetes.container.image": "headrace:1", "spark.kubernetes.namespace": "days"},
    },
}


@dataclass
class Messages:
    """Messages that a webhook and a mail server were sent."""

    posted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    mailed: list[Any] = field(default_factory=list)


@pytest.fixture(scope="module")
def messages() -> Iterator[tuple[Messages, int, int]]:
    """The messages; the ports of an HTTP and of an SMTP server."""
    received = Messages()

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.posted.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    class Smtp(socketserver.StreamRequestHandler):
        """Subset of RFC 5321 that a client without extensions uses."""

        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline():
                verb = line[:4].upper()
                if verb == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = list(iter(self.rfile.readline, b".\r\n"))
                    received.mailed.append(message_from_bytes(b"".join(lines), policy=policy.default))
                self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
                if verb == b"QUIT":
                    return

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as hook,
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Smtp) as smtp,
    ):
        for server in (hook, smtp):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield received, hook.server_address[1], smtp.server_address[1]
        hook.shutdown()
        smtp.shutdown()


@pytest.fixture(scope="module")
def master() -> Iterator[int]:
    """The port of `Master`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Master) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Master(http.server.BaseHTTPRequestHandler):
    """The REST API and the pages of a Spark master; drivers are processes. A real one: test_cluster.py."""

    folder: ClassVar[Path]
    drivers: ClassVar[list[subprocess.Popen[bytes]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        # As SparkSubmit does, after its own words "--master local".
        words = [body["environmentVariables"]["PYSPARK_PYTHON"], *body["appArgs"][2:]]
        env = os.environ | body["environmentVariables"]
        driver = f"driver-{len(self.drivers) + 1}"
        with (self.folder / driver).open("wb") as log:
            self.drivers.append(subprocess.Popen(words, env=env, stdout=log))
        self._answer({"submissionId": driver})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/json/":
            self._answer({"workers": [{"id": "w1", "webuiaddress": f"http://{self.headers['Host']}"}]})
        elif url.path == "/log/":
            self._send((self.folder / parse_qs(url.query)["driverId"][0]).read_bytes())
        else:
            code = self.drivers[int(self.path.rpartition("-")[2]) - 1].poll()
            state = "RUNNING" if code is None else "FAILED" if code else "FINISHED"
            self._answer({"driverState": state, "workerId": "w1"})

    def _answer(self, fields: dict[str, Any]) -> None:
        self._send(json.dumps({"success": True, **fields}).encode())

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@dataclass
class Days:
    """A service whose runs have ended."""

    service: Service
    folder: Path
    messages: Messages
    #: What tests have seen while the runs were at work.
    seen: dict[str, Any]
    kubernetes: kubernetes_api.Cluster

    def calls(self, pipeline: str, stage: str) -> list[dict[str, Any]]:
        """Return the calls of the stage's program."""
        return [c for c in started(self.folder, pipeline, stage) if runs_stage(c)]

    def outputs(self, pipeline: str) -> dict[str, str]:
        """Return the texts that a pipeline's stages have written, by file name."""
        return {p.name: p.read_text() for p in (self.folder / "home" / "made" / pipeline).iterdir()}


def runs_stage(call: dict[str, Any]) -> bool:
    """Not a command that asks for what a stage has made."""
    return bool(call["argv"][0] == "spark-submit" or call["argv"][1] == "run")


def started(folder: Path, pipeline: str, stage: str) -> list[dict[str, Any]]:
    """The programs and commands of a stage, in order."""
    return [c for c in stub.calls(folder) if (c["pipeline"], c["stage"]) == (pipeline, stage)]


def kill_task(folder: Path, service: Service, pipeline: str, stage: str, ds: str = DS) -> None:
    """SIGKILL to the process of the task that has a stage at work: what started its program."""
    call = service.until(lambda: [c for c in started(folder, pipeline, stage) if c["ds"] == ds], 600)[0]
    stat = Path(f"/proc/{call['pid']}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    os.kill(int(str(call["pid"])), signal.SIGKILL)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory, messages: tuple[Messages, int, int], master: int) -> Iterator[Days]:
    """All scenarios at the same time, a pipeline each: tasks of ten pipelines wait for four slots."""
    received, hook, smtp = messages
    folder = tmp_path_factory.mktemp("service")
    python = stub.make(folder)
    Master.folder = folder
    kubernetes = kubernetes_api.Cluster(folder, KUBERNETES_TOKEN)
    (folder / "pipelines").mkdir()
    for name, spec in PIPELINES.items():
        (folder / "pipelines" / f"{name}.yaml").write_text(yaml.safe_dump({"pipeline": name, **spec}))
    (folder / "airflow").mkdir()
    connections = {
        "spark_default": {"conn_type": "spark", "host": "local[2]"},
        "spark_default_remote": {
            "conn_type": "spark",
            "host": "spark://127.0.0.1",
            "port": 7077,
            "extra": {"deploy-mode": "cluster", "rest-port": master, "webui-port": master},
        },
        **dict.fromkeys(("spark_default_pods", "spark_default_mend"), PODS),
        "headrace_warehouse": {"conn_type": "postgres", "password": PASSWORD},
        "headrace_store": {"conn_type": "aws", "login": "me", "password": KEY},
        "headrace_webhook": {
            "conn_type": "http",
            "schema": "http",
            "host": "127.0.0.1",
            "port": hook,
            "password": HOOK_TOKEN,
            "extra": {"path": "/days"},
        },
        "headrace_smtp": {
            "conn_type": "smtp",
            "host": "127.0.0.1",
            "port": smtp,
            "extra": {"disable_ssl": True, "disable_tls": True, "from_email": "a@example.org", "to": "b@example.org"},
        },
    }
    env = {f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in connections.items()} | {
        "HEADRACE_CHECKOUT": os.environ.get("HEADRACE_TEST_CHECKOUT", str(checkout())),
        "HEADRACE_PYTHON": str(python),
        "HEADRACE_SPARK_SUBMIT": str(folder / "bin" / "spark-submit"),
        "HEADRACE_HOME": str(folder / "home"),
        "HEADRACE_PIPELINES": str(folder / "pipelines"),
        "HEADRACE_REPORTS_URL": "https://reports.example.org/r/",
        "HEADRACE_WAIT_SECONDS": "6",
        "HEADRACE_RETRY_SECONDS": "1",
        "HEADRACE_POLL_SECONDS": "5",
        "HEADRACE_NOTIFY": "failed,refused,done",
    }
    with kubernetes_api.serve(kubernetes) as port:
        config = kubernetes_api.kube_config(port, KUBERNETES_TOKEN)
        api = {"conn_type": "kubernetes", "extra": {"kube_config": json.dumps(config)}}
        service = Service(folder / "airflow", env | {"AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(api)})
        try:
            service.start()
            seen = play(service, folder)
            yield Days(service, folder, received, seen, kubernetes)
        finally:
            service.stop()


def play(service: Service, folder: Path) -> dict[str, Any]:
    """Start the runs, do what happens meanwhile, wait for all."""
    stub.order(folder, "good", DS, "train", "with:baseline")
    stub.order(folder, "good", DS, "baseline", "with:train")
    stub.order(folder, "late", DS, "late", "")
    stub.order(folder, "late", DS, "ingest", "75 69 0")
    stub.order(folder, "refusing", DS, "gate", "3")
    stub.order(folder, "mend", DS, "ingest", "2")
    stub.order(folder, "broken", DS, "ingest", "1 1 1")
    stub.order(folder, "killed", DS, "features", "s600 0")
    stub.order(folder, "killed", DS, "train", "s600 0")
    service.trigger("headrace_past_backfill", {"first": DAYS[0], "last": DAYS[-1]}, "b")
    for name in ("remote", "pods"):
        stub.order(folder, name, DS, "ingest", "75 0")
        stub.order(folder, name, DS, "features", "1 0")
    stub.order(folder, "pods", DS, "gate", "3")
    for name in ("killed", "late", "good", "refusing", "mend", "broken", "daily", "remote", "pods"):
        service.trigger(f"headrace_{name}_retrain", {"ds": DS}, f"r{DS}")
    kill_task(folder, service, "killed", "features")
    task = "headrace_late_retrain", f"r{DS}"
    service.until(lambda: service.tasks(*task)["complete"]["state"] == "deferred", 600)
    service.until(
        lambda: len([c for c in stub.calls(folder) if c["stage"] == "look" and c["pipeline"] == "late"]) > 2, 60
    )
    seen = {"late": service.tasks(*task)["ingest"]["state"]}
    (folder / "orders" / f"late.{DS}.late").unlink()
    for ds in DAYS[1:]:
        service.final_states("headrace_daily_score", DAYS.index(ds))
        service.trigger("headrace_daily_retrain", {"ds": ds}, f"r{ds}")
    for name in ("late", "good", "refusing", "daily", "remote", "pods"):
        service.final_states(f"headrace_{name}_score", len(DAYS) if name == "daily" else 1)
    for name in ("mend", "broken"):
        service.final_states(f"headrace_{name}_retrain")
    service.final_states("headrace_past_backfill", len(DAYS))
    # Last, as all tasks that are at work go with the machine of the scheduler: a model is being trained.
    service.until(lambda: started(folder, "killed", "train"), 600)
    service.kill("scheduler")
    service.launch("scheduler")
    service.final_states("headrace_killed_score")
    return seen


def states(days: Days, dag: str, run: str = f"r{DS}") -> dict[str, str]:
    return {name: task["state"] for name, task in days.service.tasks(f"headrace_{dag}", run).items()}


def stages_of(pipeline: str) -> list[str]:
    """The stages of a day, in order."""
    has = PIPELINES[pipeline]
    return [e.name for e in STAGES.values() if e.dag and (e.section is None or e.section in has)]


def test_a_good_day(days: Days) -> None:
    """Every stage once; train and baseline at the same time (each waited for the other); then its scores."""
    has = {name: STAGES[name].dag for name in stages_of("good")}
    trained = ["complete", *(name for name, kind in has.items() if kind == "retrain"), "model_event"]
    assert states(days, "good_retrain") == dict.fromkeys(trained, "success")
    (run, state), *more = days.service.runs("headrace_good_score").items()
    assert (state, more) == ("success", [])
    assert set(states(days, "good_score", run)) == {n for n, kind in has.items() if kind == "score"}
    for name in has:
        assert [c["ds"] for c in days.calls("good", name)] == [DS]


def test_late_data_are_waited_for_without_a_try(days: Days) -> None:
    """The sensor waits, then `ingest` itself (75), then the run waits for another run of the pipeline (69)."""
    assert days.seen["late"] is None
    assert set(states(days, "late_retrain").values()) == {"success"}
    tasks = days.service.tasks("headrace_late_retrain", f"r{DS}")
    assert len(days.calls("late", "ingest")) == 3
    assert tasks["ingest"]["try_number"] == 1
    assert len(days.calls("late", "look")) > 2


@pytest.mark.skipif("gate" not in STAGES, reason="there is no gate")
def test_a_refused_model_is_not_promoted_and_the_day_is_scored(days: Days) -> None:
    task_states = states(days, "refusing_retrain")
    assert (task_states["gate"], task_states["promote"], task_states["model_event"]) == (
        "success",
        "skipped",
        "success",
    )
    assert list(days.service.runs("headrace_refusing_score").values()) == ["success"]
    assert f"{DS}.promote" not in days.outputs("refusing")
    assert f"{DS}.publish" in days.outputs("refusing")


def test_what_the_user_must_mend_is_not_tried_again_and_a_failure_twice(days: Days) -> None:
    for name, tries in (("mend", 1), ("broken", 3)):
        task_states = states(days, f"{name}_retrain")
        assert (task_states["ingest"], task_states["features"]) == ("failed", "upstream_failed")
        assert len(days.calls(name, "ingest")) == tries
        assert days.service.runs(f"headrace_{name}_score") == {}


def test_killed_tasks_and_a_killed_scheduler(days: Days) -> None:
    """A task's process, then the scheduler with all that was at work: the day comes to its end."""
    assert set(states(days, "killed_retrain").values()) == {"success"}
    assert [len(days.calls("killed", stage)) for stage in ("features", "train")] == [2, 2]
    assert list(days.service.runs("headrace_killed_score").values()) == ["success"]


def test_a_backfill_of_three_days_is_three_daily_runs(days: Days) -> None:
    assert set(days.service.runs("headrace_past_backfill").values()) == {"success"}
    assert set(days.service.runs("headrace_daily_score").values()) == {"success"}
    assert days.outputs("past") == days.outputs("daily")
    assert len({days.outputs("past")[f"{ds}.publish"] for ds in DAYS}) == 3
    # Oldest first, and a day is published before the next one is begun.
    outer_calls = [
        c for c in stub.calls(days.folder) if c["pipeline"] == "past" and c["stage"] in ("ingest", "publish")
    ]
    assert [(c["ds"], c["stage"]) for c in outer_calls] == [
        (ds, stage) for ds in DAYS for stage in ("ingest", "publish")
    ]


def stages_tried(pipeline: str) -> list[str]:
    """A pipeline's stages in order, where a day is late once and a job fails once."""
    return [n for stage in stages_of(pipeline) for n in [stage] * (2 if stage in ("ingest", "features") else 1)]


def overtaken(days: Days, pipeline: str, stage: str) -> int:
    """Tries of a stage's task that Airflow's scheduler itself ended.

    Where a task goes on before the scheduler has read that it was deferred, which a busy machine makes likely, the
    scheduler takes the one for the other and has the task tried again.
    """
    task = "complete" if stage == "look" else stage
    instance = rf"<TaskInstance: headrace_{pipeline}_(?:retrain|score)\.{task} \S+ \[(?:running|queued)\] [^>]*>"
    log = (days.service.home / "scheduler.log").read_text()
    return sum(
        bool(re.search(f"{instance} finished with state success", line))
        for line in log.splitlines()
        if "scheduler_job_runner.py" in line
    )


def assert_tried(days: Days, pipeline: str, tried: list[str], expected: list[str]) -> None:
    """These stages in this order, as often as expected, and once more for each try that the scheduler ended."""
    assert [stage for stage, _ in groupby(tried)] == [stage for stage, _ in groupby(expected)]
    more = {stage: overtaken(days, pipeline, stage) for stage in expected}
    for stage in expected:
        assert expected.count(stage) <= tried.count(stage) <= expected.count(stage) + more[stage], stage
    tasks = days.service.tasks(f"headrace_{pipeline}_retrain", f"r{DS}")
    for stage, tries in (("ingest", 1), ("features", 2)):
        assert tries <= tasks[stage]["try_number"] <= tries + more[stage], stage


def test_drivers_on_a_cluster_are_waited_for_by_the_triggerer(days: Days) -> None:
    """Each stage and each look is a driver; its exit code stands in its log: 75 is no try, 1 is, with a new driver."""
    assert set(states(days, "remote_retrain").values()) == {"success"}
    tried = [c["stage"] for c in stub.calls(days.folder) if c["pipeline"] == "remote" and runs_stage(c)]
    assert_tried(days, "remote", tried, ["look", *stages_tried("remote")])
    assert len(Master.requests) == len(tried)
    request = Master.requests[-1]
    assert request["mainClass"] == "org.apache.spark.deploy.SparkSubmit"
    assert request["environmentVariables"]["AWS_SECRET_ACCESS_KEY"] == KEY
    assert KEY not in json.dumps(request["appArgs"] + list(request["sparkProperties"].values()))
    log = "".join(p.read_text() for p in days.service.home.rglob("attempt=*.log*") if "remote" in str(p))
    assert "the application is FINISHED" in log
    assert "error: features of remote answers 1" in log


def test_pods_of_kubernetes_are_waited_for_by_the_triggerer(days: Days) -> None:
    """Each stage and look is a pod, removed when it has ended: 75 is no try, 1 is, the gate's 3 is its verdict."""
    task_states = states(days, "pods_retrain")
    assert (task_states.pop("promote"), set(task_states.values())) == ("skipped", {"success"})
    tried = [c["stage"] for c in stub.calls(days.folder) if c["pipeline"] == "pods"]
    assert_tried(days, "pods", tried, ["look", *(stage for stage in stages_tried("pods") if stage != "promote")])
    pods = [p for p in days.kubernetes.created if p["metadata"]["name"].startswith("headrace-pods-")]
    assert len(pods) == len(tried)
    assert {p["metadata"]["namespace"] for p in pods} == {"days"}
    assert days.kubernetes.pods == {}
    # Values are in the Secret alone; the container has them in its environment.
    assert {PASSWORD, KEY} <= set(days.kubernetes.secrets["headrace-pods-049c287e-env"]["stringData"].values())
    assert not any(secret in json.dumps(pods) for secret in (PASSWORD, KEY))
    [call] = days.calls("pods", "publish")
    assert (call["env"]["WAREHOUSE_PASSWORD"], call["env"]["AWS_SECRET_ACCESS_KEY"]) == (PASSWORD, KEY)
    log = "".join(p.read_text() for p in days.service.home.rglob("attempt=*.log*") if "headrace_pods_retrain" in str(p))
    assert "error: features of pods answers 1" in log


def test_what_is_started_knows_whose_run_it_is(days: Days) -> None:
    """OpenLineage's parents: a try of a task, of the DAG's run; of processes, drivers and pods."""

    def parents(pipeline: str, stage: str) -> list[tuple[list[str], list[str]]]:
        names = ("OPENLINEAGE_PARENT_ID", "OPENLINEAGE_ROOT_PARENT_ID")
        pairs = [[c["env"][name].split("/") for name in names] for c in days.calls(pipeline, stage)]
        return [(parent, root) for parent, root in pairs]

    for pipeline in ("good", "remote", "pods"):
        ((parent, root),) = parents(pipeline, "ingest")[:1]
        ((train_parent, root_of_train),) = parents(pipeline, "train")[:1]
        assert (parent[:2], root[:2]) == (
            ["default", f"headrace_{pipeline}_retrain.ingest"],
            ["default", f"headrace_{pipeline}_retrain"],
        )
        assert root_of_train == root
        assert len({UUID(ids[2]) for ids in (parent, train_parent, root)}) == 3
    first, second = parents("killed", "features")  # two tries
    assert (first[0] != second[0], first[1]) == (True, second[1])


def test_messages(days: Days) -> None:
    posted = {(m["pipeline"], m["event"]): (token, m) for token, m in days.messages.posted}
    expected = {("mend", "failed"), ("broken", "failed"), ("good", "done"), ("past", "done"), ("late", "done")}
    if "gate" in STAGES:
        expected |= {("refusing", "refused")}
    assert expected <= set(posted)
    assert ("late", "failed") not in posted
    assert ("killed", "failed") not in posted
    token, failed = posted["mend", "failed"]
    assert token == f"Bearer {HOOK_TOKEN}"
    assert failed["report"] == f"https://reports.example.org/r/mend/{DS}.html"
    assert "ingest of mend answers 2" in failed["text"]
    mailed = {m["Subject"]: m for m in days.messages.mailed}
    mail = mailed[f"headrace: mend of {DS}: failed"]
    assert (mail["To"], mail["From"]) == ("b@example.org", "a@example.org")
    assert f"https://reports.example.org/r/mend/{DS}.html" in mail.get_content()


def test_secrets_are_in_the_jobs_environment_and_nowhere_else(days: Days) -> None:
    [call] = days.calls("late", "publish")
    assert call["env"]["WAREHOUSE_PASSWORD"] == PASSWORD
    assert call["env"]["AWS_SECRET_ACCESS_KEY"] == KEY
    assert not any(call["env"].get(name) for name in call["env"] if name.startswith(("AIRFLOW_CONN", "AIRFLOW__")))
    assert PASSWORD not in str([c["argv"] for c in stub.calls(days.folder)])
    assert KEY not in str([c["argv"] for c in stub.calls(days.folder)])
    # Rendered templates, XComs and states are in the database; logs are files.
    contents = {
        str(p): p.read_bytes() for p in days.service.home.rglob("*") if p.is_file()
    } | days.service.database_rows()
    assert b"headrace_late_retrain" in contents["task_instance"]
    assert any(name.endswith(".log") and b"Spark-Submit cmd" in text for name, text in contents.items())
    for secret in (PASSWORD, KEY, HOOK_TOKEN):
        # A column of bytes is written in hexadecimal digits.
        assert [
            name for name, text in contents.items() if secret.encode() in text or secret.encode().hex().encode() in text
        ] == []
