"""Log lines: text for people, or JSON for programs, one object a line (`headrace --log-format json`).

Both are without secrets (`headrace.redaction`): the formatters here are those of all processes of headrace.

Processes that are started below this one log in the same form: the form is a variable of the environment. Fields of a
line: `time` (UTC), `level`, `logger`, `message`, those of the context (`pipeline`, `ds`, `stage`, `run_id`), those that
a caller gives as `extra={"fields": {...}}`, and of an exception `exception` (`type`, `message`, `trace`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

from headrace.redaction import redact, redact_leaves, redact_sentence

#: text or json.
VARIABLE = "HEADRACE_LOG_FORMAT"
FORMATS = ("text", "json")

LogFormat = Literal["text", "json"]

_context: dict[str, str] = {}
#: What terminals obey (C0 and C1 without tab and newline, DEL), and marks by which a text reads otherwise than it is.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def log_format() -> LogFormat:
    """Return the form of this process's lines."""
    return "json" if os.environ.get(VARIABLE) == "json" else "text"


def is_json() -> bool:
    """Return whether lines are JSON."""
    return log_format() == "json"


def set_context(**fields: str) -> None:
    """Set what each JSON line has besides its message, from now on; empty values are left out."""
    _context.clear()
    _context.update({name: value for name, value in fields.items() if value})


class TextFormatter(logging.Formatter):
    """A record as text without secrets, that a terminal shows and does not obey."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        return visible(redact(super().format(record)))


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        own: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            kind, e, _ = record.exc_info
            trace = self.formatException(record.exc_info)
            own["exception"] = {"type": f"{kind.__module__}.{kind.__qualname__}", "message": str(e), "trace": trace}
        at = datetime.fromtimestamp(record.created, UTC)
        return json_line(record.getMessage(), record.levelname, record.name, own, at)


def json_line(
    message: str, level: str, logger: str, fields: Mapping[str, Any] | None = None, at: datetime | None = None
) -> str:
    """Return a line of this process, with its context."""
    when = (at or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": when, "level": level, "logger": logger, "message": redact(message)}
    return json.dumps({**head, **_context, **redact_leaves(dict(fields or {}))})


def as_json_line(text: str, fields: Mapping[str, str]) -> str:
    """Return another process's output as a line: a JSON object with the fields it lacks, else the text as a message.

    Args:
        text: one line, without its end.
        fields: of the context in which it was printed.
    """
    if text.startswith("{"):
        try:
            told = json.loads(text)
            if isinstance(told, dict):
                ours = {name: value for name, value in fields.items() if name not in told}
                return json.dumps({**redact_leaves(told), **ours})
        except ValueError:
            pass
    return json_line(text, "INFO", "output", fields)


def configure(
    handler: logging.Handler | None = None,
    text: str = "%(message)s",
    datefmt: str | None = None,
    level: int = logging.INFO,
    force: bool = False,
) -> None:
    """Set up the root logger, and what is printed of an exception that nobody has caught.

    Args:
        handler: where lines go; None: standard error.
        text: the format of text.
        datefmt: of its times.
        level: of the root logger.
        force: in place of handlers that are there.
    """
    handler = handler or logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if is_json() else TextFormatter(text, datefmt))
    logging.basicConfig(handlers=[handler], level=level, force=force)
    sys.excepthook = _print_uncaught
    if threading.excepthook is threading.__excepthook__:  # what others have put in its place stays
        threading.excepthook = _print_uncaught_of_thread


def print_trace(e: BaseException, logger: str = "headrace") -> None:
    """Print an exception with its trace on standard error, in the form of this process's lines."""
    if is_json():
        logging.getLogger(logger).error("failed", exc_info=e)
    else:
        print(visible(redact("".join(traceback.format_exception(e)))), end="", file=sys.stderr, flush=True)


def _print_uncaught(kind: type[BaseException], e: BaseException, trace: TracebackType | None) -> None:
    print_trace(e.with_traceback(trace))


def _print_uncaught_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        print_trace(args.exc_value)


def visible(text: str) -> str:
    r"""Return a text whose control characters a terminal shows and does not obey, as `\x1b`; lines and tabs stay.

    Ids, file names and messages of others may have such. Marks that turn the direction of writing count, too.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def tell_error(message: str, out: TextIO | None = None) -> None:
    """Write a message for the user: `error: ...` on standard error, or a line of JSON."""
    shown = json_line(message, "ERROR", "headrace") if is_json() else visible(redact_sentence(f"error: {message}"))
    print(shown, file=out or sys.stderr, flush=True)
