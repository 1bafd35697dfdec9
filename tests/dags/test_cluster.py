"""Applications of a cluster by its REST API: a real standalone master of Spark, and what YARN answers."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.jobs.submit import spark_home
from headrace.workspace import checkout
from tests.dags.service import free_port

sys.path.insert(0, str(checkout() / "airflow_dags"))
from headrace_airflow.cluster import Cluster, State, read_properties

_PROGRAM = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "word": os.environ["WORD"]}), file=open(sys.argv[1], "w"))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Cluster, Path]]:
    """A master and a worker of Spark on loopback: the master's URL, its REST API, a folder."""
    folder, port, rest = tmp_path_factory.mktemp("standalone"), free_port(), free_port()
    conf = folder / "spark.properties"
    rest_is = {"enabled": "true", "host": "127.0.0.1", "port": str(rest)}
    conf.write_text("".join(f"spark.master.rest.{key} {value}\n" for key, value in rest_is.items()))
    env = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOG_DIR": str(folder), "SPARK_WORKER_DIR": str(folder)}
    url, start = f"spark://127.0.0.1:{port}", [str(spark_home() / "bin" / "spark-class")]
    words = [
        ["org.apache.spark.deploy.master.Master", "--port", str(port), "--webui-port", "0"],
        ["org.apache.spark.deploy.worker.Worker", "--cores", "2", "--memory", "2g", "--webui-port", "0", url],
    ]
    words[0] += ["--host", "127.0.0.1", "--properties-file", str(conf)]
    words[1][1:1] = ["--host", "127.0.0.1"]
    with (folder / "log").open("wb") as log:
        daemons = [subprocess.Popen([*start, *w], env=env, stdout=log, stderr=log) for w in words]
    try:
        cluster = Cluster("standalone", f"http://127.0.0.1:{rest}")
        end = time.monotonic() + 120
        while True:
            try:
                cluster.state("driver-none")
                break
            except OSError:
                assert time.monotonic() < end, (folder / "log").read_text()[-3000:]
                time.sleep(0.2)
        yield url, cluster, folder
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()


def test_a_python_program_as_a_driver_of_a_real_master(standalone: tuple[str, Cluster, Path]) -> None:
    url, cluster, folder = standalone
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    conf = {"spark.master": url, "spark.app.name": "a name", "spark.driver.memory": "512m"}
    env = {"WORD": "hidden word", "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    sent = {code: cluster.submit(str(program), [str(folder / f"out{code}"), code], conf, env) for code in ("0", "3")}
    states: dict[str, State] = {}
    end = time.monotonic() + 120
    for code, driver in sent.items():
        while not (state := cluster.state(driver)).ended:
            assert time.monotonic() < end, state
            time.sleep(0.3)
        states[code] = state
        said = json.loads((folder / f"out{code}").read_text())
        assert said == {"argv": [str(folder / f"out{code}"), code], "word": "hidden word"}
    assert (states["0"].done, states["0"].name, states["0"].code) == (True, "FINISHED", 0)
    # The master knows that it failed, and not with which code.
    assert (states["3"].done, states["3"].name, states["3"].code) == (False, "FAILED", None)
    assert cluster.state("driver-of-another-master").name == "NOT_FOUND"


def test_what_a_resource_manager_answers() -> None:
    """As YARN documents it: state, finalStatus, diagnostics."""
    answers: dict[str, dict[str, Any]] = {
        "application_1_1": {"state": "RUNNING", "finalStatus": "UNDEFINED", "diagnostics": ""},
        "application_1_2": {"state": "FINISHED", "finalStatus": "SUCCEEDED", "diagnostics": ""},
        "application_1_3": {
            "state": "FINISHED",
            "finalStatus": "FAILED",
            "diagnostics": "User application exited with status 75",
        },
        "application_1_4": {"state": "KILLED", "finalStatus": "KILLED", "diagnostics": "killed by user"},
    }

    class Manager(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith("/ws/v1/cluster/apps/")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"app": answers[self.path.rpartition("/")[2]]}).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Manager) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster = Cluster("yarn", f"http://127.0.0.1:{server.server_address[1]}")
        found = [(s.ended, s.done, s.code) for s in map(cluster.state, answers)]
        server.shutdown()
    assert found == [(False, False, None), (True, True, 0), (True, False, 75), (True, False, None)]
    with pytest.raises(OSError, match="refused"):
        cluster.state("application_1_1")


def test_properties_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "x.properties"
    path.write_text("# written\na.b=c=d\ne=\\ f\\\\g\\n\n")
    assert read_properties(str(path)) == {"a.b": "c=d", "e": " f\\g\n"}
