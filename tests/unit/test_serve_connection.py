"""A connection of HTTP: requests in any pieces, one behind the other, refused ones among them."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools", reason="httptools is not installed: run `make serve`")
import uvloop

from headrace.export.serve import http_connection
from headrace.export.serve.http_connection import Connection, Shared
from headrace.export.serve.http_request import Head
from headrace.export.serve.options import RequestError, RequestLimits
from headrace.export.serve.server import taking
from tests.certificates import self_signed

MOST = 3_000_000
LIMITS = RequestLimits(header_bytes=2000)
CLOSED = b"\r\nconnection: close"


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written, self.closed, self.eof_written, self.reading = b"", False, False, True

    def write(self, data: bytes) -> None:
        assert (self.closed, self.eof_written) == (False, False)
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_written = True

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Echo:
    """Says the path and the body of each request; by `when` at once, or later. /no is refused before its body."""

    def __init__(self, schedule: Callable[[Callable[[], None]], object]) -> None:
        self.when, self.pending = schedule, 0

    def admit(self, head: Head) -> object:
        if head.path == "/no":
            raise RequestError(404, "no")
        return f"{head.method} {head.path} "

    def take_bytes(self, held: int, more: int) -> None:
        if held + more > MOST:
            raise RequestError(413, "too long")
        self.pending += more

    def give_back(self, count: int) -> None:
        self.pending -= count

    def start(self, request: object, body: bytes | memoryview, connection: Connection) -> None:
        answer = response(200, str(request).encode() + bytes(body))
        self.when(lambda: connection.answer(answer))

    def refusal(self, error: RequestError, connection: Connection) -> bytes:
        return response(error.status, error.message.encode())


def response(status: int, body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d\r\nlength: %d%b\r\n\r\n%b" % (status, len(body), more, body)


def post(body: bytes, path: bytes = b"/a", more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (path, more, len(body), body)


def chunked(body: bytes, step: int) -> bytes:
    parts = [body[i : i + step] for i in range(0, len(body), step)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def feed(connection: Any, transport: Transport, data: bytes, waiting: Sequence[Callable[[], None]] = ()) -> None:
    """Feed data to a connection as the loop does: into its buffer while it reads, else answer what waits."""
    while data and not transport.closed:
        while not transport.reading:
            waiting.pop(0)()  # type: ignore[attr-defined]
        buffer = connection.get_buffer(-1)
        count = min(len(buffer), len(data))
        assert count
        buffer[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


def talk(parts: Iterable[bytes], later: bool = False) -> tuple[bytes, bool, int]:
    """Return a client's answers to its parts, whether the connection is closed then, and the bytes still counted."""

    async def main() -> tuple[bytes, bool, int]:
        waiting: list[Callable[[], None]] = []
        app = Echo(waiting.append if later else lambda answer: answer())
        transport = Transport()
        connection = Connection(Shared(app, LIMITS))
        connection.connection_made(transport)  # type: ignore[arg-type]
        for part in parts:
            feed(connection, transport, part, waiting)
        while waiting:
            waiting.pop(0)()
        closed = transport.closed or transport.eof_written
        connection.connection_lost(None)
        return transport.written, closed, app.pending

    return asyncio.run(main())


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    cuts = sorted({p % len(data) for p in places} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(cuts)]


BIG = bytes(range(256)) * 9000
REQUESTS = (
    (b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n", response(200, b"GET /a ")),
    (b"\r\n" + post(b"123", b"/p?q=1"), response(200, b"POST /p 123")),
    (post(b"x" * 1000), response(200, b"POST /a " + b"x" * 1000)),
    (post(BIG), response(200, b"POST /a " + BIG)),
    (post(b"x" * 1000, b"/no"), response(404, b"no")),
    (post(b"x" * (MOST + 1)), response(413, b"too long")),
    (b"HEAD /a HTTP/1.1\r\n\r\n", b"HTTP/1.1 200\r\nlength: 8\r\n\r\n"),
)
LAST = (
    (chunked(b"x" * 1000, 300), response(200, b"POST /c " + b"x" * 1000, CLOSED)),
    (chunked(b"x" * (MOST + 1), 300_000), response(413, b"too long", CLOSED)),
    (post(b"123", more=b"Connection: close\r\n"), response(200, b"POST /a 123", CLOSED)),
    (b"GET /a HTTP/1.0\r\n\r\n", response(200, b"GET /a ", CLOSED)),
)


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=6),
    last=st.integers(0, len(LAST) - 1) | st.none(),
    places=st.lists(st.integers(0, 10**8) | st.integers(0, 300), max_size=12),
    later=st.booleans(),
)
def test_requests_in_any_pieces_are_answered_in_order(
    numbers: list[int], last: int | None, places: list[int], later: bool
) -> None:
    chosen = [REQUESTS[i] for i in numbers] + ([LAST[last]] if last is not None else [])
    data, expected = (b"".join(x) for x in zip(*chosen, strict=True))
    answers, closed, pending = talk(cut(data, places), later)
    assert answers == expected
    assert (closed, pending) == (last is not None, 0)


