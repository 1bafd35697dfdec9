"""Log lines: text for people, or JSON for programs, one object a line (`headrace --log-format json`).

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
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from headrace.redaction import redact

#: text or json.
VARIABLE = "HEADRACE_LOG_FORMAT"
FORMATS = ("text", "json")

LogFormat = Literal["text", "json"]

_context: dict[str, str] = {}
#: What terminals obey (C0 and C1 without tab and newline, DEL), and marks by which a text reads otherwise than it is.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def log_format() -> LogFormat:
    """The form of this process's lines."""
    return "json" if os.environ.get(VARIABLE) == "json" else "text"


def is_json() -> bool:
    """Whether lines are JSON."""
    return log_format() == "json"


def set_context(**fields: str) -> None:
    """What each JSON line says besides its message, from now on; empty values are left out."""
    _context.clear()
    _context.update({name: value for name, value in fields.items() if value})


class TextFormatter(logging.Formatter):
    """A record as text that a terminal shows and does not obey."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        return visible(super().format(record))


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        own: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            kind, e, _ = record.exc_info
            trace = redact(self.formatException(record.exc_info))
            own["exception"] = {"type": f"{kind.__module__}.{kind.__qualname__}", "message": redact(str(e))}
            own["exception"]["trace"] = trace
        at = datetime.fromtimestamp(record.created, UTC)
        return json_line(record.getMessage(), record.levelname, record.name, own, at)


def json_line(
    message: str, level: str, logger: str, fields: Mapping[str, Any] | None = None, at: datetime | None = None
) -> str:
    """A line of this process, with its context."""
    when = (at or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": when, "level": level, "logger": logger, "message": redact(message)}
    return json.dumps({**head, **_context, **(fields or {})}, default=str)


def as_json_line(text: str, fields: Mapping[str, str]) -> str:
    """What another process printed: where it is a JSON object already, that with the fields it lacks; else as the
    message of a line.

    Args:
        text: one line, without its end.
        fields: of the context in which it was printed.
    """
    if text.startswith("{"):
        try:
            told = json.loads(text)
            if isinstance(told, dict):
                return json.dumps({**told, **{name: value for name, value in fields.items() if name not in told}})
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
    """Set up the root logger.

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


def visible(text: str) -> str:
    r"""Return a text whose control characters a terminal shows and does not obey, as `\x1b`; lines and tabs stay.

    Ids, file names and messages of others may have such. Marks that turn the direction of writing count, too.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def tell_error(message: str, out: TextIO | None = None) -> None:
    """A message for the user: `error: ...` on standard error, or a line of JSON."""
    shown = json_line(message, "ERROR", "headrace") if is_json() else visible(f"error: {message}")
    print(shown, file=out or sys.stderr, flush=True)
