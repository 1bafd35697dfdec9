"""Everything that a process says: log lines, errors, progress; and what must not be in them, secrets.

Log lines are text for people, or JSON for programs, one object a line (`headrace --log-format json`). Both are without
secrets: the formatters here are those of all processes of headrace. Secrets are known by the names of what holds them,
by where they stand in a text, and by `hide`.

Processes that are started below this one log in the same form: the form is a variable of the environment. Fields of a
line: `time` (UTC), `level`, `logger`, `message`, those of the context (`pipeline`, `ds`, `stage`, `run_id`), those that
a caller gives as `extra={"fields": {...}}`, and of an exception `exception` (`type`, `message`, `trace`).

Progress goes to listeners in this process, such as the one behind `headrace status --watch`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal, TextIO
from urllib.parse import quote, quote_plus

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
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            kind, e, _ = record.exc_info
            trace = self.formatException(record.exc_info)
            fields["exception"] = {"type": f"{kind.__module__}.{kind.__qualname__}", "message": str(e), "trace": trace}
        time = datetime.fromtimestamp(record.created, UTC)
        return json_line(record.getMessage(), record.levelname, record.name, fields, time)


def json_line(
    message: str, level: str, logger: str, fields: Mapping[str, Any] | None = None, time: datetime | None = None
) -> str:
    """Return a line of this process, with its context."""
    timestamp = (time or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": timestamp, "level": level, "logger": logger, "message": redact(message)}
    return json.dumps({**head, **_context, **redact_leaves(dict(fields or {}))})


def as_json_line(text: str, fields: Mapping[str, str]) -> str:
    """Return another process's output as a line: a JSON object with the fields it lacks, else the text as a message.

    Args:
        text: one line, without its end.
        fields: of the context in which it was printed.
    """
    if text.startswith("{"):
        try:
            line = json.loads(text)
            if isinstance(line, dict):
                missing = {name: value for name, value in fields.items() if name not in line}
                return json.dumps({**redact_leaves(line), **missing})
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
    return _CONTROLS.sub(lambda control: repr(control[0])[1:-1], text)


def print_error(message: str, out: TextIO | None = None) -> None:
    """Write a message for the user: `error: ...` on standard error, or a line of JSON."""
    line = json_line(message, "ERROR", "headrace") if is_json() else visible(redact_sentence(f"error: {message}"))
    print(line, file=out or sys.stderr, flush=True)


# Secrets

#: A key that is to hold a secret, wherever in it that is said: the name of an account or of a container may follow.
_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|token|credential|(?<![a-z])sas(?![a-z])|(?<=[._-])pwd(?![a-z])|(?<=[._])pass$"
    r"|(access|account|private|encryption|api|shared|storage|master)[._-]?key(?![a-z])|connection[._-]?string"
    # Of URLs that are signed: Azure's, Amazon's, Google's.
    r"|^sig$|^X-(Amz|Goog)-Signature$",
    re.IGNORECASE,
)
#: What such a key holds instead of the secret: its file, where it is asked for, a class that finds it, the service that
#: keeps it.
_NO_SECRET = re.compile(
    r"(file|path|token_request_url|providers?|provider\.type(\.[\w.-]+)?|[._-]enabled|secrets?manager|GOOGLE_APPLICATION_CREDENTIALS"
    # Of Spark and Hadoop: when Kerberos' tickets are renewed, and whether passwords may stand in the configuration.
    r"|renewal\.credentials|credentials\.(renewalRatio|retryWait)|clear-text-fallback)$",
    re.IGNORECASE,
)
#: Keys of references to a secret of Kubernetes.
_REFERENCE = re.compile(r"secretKeyRef|\.secrets\.", re.IGNORECASE)
#: `scheme://user:password@host`: what is between `//` and `@`, but for the user.
_USER_INFO = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+@")
#: The key and what follows it, of `key=value` and `"key": "value"`; a whole word, so that a long one is read once.
_KEY = re.compile(r"""(?<![\w.-])([\w.-]+)["']?\s*[=:]\s*""")
#: The same in a sentence, where a colon may end the name of a key: `publish.warehouse.password: unknown key`.
_KEY_IN_SENTENCE = re.compile(r"""(?<![\w.-])([\w.-]+)(?:["']?[^\S\n]*=[^\S\n]*|["'][^\S\n]*:[^\S\n]*(?=["'\d]))""")
#: The same in the value of a property, where `group:artifact:version` is no key and its value.
_KEY_IN_VALUE = re.compile(r"""(?<![\w.-])([\w.-]+)(?:["']?\s*=|["']\s*:)\s*""")
#: The value; a quotation mark at its end is of a text that it stands in.
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;&)}\]]*[^\s,;&)}\]"']""")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}")
#: Shorter values of variables say nothing, and stand in other words.
_SHORTEST = 6
#: Of values that are known to be secrets. A shorter one would be hidden within other words, and so be told by the gaps.
_SHORTEST_KNOWN = 4
#: Of a line of a secret that has several. Logs indent lines and begin them with marks, so each is hidden by itself.
_SHORTEST_LINE = 8
HIDDEN = "***"
#: Values that are secrets whatever their variables and keys are called, and the names of variables with such values.
_values: set[str] = set()
_variables: set[str] = set()


