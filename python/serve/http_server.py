"""Takes connections of HTTP until the process is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

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
    async with taking(shared, taken, tls):
        await told.wait()
    for connection in list(shared.connections):
        connection.end()
    until = time.monotonic() + grace
    while shared.connections and time.monotonic() < until and not told_again.is_set():
        await asyncio.sleep(_POLL_SECONDS)
    for connection in [*shared.connections, *shared.leaving]:
        connection.abort()


@asynccontextmanager
async def taking(shared: Shared, taken: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Take connections while the block runs; those that were taken go on behind it, and the socket is closed.

    Args:
        shared: has the connections that were taken.
        taken: bound socket.
        tls: None: without.
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
        # What ends the task ends the server: it would go on without taking connections.
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(_accept(shared, taken, tls))
            yield
            accepting.cancel()
    finally:
        taken.close()


async def _accept(shared: Shared, taken: socket.socket, tls: ssl.SSLContext) -> None:
    """Take connections of TLS, each counted before its handshake, which costs more than a request.

    Above the limit they are closed at once: nothing can be said to a client before its handshake. (The loop's own
    server tells of a connection only when its handshake is done, and of one that fails never.)
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
    """Count it as one that opens until it is made, or has failed."""
    connection = Connection(shared)
    shared.opening.add(connection)
    task = asyncio.get_running_loop().create_task(_shake_hands(shared, connection, accepted, tls))
    task.add_done_callback(lambda _: shared.opening.discard(connection))
    return task


async def _shake_hands(shared: Shared, connection: Connection, accepted: socket.socket, tls: ssl.SSLContext) -> None:
    loop, seconds = asyncio.get_running_loop(), shared.limits.receive_seconds
    with suppress(OSError):  # of TLS and of time, too: a client's matter
        await loop.connect_accepted_socket(lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=seconds)
