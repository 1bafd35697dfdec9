"""Server process: the paths of HTTP and their answers, and one event loop for HTTP and gRPC.

One thread computes long runs, another one loads models.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import json
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import grpc
import uvloop

from headrace.errors import UserError
from headrace.export.serve.grpc_service import listen, make_server
from headrace.export.serve.http_connection import App, Cancellable, Connection, Shared
from headrace.export.serve.http_request import Head
from headrace.export.serve.infer_json import RequestPlan, answer
from headrace.export.serve.loader import Loader, ServedModel, Service
from headrace.export.serve.model import Model
from headrace.export.serve.options import CLIENT_GONE, Access, Metrics, RequestError, RequestLimits, ServeOptions
from headrace.export.serve.tensors import Array, to_raw

_JSON, _RAW, _TEXT = "application/json", "application/octet-stream", "text/plain; version=0.0.4; charset=utf-8"
#: Paths that need no token, since probes have none.
_OPEN = (["health", "live"], ["health", "ready"])
#: Largest number of cached paths of models, and of cached answer heads of a request's header.
_PATHS, _SHAPES = 1000, 16
_ERROR = "an error of the server: see its log"

#: Connections that wait to be accepted.
BACKLOG = 2048
_POLL_SECONDS = 0.02
#: Number of new objects after which Python looks for garbage: its default.
_COLLECT_AFTER = 700


class HttpApp:
    """Application that answers the requests of a server; see `http_connection.App`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._access = Access(service.options.token)
        self._infer_paths: dict[str, tuple[str, str]] = {}
        self._answered: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, head: Head) -> ServedModel | None:
        """Return the model of an inference request, or None for another request.

        Raises:
            RequestError: the token (401) or the model (404) is missing, the method or coding is not supported, or the
                body is too long.
        """
        target = self._infer_paths.get(head.path)
        parts = [] if target else _parts(head)
        if parts[1:] not in _OPEN:
            self._access.check(head.authorization)
        self._service.check_size(head.length)
        if target is None and len(parts) > 3 and parts[-1] == "infer":
            target = _model(parts[:-1])
            if target is not None and self._service.has(*target) and len(self._infer_paths) < _PATHS:
                self._infer_paths[head.path] = target
        if target is None:
            return None
        if head.method != "POST":
            raise RequestError(405, "infer is asked by POST")
        if head.encoding not in (b"", b"identity"):
            raise RequestError(415, "bodies are taken as they are, without Content-Encoding")
        return self._service.find(*target)

    def take_bytes(self, earlier: int, more: int) -> None:
        """Count bytes of a body. Raises RequestError if it has too many (413), or all bodies together have (503)."""
        self._service.check_size(earlier + more)
        self._service.take_bytes(more)

    def give_back(self, count: int) -> None:
        """Uncount bytes of bodies whose requests are answered."""
        self._service.give_back(count)

    def start(self, target: object, body: bytes | memoryview, connection: Connection) -> Cancellable | None:
        """Begin to answer a request that has been admitted."""
        assert connection.head is not None
        if not isinstance(target, ServedModel):
            task = asyncio.get_running_loop().create_task(self._answer_other(connection.head, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        try:
            plan, outputs = self._submit(target, connection.head, body)
        except Exception as e:
            connection.answer(self._failure(e, connection))
            return None
        outputs.add_done_callback(partial(self._answer_infer, target.model, plan, connection))
        return outputs

    def refusal(self, error: RequestError, connection: Connection) -> bytes:
        """Return the answer that reports an error."""
        self._count(error.status, connection)
        more = "" if error.retry_after is None else f"retry-after: {error.retry_after}\r\n"
        body = _dumps({"error": error.message})
        return _head(error.status, _JSON, len(body), more) + body

    def client_gone(self, connection: Connection) -> None:
        """Count a request whose client has gone before its answer."""
        self._count(CLIENT_GONE, connection)

    def _submit(
        self, served: ServedModel, head: Head, body: bytes | memoryview
    ) -> tuple[RequestPlan, asyncio.Future[list[Array]]]:
        end = len(body) if head.json_bytes is None else head.json_bytes
        if end > len(body):
            raise RequestError(400, f"a body of {len(body):,} bytes; its JSON is said to have {end:,}")
        plan = served.plans.find(served.model, bytes(body[:end]), self._service.options.limits)
        return plan, served.batcher.submit(plan.blocks(body, end), plan.rows, plan.key, plan.timeout)

    def _answer_infer(
        self, model: Model, plan: RequestPlan, connection: Connection, outputs: asyncio.Future[list[Array]]
    ) -> None:
        if outputs.cancelled() or connection.is_gone:
            self.client_gone(connection)
            return
        try:
            answer_bytes = _infer_answer(model, plan, outputs.result())
            self._count(200, connection)
        except Exception as e:
            answer_bytes = self._failure(e, connection)
        connection.answer(answer_bytes)

    async def _answer_other(self, head: Head, connection: Connection) -> None:
        try:
            # The connection leaves the body out of an answer to HEAD (RFC 9110, 9.3.2).
            method = "GET" if head.method == "HEAD" else head.method
            status, content_type, body = await self._route(method, _parts(head))
            answer_bytes = _head(status, content_type, len(body)) + body
            self._count(status, connection)
        except Exception as e:
            answer_bytes = self._failure(e, connection)
        connection.answer(answer_bytes)

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

    async def _route(self, method: str, parts: list[str]) -> tuple[int, str, bytes]:
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
        target = _model(parts[:-1] if last else parts)
        if target is not None and last == "ready":
            return (200 if self._service.has(*target) else 404), _JSON, b""
        if target is not None and last == "config":
            return 200, _JSON, _dumps(self._service.config(*target))
        if target is not None and not last:
            return 200, _JSON, _dumps(self._service.metadata(*target))
        raise RequestError(404, f"there is no GET {'/' + '/'.join(parts)}"[:300])


def _infer_answer(model: Model, plan: RequestPlan, outputs: Sequence[Array]) -> bytes:
    """Return the answer of an inference request.

    If all outputs are raw numbers, the part before them is cached by the outputs' shapes.
    """
    shapes = tuple(x.shape for x in outputs)
    prefix = plan.answers.get(shapes)
    if prefix is not None:
        return b"".join((prefix, *(to_raw(outputs[index]) for index, _ in plan.outputs)))
    json_bytes, raws = answer(model, plan, outputs)
    more = f"inference-header-content-length: {len(json_bytes)}\r\n" if raws else ""
    prefix = _head(200, _RAW if raws else _JSON, len(json_bytes) + sum(map(len, raws)), more) + json_bytes
    is_fixed = all(raw and outputs[index].dtype.kind != "O" for index, raw in plan.outputs)
    if is_fixed and len(plan.answers) < _SHAPES:
        plan.answers[shapes] = prefix
    return b"".join((prefix, *raws))


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
    headers = f"content-type: {content_type}\r\ncontent-length: {length}\r\n{more}"
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{headers}\r\n".encode("ascii")


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


async def serve_http(
    app: App, limits: RequestLimits, taken: socket.socket, tls: ssl.SSLContext | None, grace: float
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: application that answers requests.
        limits: limits of requests.
        taken: bound socket.
        tls: context of TLS; None: no TLS.
        grace: seconds in which current requests may end; a second signal ends them at once.
    """
    loop = asyncio.get_running_loop()
    stop, force_stop = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (force_stop if stop.is_set() else stop).set())
    shared = Shared(app, limits)
    async with taking(shared, taken, tls):
        await stop.wait()
    for connection in list(shared.connections):
        connection.end()
    until = time.monotonic() + grace
    while shared.connections and time.monotonic() < until and not force_stop.is_set():
        await asyncio.sleep(_POLL_SECONDS)
    for connection in [*shared.connections, *shared.leaving]:
        connection.abort()


@asynccontextmanager
async def taking(shared: Shared, taken: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Accept connections during the block, then close the socket; accepted connections continue after it.

    Args:
        shared: registry of the accepted connections.
        taken: bound socket.
        tls: context of TLS; None: no TLS.
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        server = await loop.create_server(lambda: Connection(shared), sock=taken, backlog=BACKLOG)
        try:
            yield
        finally:
            server.close()
        return
    try:
        # An error of the task must end the server, which would otherwise run on without accepting connections.
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(_accept(shared, taken, tls))
            yield
            accepting.cancel()
    finally:
        taken.close()


async def _accept(shared: Shared, taken: socket.socket, tls: ssl.SSLContext) -> None:
    """Accept connections of TLS, and count each before its handshake, which costs more than a request.

    Above the limit they are closed at once, since a client cannot be answered before its handshake. The loop's own
    server would report a connection only after its handshake, and a failed one never.
    """
    loop = asyncio.get_running_loop()
    handshakes = set[asyncio.Task[None]]()
    try:
        while True:
            try:
                accepted, _ = await loop.sock_accept(taken)
            except OSError:  # the client has gone, or the process has too many open files for now
                await asyncio.sleep(_POLL_SECONDS)
                continue
            if len(shared.connections) + len(shared.opening) >= shared.limits.connections:
                accepted.close()
                continue
            task = _begin_handshake(shared, accepted, tls)
            handshakes.add(task)
            task.add_done_callback(handshakes.discard)
    finally:
        for task in handshakes:
            task.cancel()


def _begin_handshake(shared: Shared, accepted: socket.socket, tls: ssl.SSLContext) -> asyncio.Task[None]:
    """Start the handshake of an accepted connection, which counts as opening until it succeeds or fails."""
    connection = Connection(shared)
    shared.opening.add(connection)
    task = asyncio.get_running_loop().create_task(_shake_hands(shared, connection, accepted, tls))
    task.add_done_callback(lambda _: shared.opening.discard(connection))
    return task


async def _shake_hands(shared: Shared, connection: Connection, accepted: socket.socket, tls: ssl.SSLContext) -> None:
    loop, seconds = asyncio.get_running_loop(), shared.limits.receive_seconds
    with suppress(OSError):  # a failed or slow handshake is the client's fault
        await loop.connect_accepted_socket(lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=seconds)


logger = logging.getLogger(__name__)

#: Seconds in which current requests may end after the first signal.
_GRACE = 10
#: Seconds after which a waiting thread gets the interpreter; the thread of long runs needs it only for moments.
_SWITCH_SECONDS = 0.0005


def serve(options: ServeOptions, started: Callable[[str, str | None], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        options: options of the server.
        started: called once with the addresses of HTTP and gRPC, when the server accepts requests.

    Raises:
        UserError: the repository, an address or a file of TLS cannot be used.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, started))


async def _serve(options: ServeOptions, started: Callable[[str, str | None], None]) -> None:
    taken = _socket(options)
    tls = _tls(options)
    metrics = Metrics()
    with ThreadPoolExecutor(1, thread_name_prefix="run") as runs:
        loader = Loader(options, runs, metrics)
        service = Service(options, loader, metrics)
        try:
            await loader.start()
        except OSError as e:
            raise UserError(f"{options.repository} cannot be read: {e}") from None
        # Exclude permanent objects from collections. These are frequent here, since a long one delays answers; other
        # commands of `headrace` collect rarely.
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        polling = asyncio.create_task(loader.poll()) if options.control == "poll" else None
        over_grpc, grpc_address = await _start_grpc(service)
        try:
            http_address = f"{'http' if options.certificate is None else 'https'}://{_address(taken)}"
            started(http_address, grpc_address)
            await serve_http(HttpApp(service), options.limits, taken, tls, _GRACE)
        finally:
            if over_grpc is not None:
                await over_grpc.stop(_GRACE)
            if polling is not None:
                polling.cancel()
                with suppress(asyncio.CancelledError):
                    await polling
            loader.close()


async def _start_grpc(service: Service) -> tuple[grpc.aio.Server | None, str | None]:
    options = service.options
    if options.grpc_port is None:
        return None, None
    server = make_server(service)
    try:
        port = listen(server, service)
    except RuntimeError:
        raise UserError(f"port {options.grpc_port} of {options.host} is taken: choose --grpc-port") from None
    await server.start()
    return server, f"{options.host}:{port}"


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    if options.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.certificate, options.key)
    except (OSError, ssl.SSLError) as e:
        raise UserError(f"TLS: {options.certificate}, {options.key}: {e}") from None
    return context


def _socket(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((options.host, options.http_port))
        taken.listen(BACKLOG)
    except (OSError, OverflowError) as e:
        taken.close()
        raise UserError(f"port {options.http_port} of {options.host} cannot be taken: {e}: choose --port") from None
    taken.setblocking(False)
    return taken


def _address(taken: socket.socket) -> str:
    host, port = taken.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