@pytest.mark.parametrize("later", [False, True])
def test_thousands_of_requests_in_one_piece(later: bool) -> None:
    answers, closed, _ = talk([b"GET /a HTTP/1.1\r\n\r\n" * 5000], later)
    assert (answers, closed) == (response(200, b"GET /a ") * 5000, False)


def test_a_client_that_asks_whether_to_go_on() -> None:
    head, body = post(b"123", more=b"Expect: 100-continue\r\n").split(b"\r\n\r\n")
    answers, closed, _ = talk([head + b"\r\n\r\n", body])
    assert (answers, closed) == (b"HTTP/1.1 100 Continue\r\n\r\n" + response(200, b"POST /a 123"), False)
    head = post(b"123", b"/no", b"Expect: 100-continue\r\n").split(b"\r\n\r\n")[0]
    assert talk([head + b"\r\n\r\n"]) == (response(404, b"no", CLOSED), True, 0)


def test_a_body_sent_without_waiting_for_the_word_is_no_request() -> None:
    """Refused and not awaited: what comes behind the head may be the body, and is never run."""
    body = post(b"1", b"/run") * 3
    assert talk([post(body, b"/no", b"Expect: 100-continue\r\n")]) == (response(404, b"no", CLOSED), True, 0)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /a HTTP/1.1\r\nX: " + b"a" * 3000, 431),
        (b"GET /a HTTP/1.1\r\nX: " + b"a" * 3000 + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /a HTTP/x\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n1234", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: -3\r\n\r\n123", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\n123", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length : 3\r\n\r\n123", 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        (b"GET /a HTTP/1.1\nHost: x\n\n", 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 3000, 431),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;" + b"a" * 3000, 431),
    ],
)
def test_what_is_no_request_is_told_so_once(data: bytes, status: int) -> None:
    for parts in ([data], cut(data, range(len(data)))):
        answers, closed, pending = talk([post(b"1"), *parts])
        assert answers.startswith(response(200, b"POST /a 1") + b"HTTP/1.1 %d" % status)
        assert (len(re.findall(b"HTTP/1.1 ", answers)), closed, pending) == (2, True, 0)


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_what_comes_behind_the_last_chunk_is_not_read(more: bytes) -> None:
    data = chunked(b"123", 3).replace(b"Host: x\r\n", b"Host: x\r\n" + more) + b"\x16\x03\x01"
    assert talk([data]) == (response(200, b"POST /c 123", CLOSED), True, 0)


@pytest.mark.parametrize("data", [b"\x16\x03\x01", post(b"x" * 1000)[:-1]])
def test_a_client_that_reads_nothing_does_not_keep_a_closed_connection(data: bytes) -> None:
    async def main() -> None:
        aborted = asyncio.Event()

        class Full(Transport):
            def abort(self) -> None:
                aborted.set()

        app = Echo(lambda answer: answer())
        connection = Connection(Shared(app, RequestLimits(receive_seconds=0.01, send_seconds=0.01)))
        connection.connection_made(transport := Full())  # type: ignore[arg-type]
        feed(connection, transport, data)
        await asyncio.wait_for(aborted.wait(), 30)
        assert transport.written.startswith((b"HTTP/1.1 400", b"HTTP/1.1 408"))
        assert app.pending == 0
        connection.connection_lost(None)

    asyncio.run(main())


def test_what_comes_ahead_is_not_read_without_end() -> None:
    async def main() -> None:
        waiting: list[Callable[[], None]] = []
        transport = Transport()
        connection = Connection(Shared(Echo(waiting.append), LIMITS))
        connection.connection_made(transport)  # type: ignore[arg-type]
        feed(connection, transport, post(b"1"))
        for _ in range(9):
            feed(connection, transport, post(b"x" * 8000))
        assert not transport.reading
        for _ in range(10):
            waiting.pop(0)()
        assert transport.reading
        assert transport.written == response(200, b"POST /a 1") + response(200, b"POST /a " + b"x" * 8000) * 9
        connection.connection_lost(None)

    asyncio.run(main())


def test_work_for_a_client_that_has_gone_is_given_up() -> None:
    async def main() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        app = Echo(lambda answer: None)
        app.start = lambda *_: future  # type: ignore[assignment, method-assign]
        transport = Transport()
        connection = Connection(Shared(app, LIMITS))
        connection.connection_made(transport)  # type: ignore[arg-type]
        feed(connection, transport, post(b"123"))
        assert app.pending == 3
        connection.connection_lost(None)
        assert future.cancelled()
        assert app.pending == 0

    asyncio.run(main())


