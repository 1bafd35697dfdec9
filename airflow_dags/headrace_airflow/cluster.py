"""Applications that run on a cluster by themselves: sent by REST or spark-submit, then known by an id and a state.

Standalone: the REST API of Spark's master takes Python programs only by way of SparkSubmit itself, which spark-submit's
own cluster mode refuses; it tells a driver's state and no exit code, which `python/jobs/run_command.py` therefore says
in the driver's log, and the worker's page gives. YARN: the ResourceManager's REST API, whose diagnostics name the code.
An application that has ended before its Spark session was there has Spark's code for that, 13, as its first one.
"""

from __future__ import annotations

import json
import logging
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger("headrace.airflow")

_TIMEOUT_SECONDS = 30
#: As much of the end of a driver's log as is read.
_LOG_BYTES = 20_000
_EXITED = re.compile(r"exited with\s+(?:status|exitCode:?|code)\s+(\d+)", re.IGNORECASE)
#: As YARN's application master says it of the program itself.
_USER_EXITED = re.compile(r"User application exited with (?:status )?(\d+)")
#: A cluster does not know the application: it forgets old ones, or has been started anew without them.
NOT_FOUND = "NOT_FOUND"
#: The last line of `python/jobs/run_command.py`.
_ENDS = re.compile(r"^headrace ends with exit code (\d+)$", re.MULTILINE)
#: States of Spark's master (DriverState) and of YARN in which nothing more will happen.
_FINAL_STATES = ("FINISHED", "FAILED", "KILLED", "ERROR", NOT_FOUND)


@dataclass(frozen=True)
class State:
    """State of an application."""

    is_final: bool
    done: bool
    name: str
    #: None: not told.
    code: int | None = None
    message: str = ""

    def as_event(self) -> dict[str, Any]:
        """Return the fields of a trigger's event."""
        return asdict(self)


@dataclass(frozen=True)
class Cluster:
    """Service that knows the applications: `kind` is standalone or yarn, `rest` the address of its API.

    Of a standalone master `web` is the address of its pages: they name the workers, which have the drivers' logs.
    """

    kind: str
    rest: str
    web: str = ""

    def state(self, application: str) -> State:
        """Return the state of an application by its id.

        Raises:
            OSError: the API cannot be asked now.
        """
        if self.kind == "yarn":
            return self._yarn_state(application)
        status = _ask(f"{self.rest}/v1/submissions/status/{application}")
        if not status.get("success"):
            # The master has been started anew without its drivers, or is being so.
            return State(True, False, NOT_FOUND, message=str(status.get("message") or ""))
        name, message = str(status.get("driverState", "UNKNOWN")), str(status.get("message") or "").strip()
        done = name == "FINISHED"
        if name == "FAILED":
            log_end = self._end_of_log(application, str(status.get("workerId")))
            if ends := _ENDS.findall(log_end):
                return State(True, False, name, int(ends[-1]), last_words(_ENDS.sub("", log_end)))
        code = _EXITED.search(message)
        return State(name in _FINAL_STATES, done, name, 0 if done else int(code[1]) if code else None, message)

    def _yarn_state(self, application: str) -> State:
        answer = _ask(f"{self.rest}/ws/v1/cluster/apps/{application}")
        if "RemoteException" in answer:
            return State(True, False, NOT_FOUND, message=str(answer["RemoteException"].get("message") or ""))
        if "state" not in answer.get("app", {}):
            raise OSError(f"{self.rest} tells no state of {application}")
        app = answer["app"]
        name, diagnostics = str(app["state"]), str(app.get("diagnostics") or "").strip()
        if name not in _FINAL_STATES:
            return State(False, False, name, message=diagnostics)
        if name == "FINISHED" and app.get("finalStatus") == "SUCCEEDED":
            return State(True, True, name, 0, diagnostics)
        program = _USER_EXITED.search(diagnostics)
        code = program or _EXITED.search(diagnostics)
        # What follows the first line is the end of the application master's log, traces and all.
        message = program[0] if program else diagnostics.partition("\n")[0]
        page = f"; its log: {app['amContainerLogs']}" if app.get("amContainerLogs") else ""
        return State(True, False, name, int(code[1]) if code else None, message + page)

    def _end_of_log(self, driver: str, worker: str) -> str:
        """Return the last output of a driver of the standalone master; empty where the pages cannot be read."""
        query = urllib.parse.urlencode({"driverId": driver, "logType": "stdout", "byteLength": _LOG_BYTES})
        try:
            workers = _ask(f"{self.web}/json/").get("workers", [])
            page = next(w["webuiaddress"] for w in workers if w["id"] == worker)
            with urllib.request.urlopen(f"{page}/log/?{query}", timeout=_TIMEOUT_SECONDS) as answer:
                return str(answer.read().decode(errors="replace"))
        except (OSError, ValueError, StopIteration) as e:
            log.warning("the log of %s cannot be read by %s: %s", driver, self.web or "no page", e)
            return ""

    def submit(
        self, master: str, program: str, words: Sequence[str], env: Mapping[str, str], name: str, memory: str
    ) -> str:
        """Have the standalone master run a Python program as a driver on one of its workers.

        Args:
            master: its URL.
            program: its path, the same on each worker.
            words: its arguments.
            env: variables for the driver's process.
            name: what the master's page calls it.
            memory: what the worker counts for it, as Spark spells it: the program has a JVM of its own.

        Returns:
            The driver's id.

        Raises:
            RuntimeError: the master refuses.
            OSError: it cannot be reached.
        """
        request = {
            "action": "CreateSubmissionRequest",
            "appResource": f"file:{program}",
            "mainClass": "org.apache.spark.deploy.SparkSubmit",
            "appArgs": ["--master", "local", program, *words],
            "clientSparkVersion": "4.0",
            "environmentVariables": dict(env),
            "sparkProperties": {
                "spark.app.name": name,
                "spark.master": master,
                "spark.submit.deployMode": "cluster",
                "spark.driver.supervise": "false",
                "spark.driver.memory": memory,
            },
        }
        answer = _ask(f"{self.rest}/v1/submissions/create", request)
        if not answer.get("success"):
            raise RuntimeError(f"{self.rest} refuses the application: {answer.get('message') or answer}")
        return str(answer["submissionId"])


def last_words(text: str) -> str:
    """Return the end of a program's output: its own message where there is one."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return "\n".join(errors[-1:] or lines[-5:])


def _ask(url: str, body: Any = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json;charset=UTF-8"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            content = answer.read()
        try:
            parsed = json.loads(content)
        except ValueError:
            # A standby ResourceManager that knows no active one answers with a page, and that all is well.
            raise OSError(f"{url} answers no JSON: {content[:200].decode(errors='replace')}") from None
    except urllib.error.HTTPError as e:
        if e.code >= 500:
            raise
        try:
            parsed = json.load(e)
        except ValueError:
            raise e from None
    return parsed if isinstance(parsed, dict) else {}
