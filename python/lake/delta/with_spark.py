"""What of a commit to a Delta table is left to Spark: SQL constraints of others, and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.storage import Location

_LOG = logging.getLogger("headrace.lake")


def broken_constraints(rows: DataFrame, constraints: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """(name, rows that break it) of the constraints that some rows break: what Delta checks where Spark writes.

    Args:
        rows: those to be added.
        constraints: SQL by name (`headrace.lake.delta.transaction.Transaction.constraints`).
    """
    for name, text in constraints.items():
        broken = rows.where(~F.coalesce(F.expr(text), F.lit(False))).count()
        if broken:
            yield name, broken


def write_checkpoint(spark: SparkSession, table: Location) -> None:
    """Delta's own, as its writers leave one after some commits: who reads the table then reads less of its log."""
    jvm: Any = spark._jvm
    try:
        log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(table))
        # Beginning a transaction reads the newest version.
        log.startTransaction()
        log.checkpoint()
    except Exception as e:  # whatever it is (Spark's, Java's, a JVM that has ended): the commit is there
        java = getattr(e, "java_exception", None)
        _LOG.warning("%s: no checkpoint was written: %s", table, e if java is None else java.getMessage())
