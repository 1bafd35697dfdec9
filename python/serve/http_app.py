"""The HTTP side: what is asked by which path, and its answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from headrace.serve.access import Access
from headrace.serve.catalogue import Served
from headrace.serve.errors import CLIENT_GONE, RequestError
from headrace.serve.http_connection import Cancellable, Connection
from headrace.serve.http_head import Head
from headrace.serve.infer_json import Plan, answer
from headrace.serve.model import Model
from headrace.serve.service import Service
from headrace.serve.tensors import Array, to_raw

logger = logging.getLogger(__name__)

_JSON, _RAW, _TEXT = "application/json", "application/octet-stream", "text/plain; version=0.0.4; charset=utf-8"
#: Without a token too: who probes has none.
_OPEN = (["health", "live"], ["health", "ready"])
#: Paths of models that are kept; shapes of answers that are kept of a request's header.
_PATHS, _SHAPES = 1000, 16
_ERROR = "an error of the server: see its log"


class HttpApp:
    """Answers requests of one server: see `http_connection.App`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._access = Access(service.options.token)
        self._infer_paths: dict[str, tuple[str, str]] = {}
        self._answered: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, head: Head) -> Served | None:
        """The model that is asked for answers; None: the request asks for something else.

        Raises:
            RequestError: no token (401), no such model (404), another method or coding, a body that is too long.
        """
        asked = self._infer_paths.get(head.path)
        parts = [] if asked else _parts(head)
        if parts[1:] not in _OPEN:
            self._access.check(head.authorization)
        self._service.check_size(head.length)
        if asked is None and len(parts) > 3 and parts[-1] == "infer":
            asked = _model(parts[:-1])
            if asked is not None and self._service.has(*asked) and len(self._infer_paths) < _PATHS:
                self._infer_paths[head.path] = asked
        if asked is None:
            return None
        if head.method != "POST":
            raise RequestError(405, "infer is asked by POST")
        if head.encoding not in (b"", b"identity"):
            raise RequestError(415, "bodies are taken as they are, without Content-Encoding")
        return self._service.find(*asked)

    def take_bytes(self, before: int, more: int) -> None:
        """Count bytes of a body. Raises RequestError: they are too many (413), with those of others (503)."""
        self._service.check_size(before + more)
        self._service.take_bytes(more)

    def give_back(self, count: int) -> None:
        """They have been answered."""
        self._service.give_back(count)

    def start(self, asked: object, body: bytes | memoryview, connection: Connection) -> Cancellable | None:
        """Begin to answer a request that has been admitted."""
        assert connection.head is not None
        if not isinstance(asked, Served):
            task = asyncio.get_running_loop().create_task(self._answer_other(connection.head, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        try:
            plan, outputs = self._submit(asked, connection.head, body)
        except Exception as e:
            connection.answer(self._failure(e, connection))
            return None
        outputs.add_done_callback(partial(self._answer_infer, asked.model, plan, connection))
        return outputs

    def refusal(self, error: RequestError, connection: Connection) -> bytes:
        """The answer that says an error."""
        self._count(error.status, connection)
        more = "" if error.retry_after is None else f"retry-after: {error.retry_after}\r\n"
        body = _dumps({"error": error.message})
        return _head(error.status, _JSON, len(body), more) + body

    def gone(self, connection: Connection) -> None:
        """Count a request that is not answered: its client has gone."""
        self._count(CLIENT_GONE, connection)

    def _submit(self, served: Served, head: Head, body: bytes | memoryview) -> tuple[Plan, asyncio.Future[list[Array]]]:
        end = len(body) if head.json_bytes is None else head.json_bytes
        if end > len(body):
            raise RequestError(400, f"a body of {len(body):,} bytes; its JSON is said to have {end:,}")
        plan = served.plans.of(served.model, bytes(body[:end]), self._service.options.limits)
        return plan, served.batcher.submit(plan.blocks(body, end), plan.rows, plan.key, plan.timeout)

    def _answer_infer(
        self, model: Model, plan: Plan, connection: Connection, outputs: asyncio.Future[list[Array]]
    ) -> None:
        if outputs.cancelled() or connection.is_gone:
            self.gone(connection)
            return
        try:
            found = _infer_answer(model, plan, outputs.result())
            self._count(200, connection)
        except Exception as e:
            found = self._failure(e, connection)
        connection.answer(found)

    async def _answer_other(self, head: Head, connection: Connection) -> None:
        try:
            # The connection leaves the body out of an answer to HEAD (RFC 9110, 9.3.2).
            method = "GET" if head.method == "HEAD" else head.method
            status, content_type, body = await self._other(method, _parts(head))
            found = _head(status, content_type, len(body)) + body
            self._count(status, connection)
        except Exception as e:
            found = self._failure(e, connection)
        connection.answer(found)

    def _failure(self, e: Exception, connection: Connection) -> bytes:
        if not isinstance(e, RequestError):
            path = connection.head.path if connection.head is not None else ""
            logger.error("a request to %s failed", path[:200], exc_info=e)
            e = RequestError(500, _ERROR)
        return self.refusal(e, connection)

    def _count(self, status: int, connection: Connection) -> None:
        counter = self._answered.get(status)
        if counter is None:
            counter = self._answered[status] = self._service.metrics.requests.labels("http", str(status))
        counter.inc()
        if connection.head is not None:
            self._service.metrics.seconds.observe(time.perf_counter() - connection.started)

    async def _other(self, method: str, parts: list[str]) -> tuple[int, str, bytes]:
        service = self._service
        match method, parts:
            case "GET", ["v2", "health", "live"]:
                return 200, _JSON, b""
            case "GET", ["v2", "health", "ready"]:
                return (200 if service.ready else 503), _JSON, b""
            case "GET", ["v2"] | ["v2", ""]:
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

    def _of_model(self, parts: list[str]) -> tuple[int, str, bytes]:
        last = parts[-1] if len(parts) in (4, 6) else ""
        asked = _model(parts[:-1] if last else parts)
        if asked is not None and last == "ready":
            return (200 if self._service.has(*asked) else 404), _JSON, b""
        if asked is not None and last == "config":
            return 200, _JSON, _dumps(self._service.config(*asked))
        if asked is not None and not last:
            return 200, _JSON, _dumps(self._service.metadata(*asked))
        raise RequestError(404, f"there is no GET {'/' + '/'.join(parts)}"[:300])


def _infer_answer(model: Model, plan: Plan, outputs: Sequence[Array]) -> bytes:
    """With numbers that are all raw, what comes before them is the same for outputs of the same shapes."""
    shapes = tuple(x.shape for x in outputs)
    before = plan.answers.get(shapes)
    if before is not None:
        return b"".join((before, *(to_raw(outputs[index]) for index, _ in plan.outputs)))
    said, raws = answer(model, plan, outputs)
    more = f"inference-header-content-length: {len(said)}\r\n" if raws else ""
    before = _head(200, _RAW if raws else _JSON, len(said) + sum(map(len, raws)), more) + said
    is_fixed = all(raw and outputs[index].dtype.kind != "O" for index, raw in plan.outputs)
    if is_fixed and len(plan.answers) < _SHAPES:
        plan.answers[shapes] = before
    return b"".join((before, *raws))


def _parts(head: Head) -> list[str]:
    return [unquote(part) for part in head.path.split("/")[1:]]


def _model(parts: list[str]) -> tuple[str, str] | None:
    match parts:
        case ["v2", "models", name]:
            return name, ""
        case ["v2", "models", name, "versions", version]:
            return name, version
    return None


def _head(status: int, content_type: str, length: int, more: str = "") -> bytes:
    said = f"content-type: {content_type}\r\ncontent-length: {length}\r\n{more}"
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{said}\r\n".encode("ascii")


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
