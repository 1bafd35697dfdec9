"""Operators that treat each row alone: filter, dropna, rename, lambda."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from headrace.config.schema import ColumnType, TableColumn, quoted
from headrace.errors import UserError
from headrace.features.functions.arrays import input_values, is_missing, one_chunk
from headrace.features.table_ops.base import (
    QUERY,
    SparkTableContext,
    TableOp,
    TableSchema,
    filter_events,
    refuse,
    reserved,
)
from headrace.features.table_ops.predicate import Predicate
from headrace.features.table_ops.row_expression import RowExpression, parse
from headrace.features.table_ops.sql import fault_without_spark
from headrace.features.types import OpError, ValueType, declared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Filter(TableOp):
    """Keeps the rows for which `where` is true, not those for which it is false or unknown (a null in it).

    For the conditions see headrace.features.table_ops.predicate. Query rows always stay. Source: NVTabular's Filter.
    """

    name: ClassVar[str] = "filter"
    rowwise: ClassVar[bool] = True

    where: str

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        Predicate(self.where, schema.types)
        return dict(schema.types)

    def reads(self, needed: Collection[str], schema: TableSchema) -> set[str]:
        return {*needed, *Predicate(self.where, schema.types).columns}

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table] | None:
        condition = Predicate(self.where, schema.types)
        if any(schema.types[c].element == "decimal" for c in condition.columns):
            return None  # Arrow rounds decimals to doubles otherwise than Spark
        return lambda rows: filter_events(rows, condition.arrow(lambda name: one_chunk(rows.column(name))))

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        return frame.where(F.col(QUERY).isNotNull() | Predicate(self.where, context.schema.types).spark())


class Dropna(TableOp):
    """Drops rows in which any (or all) of the columns are missing: null, NaN or an empty list. Query rows always stay.

    Source: NVTabular's Dropna.
    """

    name: ClassVar[str] = "dropna"
    rowwise: ClassVar[bool] = True

    subset: tuple[str, ...] = Field(min_length=1)
    how: Literal["any", "all"] = "any"

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        for column in self.subset:
            schema.type_of(column)
        return dict(schema.types)

    def reads(self, needed: Collection[str], schema: TableSchema) -> set[str]:
        return {*needed, *self.subset}

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table]:
        def drop(rows: pa.Table) -> pa.Table:
            missing = [is_missing(input_values(one_chunk(rows.column(c)))) for c in self.subset]
            return filter_events(
                rows, pa.array(~(np.logical_or if self.how == "any" else np.logical_and).reduce(missing))
            )

        return drop

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.functions import spark_expressions

        missing = [spark_expressions.is_missing(c, context.schema.types[c]) for c in self.subset]
        drop = reduce(lambda a, b: a | b if self.how == "any" else a & b, missing)
        return frame.where(F.col(QUERY).isNotNull() | ~drop)


class RenameColumns(TableOp):
    """Gives columns other names: `rename: {to: {old: new}}`. Two may swap theirs.

    The label and the event's time keep theirs: other parts of the spec name them. Source: NVTabular's Rename.
    """

    name: ClassVar[str] = "rename"
    rowwise: ClassVar[bool] = True

    to: Mapping[str, str] = Field(min_length=1)

    def former_name(self, column: str) -> str | None:
        return next((old for old, new in self.to.items() if new == column), None)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        for old, new in self.to.items():
            schema.type_of(old)
            refuse(old == schema.label, f"'{old}' is the label; features.label names it")
            refuse(old == schema.time, f"'{old}' is the event's time; table.event_time names it")
            refuse(reserved(new), f"'{new}' is a reserved name (`ds`, names that begin with `_`)")
        out: dict[str, ValueType] = {}
        names: set[str] = set()
        for name, type_ in schema.types.items():
            new = self.to.get(name, name)
            # Spark's names have no case.
            refuse(new.lower() in names, f"two columns would be named '{new}'")
            names.add(new.lower())
            out[new] = type_
        return out

    def reads(self, needed: Collection[str], schema: TableSchema) -> set[str]:
        return {c for c in schema.types if self.to.get(c, c) in needed}

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table]:
        return lambda rows: rows.rename_columns([self.to.get(c, c) for c in rows.schema.names])

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import without_helpers

        frame = without_helpers(frame)
        return frame.select(*[col(c).alias(self.to.get(c, c)) for c in frame.columns])


#: Results that another run of the same day would not give.
_CHANGING = frozenset(
    {
        "rand",
        "randn",
        "random",
        "uniform",
        "randstr",
        "uuid",
        "shuffle",
        "monotonically_increasing_id",
        "spark_partition_id",
        "input_file_name",
        "input_file_block_start",
        "input_file_block_length",
        "now",
        "curdate",
        "curtime",
        "current_date",
        "current_time",
        "current_timestamp",
        "localtimestamp",
        "current_user",
        "user",
        "session_user",
        "current_catalog",
        "current_database",
        "current_schema",
        "version",
    }
)
#: What is no function of one row.
_NOT_A_ROW = frozenset({"select", "over", "explode", "explode_outer", "posexplode", "inline", "stack", "from"})
_WORD = re.compile(
    r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*"|`((?:[^`]|``)+)`|([^\W\d]\w*)\s*(\()?|(\*\s*[),]|\(\s*\*)"""
)


