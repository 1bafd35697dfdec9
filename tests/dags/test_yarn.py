"""Jobs of the DAGs as applications of a real YARN: sent by spark-submit, waited for by their triggers."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.installation import checkout, pipeline_file, s3_dir
from headrace.jobs.submit import spark_home
from tests.hadoop_servers import Yarn, require_jars, yarn
from tests.support import manifests

sys.path.insert(0, str(checkout() / "airflow_dags"))
from headrace_airflow.cluster import Cluster

AIRFLOW = checkout() / ".venv-airflow" / "bin" / "python"

pytestmark = [
    *(pytest.mark.jvm, pytest.mark.service, pytest.mark.extra),
    pytest.mark.skipif(not AIRFLOW.is_file(), reason="Airflow's environment is not here: run `make airflow`"),
]

#: Does what is ordered for its day: opens a session or none, works until a file is there, ends with a code.
_PROGRAM = """
import json, os, sys, time
folder, ds = sys.argv[sys.argv.index("--home") + 1], sys.argv[sys.argv.index("--ds") + 1]
order = json.load(open(f"{folder}/orders.json"))[ds]
if order["session"]:
    from pyspark.sql import SparkSession
    session = SparkSession.builder.getOrCreate()
    print(session.sparkContext.master)
open(f"{folder}/began.{ds}", "w").close()
while order["until"] and not os.path.exists(f"{folder}/{order['until']}"):
    time.sleep(0.1)
sys.exit(order["code"])
"""
DONE, LATE, EARLY, KILLED, LONG = (f"2026-02-0{n}" for n in range(1, 6))
ORDERS = {
    DONE: {"session": True, "until": None, "code": 0},
    LATE: {"session": True, "until": None, "code": 75},
    EARLY: {"session": False, "until": None, "code": 2},
    KILLED: {"session": True, "until": "never", "code": 0},
    # It is at work when the ResourceManager goes, and when it is back.
    LONG: {"session": True, "until": "back", "code": 0},
}
#: Of a stage without Spark.
LOCAL_DAY = "2026-02-06"

#: A stage of a day. Before it, the secrets are used as far as they go: a task of an executor fails to connect with the
#: password, and the JVM with the keys. Then it waits until the test has looked around.
_STAGE_WITH_SECRETS = """
import hashlib, json, os, sys, time, traceback
from pyspark.sql import SparkSession
folder = sys.argv[sys.argv.index("--home") + 1]
spark = SparkSession.builder.getOrCreate()
password = json.load(open(os.environ["HEADRACE_SECRETS"]))["DB_PASS"]

def connect(_):
    import psycopg
    psycopg.connect(host="127.0.0.1", port=1, user="headrace", password=password)

for fail in (
    lambda: spark.sparkContext.parallelize([0], 1).map(connect).collect(),
    lambda: spark.read.text("s3a://bucket/file.txt").collect(),
):
    try:
        fail()
    except Exception:
        traceback.print_exc()
    else:
        sys.exit("nothing failed")
with open(f"{folder}/ready.new", "w") as file:
    file.write(hashlib.sha256(password.encode()).hexdigest())
