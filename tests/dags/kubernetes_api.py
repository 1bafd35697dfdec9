"""Subset of Kubernetes' API that a pod's operator uses, over HTTP; containers are processes of this machine.

No cluster: nothing is scheduled, no image is pulled, a volume is not mounted. A pod is `Pending` at its first looks,
then `Running` while its process is, then `Succeeded` or `Failed` with the container's exit code and the end of its log.
"""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PENDING_LOOKS = 2
_PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+)(/log)?)?")
_SECRETS = re.compile(r"/api/v1/namespaces/([^/]+)/secrets(?:/([^/]+))?")
_EVENTS = re.compile(r".*/events")


class Cluster:
    """State of the API server.

    Args:
        folder: where containers' logs go.
        token: the bearer token that each request must have.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token
        self.pods: dict[str, dict[str, Any]] = {}
        #: Names, in order; also of those that are gone.
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.secrets: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._looks: dict[str, int] = {}
        self._lock = threading.RLock()

    def create(self, namespace: str, pod: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = pod["metadata"]["name"]
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            pod["metadata"] |= {"namespace": namespace, "uid": f"uid-{len(self.created)}", "creationTimestamp": now}
            pod["status"] = {"phase": "Pending", "startTime": now}
            self.pods[name], self._looks[name] = pod, 0
            self.created.append(pod)
            return pod

    def look(self, name: str) -> dict[str, Any] | None:
        """A pod as it is now."""
        with self._lock:
            pod = self.pods.get(name)
            if pod is None:
                return None
            self._looks[name] += 1
            if self._looks[name] > _PENDING_LOOKS:
                if name not in self._processes:
                    self._processes[name] = self._start(name, pod)
                self._update(name, pod, self._processes[name].poll())
            return pod

    def delete(self, name: str) -> dict[str, Any] | None:
        with self._lock:
            if name in self._processes and self._processes[name].poll() is None:
                self._processes[name].kill()
            self.deleted.append(name)
            return self.pods.pop(name, None)

    def log(self, name: str) -> bytes:
        path = self.folder / f"{name}.log"
        return path.read_bytes() if path.exists() else b""

    def _start(self, name: str, pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        container = pod["spec"]["containers"][0]
        env = {"PATH": os.environ["PATH"]} | {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}
        for source in container.get("envFrom", []):
            secret = self.secrets[source["secretRef"]["name"]]
            env |= {key: base64.b64decode(value).decode() for key, value in secret.get("data", {}).items()}
            env |= secret.get("stringData", {})
        words = [*container["command"], *container.get("args", [])]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def _update(self, name: str, pod: dict[str, Any], code: int | None) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        state: dict[str, Any] = {"running": {"startedAt": now}}
        if code is not None:
            end = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now}
            policy = pod["spec"]["containers"][0].get("terminationMessagePolicy")
            if code and policy == "FallbackToLogsOnError":
                end["message"] = self.log(name).decode()[-2048:]
            state = {"terminated": end}
        container = pod["spec"]["containers"][0]
        status = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        status |= {"ready": code is None, "state": state}
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        pod["status"] |= {"phase": phase, "containerStatuses": [status]}


@contextmanager
def serve(cluster: Cluster) -> Iterator[int]:
    """The API on loopback; gives its port."""

    class Api(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if self.headers["Authorization"] != f"Bearer {cluster.token}":
                self._send(401, {"kind": "Status", "code": 401, "reason": "Unauthorized"})
                return
            url = urlsplit(self.path)
            if match := _PODS.fullmatch(url.path):
                self._pods(match[1], match[2], bool(match[3]), body, parse_qs(url.query))
            elif match := _SECRETS.fullmatch(url.path):
                self._secrets(match[2], body)
            elif _EVENTS.fullmatch(url.path):
                self._send(200, {"kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": []})
            else:
                self._send(404, {"kind": "Status", "code": 404})

        def _pods(self, namespace: str, name: str | None, log: bool, body: Any, query: dict[str, list[str]]) -> None:
            if log:
                self._send(200, cluster.log(name or ""))
            elif name is None and self.command == "POST":
                self._send(201, cluster.create(namespace, body))
            elif name is None:
                items = [p for p in list(cluster.pods.values()) if _selected(p, query.get("labelSelector", [""])[0])]
                self._send(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
            else:
                pod = cluster.delete(name) if self.command == "DELETE" else cluster.look(name)
                if pod is not None and self.command == "PATCH":
                    pod["metadata"]["labels"] |= body["metadata"]["labels"]
                self._send(*((404, {"kind": "Status", "code": 404}) if pod is None else (200, pod)))

        def _secrets(self, name: str | None, body: Any) -> None:
            name = name or body["metadata"]["name"]
            if self.command == "POST" and name in cluster.secrets:
                self._send(409, {"kind": "Status", "code": 409, "reason": "AlreadyExists"})
                return
            cluster.secrets[name] = body
            self._send(201, body)

        def _send(self, code: int, answer: Any) -> None:
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, bytes) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def kube_config(port: int, token: str) -> dict[str, Any]:
    """Return the configuration that a client of the API needs."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": token}}],
    }


def _selected(pod: dict[str, Any], selector: str) -> bool:
    """Return whether a selector chooses a pod, by equality and absence, as the operator writes it."""
    labels = pod["metadata"].get("labels", {})
    for word in filter(None, selector.split(",")):
        if word.startswith("!"):
            if word[1:] in labels:
                return False
        elif "!=" in word:
            key, _, value = word.partition("!=")
            if labels.get(key) == value:
                return False
        else:
            key, _, value = word.partition("=")
            if labels.get(key) != value:
                return False
    return True
