"""Jobs of the DAGs as applications of a real YARN: sent by spark-submit, waited for by their triggers."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.jobs.submit import spark_home
from headrace.workspace import checkout, pipeline_file
from tests.hadoop_servers import Yarn, require_jars, yarn

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
HERE = "2026-02-06"


class _Jobs:
    """airflow_side.py at work, and the applications that it has told of."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.applications: dict[str, str] = {}
        self.said: list[str] = []
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=env["AIRFLOW_HOME"]
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line)
            if found := re.match(r"(\S+) deferred (application_\d+_\d+)", line):
                self.applications[found[1]] = found[2]

    def ended(self) -> dict[str, Any]:
        """What it answers."""
        assert self._process.stdout is not None
        answer = self._process.stdout.read()
        self._thread.join()
        assert self._process.wait() == 0, self.log
        found: dict[str, Any] = json.loads(answer)["jobs"]
        return found

    def stop(self) -> None:
        """End it, where a test has failed."""
        self._process.kill()
        self._process.wait()

    @property
    def at_work(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """The end of what it said."""
        return "".join(self.said)[-6000:]


def _airflow(home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HEADRACE", "PYTHONPATH"))}
    return kept | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(checkout() / "airflow_dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }


def _start(folder: Path, place: Yarn, *words: str) -> _Jobs:
    spec = yaml.safe_load(pipeline_file("clicks").read_text())
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
        jobs = _start(tmp_path, place, str(program), *(w for ds in ORDERS for w in ("ingest", ds)), "report", HERE)
        try:
            _until(lambda: KILLED in jobs.applications, jobs)
            place.kill_application(jobs.applications[KILLED])
            _until(lambda: all(_ended(place, jobs.applications.get(ds)) for ds in ORDERS if ds != LONG), jobs)
            _until(lambda: (tmp_path / f"began.{LONG}").exists() and LONG in jobs.applications, jobs)
            place.resourcemanager.kill()
            place.restart()
            (tmp_path / "back").touch()
            ended = jobs.ended()
        finally:
            jobs.stop()
    assert ended.pop(HERE) == {"event": None, "ends": None}, jobs.log
    assert set(jobs.applications) == set(ORDERS)
    assert list(tmp_path.glob("reports/**/*.html"))
    assert {ds: one["ends"] for ds, one in ended.items()} == {
        DONE: None,
        LATE: "AirflowRescheduleException",
        EARLY: "AirflowFailException",
        KILLED: "AirflowException",
        LONG: None,
    }, jobs.log
    states = {ds: (one["event"]["name"], one["event"]["done"], one["event"]["code"]) for ds, one in ended.items()}
    assert states == {
        DONE: ("FINISHED", True, 0),
        LATE: ("FINISHED", False, 75),
        EARLY: ("FAILED", False, 2),
        KILLED: ("KILLED", False, None),
        LONG: ("FINISHED", True, 0),
    }
    assert ended[EARLY]["says"].startswith(
        "ingest of 'far' for 2026-02-03: the application is FAILED: User application"
    )
    assert "was killed by user" in ended[KILLED]["says"]


def _ended(place: Yarn, application: str | None) -> bool:
    return application is not None and Cluster("yarn", place.rest).state(application).ended


def test_what_is_lost_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """A ResourceManager started anew, as it was seen: no answer, a page, not one application known, then all."""
    known = {"app": {"state": "RUNNING", "finalStatus": "UNDEFINED"}}
    done = {"app": {"state": "FINISHED", "finalStatus": "SUCCEEDED", "diagnostics": ""}}
    unknown = {"RemoteException": {"exception": "NotFoundException", "message": "app not found"}}
    page, lost = (200, b"This is standby RM"), (404, json.dumps(unknown).encode())
    answers = [lost] * 4 + [(503, b"")] * 3 + [page] * 2
    answers += [(200, json.dumps(known).encode())] + [lost] * 9 + [(200, json.dumps(done).encode())]

    class Manager(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, said = answers.pop(0) if answers else lost
            self.send_response(code)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Manager) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rest = f"http://127.0.0.1:{server.server_address[1]}"
        found = _wait(tmp_path, rest)
        assert (found["name"], found["done"], found["code"]) == ("FINISHED", True, 0)
        assert not answers
        gone = _wait(tmp_path, rest)
        server.shutdown()
    assert (gone["name"], gone["done"], gone["code"], gone["message"]) == ("NOT_FOUND", False, None, "app not found")


def _wait(folder: Path, rest: str) -> dict[str, Any]:
    side = [str(AIRFLOW), str(Path(__file__).with_name("airflow_side.py")), "wait", rest, "application_1_1"]
    done = subprocess.run(side, env=_airflow(folder), capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    event: dict[str, Any] = json.loads(done.stdout)["event"]
    return event


def _until(done: Callable[[], bool], jobs: _Jobs) -> None:
    end = time.monotonic() + 240
    while not done():
        assert time.monotonic() < end, jobs.log
        assert jobs.at_work, f"{jobs.log}{jobs.ended()}"
        time.sleep(0.1)
