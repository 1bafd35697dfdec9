"""Spark SQL expressions of a spec as conditions on a frame's rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

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
def _unlogged() -> Iterator[None]:
    """PySpark logs what does not resolve, with the JVM's stack trace; here it is an answer."""
    log = logging.getLogger("SQLQueryContextLogger")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _first_line(error: AnalysisException) -> str:
    return str(error).strip().splitlines()[0]
