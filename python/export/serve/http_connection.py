"""A connection of HTTP/1.1: requests come in, answers go out one after the other, all within time limits.

Bytes are read into one buffer that all connections share, and the bytes of a longer body straight into it: a body is
copied once at most. What comes too slowly, or is not taken, holds nothing for long.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from headrace.export.serve.http_request import Body, Head, HeadReader, Heads
from headrace.export.serve.options import RequestError, RequestLimits

#: Bytes that are read at once.
_READ = 1 << 17
#: Bytes behind a request that are taken while it is answered.
_AHEAD = 1 << 16
#: A connection that is told why it ends stays until its client ends it, too: for so many seconds and bytes that still
#: come, and so many of them at the same time. What is closed with bytes unread is reset, and the answer with it.
_LEAVE_SECONDS, _LEAVE_BYTES, _LEAVING = 2.0, 1 << 20, 256
_END = b"\r\n\r\n"


class Cancellable(Protocol):
    """Work that may be given up."""

    def cancel(self) -> object:
        """Nobody waits for it any more."""


class App(Protocol):
    """Application that answers requests. Answers are complete, with their heads."""

    def admit(self, head: Head) -> object:
        """Return what will answer. Raises RequestError: the request is refused before its body comes."""

    def take_bytes(self, earlier: int, more: int) -> None:
        """Count bytes of a body behind those before. Raises RequestError: they are too many."""

    def give_back(self, count: int) -> None:
        """Release bytes of a body that are no longer needed."""

    def start(self, target: object, body: bytes | memoryview, connection: Connection) -> Cancellable | None:
        """Begin to answer: `connection.answer` is called once, now or later."""

    def refusal(self, error: RequestError, connection: Connection) -> bytes:
        """Return an answer."""

    def client_gone(self, connection: Connection) -> None:
        """Note that the client has gone before all of its request had come."""


class Shared:
    """State that the connections of a server share.

    Attributes:
        opening: those of TLS whose handshake goes on.
        connections: those that may have requests.
        leaving: those that are told why they have none.
    """

    def __init__(self, app: App, limits: RequestLimits) -> None:
        self.app, self.limits = app, limits
        self.loop = asyncio.get_running_loop()
        self.opening: set[Connection] = set()
        self.connections: set[Connection] = set()
        self.leaving: set[Connection] = set()
        self.heads = Heads()
        self.buffer = bytearray(_READ)
        self.view = memoryview(self.buffer)


class Connection(asyncio.BufferedProtocol):
    """One connection.

    Attributes:
        head: of the request that comes or is answered.
        started: when its head had come, by `time.perf_counter`.
        is_gone: whether the connection is closed.
    """

    def __init__(self, shared: Shared) -> None:
        self.head: Head | None = None
        self.started = 0.0
        self._shared = shared
        self._transport: Any = None
        self._target: object = None
        self._reader: HeadReader | None = None  # of a head that has come in part, or of chunks
        self._body: Body | None = None  # that has come in part
        self._chunks: bytearray | None = None  # the same where its length is not said
        self._counted = 0  # bytes of it
        self._missing = 0  # bytes of one that was refused, which are still to come
        self._unread = _LEAVE_BYTES  # that may come when it is leaving
        self._answering = False
        self._refused = False  # answered before all of it had come
        self._last = False  # no request is taken behind this one
        self._at_end = False  # the client sends no more
        self._consuming = False  # requests that have come are begun, one behind the other
        self.is_gone = False
        self._work: Cancellable | None = None
        self._ahead = bytearray()  # what came behind it
        self._reading_paused = self._writing_paused = False
        self._used = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None
        self._close_deadline: asyncio.TimerHandle | None = None

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        connections, most = self._shared.connections, self._shared.limits.connections
        self._shared.opening.discard(self)
        if len(connections) >= most:
            # Not when its first head has come: until then it would be one more.
            self._end(RequestError(503, "the server has too many connections", retry_after=1))
            return
        connections.add(self)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.connections.discard(self)
        self._shared.leaving.discard(self)
        for timer in (self._idle, self._deadline, self._send_deadline, self._close_deadline):
            if timer is not None:
                timer.cancel()
        self.is_gone = True
        if self._work is not None:
            self._work.cancel()
        elif self.head is not None and not self._answering and not self._refused:
            self._shared.app.client_gone(self)
        self._give_back()

    def eof_received(self) -> bool:
        """Note that the client sends no more; return whether the transport stays open.

        True: the request is still answered (RFC 9112, 9.6), and the connection closed after that. False: the loop
        closes it when all output is sent.
        """
        self._at_end = True
        # A connection of TLS ends in both directions.
        if self._transport.can_write_eof() and not self._is_ending() and (self._answering or self._ahead):
            return True
        self._limit_close()
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.view if self._body is None else self._body.free()

    def buffer_updated(self, nbytes: int) -> None:
        if self in self._shared.leaving:
            self._unread -= nbytes
            if self._unread < 0:
                self._close()
            return
        if self._body is None:
            self._consume(self._shared.buffer, nbytes)
            return
        if self._take(self._body, nbytes):
            self._body.filled += nbytes
            self._begin_if_whole(self._body)
        self._watch()

    def pause_writing(self) -> None:
        self._writing_paused = True
        self._send_deadline = self._shared.loop.call_later(self._shared.limits.send_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None
        self._go_on()

    # Requests.

    def _consume(self, data: bytearray, stop: int) -> None:
        """Take bytes of requests, up to one that is to be answered first."""
        offset, view = 0, memoryview(data)
        self._consuming = True
        try:
            while offset < stop and not self._is_ending():
                if self._answering or (self._writing_paused and self.head is None):
                    self._keep(view[offset:stop])
                    break
                if self._missing:
                    offset += self._skip(stop - offset)
                elif self.head is None:
                    offset = self._take_head(data, offset, stop)
                elif self._body is not None:
                    part = view[offset : min(stop, offset + self._body.length - self._body.filled)]
                    offset += len(part)
                    if self._take(self._body, len(part)):
                        self._body.add(part)
                        self._begin_if_whole(self._body)
                else:
                    part, offset = view[offset:stop], stop
                    self._take_chunks(part)
        except RequestError as e:
            # Where the next request begins is not known.
            self._end(e)
        finally:
            self._consuming = False
            self._watch()

    def _keep(self, data: memoryview) -> None:
        self._ahead += data
        if len(self._ahead) > _AHEAD and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def _skip(self, count: int) -> int:
        count = min(count, self._missing)
        self._missing -= count
        if not self._missing:
            self._next()
        return count

    def _take_head(self, data: bytearray, offset: int, stop: int) -> int:
        """Read a head, and a body that is there as a whole; where it ends."""
        known = self._shared.heads.find(data, offset, stop) if self._reader is None else None
        if known is not None:
            head, offset = known
        else:
            reader, most = self._reader or HeadReader(), self._shared.limits.header_bytes
            self._reader = reader
            offset += reader.read_head(memoryview(data)[offset : min(stop, offset + most + 1)])
            if len(reader.data) > most:
                raise RequestError(431, "the request's header is too long")
            if reader.head is None:
                return offset
            head = reader.head
            if not head.chunked:
                self._reader = None
                self._shared.heads.add(bytes(reader.data), head)
        self.head, self.started = head, time.perf_counter()
        self._last = self._last or head.chunked or not head.keep_alive
        end = offset + head.length
        try:
            self._target = self._shared.app.admit(head)
            if head.chunked:
                self._chunks = bytearray()
            elif end <= stop:
                self._count(head.length)
                self._begin(bytes(memoryview(data)[offset:end]))
                return end
            else:
                self._body = Body(head.length)
        except RequestError as e:
            self._refuse(e, head.length)
            return offset
        if head.expects_continue:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return offset

    def _take_chunks(self, data: memoryview) -> None:
        assert self._reader is not None
        for chunk in self._reader.read_chunks(data):
            if self._chunks is None:
                break
            try:
                self._count(len(chunk))
            except RequestError as e:
                self._refuse(e, 0)
            else:
                self._chunks += chunk
        if not self._reader.complete:
            if self._reader.unread > self._shared.limits.header_bytes:
                raise RequestError(431, "the trailer of the request, or a chunk's head, is too long")
        else:
            self._reader = None
            if self._refused:
                self._next()
            else:
                self._begin(memoryview(self._chunks or b""))

    def _take(self, body: Body, more: int) -> bool:
        """Count bytes of a body; False: it is refused."""
        try:
            self._count(more)
        except RequestError as e:
            self._refuse(e, body.length - body.filled - more)
            return False
        return True

    def _count(self, more: int) -> None:
        self._shared.app.take_bytes(self._counted, more)
        self._counted += more

    def _give_back(self) -> None:
        self._shared.app.give_back(self._counted)
        self._counted = 0

    def _begin_if_whole(self, body: Body) -> None:
        if body.filled == body.length:
            self._begin(body.all())

    def _begin(self, body: bytes | memoryview) -> None:
        """Start answering: all of a request has come."""
        self._answering, self._body, self._chunks = True, None, None
        work = self._shared.app.start(self._target, body, self)
        if self._answering:
            self._work = work

    # Answers.

    def answer(self, answer: bytes) -> None:
        """Answer the request that has come."""
        self._answering, self._work = False, None
        self._give_back()
        if not self._transport.is_closing():
            self._write(answer)
            self._next()

    def _refuse(self, error: RequestError, missing: int) -> None:
        """Answer a request of which bytes are missing, which are then let pass."""
        assert self.head is not None
        self._body = self._chunks = None
        self._give_back()
        # A client that waits for a word before it sends them may send them or not.
        unknown = missing > 0 and self.head.expects_continue
        self._last = self._last or unknown
        self._write(self._shared.app.refusal(error, self))
        if unknown:
            self._leave()
        elif missing or self._reader is not None:
            self._missing, self._refused = missing, True
        else:
            self._next()

    def _end(self, error: RequestError) -> None:
        """Answer, where that is not done, and close the connection."""
        if self._is_ending():
            return
        if not self._refused:
            self._last = True
            self._write(self._shared.app.refusal(error, self))
        self._leave()

    def _leave(self) -> None:
        """Say that nothing more is said, and close the connection when its client has read that (RFC 9112, 9.6)."""
        leaving = self._shared.leaving
        self._shared.connections.discard(self)
        # With TLS only both directions can be ended.
        if len(leaving) >= _LEAVING or not self._transport.can_write_eof():
            self._close()
            return
        leaving.add(self)
        # No request is under way any more, and what came behind this one is not looked at.
        self.head, self._reader, self._body, self._chunks = None, None, None, None
        self._give_back()
        self._arrived()
        if self._idle is not None:
            self._idle.cancel()
        self._ahead = bytearray()
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._transport.write_eof()
        seconds = min(_LEAVE_SECONDS, self._shared.limits.send_seconds)
        self._close_deadline = self._shared.loop.call_later(seconds, self._transport.abort)

    def _is_ending(self) -> bool:
        """Return whether the connection is ending: bytes that still come are not read as requests."""
        return self in self._shared.leaving or self._transport.is_closing()

    def _close(self) -> None:
        """Close the connection when all answers are sent, or when their time is over."""
        self._body = self._chunks = None
        self._give_back()
        self._limit_close()
        self._transport.close()

    def _limit_close(self) -> None:
        if self._close_deadline is None:
            seconds = self._shared.limits.send_seconds
            self._close_deadline = self._shared.loop.call_later(seconds, self._transport.abort)

    def _write(self, answer: bytes) -> None:
        is_head = self.head is not None and self.head.method == "HEAD"
        if self._last or is_head:
            head, end, body = answer.partition(_END)
            answer = head + (b"\r\nconnection: close" if self._last else b"") + end + (b"" if is_head else body)
        self._transport.write(answer)

    def _next(self) -> None:
        """Go on to the next request: this one has come and is answered."""
        self.head, self._target, self._refused = None, None, False
        self._arrived()
        if self._last:
            self._close()
            return
        self._used = self._shared.loop.time()
        if self._idle is None:
            self._idle = self._shared.loop.call_later(self._shared.limits.idle_seconds, self._look_whether_idle)
        self._go_on()

    def _go_on(self) -> None:
        """Take what came behind it."""
        if self._answering or self._is_ending():
            return
        if self._ahead:
            data, self._ahead = self._ahead, bytearray()
            self._consume(data, len(data))
        is_waiting = self._answering or self._ahead or self._consuming
        if self._at_end and not is_waiting and not self._is_ending():
            self._close()
            return
        if self._reading_paused and len(self._ahead) <= _AHEAD:
            self._reading_paused = False
            self._transport.resume_reading()

    def end(self) -> None:
        """Take no further request; the connection is closed at once where there is none."""
        if self.head is None and self._reader is None:
            self._close()
        self._last = True

    def abort(self) -> None:
        """Close it with all that is under way."""
        self._transport.abort()

    # Time.

    def _watch(self) -> None:
        """Start the time limit of a request that is arriving, or stop it."""
        if self._answering or (self.head is None and self._reader is None):
            self._arrived()
        elif self._deadline is None:
            self._expect()

    def _expect(self) -> None:
        self._deadline = self._shared.loop.call_later(self._shared.limits.receive_seconds, self._too_slow)

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        seconds = f"{self._shared.limits.receive_seconds:g}"
        self._end(RequestError(408, f"the request has not arrived within {seconds} seconds"))

    def _look_whether_idle(self) -> None:
        self._idle = None
        loop, seconds = self._shared.loop, self._shared.limits.idle_seconds
        if self._transport.is_closing():
            return
        is_busy = self._answering or self.head is not None or self._reader is not None
        rest = seconds if is_busy else self._used + seconds - loop.time()
        if rest > 0:
            self._idle = loop.call_later(rest, self._look_whether_idle)
        elif self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._close()
