"""What an error of Spark's says, by its text: what a Python task has ended with, or what a store has answered."""

from __future__ import annotations

import re
from urllib.parse import unquote

from pyspark.errors.exceptions.captured import CapturedException

from headrace.errors import UserError
from headrace.lake.spark_outages import store_away_of_spark
from headrace.lake.spark_refusals import refusal_of_spark
from headrace.lake.task_errors import task_error

#: Spark 4's error conditions of a scan: the condition, and the file as a URI.
_FAILED_READ = re.compile(r"\[FAILED_READ_FILE\.(\w+)\] Encountered error while reading file (\S+?)\.?\s")
_CAUSE = re.compile(r"\nCaused by: (?:[\w$]+\.)+([\w$]+(?:: [^\n]*)?)")
_HINTS = {"CANNOT_READ_FILE_FOOTER": "it has no footer", "NO_HINT": "no reason is given"}
#: Causes that say nothing of a file.
_NOT_OF_THE_FILE = ("OutOfMemoryError", "No space left", "InterruptedException", "InterruptedIOException")
#: Characters of a cause that a message shows.
_SHOWN = 300


def error_in_spark(error: BaseException) -> Exception | None:
    """The error that Spark has wrapped in one of its own; None: it is Spark's, or unknown here."""
    texts = [str(error)]
    if isinstance(error, CapturedException):
        # It says what it is alone, and in Java's trace what it comes of.
        texts.append(error._stackTrace)
    for text in texts:
        if (found := task_error(text) or store_away_of_spark(text) or refusal_of_spark(text)) is not None:
            return found
    # Last: a store that is away says mostly that a file cannot be read.
    return next((found for text in texts if (found := _unreadable_file(text)) is not None), None)


def _unreadable_file(text: str) -> UserError | None:
    """That a data file is damaged or gone, as Spark's scans tell it."""
    failed = _FAILED_READ.search(text)
    causes = [cause.strip() for cause in _CAUSE.findall(text)]
    if failed is None or any(word in cause for cause in causes for word in _NOT_OF_THE_FILE):
        return None
    kind, file = failed.groups()
    path = unquote(re.sub("^file:/+", "/", file))
    if kind == "FILE_NOT_EXIST":
        return UserError(f"the data file {path} is gone. Restore it, or have its table written again")
    why = causes[-1] if causes else _HINTS.get(kind, kind.replace("_", " ").lower())
    return UserError(
        f"the data file {path} is damaged: Spark cannot read it ({why[:_SHOWN]}). Restore it, or have it delivered "
        f"again"
    )
