"""Rules of the user's own: references to other tables, and figures in Spark SQL or the warehouse's SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.config.publish import AuditRule, Reference
from headrace.errors import UserError, nearest
from headrace.publish.audit import check_within
from headrace.publish.target import Check, StagedDay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_EXAMPLES = 3


def reference_checks(spark: SparkSession, df: DataFrame, references: Mapping[str, Reference]) -> Iterator[Check]:
    """For each column: that the table has its values.

    Raises:
        UserError: the scores or the table have no such column, or the table cannot be read.
    """
    from pyspark.sql import functions as F

    from headrace.features.functions.spark_expressions import col

    for column, reference in references.items():
        key_path = f"publish.audit.references.{column}"
        if column not in df.columns:
            raise UserError(
                f"{key_path}: the scores have no such column{nearest(column, df.columns)}; they have: "
                f"{', '.join(df.columns)}"
            )
        table = _read(spark, reference.table, key_path)
        key = reference.column or column
        if key not in table.columns:
            raise UserError(
                f"{key_path}: {reference.table} has no column '{key}'{nearest(key, table.columns)}; it has: "
                f"{', '.join(table.columns)}"
            )
        values = df.select(col(column).alias("value")).where(F.col("value").isNotNull()).distinct()
        known = table.select(col(key).alias("known"))
        missing = values.join(known, values["value"].eqNullSafe(known["known"]), "left_anti")
        count = missing.count()
        detail = ""
        if count:
            examples = missing.orderBy("value").limit(_EXAMPLES).collect()
            detail = "for example " + ", ".join(str(row["value"]) for row in examples)
        yield Check(f"values of {column} that {reference.table} lacks", count, "0", not count, detail)


def _read(spark: SparkSession, table: str, key_path: str) -> DataFrame:
    from pyspark.errors import AnalysisException

    from headrace.storage import local

    try:
        if "/" not in table:
            return spark.read.table(table)
        kind = "delta" if (local(table) / "_delta_log").is_dir() else "parquet"
        return spark.read.format(kind).load(table)
    except AnalysisException as e:
        raise UserError(f"{key_path}: {table} cannot be read ({str(e).splitlines()[0]})") from None


def own_checks(df: DataFrame, staged: StagedDay, rules: Mapping[str, AuditRule]) -> Iterator[Check]:
    """Yield the figures of `publish.audit.rules` against their limits.

    Raises:
        UserError: a rule cannot be computed, or gives no number.
    """
    yield from _by_spark(df, {name: rule for name, rule in rules.items() if rule.expr is not None})
    for name, rule in rules.items():
        if rule.sql is not None:
            yield _by_warehouse(staged, name, rule)


def _by_spark(df: DataFrame, rules: Mapping[str, AuditRule]) -> Iterator[Check]:
    """All expressions in one pass."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    if not rules:
        return
    columns = []
    for name, rule in rules.items():
        assert rule.expr is not None
        try:
            column = F.expr(rule.expr)
            df.agg(column.cast("double"))
        except (AnalysisException, ParseException) as e:
            raise UserError(f"publish.audit.rules.{name}.expr: {str(e).strip().splitlines()[0]}") from None
        columns.append(column.cast("double").alias(name))
    figures = df.agg(*columns).collect()[0].asDict()
    for name, rule in rules.items():
        yield check_within(name, figures[name], rule.min, rule.max, rule.expr or "")


def _by_warehouse(staged: StagedDay, name: str, rule: AuditRule) -> Check:
    key_path = f"publish.audit.rules.{name}.sql"
    assert rule.sql is not None
    places: dict[str, str] = {"staged": staged.relation}
    if staged.previous is not None:
        places["previous"] = staged.previous.relation
    try:
        sql = rule.sql.format(**places)
    except KeyError as e:
        if e.args == ("previous",):
            return Check(name, 0.0, "compared with an earlier day", True, "no earlier day")
        raise UserError(f"{key_path}: {{{e.args[0]}}} is none of {{staged}}, {{previous}}") from None
    except (ValueError, IndexError) as e:
        raise UserError(f"{key_path}: {e}; double a brace that is meant as such") from None
    rows = staged.query(sql)
    if len(rows) != 1 or len(rows[0]) != 1:
        raise UserError(f"{key_path}: gives {len(rows)} rows of {len(rows[0]) if rows else 0} columns, not one number")
    return check_within(name, _number(rows[0][0], key_path), rule.min, rule.max)


def _number(value: Any, key_path: str) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise UserError(f"{key_path}: gives {value!r}, not a number") from None
