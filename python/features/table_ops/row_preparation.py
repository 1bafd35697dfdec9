"""Table operators that treat each row alone, over Arrow tables: the Arrow engine applies them to the lake's files.

rows = row_preparation(spec)        # None: some operator needs other rows, other tables, or Spark's SQL
rows.apply(table)                   # events as in the lake -> the rows that Preparation.spark makes of them
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.config import Spec
from headrace.features.table_ops.preparation import BoundTableOp, Preparation
from headrace.features.types import ValueType

#: Spark properties by which an expression means something else.
_MEANING = ("spark.sql.ansi.", "spark.sql.legacy.", "spark.sql.caseSensitive", "spark.sql.parser.")


@dataclass(frozen=True)
class RowPreparation:
    """Operators in their order; pickled into tasks."""

    steps: tuple[BoundTableOp, ...]

    def key(self) -> list[Any]:
        """JSON that says what the operators make."""
        return [{"op": s.op.name, "params": s.op.model_dump(mode="json")} for s in self.steps]

    def inputs(self, wanted: Collection[str]) -> dict[str, ValueType]:
        """The lake's columns that `wanted` ones, and which rows there are, are made of."""
        needed = set(wanted)
        for step in reversed(self.steps):
            needed = step.op.reads(needed, step.schema)
        return {name: type_ for name, type_ in self.steps[0].schema.types.items() if name in needed}

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows of events whose columns have the declared types; texts may be dictionaries.

        Raises:
            UserError: an overflow of integers, or a division by zero.
        """
        for step in self.steps:
            rows = step.op.arrow_rows(step.schema)
            assert rows is not None
            table = rows(table)
        return table


def row_preparation(spec: Spec) -> RowPreparation | None:
    """The operators of a pipeline; None where it has none, or one that needs more than Arrow and a row."""
    if not spec.features.prepare or spark_alone(spec) is not None:
        return None
    return RowPreparation(Preparation.from_spec(spec).steps)


def spark_alone(spec: Spec) -> str | None:
    """The first operator for which rows must pass through Spark, as `features.prepare[1] (lambda)`; None: no operator.

    Raises:
        UserError: see `Preparation`.
    """
    changed = any(key.startswith(_MEANING) for key in spec.spark.properties)
    for step in Preparation.from_spec(spec).steps:
        if step.op.arrow_rows(step.schema) is None or (changed and step.op.name == "lambda"):
            return f"{step.where} ({step.op.name})"
    return None
