"""What an error of Spark's says, by its text: what a Python task has ended with, or what a store has answered."""

from __future__ import annotations

from pyspark.errors.exceptions.captured import CapturedException

from headrace.lake.spark_outages import store_away_of_spark
from headrace.lake.spark_refusals import refusal_of_spark
from headrace.lake.task_errors import task_error


def error_in_spark(error: BaseException) -> Exception | None:
    """The error that Spark has wrapped in one of its own; None: it is Spark's, or unknown here."""
    texts = [str(error)]
    if isinstance(error, CapturedException):
        # It says what it is alone, and in Java's trace what it comes of.
        texts.append(error._stackTrace)
    for text in texts:
        if (found := task_error(text) or store_away_of_spark(text) or refusal_of_spark(text)) is not None:
            return found
    return None
