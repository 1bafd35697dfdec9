"""A whole Airflow on this machine: API server, scheduler, DAG processor, triggerer, and tasks as processes.

Its database is a PostgreSQL of its own, as Airflow's documentation asks for: SQLite has one writer at a time, and on a
busy machine a scheduler that finds it locked ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.publish.postgres import embedded

AIRFLOW = checkout() / ".venv-airflow" / "bin" / "airflow"
DAGS = checkout() / "airflow_dags"
#: Of a run and of a task.
FINAL_STATES = ("success", "failed")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Service:
    """The processes, their log files in `home`, and their REST API.

    Args:
        home: AIRFLOW_HOME.
        env: variables of the DAGs and connections.
    """

    def __init__(self, home: Path, env: Mapping[str, str]) -> None:
        self.home, self._port = home, free_port()
        self._database = Workspace(home / "database")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = ""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HEADRACE", "PYTHONPATH"))}
        self.env = {
            **inherited,
            "AIRFLOW_HOME": str(home),
            "PYTHONPATH": str(DAGS),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{self._port}/execution/",
            "AIRFLOW__API__PORT": str(self._port),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(16),
            # Nobody changes the pipelines, so the file of their DAGs is read once, and not every half a minute.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
            # A task or a scheduler that is killed is noticed within seconds.
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "2",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "25",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "20",
            "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
            "HEADRACE_SCHEDULE": "none",
            **env,
        }

    def start(self) -> None:
        """Make the database and the pools, start the processes, wait until the API answers."""
        port = embedded.start(self._database, database="airflow", user="airflow").port
        place = f"airflow:{embedded.password(self._database)}@127.0.0.1:{port}/airflow"
        self.env |= {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{place}",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": f"postgresql+asyncpg://{place}",
        }
        for words in (("db", "migrate"), ("pools", "import", str(DAGS / "pools.json"))):
            subprocess.run([AIRFLOW, *words], env=self.env, check=True, capture_output=True)
        for name in ("api-server", "dag-processor", "triggerer", "scheduler"):
            self.launch(name)
        self.until(self._answers, 600)

    def launch(self, name: str) -> None:
        """Start one of the processes."""
        words = {"scheduler": ["--skip-serve-logs"], "triggerer": ["--skip-serve-logs"]}.get(name, [])
        with (self.home / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [AIRFLOW, name, *words],
                env=self.env,
                cwd=self.home,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """SIGKILL to one of the processes, and to what it has started, as when its machine goes."""
        process = self._processes.pop(name)
        for pid in [*_children(process.pid), process.pid]:
            _signal(pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End all."""
        for process in self._processes.values():
            process.terminate()
        for name in list(self._processes):
            try:
                self._processes[name].wait(15)
            except subprocess.TimeoutExpired:
                self.kill(name)
        self._processes.clear()
        embedded.stop(self._database)

    def database_rows(self) -> dict[str, bytes]:
        """The rows of each table of Airflow's database, as PostgreSQL's COPY writes them."""
        contents: dict[str, bytes] = {}
        place = {"host": "127.0.0.1", "port": embedded.status(self._database).port, "dbname": "airflow"}
        with psycopg.connect(user="airflow", password=embedded.password(self._database), **place) as conn:
            for (table,) in conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall():
                statement = sql.SQL("COPY {} TO STDOUT").format(sql.Identifier(table))
                with conn.cursor() as cursor, cursor.copy(statement) as copy:
                    contents[table] = b"".join(copy)
        return contents

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the REST API.

        Raises:
            urllib.error.URLError: it refuses, or does not answer.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def trigger(self, dag_id: str, conf: Mapping[str, str], run_id: str) -> None:
        """Start a run by hand, of a DAG that is unpaused where it was paused."""
        self.until(lambda: self._known(dag_id), 600)
        self.api("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": False})
        body = {"dag_run_id": run_id, "conf": dict(conf), "logical_date": None}
        self.api("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)

    def runs(self, dag_id: str) -> dict[str, str]:
        """The states of its runs."""
        dag_runs = self.api("GET", f"/api/v2/dags/{dag_id}/dagRuns?limit=100")["dag_runs"]
        return {r["dag_run_id"]: r["state"] for r in dag_runs}

    def final_states(self, dag_id: str, runs: int = 1, seconds: float = 900) -> dict[str, str]:
        """Wait until a DAG has so many runs, and all of them have ended."""

        def look() -> dict[str, str] | None:
            states = self.runs(dag_id)
            return states if len(states) >= runs and all(s in FINAL_STATES for s in states.values()) else None

        return self.until(look, seconds)

    def tasks(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """The tasks of a run."""
        run = urllib.request.quote(run_id)  # type: ignore[attr-defined]
        instances = self.api("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run}/taskInstances?limit=100")["task_instances"]
        return {t["task_id"]: t for t in instances}

    def until(self, look: Callable[[], Any], seconds: float) -> Any:
        """Ask until the answer is true; gives it.

        Raises:
            TimeoutError: with the ends of the logs.
        """
        end = time.monotonic() + seconds
        while not (result := look()):
            if time.monotonic() > end:
                log_ends = [f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in self.home.glob("*.log")]
                raise TimeoutError("\n".join(log_ends))
            time.sleep(0.5)
        return result

    def _answers(self) -> bool:
        try:
            self._token = self.api("GET", "/auth/token")["access_token"]
            health = self.api("GET", "/api/v2/monitor/health")
        except (OSError, KeyError):
            return False
        return all(health[part]["status"] == "healthy" for part in ("scheduler", "triggerer", "dag_processor"))

    def _known(self, dag_id: str) -> bool:
        try:
            return bool(self.api("GET", f"/api/v2/dags/{dag_id}"))
        except urllib.error.HTTPError:
            return False


def _children(pid: int) -> list[int]:
    """All processes below one, the deepest first."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            below.setdefault(parent, []).append(int(entry.name))
    pids: list[int] = []

    def add(parent: int) -> None:
        for child in below.get(parent, []):
            add(child)
            pids.append(child)

    add(pid)
    return pids


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
