"""Processor time of a request in headrace's HTTP layer and in uvicorn: what the layer of its own is for.

    make serve
    python -m bench.serve_http

Both have httptools and uvloop, take a body of 10 kB and answer 900 bytes, to four clients that ask one request after
the other. A server is a process of its own; its processor time between the first and the last answer counts. Servers
take turns, and the median over the turns is printed.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import psutil

SERVERS = ("headrace", "uvicorn")
CLIENTS, REQUESTS, WARM_UP, TURNS = 4, 5_000, 500, 5
BODY, ANSWER = b"x" * 10_000, b"y" * 900
REQUEST = b"POST /infer HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


class HeadraceApp:
    """An application of headrace.export.serve.http_connection that answers each body with the same bytes."""

    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)

    def admit(self, head: object) -> object:
        return None

    def take_bytes(self, held: int, more: int) -> None:
        pass

    def give_back(self, count: int) -> None:
        pass

    def start(self, request: object, body: bytes | memoryview, connection: Any) -> None:
        assert len(body) == len(BODY)
        connection.answer(self.answer)

    def refusal(self, error: Exception, connection: object) -> bytes:
        raise error

    def client_gone(self, connection: object) -> None:
        pass


async def asgi_app(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    """Answer as the server does, for uvicorn."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    assert len(body) == len(BODY)
    headers = [(b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def serve(name: str, fd: int) -> None:
    """Serve on a bound socket until the process is ended."""
    bound = socket.socket(fileno=fd)
    if name == "uvicorn":
        import uvicorn

        config = uvicorn.Config(asgi_app, loop="uvloop", http="httptools", lifespan="off", access_log=False)
        uvicorn.Server(config).run(sockets=[bound])
        return
    import uvloop

    from headrace.export.serve.options import RequestLimits
    from headrace.export.serve.server import serve_http

    uvloop.run(serve_http(HeadraceApp(), RequestLimits(), bound, None, 0.0))


def ask(port: int, count: int) -> None:
    """Ask one request after the other on a connection."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            client.sendall(REQUEST)
            answer = b""
            while not answer.endswith(ANSWER):
                part = client.recv(1 << 16)
                assert part, "the server has closed the connection"
                answer += part
            assert answer.startswith(b"HTTP/1.1 200")


def ask_all(port: int, count: int) -> None:
    clients = [threading.Thread(target=ask, args=(port, count)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def measure(name: str) -> float:
    """Return microseconds of processor time a request, of all threads of the server."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port, fd = bound.getsockname()[1], bound.fileno()
        os.set_inheritable(fd, True)
        command = [sys.executable, "-m", "bench.serve_http", name, str(fd)]
        with subprocess.Popen(command, pass_fds=(fd,)) as process:
            try:
                ask_all(port, WARM_UP)
                server = psutil.Process(process.pid)
                start = server.cpu_times()
                ask_all(port, REQUESTS)
                after = server.cpu_times()
            finally:
                process.kill()
    seconds = after.user + after.system - start.user - start.system
    return seconds / (CLIENTS * REQUESTS) * 1e6


def main() -> None:
    runs = [{name: measure(name) for name in SERVERS} for _ in range(TURNS)]
    medians = {name: statistics.median(run[name] for run in runs) for name in SERVERS}
    for name in SERVERS:
        listed = ", ".join(f"{run[name]:.1f}" for run in runs)
        print(f"{name}: {medians[name]:.1f} us a request ({listed})")
    print(f"uvicorn / headrace: {medians['uvicorn'] / medians['headrace']:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        main()
