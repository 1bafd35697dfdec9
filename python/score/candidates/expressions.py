"""Spark SQL expressions of a spec as conditions on a frame's rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.errors.exceptions.base import QueryContextType
from pyspark.logger import PySparkLogger
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import Score
from headrace.errors import UserError, nearest


def condition(frame: DataFrame, expression: str, where: str) -> Column:
    """Whether an expression is true of a row: boolean, never null.

    Args:
        frame: has the columns.
        expression: Spark SQL.
        where: its place in the spec, for messages.

    Raises:
        UserError: it is no expression, is no truth value, or names an unknown column, with the nearest.
    """
    if (fault := fault_of(frame, expression)) is not None:
        raise UserError(f"{where}: {fault}")
    return F.coalesce(F.expr(expression), F.lit(False))


def fault_of(frame: DataFrame, expression: str) -> str | None:
    """Why an expression is no condition on a frame's rows; None: it is one. Runs no Spark job."""
    try:
        # `where` itself takes texts that can be cast for conditions; what is wrong is known when the plan is analysed.
        with _unlogged():
            found = frame.select(F.expr(expression).alias("__condition"))
        kind = dict(found.dtypes)["__condition"]
    except ParseException as e:
        return f"'{expression}' is no Spark SQL expression: {_first_line(e)}"
    except AnalysisException as e:
        name = (e.getMessageParameters() or {}).get("objectName")
        if name is not None and str(e.getCondition()).startswith("UNRESOLVED_COLUMN"):
            column = name.replace("`.`", ".").strip("`")
            known = [c for c in frame.columns if not c.startswith("_")]
            return f"there is no column '{column}'{nearest(column, known)} (there are: {', '.join(known)})"
        return f"'{expression}': {_first_line(e)}"
    return None if kind == "boolean" else f"'{expression}' is {kind}, not true or false"


@contextmanager
def expression_errors(score: Score) -> Iterator[None]:
    """What Spark says of a value that an expression of the section cannot take is said of that expression.

    Raises:
        UserError: such a value, such as a divisor of 0 or a text that is no number.
    """
    try:
        with _unlogged():
            yield
    except PySparkException as e:
        for context in e.getQueryContext():
            for where, expression in _expressions(score):
                if context.contextType() is QueryContextType.SQL and context.fragment() in expression:
                    said = _first_line(e).partition(" If necessary set ")[0]
                    raise UserError(f"{where}: '{expression}': {said}") from None
        raise


def _expressions(score: Score) -> Iterator[tuple[str, str]]:
    """(place in the spec, Spark SQL)"""
    entries: list[tuple[str, object]] = [(f"score.filters[{i}]", entry) for i, entry in enumerate(score.filters)]
    if score.candidates is not None:
        entries += [(f"score.candidates.sources.{n}", source) for n, source in score.candidates.sources.items()]
    for where, entry in entries:
        if isinstance(expression := getattr(entry, "where", None), str):
            yield f"{where}.where", expression


@contextmanager
def _unlogged() -> Iterator[None]:
    """PySpark logs what does not resolve, with the JVM's stack trace; here it is an answer."""
    # By PySpark's own class: a plain logger of that name, had it been made first, takes none of what PySpark tells it.
    log = PySparkLogger.getLogger("SQLQueryContextLogger")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _first_line(error: PySparkException) -> str:
    return str(error).strip().splitlines()[0]
