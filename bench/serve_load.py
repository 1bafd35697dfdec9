"""Requests at given moments, whether those before have been answered or not: an open loop.

A request's latency counts from the moment at which it was to be sent, so that a server that stalls is charged for all
that would have come meanwhile (no coordinated omission). One process, which spins: moments are met within microseconds.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_TYPES = {"i": "INT64", "f": "FP32"}
#: Seconds after the last request within which answers still count.
_REST = 5.0


@dataclass
class LoadOutcome:
    """Outcome of a load.

    Attributes:
        latencies: seconds of answers, float64.
        refused: answered 503.
        failed: answered otherwise.
        lost: never answered.
        seconds: from the first moment to the last answer.
    """

    latencies: npt.NDArray[np.float64]
    refused: int
    failed: int
    lost: int
    seconds: float

    def ms(self, share: float) -> float:
        """Return a quantile of latency in milliseconds."""
        return float(np.quantile(self.latencies, share)) * 1e3 if len(self.latencies) else float("inf")


def request_of(model: str, tensors: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Return a whole HTTP request with raw tensors."""
    inputs = []
    for name, array in tensors.items():
        parameters = {"binary_data_size": array.nbytes}
        tensor = {"name": name, "datatype": _TYPES[array.dtype.kind], "shape": list(array.shape)}
        inputs.append({**tensor, "parameters": parameters})
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = header + b"".join(x.tobytes() for x in tensors.values())
    lines = f"Host: bench\r\nContent-Length: {len(body)}\r\nInference-Header-Content-Length: {len(header)}\r\n\r\n"
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\n{lines}".encode() + body


@dataclass
class _Client:
    socket: socket.socket
    due: float = 0.0
    request_index: int = 0
    got: bytearray = field(default_factory=bytearray)
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    waiting: bool = False
    idle: bool = True


def moments(rate: float, seconds: float, seed: int, paced: bool) -> npt.NDArray[np.float64]:
    """Return the arrivals of requests, in seconds.

    Independent users have exponential pauses (a Poisson process); a paced sender has equal ones.
    """
    if paced:
        return np.arange(int(rate * seconds)) / rate
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 1.2) + 10))
    return arrivals[arrivals < seconds]


def run(
    port: int,
    requests: list[bytes],
    rate: float,
    seconds: float,
    clients: int = 256,
    seed: int = 1,
    check: Callable[[int, bytes, bytes], None] | None = None,
    spin: bool = True,
    paced: bool = False,
) -> LoadOutcome:
    """Send requests in turn at the moments of `moments`.

    Args:
        port: of HTTP on this host.
        requests: whole ones, see `request_of`.
        rate: of them, a second.
        seconds: of sending.
        clients: connections; a request for which none is free waits, and its latency counts.
        seed: of the moments.
        check: called with the request's index, the head and the body of each answer of 200.
        spin: False: wait between moments by milliseconds, for a load that leaves the processor to others.
        paced: see `moments`.
    """
    due = moments(rate, seconds, seed, paced)
    poll = select.epoll()
    by_fd: dict[int, _Client] = {}
    for _ in range(clients):
        s = socket.create_connection(("127.0.0.1", port))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.setblocking(False)
        by_fd[s.fileno()] = _Client(s)
        poll.register(s, select.EPOLLIN)
    free = deque(by_fd.values())
    latencies: list[float] = []
    sent = refused = failed = busy = 0
    start = time.perf_counter() + 0.05
    end = start + seconds + _REST
    while (sent < len(due) or busy) and (now := time.perf_counter()) < end:
        while sent < len(due) and free and start + due[sent] <= now:
            client = free.popleft()
            client.due, client.request_index, client.got = start + due[sent], sent % len(requests), bytearray()
            client.idle = False
            _send(client, requests[client.request_index], poll)
            sent += 1
            busy += 1
        for fd, event in poll.poll(0 if spin else 0.001):
            client = by_fd[fd]
            if event & select.EPOLLOUT:
                _send_rest(client, poll)
            if not event & ~select.EPOLLOUT:
                continue
            answer = _received(client)
            if answer is None:
                continue
            if client.idle:  # the server has closed what nobody used
                poll.unregister(client.socket)
                free.remove(client)
                continue
            client.idle = True
            head, body = answer
            busy -= 1
            if head.startswith(b"HTTP/1.1 200"):
                latencies.append(time.perf_counter() - client.due)
                if check is not None:
                    check(client.request_index, head, body)
            elif head.startswith(b"HTTP/1.1 503"):
                refused += 1
            else:
                failed += 1
            if head:
                free.append(client)
    taken = time.perf_counter() - start
    for client in by_fd.values():
        client.socket.close()
    poll.close()
    lost = len(due) - len(latencies) - refused - failed
    return LoadOutcome(np.array(latencies), refused, failed, lost, taken)


def _send(client: _Client, request: bytes, poll: select.epoll) -> None:
    client.rest = memoryview(request)
    _send_rest(client, poll)


def _send_rest(client: _Client, poll: select.epoll) -> None:
    with suppress(BlockingIOError):
        client.rest = client.rest[client.socket.send(client.rest) :]
    if bool(client.rest) != client.waiting:
        client.waiting = bool(client.rest)
        poll.modify(client.socket, select.EPOLLIN | (select.EPOLLOUT if client.waiting else 0))


def _received(client: _Client) -> tuple[bytes, bytes] | None:
    """Return an answer's head and body; None: not all of it is there. Empty: the connection was closed."""
    try:
        data = client.socket.recv(1 << 18)
    except (BlockingIOError, ConnectionError):
        data = b""
    if not data:
        return b"", b""
    client.got += data
    end = client.got.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(client.got[:end]).lower().replace(b"http/", b"HTTP/")
    length = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
    if len(client.got) < end + 4 + length:
        return None
    return head, bytes(client.got[end + 4 :])
