"""Server process: one event loop for both protocols, one thread for long runs, one for loading."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import uvloop

from headrace.errors import UserError
from headrace.export.serve.grpc_service import listen, make_server
from headrace.export.serve.http_server import BACKLOG, HttpApp, serve_http
from headrace.export.serve.loader import Loader, Service
from headrace.export.serve.metrics import Metrics
from headrace.export.serve.options import ServeOptions

logger = logging.getLogger(__name__)

#: Seconds in which requests that have begun may end when the server is told to.
_GRACE = 10
#: After which a thread that waits for the interpreter is given it: a run's thread needs it for moments only.
_SWITCH_SECONDS = 0.0005


def serve(options: ServeOptions, started: Callable[[str, str | None], None]) -> None:
    """Serve until the process is told to end (SIGINT, SIGTERM).

    Args:
        options: of the server.
        started: called once with the addresses of HTTP and gRPC, when requests are taken.

    Raises:
        UserError: the repository, an address, or a file of TLS cannot be had.
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
        # What stays is not looked through again at each collection.
        gc.freeze()
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