def hide(value: str) -> None:
    """Have `redact` hide a value from now on: a secret that this process has read."""
    if len(value) >= _SHORTEST_KNOWN:
        _values.add(value)


def hide_variable(name: str) -> None:
    """Have `redact` hide the value of an environment variable that a pipeline says has a secret."""
    _variables.add(name)


def is_secret(key: str) -> bool:
    """Return whether the value of a property or variable is a secret, by its key."""
    return _SECRET.search(key) is not None and _NO_SECRET.search(key) is None and _REFERENCE.search(key) is None


def holds_secret(key: str, value: object) -> bool:
    """Return whether a property must not be written down: by its key, or by its value.

    Unlike `redact` it does not ask the environment: what a file may hold is the same on every machine.
    """
    if is_secret(key):
        return True
    return isinstance(value, str) and _REFERENCE.search(key) is None and _without_secrets(value, _KEY_IN_VALUE) != value


def redact(text: str) -> str:
    """Return a text for a log, without what may be a secret.

    Hidden are passwords in URLs, values of keys that are named like secrets (`is_secret`), HTTP's credentials, private
    keys, the values of this process's own environment variables that are named so, and all that `hide` and
    `hide_variable` know of. Values of fewer than 4 characters (6 of variables) are left: other words have them, too.
    """
    return _without_secrets(_without_known(text), _KEY)


def redact_sentence(text: str) -> str:
    """Redact a message that may name keys of a spec before a colon."""
    return _without_secrets(_without_known(text), _KEY_IN_SENTENCE)


def redact_leaves(value: Any) -> Any:
    """Return a value for JSON: `redact` is applied to the texts in its lists and mappings; other types become text."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {_redact_key(key): _redact_item(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_leaves(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value))


def _redact_key(key: Any) -> Any:
    return _without_known(key) if isinstance(key, str) else key


def _redact_item(key: str, value: Any) -> Any:
    return HIDDEN if isinstance(value, str) and is_secret(key) else redact_leaves(value)


def _without_known(text: str) -> str:
    """Return a text without the values that are known to be secrets, in each of their forms."""
    values = _values | {value for name in _variables if len(value := os.environ.get(name, "")) >= _SHORTEST_KNOWN}
    values |= {v for name, v in os.environ.items() if len(v) >= _SHORTEST and _is_secret_variable(name)}
    forms = {form for value in values for form in _forms(value)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


@lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    return is_secret(name)


@lru_cache(maxsize=1024)
def _forms(value: str) -> frozenset[str]:
    """Return a secret as texts have it: as it is, in addresses, in JSON, as `repr` and `ascii` write it, by lines."""
    data = value.encode("utf-8", errors="surrogatepass")
    forms = {value, quote(data), quote(data, safe=""), quote_plus(data), repr(data)[2:-1]}
    forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    for written in (repr, ascii):
        # Both quotation marks are in it: the text that has the secret decides whether the single one is escaped.
        body = written(value + "'\"")[1:-4]
        forms |= {body, body.replace("\\'", "'")}
    if len(lines := value.splitlines()) > 1:
        forms |= {line.strip() for line in lines if len(line.strip()) >= _SHORTEST_LINE}
    return frozenset(form for form in forms if form.strip())


def _without_secrets(text: str, keys: re.Pattern[str]) -> str:
    """Return a text without secrets by position: behind one of `keys`, and elsewhere."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    return _without_values(_BEARER.sub(rf"\1 {HIDDEN}", _USER_INFO.sub(rf"\1:{HIDDEN}@", text)), keys)


def _without_values(text: str, keys: re.Pattern[str]) -> str:
    """Return a text without values of secret keys; the value of another key may itself be a key: `Error: token=abc`."""
    parts, position, copied = list[str](), 0, 0
    while (key := keys.search(text, position)) is not None:
        position = key.end()
        if is_secret(key[1]) and (value := _VALUE.match(text, position)) is not None:
            parts += [text[copied:position], HIDDEN]
            position = copied = value.end()
    return "".join([*parts, text[copied:]])


# Progress


@dataclass(frozen=True)
class Progress:
    """Units done, of how many."""

    done: int
    total: int
    #: The unit of `done` and `total`: steps, rows, tasks.
    unit: str
    #: Units a second; 0: unknown.
    rate: float = 0.0
    #: None: unknown.
    seconds_left: float | None = None


Listener = Callable[[Progress], None]
_listeners: list[Listener] = []


def report_progress(progress: Progress) -> None:
    """Send progress to the listeners of this process, if there are any."""
    for listener in tuple(_listeners):
        listener(progress)


@contextmanager
def listening_to_progress(listener: Listener) -> Iterator[None]:
    """Call `listener` with each progress that is sent within the block, in the sender's thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