def test_a_connection_above_the_limit_is_refused_before_it_says_anything() -> None:
    async def main() -> None:
        shared = Shared(Echo(lambda answer: answer()), RequestLimits(connections=1))
        first, second, third = (Connection(shared) for _ in range(3))
        transports = [Transport() for _ in range(3)]
        first.connection_made(transports[0])  # type: ignore[arg-type]
        second.connection_made(transports[1])  # type: ignore[arg-type]
        assert (transports[1].written, transports[1].eof_written) == (
            response(503, b"the server has too many connections", CLOSED),
            True,
        )
        feed(first, transports[0], post(b"1"))
        assert transports[0].written == response(200, b"POST /a 1")
        first.connection_lost(None)
        # The one that was refused is still there, and takes no room.
        assert not transports[1].closed
        third.connection_made(transports[2])  # type: ignore[arg-type]
        feed(third, transports[2], post(b"3"))
        assert transports[2].written == response(200, b"POST /a 3")
        third.connection_lost(None)
        second.connection_lost(None)
        assert (shared.connections, shared.leaving) == (set(), set())

    asyncio.run(main())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("data", [b"x" * 60_000, post(b"x" * 60_000)])
def test_a_client_that_has_sent_something_reads_why_it_is_refused(data: bytes, new_loop: Any) -> None:
    """A socket that is closed with bytes unread is reset: its client may lose what it was told."""

    async def main() -> None:
        shared = Shared(Echo(lambda answer: answer()), RequestLimits(connections=1))
        taken = socket.create_server(("127.0.0.1", 0))
        taken.setblocking(False)
        port = taken.getsockname()[1]
        async with taking(shared, taken, None):
            _, first = await asyncio.open_connection("127.0.0.1", port)
            while not shared.connections:
                await asyncio.sleep(0)
            # All of it is there before the connection is taken.
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(data)
                client.setblocking(False)
                answer = b""
                while part := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1000), 30):
                    answer += part
            assert answer == response(503, b"the server has too many connections", CLOSED)
            first.close()
            while shared.leaving or shared.connections:
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_a_refused_connection_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        shared = Shared(Echo(lambda answer: answer()), RequestLimits(connections=0, send_seconds=0.01))
        monkeypatch.setattr(http_connection, "_LEAVING", 2)
        refused = [(Connection(shared), Transport()) for _ in range(3)]
        for connection, transport in refused:
            connection.connection_made(transport)  # type: ignore[arg-type]
            assert transport.written == response(503, b"the server has too many connections", CLOSED)
        assert [transport.closed for _, transport in refused] == [False, False, True]
        # It sends on and on.
        connection, transport = refused[0]
        feed(connection, transport, post(b"x" * (1 << 20)))
        assert transport.closed
        # It sends nothing, and does not go.
        connection, transport = refused[1]
        feed(connection, transport, post(b"123") * 2)
        while not transport.closed:
            await asyncio.sleep(0.001)
        for connection, _ in refused:
            connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_of_tls_count_before_their_handshake(tmp_path: Path, new_loop: Any) -> None:
    certificate, key = self_signed(tmp_path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    client = ssl.create_default_context(cafile=certificate)
    counts = list[int]()

    class Counted(set[Connection]):
        """All that count at the moment when one is made."""

        def add(self, connection: Connection) -> None:
            super().add(connection)
            counts.append(len(self) + len(shared.opening))

    shared: Shared

    async def main() -> None:
        nonlocal shared
        shared = Shared(Echo(lambda answer: answer()), RequestLimits(connections=1))
        shared.connections = Counted()
        taken = socket.create_server(("127.0.0.1", 0))
        taken.setblocking(False)
        port = taken.getsockname()[1]
        async with taking(shared, taken, server):
            _, silent = await asyncio.open_connection("127.0.0.1", port)
            reader, refused = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(reader.read(), 30) == b""
            refused.close()
            assert not shared.connections
            # Its handshake fails, and there is room for another one.
            silent.close()
            while True:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
                    break
                except OSError:
                    await asyncio.sleep(0.01)
            writer.write(post(b"123"))
            expected = response(200, b"POST /a 123")
            assert await asyncio.wait_for(reader.readexactly(len(expected)), 30) == expected
            assert len(shared.connections) == 1
            assert counts == [1]
            more, another = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(more.read(), 30) == b""
            another.close()
        # Those that were taken go on.
        writer.write(post(b"4"))
        expected = response(200, b"POST /a 4")
        assert await asyncio.wait_for(reader.readexactly(len(expected)), 30) == expected
        writer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
