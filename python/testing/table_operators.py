"""Checks that a table operator does not read the future."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.config import OpSpec
from headrace.errors import UserError
from headrace.features.table_ops.base import FILE, LINE, QUERY, TableOp
from headrace.features.table_ops.external import ExternalReader
from headrace.features.table_ops.preparation import Preparation
from headrace.library.frames import columns_of
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def check_table_operator(
    op: TableOp | OpSpec,
    table: pa.Table,
    *,
    label: str,
    time: str,
    spark: SparkSession,
    home: str | os.PathLike[str] = ".",
) -> pa.Table:
    """Run a table operator on events, and again without, and with other, rows of the future.

    No row up to an instant may change when all rows after it are removed, or when these have their values exchanged
    among them, labels included.

    Args:
        op: the operator, or its spec (`OpSpec(op="my_package.ops:Sessions", params={...})`).
        table: events; rows without a time are left alone.
        label: the column of 0 and 1.
        time: the column of the events' time (timestamp or date).
        spark: a session.
        home: what paths of external tables are relative to.

    Returns:
        the rows as the operator leaves them.

    Raises:
        AssertionError: a row changed; says which, and when the change was.
        UserError: the operator cannot take the columns.
    """
    spec = op if isinstance(op, OpSpec) else OpSpec(op=reference_of(op), params=op.model_dump(exclude_unset=True))
    preparation = Preparation([spec], columns_of(table, table.column_names), label, time)
    rows = table.num_rows
    table = table.append_column(FILE, pa.repeat("events", rows)).append_column(LINE, pa.array(range(rows), pa.int64()))
    all_rows = _run(preparation, table, spark, home)
    instants = sorted({t for t in table.column(time).to_pylist() if t is not None})
    for instant in instants[:: max(1, len(instants) // 3)]:
        # Null: as if it were not after.
        after = pc.fill_null(pc.greater(table.column(time), pa.scalar(instant, table.column(time).type)), False)
        past = table.filter(pc.invert(after))
        future = table.filter(after)
        columns = _columns(preparation, table, label)
        for replaced, change in (
            (past, "without the rows after it"),
            (pa.concat_tables([past, _exchanged(future, [time, FILE, LINE])]), "with other rows after it"),
        ):
            again = _run(preparation, replaced, spark, home)
            for line in past.column(LINE).to_pylist():
                left, right = all_rows.get(line), again.get(line)
                assert _rendered(left, columns) == _rendered(right, columns), (
                    f"row {line} up to {instant}: {_rendered(left, columns)} with all rows, "
                    f"{_rendered(right, columns)} {change}"
                )
    return pa.Table.from_pylist([all_rows[line] for line in sorted(all_rows)])


def reference_of(op: TableOp) -> str:
    """Return the reference by which a spec names an operator's class."""
    kind = type(op)
    is_own = kind.__module__.startswith("headrace.features.")
    return kind.name if is_own else f"{kind.__module__}:{kind.__qualname__}"


def _columns(preparation: Preparation, table: pa.Table, label: str) -> Sequence[str]:
    columns = [c.name for c in preparation.columns]
    if not columns:
        raise UserError("the operator leaves no column")
    return columns


def _exchanged(rows: pa.Table, fixed: Sequence[str]) -> pa.Table:
    """Return the rows with each column's values rotated by one row against the fixed columns."""
    if rows.num_rows < 2:
        return rows
    turned = rows.take(pa.array([*range(1, rows.num_rows), 0]))
    for name in fixed:
        turned = turned.set_column(turned.column_names.index(name), name, rows.column(name))
    return turned


def _run(
    preparation: Preparation, table: pa.Table, spark: SparkSession, home: str | os.PathLike[str]
) -> dict[int, dict[str, Any]]:
    reader = ExternalReader(Workspace(Path(home)))
    prepared: DataFrame = preparation.spark(_frame(spark, table), reader)
    rows_of_table = [row for row in prepared.toArrow().to_pylist() if row.get(QUERY) is None]
    return {row[LINE]: row for row in rows_of_table}


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    types = ", ".join(f"`{c.name}` {c.type}" for c in columns_of(table, table.column_names))
    return spark.createDataFrame(table.to_pylist(), types)


def _rendered(row: dict[str, Any] | None, columns: Sequence[str]) -> str | None:
    return None if row is None else repr({name: row[name] for name in columns})
