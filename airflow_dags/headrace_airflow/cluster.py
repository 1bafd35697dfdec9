"""Applications that run on a cluster by themselves: sent by REST or spark-submit, then known by an id and a state.

Standalone: the REST API of Spark's master takes Python programs only by way of SparkSubmit itself, which spark-submit's
own cluster mode refuses; it tells a driver's state and no exit code. YARN: the ResourceManager's REST API, whose
diagnostics name the exit code.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_TIMEOUT_SECONDS = 30
_EXITED = re.compile(r"exited with (?:status|exitCode:?|code) (\d+)", re.IGNORECASE)
#: States of Spark's master (DriverState) and of YARN in which nothing more will happen.
_ENDED = ("FINISHED", "FAILED", "KILLED", "ERROR", "NOT_FOUND")


@dataclass(frozen=True)
class State:
    """Of an application."""

    ended: bool
    done: bool
    name: str
    #: None: not told.
    code: int | None = None
    message: str = ""

    def as_event(self) -> dict[str, Any]:
        """For a trigger's event."""
        return asdict(self)


@dataclass(frozen=True)
class Cluster:
    """What knows the applications: `kind` is standalone or yarn, `rest` the address of its API."""

    kind: str
    rest: str

    def state(self, application: str) -> State:
        """Of an application, by its id.

        Raises:
            OSError: the API cannot be asked now.
        """
        if self.kind == "yarn":
            found = _ask(f"{self.rest}/ws/v1/cluster/apps/{application}").get("app", {})
            name, message = str(found.get("state", "UNKNOWN")), str(found.get("diagnostics") or "").strip()
            done = name == "FINISHED" and found.get("finalStatus") == "SUCCEEDED"
        else:
            found = _ask(f"{self.rest}/v1/submissions/status/{application}")
            if not found.get("success"):
                # The master has been started anew without its drivers, or is being so.
                return State(True, False, "NOT_FOUND", message=str(found.get("message") or ""))
            name, message = str(found.get("driverState", "UNKNOWN")), str(found.get("message") or "").strip()
            done = name == "FINISHED"
        code = _EXITED.search(message)
        return State(name in _ENDED, done, name, 0 if done else int(code[1]) if code else None, message)

    def submit(self, program: str, words: Sequence[str], conf: Mapping[str, str], env: Mapping[str, str]) -> str:
        """Have the standalone master run a Python program as a driver on one of its workers.

        Args:
            program: its path, the same on each worker.
            words: its arguments.
            conf: Spark properties; `spark.master` among them.
            env: variables for the driver's process.

        Returns:
            The driver's id.

        Raises:
            RuntimeError: the master refuses.
            OSError: it cannot be reached.
        """
        options = [w for key, value in sorted(conf.items()) for w in ("--conf", f"{key}={value}")]
        request = {
            "action": "CreateSubmissionRequest",
            "appResource": f"file:{program}",
            "mainClass": "org.apache.spark.deploy.SparkSubmit",
            "appArgs": ["--master", conf["spark.master"], "--deploy-mode", "client", *options, program, *words],
            "clientSparkVersion": "4.0",
            "environmentVariables": dict(env),
            "sparkProperties": {
                "spark.app.name": conf.get("spark.app.name", "headrace"),
                "spark.master": conf["spark.master"],
                "spark.submit.deployMode": "cluster",
                "spark.driver.supervise": "false",
            },
        }
        found = _ask(f"{self.rest}/v1/submissions/create", request)
        if not found.get("success"):
            raise RuntimeError(f"{self.rest} refuses the application: {found.get('message') or found}")
        return str(found["submissionId"])


def read_properties(path: str) -> dict[str, str]:
    """A file that `headrace spark-properties` has written: lines key=value, backslashes escaped."""
    with open(path, encoding="utf-8") as file:
        lines = [line.rstrip("\n") for line in file if line.strip() and not line.startswith("#")]
    pairs = (line.partition("=") for line in lines)
    escapes = {"n": "\n", "r": "\r", "t": "\t"}
    return {key: re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), value) for key, _, value in pairs}


def _ask(url: str, body: Any = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json;charset=UTF-8"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as e:
        if e.code >= 500:
            raise
        try:
            found = json.load(e)
        except ValueError:
            raise e from None
    return found if isinstance(found, dict) else {}