os.rename(f"{folder}/ready.new", f"{folder}/ready")
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.1)
from headrace.jobs.run_stage import main
main()
"""
PASSWORD, AWS_ID, AWS_SECRET, AWS_TOKEN = (
    f"{name}-7f3a9c51d2e84b60" for name in ("Warehouse", "AKIA", "AwsSecret", "AwsToken")
)
SECRETS = (PASSWORD, AWS_SECRET, AWS_TOKEN)
#: The files in which secrets may travel.
PRIVATE_FILES = {"headrace-secrets.json", "headrace-aws-credentials"}


class _Jobs:
    """airflow_side.py at work, and the applications that it has told of."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.applications: dict[str, str] = {}
        self.log_lines: list[str] = []
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=env["AIRFLOW_HOME"]
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log_lines.append(line)
            if match := re.match(r"(\S+) deferred (application_\d+_\d+)", line):
                self.applications[match[1]] = match[2]

    def results(self) -> dict[str, Any]:
        """Return the results that the process answers with."""
        assert self._process.stdout is not None
        answer = self._process.stdout.read()
        self._thread.join()
        assert self._process.wait() == 0, self.log
        results: dict[str, Any] = json.loads(answer)["jobs"]
        return results

    def stop(self) -> None:
        """End it, where a test has failed."""
        self._process.kill()
        self._process.wait()

    @property
    def at_work(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """The end of what it said."""
        return "".join(self.log_lines)[-6000:]


def _airflow(home: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HEADRACE", "PYTHONPATH"))}
    return inherited | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(checkout() / "airflow_dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }


def _start(
    folder: Path,
    place: Yarn,
    *words: str,
    properties: Mapping[str, str] | None = None,
    sections: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> _Jobs:
    spec = yaml.safe_load(pipeline_file("clicks").read_text()) | dict(sections or {})
    spec["pipeline"] = "far"
    spec["spark"] = {
        "driver_memory": "512m",
        "properties": {
            # Spark's jars lie where the containers run; without this each application brings 450 MB of them.
            "spark.yarn.jars": f"local:{spark_home()}/jars/*",
            "spark.yarn.stagingDir": f"file://{folder}/staging",
            "spark.driver.memoryOverhead": "128m",
            # Else the containers' JVMs are those of a server, with both compilers.
            "spark.yarn.appMasterEnv.JAVA_TOOL_OPTIONS": os.environ["JAVA_TOOL_OPTIONS"],
            # No executors: the programs compute nothing.
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
            **(properties or {}),
        },
    }
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "far.yaml").write_text(yaml.safe_dump(spec))
    (folder / "airflow").mkdir()
    extra = {"deploy-mode": "cluster", "yarn_resourcemanager_webapp_address": place.rest}
    env = _airflow(folder / "airflow") | {
        **place.environ,
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "yarn", "extra": extra}),
        "HEADRACE_PYTHON": sys.executable,
        "HEADRACE_HOME": str(folder),
        "HEADRACE_PIPELINES": str(folder / "pipelines"),
        "HEADRACE_POLL_SECONDS": "2",
        **(variables or {}),
    }
    return _Jobs([str(AIRFLOW), str(Path(__file__).with_name("airflow_side.py")), "jobs", "far", *words], env)


def test_the_states_of_real_applications(tmp_path: Path) -> None:
    """Done, late (75), ended before its session (2), killed; and at work while the ResourceManager is away.

    A stage without Spark is no application: YARN would call one failed that opens no session.
    """
    require_jars()
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    (tmp_path / "orders.json").write_text(json.dumps(ORDERS))
    with yarn(tmp_path / "yarn", tmp_path / "conf", memory_mb=16384, cores=16) as place:
        jobs = _start(tmp_path, place, str(program), *(w for ds in ORDERS for w in ("ingest", ds)), "report", LOCAL_DAY)
        try:
            _until(lambda: KILLED in jobs.applications, jobs)
            place.kill_application(jobs.applications[KILLED])
            _until(lambda: all(_is_over(place, jobs.applications.get(ds)) for ds in ORDERS if ds != LONG), jobs)
            _until(lambda: (tmp_path / f"began.{LONG}").exists() and LONG in jobs.applications, jobs)
            place.resourcemanager.kill()
            place.restart()
            (tmp_path / "back").touch()
            outcomes = jobs.results()
        finally:
            jobs.stop()
    assert outcomes.pop(LOCAL_DAY) == {"event": None, "ends": None}, jobs.log
    assert set(jobs.applications) == set(ORDERS)
    assert list(tmp_path.glob("reports/**/*.html"))
    assert {ds: outcome["ends"] for ds, outcome in outcomes.items()} == {
        DONE: None,
        LATE: "AirflowRescheduleException",
        EARLY: "AirflowFailException",
        KILLED: "AirflowException",
        LONG: None,
    }, jobs.log
    states = {
        ds: (outcome["event"]["name"], outcome["event"]["done"], outcome["event"]["code"])
        for ds, outcome in outcomes.items()
    }
    assert states == {
        DONE: ("FINISHED", True, 0),
        LATE: ("FINISHED", False, 75),
        EARLY: ("FAILED", False, 2),
        KILLED: ("KILLED", False, None),
        LONG: ("FINISHED", True, 0),
    }
    assert outcomes[EARLY]["says"].startswith(
        "ingest of 'far' for 2026-02-03: the application is FAILED: User application"
    )
    assert "was killed by user" in outcomes[KILLED]["says"]


def _is_over(place: Yarn, application: str | None) -> bool:
    return application is not None and Cluster("yarn", place.rest).state(application).is_final


def test_what_is_lost_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """A ResourceManager started anew, as it was seen: no answer, a page, not one application known, then all."""
    known = {"app": {"state": "RUNNING", "finalStatus": "UNDEFINED"}}
    finished = {"app": {"state": "FINISHED", "finalStatus": "SUCCEEDED", "diagnostics": ""}}
    unknown = {"RemoteException": {"exception": "NotFoundException", "message": "app not found"}}
    page, lost = (200, b"This is standby RM"), (404, json.dumps(unknown).encode())
    answers = [lost] * 4 + [(503, b"")] * 3 + [page] * 2
    answers += [(200, json.dumps(known).encode())] + [lost] * 9 + [(200, json.dumps(finished).encode())]

    class Manager(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answers.pop(0) if answers else lost
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Manager) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rest = f"http://127.0.0.1:{server.server_address[1]}"
        event = _wait(tmp_path, rest)
        assert (event["name"], event["done"], event["code"]) == ("FINISHED", True, 0)
        assert not answers
        unknown_event = _wait(tmp_path, rest)
        server.shutdown()
    assert (unknown_event["name"], unknown_event["done"], unknown_event["code"], unknown_event["message"]) == (
        "NOT_FOUND",
        False,
        None,
        "app not found",
    )


def _wait(folder: Path, rest: str) -> dict[str, Any]:
    side = [str(AIRFLOW), str(Path(__file__).with_name("airflow_side.py")), "wait", rest, "application_1_1"]
    completed = subprocess.run(side, env=_airflow(folder), capture_output=True, text=True, check=False, cwd=folder)
    assert completed.returncode == 0, completed.stderr[-4000:]
    event: dict[str, Any] = json.loads(completed.stdout)["event"]
    return event


def test_no_secret_of_an_application_is_to_be_seen(tmp_path: Path) -> None:
    """Process lists, files, the event log and the containers' logs of a stage in cluster mode hold no secret."""
    require_jars()
    if not any(s3_dir().glob("*.jar")):
        pytest.skip("no Spark for S3: run `make s3`")
    program = tmp_path / "program.py"
    program.write_text(_STAGE_WITH_SECRETS)
    (tmp_path / "events").mkdir()
    generated = [sys.executable, "-m", "headrace.cli", "generate", "clicks", "--until", DONE, "--no-spark"]
    sizes = {"start": DONE, "rows_per_day": 200, "users": 20, "items": 10}
    sets = [word for key, value in sizes.items() for word in ("--set", f"generate.{key}={value}")]
    subprocess.run([*generated, *sets, "--home", str(tmp_path)], check=True, env=_airflow(tmp_path))
    with _refusing_store() as (endpoint, requests), yarn(tmp_path / "yarn", tmp_path / "conf") as place:
        chain = "software.amazon.awssdk.auth.credentials.ProfileCredentialsProvider"
        properties = {
            "spark.jars": ",".join(map(str, sorted(s3_dir().glob("*.jar")))),
            "spark.hadoop.fs.s3a.endpoint": endpoint,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
            "spark.hadoop.fs.s3a.attempts.maximum": "1",
            "spark.hadoop.fs.s3a.aws.credentials.provider": chain,
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": (tmp_path / "events").as_uri(),
            "spark.dynamicAllocation.enabled": "false",
            "spark.executor.instances": "1",
            "spark.executor.memory": "512m",
            "spark.task.maxFailures": "1",
        }
        warehouse = {"kind": "postgres", "host": "127.0.0.1", "user": "u", "database": "d", "password_env": "DB_PASS"}
        store = {"aws_session_token": AWS_TOKEN, "endpoint_url": endpoint, "region_name": "us-east-1"}
        connections = {
            "AIRFLOW_CONN_HEADRACE_WAREHOUSE": {"conn_type": "postgres", "password": PASSWORD},
            "AIRFLOW_CONN_HEADRACE_STORE": {
                "conn_type": "aws", "login": AWS_ID, "password": AWS_SECRET, "extra": store,
            },
        }  # fmt: skip
        with _command_lines() as lines:
            jobs = _start(
                tmp_path, place, str(program), "ingest", DONE,
                properties=properties,
                sections={"publish": {"warehouse": warehouse}},
                variables={name: json.dumps(value) for name, value in connections.items()},
            )  # fmt: skip
            try:
                _until((tmp_path / "ready").is_file, jobs)
                during = _files_with_secrets(tmp_path)
                exposed = [file for file in during if _others_can_read(file, tmp_path)]
                (tmp_path / "go").touch()
                outcomes = jobs.results()
            finally:
                jobs.stop()
        after = _files_with_secrets(tmp_path)
        logs = "".join(file.read_text() for file in (tmp_path / "yarn" / "containers").rglob("std*"))
        events = "".join(file.read_text() for file in (tmp_path / "events").rglob("events_*"))
    assert outcomes[DONE]["ends"] is None, jobs.log + logs
    assert manifests(tmp_path, DONE, "far").keys() == {"ingest"}
    # The secrets had arrived, and were used.
    assert (tmp_path / "ready").read_text() == hashlib.sha256(PASSWORD.encode()).hexdigest()
    assert any(f"Credential={AWS_ID}/" in header for header in requests)
    assert "OperationalError" in logs
    assert "OperationalError" in events
    assert "AccessDenied" in logs
    # And nobody else sees them. A node keeps its copies in the cache of the user.
    assert {file.name for file in during} == PRIVATE_FILES
    assert exposed == []
    assert [file for file in after if file.name not in PRIVATE_FILES or _others_can_read(file, tmp_path)] == []
    # What the page of the application shows of its environment is this event.
    assert '"Event":"SparkListenerEnvironmentUpdate"' in events
    assert "spark.executor.instances" in events
    assert any("org.apache.spark.deploy.SparkSubmit" in line for line in lines)
    assert any("org.apache.spark.deploy.yarn.ApplicationMaster" in line for line in lines)
    assert any("YarnCoarseGrainedExecutorBackend" in line for line in lines)
    for text in (logs, events, "".join(jobs.log_lines), *lines):
        assert not [secret for secret in SECRETS if secret in text]


@contextmanager
def _refusing_store() -> Iterator[tuple[str, list[str]]]:
    """Serve S3's refusal to every request; yields the address and the requests' signatures."""
    headers: list[str] = []
    refusal = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message><RequestId>1</RequestId></Error>"

    class Store(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(str(self.headers.get("Authorization")))
            self.send_response(403)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(refusal)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(refusal)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", headers
        server.shutdown()


@contextmanager
def _command_lines() -> Iterator[set[str]]:
    """Collect the command lines of all processes of this machine while the block runs."""
    lines: set[str] = set()
    stop = threading.Event()

    def collect() -> None:
        while not stop.wait(0.1):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):  # it has ended
                    lines.add(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield lines
    finally:
        stop.set()
        thread.join()


def _files_with_secrets(folder: Path) -> list[Path]:
    """Return the files below a folder, members of archives included, in which a secret stands."""
    return [file for file in folder.rglob("*") if file.is_file() and any(map(_has_secret, _contents(file)))]


def _contents(file: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError):  # a container's, which has ended
        if file.suffix == ".zip" and zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                yield from map(archive.read, archive.namelist())
        yield file.read_bytes()


def _has_secret(data: bytes) -> bool:
    return any(secret.encode() in data for secret in SECRETS)


def _others_can_read(file: Path, top: Path) -> bool:
    """Say whether another account can read a file: it may be, and so may be entered all folders above it."""
    path = file.resolve()
    folders = path.parents[: path.parents.index(top.resolve())]
    reachable = all(stat.S_IMODE(folder.stat().st_mode) & 0o011 for folder in folders)
    return reachable and bool(stat.S_IMODE(path.stat().st_mode) & 0o044)


def _until(is_done: Callable[[], bool], jobs: _Jobs) -> None:
    end = time.monotonic() + 240
    while not is_done():
        assert time.monotonic() < end, jobs.log
        assert jobs.at_work, f"{jobs.log}{jobs.results()}"
        time.sleep(0.1)
