"""The HTTP side, as an ASGI application."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import unquote

from headrace.serve.access import Access
from headrace.serve.errors import RequestError
from headrace.serve.infer_json import answer, plan_of
from headrace.serve.service import Service

logger = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
_JSON, _RAW, _TEXT = b"application/json", b"application/octet-stream", b"text/plain; version=0.0.4; charset=utf-8"
_HEADER_LENGTH = b"inference-header-content-length"
#: Without a token too: who probes has none.
_OPEN = (["health", "live"], ["health", "ready"])


class HttpApp:
    """Answers requests of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._access = Access(service.options.token)
        self._infer_paths: dict[str, tuple[str, str]] = {}
        self._answered: dict[int, Any] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        taken = [0]
        more: list[tuple[bytes, bytes]] = []
        try:
            status, content_type, body = await self._respond(scope, receive, taken, more)
        except RequestError as e:
            status, content_type, body = e.status, _JSON, _dumps({"error": e.message})
            if e.retry_after is not None:
                more = [(b"retry-after", b"%d" % e.retry_after)]
        except _Gone:
            return
        except Exception:
            logger.exception("a request to %s failed", scope["path"][:200])
            status, content_type, body = 500, _JSON, _dumps({"error": "an error of the server: see its log"})
        finally:
            self._service.give_back(taken[0])
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self._count(status, time.perf_counter() - started)

    def _count(self, status: int, seconds: float) -> None:
        counter = self._answered.get(status)
        if counter is None:
            counter = self._answered[status] = self._service.metrics.requests.labels("http", str(status))
        counter.inc()
        self._service.metrics.seconds.observe(seconds)

    async def _respond(
        self, scope: dict[str, Any], receive: Receive, taken: list[int], more: list[tuple[bytes, bytes]]
    ) -> tuple[int, bytes, bytes]:
        path, method = scope["path"], scope["method"]
        asked = self._infer_paths.get(path)
        parts = [] if asked else [unquote(p) for p in path.split("/")[1:]]
        length = header_length = None
        authorization = encoding = b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = _number("Content-Length", value)
            elif name == _HEADER_LENGTH:
                header_length = _number("Inference-Header-Content-Length", value)
            elif name == b"authorization":
                authorization = value
            elif name == b"content-encoding":
                encoding = value
        if parts[1:] not in _OPEN:
            self._access.check(authorization)
        if asked is None and len(parts) > 3 and parts[-1] == "infer":
            asked = _model(parts[:-1])
            if asked is not None and self._service.has(*asked) and len(self._infer_paths) < 1000:
                self._infer_paths[path] = asked
        if asked is None:
            if method == "POST":
                await _body(self._service, receive, length, taken)
            return await self._other(method, parts)
        if method != "POST":
            raise RequestError(405, "infer is asked by POST")
        if encoding not in (b"", b"identity"):
            raise RequestError(415, "bodies are taken as they are, without Content-Encoding")
        served = self._service.find(*asked)
        body = await _body(self._service, receive, length, taken)
        if header_length is not None and header_length > len(body):
            raise RequestError(400, f"a body of {len(body):,} bytes; its JSON is said to have {header_length:,}")
        end = len(body) if header_length is None else header_length
        plan = plan_of(served, body[:end] if header_length is not None else body, self._service.options.limits)
        outputs = await served.batcher.submit(plan.feeds(body, end), plan.rows, plan.key, plan.timeout)
        content, json_bytes = answer(served.model, plan, outputs)
        if json_bytes is None:
            return 200, _JSON, content
        more.append((_HEADER_LENGTH, b"%d" % json_bytes))
        return 200, _RAW, content

    async def _other(self, method: str, parts: list[str]) -> tuple[int, bytes, bytes]:
        service = self._service
        match method, parts:
            case "GET", ["v2", "health", "live"]:
                return 200, _JSON, b""
            case "GET", ["v2", "health", "ready"]:
                return (200 if service.ready else 503), _JSON, b""
            case "GET", ["v2" | "v2/"] | ["v2", ""]:
                return 200, _JSON, _dumps(service.server())
            case "GET", ["metrics"]:
                service.metrics.pending_bytes.set(service.pending_bytes)
                return 200, _TEXT, service.metrics.text()
            case "POST", ["v2", "repository", "index"]:
                return 200, _JSON, _dumps(await service.loader.index())
            case "POST", ["v2", "repository", "models", name, "load"]:
                await service.loader.load(name)
                return 200, _JSON, b"{}"
            case "POST", ["v2", "repository", "models", name, "unload"]:
                await service.loader.unload(name)
                return 200, _JSON, b"{}"
            case "GET", ["v2", "models", *_]:
                return self._of_model(parts)
        raise RequestError(404, f"there is no {method} {'/' + '/'.join(parts)}"[:300])

    def _of_model(self, parts: list[str]) -> tuple[int, bytes, bytes]:
        last = parts[-1] if len(parts) in (4, 6) else ""
        asked = _model(parts[:-1] if last else parts)
        if asked is not None and last == "ready":
            return (200 if self._service.has(*asked) else 404), _JSON, b""
        if asked is not None and last == "config":
            return 200, _JSON, _dumps(self._service.config(*asked))
        if asked is not None and not last:
            return 200, _JSON, _dumps(self._service.metadata(*asked))
        raise RequestError(404, f"there is no GET {'/' + '/'.join(parts)}"[:300])


class _Gone(Exception):
    """The client has closed the connection."""


def _model(parts: list[str]) -> tuple[str, str] | None:
    match parts:
        case ["v2", "models", name]:
            return name, ""
        case ["v2", "models", name, "versions", version]:
            return name, version
    return None


def _number(name: str, value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise RequestError(400, f"{name} must be a number of bytes")
    return int(value)


async def _body(service: Service, receive: Receive, length: int | None, taken: list[int]) -> bytes:
    service.check_size(length or 0)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        part = message.get("body", b"")
        size += len(part)
        service.check_size(size)
        service.take_bytes(len(part))
        taken[0] = size
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
