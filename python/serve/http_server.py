"""Takes connections of HTTP until the process is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import time

from headrace.serve.http_connection import App, Connection, Shared
from headrace.serve.options import Limits

#: Connections that wait to be accepted.
BACKLOG = 2048
_POLL_SECONDS = 0.02


async def serve_http(app: App, limits: Limits, taken: socket.socket, tls: ssl.SSLContext | None, grace: float) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: what answers.
        limits: of requests.
        taken: bound socket.
        tls: None: without.
        grace: seconds in which requests that have begun may end; a second signal ends them at once.
    """
    loop = asyncio.get_running_loop()
    told, told_again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (told_again if told.is_set() else told).set())
    shared = Shared(app, limits)
    server = await loop.create_server(
        lambda: Connection(shared),
        sock=taken,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else limits.receive_seconds,
        backlog=BACKLOG,
    )
    await told.wait()
    server.close()
    for connection in list(shared.connections):
        connection.end()
    until = time.monotonic() + grace
    while shared.connections and time.monotonic() < until and not told_again.is_set():
        await asyncio.sleep(_POLL_SECONDS)
    for connection in list(shared.connections):
        connection.abort()