class AddedColumn(BaseModel):
    """A column to add: an expression of Spark's SQL, and the type that it is cast to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    expression: str
    type: ColumnType

    def value_type(self, name: str) -> ValueType:
        """Return the type of the column, as features see it."""
        return declared(TableColumn(name=name, type=self.type))


class Lambda(TableOp):
    """Adds columns, each an expression of Spark's SQL over the other columns of its row.

        lambda: {add: {price_per_day: {expression: "item_price / (1 + item_age_days)", type: double}}}

    Expressions do not see each other's columns; use two operators. One may make the label (`features.label: rich`), of
    columns that no feature is then made of:

        lambda: {add: {rich: {expression: "income = '>50K'", type: int}}}

    Refused: the label, functions that another run would answer otherwise (`rand`, `current_date`), aggregates, windows,
    subqueries, Python functions. Whether an expression runs on GPUs, `headrace plan --gpu` says. Source: NVTabular's
    LambdaOp.
    """

    name: ClassVar[str] = "lambda"
    rowwise: ClassVar[bool] = True

    add: Mapping[str, AddedColumn] = Field(min_length=1)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        # What the text shows is said before any data is read; the plan is looked at when there is one.
        columns = {c.lower() for c in schema.types}
        for name, column in self.add.items():
            for text, called in _words(column.expression):
                # As Spark compares names.
                word = text.lower()
                if word == "*":
                    raise OpError(f"'{name}': `*` would take in the label; name the columns")
                if word == schema.label.lower() and not called:
                    schema.not_label([schema.label], f"'{name}'")
                if word in _CHANGING and (called or word not in columns):
                    raise OpError(f"'{name}': `{text}` answers otherwise when the day is run again")
                if word in _NOT_A_ROW and word not in columns:
                    raise OpError(f"'{name}': `{text}` is no function of one row")
            if (fault := fault_without_spark(column.expression, schema.types)) is not None:
                raise OpError(f"'{name}': {fault}")
        return schema.adding({name: column.value_type(name) for name, column in self.add.items()})

    def reads(self, needed: Collection[str], schema: TableSchema) -> set[str]:
        used = (self.made_of(name, schema) for name in self.add if name in needed)
        return set(needed).difference(self.add).union(*used)

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table] | None:
        parsed = {
            n: parse(m.expression, schema.types, declared(TableColumn(name=n, type=m.type)))
            for n, m in self.add.items()
        }
        # A column without an expression here is Spark's, and so are all rows then.
        expressions = {n: e for n, e in parsed.items() if e is not None}
        return (lambda rows: _with_columns(rows, expressions)) if len(expressions) == len(parsed) else None

    def made_of(self, column: str, schema: TableSchema) -> frozenset[str]:
        if column not in self.add:
            return frozenset()
        words = {word.lower() for word, _ in _words(self.add[column].expression)}
        return frozenset(c for c in schema.types if c.lower() in words)

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as F

        types, label = list(context.schema.types), context.schema.label
        for name, column in self.add.items():
            try:
                # Only what was declared: not the row's identity, nor helper columns.
                visible = frame.select(*[quoted(c) for c in context.schema.types])
                result = visible.select(F.expr(column.expression).cast(str(column.value_type(name))).alias(name))
                _check_plan(name, visible, result, types.index(label) if label in types else None)
            except PySparkException as e:
                raise UserError(f"features.prepare (lambda): '{name}': {' '.join(str(e).split())[:400]}") from None
        type_names = {name: str(column.value_type(name)) for name, column in self.add.items()}
        return frame.select("*", *[F.expr(m.expression).cast(type_names[n]).alias(n) for n, m in self.add.items()])


def _with_columns(rows: pa.Table, expressions: Mapping[str, RowExpression]) -> pa.Table:
    """Return the rows with more columns; those that nobody wants may lack what they are made of.

    Raises:
        UserError: an overflow of integers, or a division by zero.
    """
    out, existing = rows, set(rows.schema.names)
    for name, expression in expressions.items():
        if not existing.issuperset(expression.columns):
            continue
        try:
            out = out.append_column(name, expression.arrow(lambda column: one_chunk(rows.column(column))))
        except pa.ArrowInvalid as e:
            raise UserError(f"features.prepare (lambda): '{name}': {e}") from None
    return out


def _words(expression: str) -> Iterator[tuple[str, bool]]:
    """Return names outside of texts, and whether they are called; `*` where it stands for all columns."""
    for match in _WORD.finditer(expression):
        name, word, called, star = match.groups()
        if name is not None:
            yield name.replace("``", "`"), False
        elif word is not None:
            yield word, called is not None
            if called is not None and re.match(r"\s*\*", expression[match.end() :]):
                yield "*", False
        elif star is not None:
            yield "*", False


def _check_plan(name: str, visible: DataFrame, result: DataFrame, label: int | None) -> None:
    """See that the analyzed plan is a projection of deterministic expressions, and the label in none of them.

    Args:
        name: of the column that is added.
        visible: what the expression sees.
        result: `visible` with the expression selected.
        label: the label's place among the columns of `visible`; None where the operator makes it.

    Raises:
        UserError: it is not.
    """
    plan: Any = result._jdf.queryExecution().analyzed()
    visible_plan: Any = visible._jdf.queryExecution().analyzed()
    place = f"features.prepare (lambda): '{name}'"
    if plan.nodeName() != "Project" or plan.children().apply(0).nodeName() != visible_plan.nodeName():
        raise UserError(f"{place}: is no function of one row (an aggregate, a window or a generator)")
    top = plan.expressions().apply(0)
    if label is not None and top.references().contains(visible_plan.output().apply(label)):
        raise UserError(f"{place}: '{visible.columns[label]}' is the label, and the row's own would be in it: it leaks")
    if not top.deterministic():
        raise UserError(f"{place}: answers otherwise when the day is run again")
    todo = [top]
    while todo:
        node = todo.pop()
        kind = str(node.getClass().getSimpleName())
        if "Python" in kind or "Subquery" in kind:
            kind_name = "a Python function" if "Python" in kind else "a subquery"
            raise UserError(f"{place}: {kind_name} is no expression of Spark's; GPUs and the plan cannot see into it")
        if kind.startswith("Current") or kind in ("Now", "LocalTimestamp"):
            raise UserError(f"{place}: answers otherwise when the day is run again")
        children = node.children()
        todo += [children.apply(i) for i in range(children.size())]
