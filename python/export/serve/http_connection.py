"""A connection of HTTP/1.1: it reads requests and sends their answers one after the other, within time limits.

Bytes are read into one buffer that all connections share, and bytes of a longer body directly into the body: it is
copied at most once. Requests that arrive too slowly, and answers that the client does not take, are given up.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from headrace.export.serve.http_request import Body, Head, HeadReader, Heads
from headrace.export.serve.options import RequestError, RequestLimits

#: Most bytes of one read.
_READ = 1 << 17
#: Most bytes of later requests that are read while a request is answered.
_AHEAD = 1 << 16
#: Limits of connections that wait for their client to close, after a final answer: seconds, bytes that still arrive,
#: and number at the same time. Closing with unread bytes would reset the connection, and the client would lose the
#: answer.
_LEAVE_SECONDS, _LEAVE_BYTES, _LEAVING = 2.0, 1 << 20, 256
_END = b"\r\n\r\n"


class Cancellable(Protocol):
    """Work that can be cancelled."""

    def cancel(self) -> object:
        """Cancel the work: nobody waits for its result any more."""


class App(Protocol):
    """Application that answers requests with complete answers, heads included."""

    def admit(self, head: Head) -> object:
        """Return the target that will answer. Raises RequestError to refuse the request before its body arrives."""

    def take_bytes(self, earlier: int, more: int) -> None:
        """Count `more` bytes of a body that has `earlier` ones already. Raises RequestError if they are too many."""

    def give_back(self, count: int) -> None:
        """Release bytes of a body that are no longer needed."""

    def start(self, target: object, body: bytes | memoryview, connection: Connection) -> Cancellable | None:
        """Begin to answer: call `connection.answer` once, now or later."""

    def refusal(self, error: RequestError, connection: Connection) -> bytes:
        """Return the answer that reports an error."""

    def client_gone(self, connection: Connection) -> None:
        """Note that the client has closed the connection before its request was complete."""


class Shared:
    """State that the connections of a server share.

    Attributes:
        opening: connections of TLS during their handshake.
        connections: connections that may send requests.
        leaving: connections that wait for their client to close.
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
        head: head of the request that is arriving or being answered.
        started: time by `time.perf_counter` when the head was complete.
        is_gone: whether the connection is closed.
    """

    def __init__(self, shared: Shared) -> None:
        self.head: Head | None = None
        self.started = 0.0
        self._shared = shared
        self._transport: Any = None
        self._target: object = None
        self._reader: HeadReader | None = None  # reader of an incomplete head, or of chunks
        self._body: Body | None = None  # incomplete body of known length
        self._chunks: bytearray | None = None  # incomplete chunked body
        self._counted = 0  # bytes of the body that were counted
        self._missing = 0  # bytes of a refused body that have not arrived yet
        self._unread = _LEAVE_BYTES  # bytes that may still arrive while it is leaving
        self._answering = False
        self._refused = False  # the request was answered before it was complete
        self._last = False  # no further request is taken after this one
        self._at_end = False  # the client sends no more
        self._consuming = False  # `_consume` is running
        self.is_gone = False
        self._work: Cancellable | None = None
        self._ahead = bytearray()  # what came behind it
        self._reading_paused = self._writing_paused = False
        self._used = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None
        self._close_deadline: asyncio.TimerHandle | None = None

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        connections, most = self._shared.connections, self._shared.limits.connections
        self._shared.opening.discard(self)
        if len(connections) >= most:
            # Refuse it now: until its first head arrives it would count as one more.
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
        """Read bytes of requests, up to one that must be answered before the next is read."""
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
            # The start of the next request is unknown, so the connection ends.
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
        """Read a head, and its body if that is complete; return the end of what was read."""
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
        """Count bytes of a body; return False if it is refused."""
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
        """Start to answer a complete request."""
        self._answering, self._body, self._chunks = True, None, None
        work = self._shared.app.start(self._target, body, self)
        if self._answering:
            self._work = work

    # Answers.

    def answer(self, answer: bytes) -> None:
        """Send the answer to the current request."""
        self._answering, self._work = False, None
        self._give_back()
        if not self._transport.is_closing():
            self._write(answer)
            self._next()

    def _refuse(self, error: RequestError, missing: int) -> None:
        """Answer an incomplete request with an error, and ignore its missing bytes."""
        assert self.head is not None
        self._body = self._chunks = None
        self._give_back()
        # A client that waits for `100 Continue` may send the body or not.
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
        """Send an error, unless the request is answered already, and close the connection."""
        if self._is_ending():
            return
        if not self._refused:
            self._last = True
            self._write(self._shared.app.refusal(error, self))
        self._leave()

    def _leave(self) -> None:
        """End the output, and close the connection when its client has closed it too (RFC 9112, 9.6)."""
        leaving = self._shared.leaving
        self._shared.connections.discard(self)
        # With TLS only both directions can be closed together.
        if len(leaving) >= _LEAVING or not self._transport.can_write_eof():
            self._close()
            return
        leaving.add(self)
        # There is no current request any more, and later bytes are ignored.
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
        """Return whether the connection is ending, so that bytes that still arrive are not read as requests."""
        return self in self._shared.leaving or self._transport.is_closing()

    def _close(self) -> None:
        """Close the connection when all answers are sent, or when the time limit ends."""
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
        """Go on to the next request after this one is complete and answered."""
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
        """Read the bytes that arrived after the request."""
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
        """Take no further request; close the connection at once if it has no current one."""
        if self.head is None and self._reader is None:
            self._close()
        self._last = True

    def abort(self) -> None:
        """Close the connection at once, and cancel its current request."""
        self._transport.abort()

    # Time limits.

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
