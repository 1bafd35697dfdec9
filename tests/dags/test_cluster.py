"""Applications of a cluster by its REST API: a real standalone master of Spark, and what YARN answers."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.config.installation import checkout
from tests.dags.standalone import standalone

sys.path.insert(0, str(checkout() / "airflow_dags"))
from headrace_airflow.cluster import Cluster, State

RUN_COMMAND = checkout() / "python" / "jobs" / "run_command.py"

_PROGRAM = """
import json, os, sys
gateway = "PYSPARK_GATEWAY_PORT" in os.environ
print(json.dumps({"argv": sys.argv[1:], "word": os.environ["WORD"], "gateway": gateway}), file=open(sys.argv[1], "w"))
print("error: not yet", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.jvm
@pytest.mark.service
def test_a_command_as_a_driver_of_a_real_master(tmp_path: Path) -> None:
    """Its arguments, its variables, and by its log its exit code and its last words."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    env = {"WORD": "hidden word", "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    states: dict[str, State] = {}
    with standalone(tmp_path) as place:
        cluster = Cluster("standalone", f"http://127.0.0.1:{place.rest}", f"http://127.0.0.1:{place.web}")
        sent = {}
        for code in ("0", "75"):
            words = [sys.executable, str(program), str(tmp_path / f"out{code}"), code]
            sent[code] = cluster.submit(place.url, str(RUN_COMMAND), words, env, "a name", "512m")
        end = time.monotonic() + 120
        for code, driver in sent.items():
            while not (state := cluster.state(driver)).is_final:
                assert time.monotonic() < end, state
                time.sleep(0.3)
            states[code] = state
            report = json.loads((tmp_path / f"out{code}").read_text())
            assert report == {"argv": [str(tmp_path / f"out{code}"), code], "word": "hidden word", "gateway": False}
        # Where the worker's pages are not to be reached, the state alone is known.
        blind = Cluster("standalone", cluster.rest, "http://127.0.0.1:9").state(sent["75"])
        assert cluster.state("driver-of-another-master").name == "NOT_FOUND"
    assert (states["0"].done, states["0"].name, states["0"].code) == (True, "FINISHED", 0)
    assert (states["75"].done, states["75"].name, states["75"].code) == (False, "FAILED", 75)
    assert states["75"].message == "error: not yet"
    assert (blind.done, blind.name, blind.code) == (False, "FAILED", None)


def test_what_a_resource_manager_answers() -> None:
    """Answers are those of YARN's documentation: state, finalStatus, diagnostics."""
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
            application = answers.get(self.path.rpartition("/")[2])
            lost = {"RemoteException": {"exception": "NotFoundException", "message": "app not found"}}
            self.send_response(200 if application else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"app": application} if application else lost).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Manager) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster = Cluster("yarn", f"http://127.0.0.1:{server.server_address[1]}")
        application = [(s.is_final, s.done, s.code) for s in map(cluster.state, answers)]
        lost = cluster.state("application_0_1")
        answers["application_1_1"] = {"appIdNum": "1"}
        with pytest.raises(OSError, match="tells no state"):
            cluster.state("application_1_1")
        server.shutdown()
    assert (lost.is_final, lost.done, lost.name, lost.message) == (True, False, "NOT_FOUND", "app not found")
    assert application == [(False, False, None), (True, True, 0), (True, False, 75), (True, False, None)]
    with pytest.raises(OSError, match="refused"):
        cluster.state("application_1_1")
