"""Output of an application: all of it to its stages' logs, without the JVM's chatter to the screen.

Among it are messages of an application with several stages to its submitter: lines of JSON (`StageEvent`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol, TextIO

from headrace.logs import as_json_line, redact_sentence, visible

#: First byte of a report's line: the control character "record separator", which no text has.
MARK = b"\x1e"
#: Longest reason, in characters: a short line is written to a pipe atomically (PIPE_BUF).
_MOST_REASON = 300

Kind = Literal["check", "run", "skip", "done", "failed"]


@dataclass(frozen=True)
class StageEvent:
    """Something about a stage: it is checked, it begins to work, there is nothing to do, it is done, it has failed."""

    stage: str
    kind: Kind
    #: Reason why the stage runs (`run`).
    reason: str = ""
    #: The day; empty: that of the application.
    ds: str = ""
    #: The id of the attempt (`check`, `run`).
    run_id: str = ""

    def send(self) -> None:
        """Print it, behind what this process has printed before."""
        sys.stdout.flush()
        sys.stderr.flush()
        data = asdict(self) | {"reason": self.reason[:_MOST_REASON]}
        os.write(sys.stdout.fileno(), MARK + json.dumps(data).encode() + b"\n")

    @staticmethod
    def parse(line: bytes) -> StageEvent | None:
        """Return the event that follows MARK in a line, or None."""
        try:
            return StageEvent(**json.loads(line))
        except (ValueError, TypeError):
            return None


OnEvent = Callable[[StageEvent], None]

#: Lines that say nothing to the user; they stay in the log.
_NOISE = re.compile(
    r"WARNING: Using incubator modules"
    r"|Unable to load native-hadoop library"
    r"|Using Spark's default log4j profile|Setting default log level to|To adjust logging level use sc\.setLogLevel"
    r"|Note that spark\.local\.dir will be overridden"
    r"|Picked up (JAVA_TOOL_OPTIONS|_JAVA_OPTIONS)"
    r"|^WARNING: (A terminally deprecated|An illegal reflective|Please consider reporting|Use --illegal-access|"
    r"All illegal access|sun\.misc\.Unsafe|.* has been called by )"
    # XGBoost's workers, which may write several lines into one.
    r"|^(\[[\d:]+\] Task \d+ got rank \d+)+$"
    # Python's warning at the end of a rank, before it removes them.
    r"|resource_tracker: There appear to be \d+ leaked semaphore|^\s*warnings\.warn\('resource_tracker: "
)


#: Most bytes to hold back until their line ends.
_LONGEST_LINE = 1 << 20


class Sink(Protocol):
    """Destination of output."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


def ignore(event: StageEvent) -> None:
    """For applications that send no events."""


def copy_output(source: int, sink: Sink, echo: TextIO, on_event: OnEvent) -> None:
    """Copy all that comes from a file descriptor, until its end.

    Args:
        source: the read end of a pipe.
        sink: gets every byte but those of events and of secrets.
        echo: gets the lines as they come, without noise, and control characters as `visible` shows them. Progress that
            rewrites its line (carriage returns) is shown only where it is a terminal.
        on_event: called with each event when all before it is written, and nothing after it.
    """
    screen, held = _Screen(echo), b""
    lines = _Lines(sink, screen)
    while chunk := os.read(source, 65_536):
        held += chunk
        while held:
            text, mark, rest = held.partition(MARK)
            line, end, rest = rest.partition(b"\n")
            event = StageEvent.parse(line) if end else None
            if mark and end and event is None:
                text, mark, held = text + mark + line + end, b"", rest
            else:
                held = mark + line if mark and not end else rest
            if text:
                lines.write(text)
            if event is not None:
                lines.end_line()
                on_event(event)
            elif mark:
                break  # the line has not ended yet
    if held:
        lines.write(held)
    lines.end_line()


class JsonLines:
    """A sink that makes each line of what it gets a JSON object, and hands it to another sink and to the screen.

    Args:
        sink: keeps the lines.
        echo: shows them.
        fields: those that the lines of other programs are given, as of now.
    """

    def __init__(self, sink: Sink, echo: TextIO, fields: Callable[[], Mapping[str, str]]) -> None:
        self._sink, self._echo, self._fields, self._held = sink, echo, fields, b""

    def write(self, data: bytes, /) -> object:
        """Take bytes; a line is handed on once it has ended."""
        *lines, self._held = re.split(rb"[\n\r]", self._held + data)
        self._hand_on(lines)
        return None

    def flush(self) -> object:
        """See Sink."""
        self._echo.flush()
        return self._sink.flush()

    def close(self) -> None:
        """Write the rest as a line."""
        held, self._held = self._held, b""
        self._hand_on([held])
        self.flush()

    def _hand_on(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if text := line.decode("utf-8", errors="replace").strip():
                record = as_json_line(text, self._fields()) + "\n"
                self._sink.write(record.encode())
                self._echo.write(record)


class _Lines:
    """Whole lines, without secrets, for a sink and a screen; a sink of JSON lines hides them itself, by value."""

    def __init__(self, sink: Sink, screen: _Screen) -> None:
        self._sink, self._screen, self._partial = sink, screen, b""

    def write(self, data: bytes) -> None:
        data = self._partial + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _LONGEST_LINE:
            end = len(data)
        self._partial = data[end:]
        self._hand_on(data[:end])

    def end_line(self) -> None:
        data, self._partial = self._partial, b""
        self._hand_on(data)
        self._screen.end_line()

    def _hand_on(self, data: bytes) -> None:
        if not data:
            return
        if not isinstance(self._sink, JsonLines):
            data = redact_sentence(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        self._sink.write(data)
        self._sink.flush()
        self._screen.write(data)


class _Screen:
    def __init__(self, echo: TextIO) -> None:
        self._echo, self._live = echo, echo.isatty()
        self._partial = b""

    def write(self, data: bytes) -> None:
        *pieces, self._partial = re.split(rb"(?<=[\n\r])", self._partial + data)
        self._show(pieces)

    def end_line(self) -> None:
        pieces, self._partial = [self._partial] if self._partial else [], b""
        self._show(pieces)

    def _show(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            line = piece.decode("utf-8", errors="replace")
            text = visible(line.rstrip("\n\r"))
            if line in ("\n", "\r") or _NOISE.search(text):
                continue
            if line.endswith("\r"):
                if self._live:
                    self._echo.write("\r\x1b[2K" + text)
            else:
                # Erase a half-written progress bar first.
                self._echo.write(("\r\x1b[2K" if self._live else "") + text + "\n")
        self._echo.flush()
