"""Checks of your own operators, to call from your own tests (docs/library.md).

from headrace.testing import batches, check_operator, check_table_operator

@given(batches({"price": "double", "click": "boolean"}))
def test_halve(spark, batch):
    check_operator(["price"] >> Halve(), batch, label="click", spark=spark)

Row operators must have the same result in both engines, row by row. Table operators must not read the future. `batches`
are Hypothesis strategies for rows with the values that operators meet: nulls, NaN, infinities, extremes, odd texts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config import OpSpec
from headrace.config.schema import ColumnType, TableColumn
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.ops.base import Chains, Selection
from headrace.features.table_ops.base import FILE, LINE, QUERY, TableOp
from headrace.features.table_ops.preparation import ExternalReader, Preparation
from headrace.features.types import declared
from headrace.library.frames import columns_of
from headrace.library.workflow import FittedWorkflow, Workflow

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy
    from pyspark.sql import DataFrame, SparkSession


__all__ = ["batches", "check_operator", "check_table_operator"]


_START = datetime(2026, 1, 1, tzinfo=UTC)


def batches(
    columns: Mapping[str, ColumnType], label: str | None = None, max_rows: int = 40
) -> SearchStrategy[pa.Table]:
    """Return a strategy for tables with these columns and 0 to `max_rows` rows.

    Args:
        columns: name -> type, as in `table.columns`.
        label: a column that has only the values 0 and 1.
        max_rows: largest number of rows.
    """
    from hypothesis import strategies as st

    def values(name: str, type_: ColumnType) -> SearchStrategy[Any]:
        if name == label:
            return st.integers(0, 1)
        if type_.startswith("array<"):
            return st.none() | st.lists(_scalars(type_[len("array<") : -1]), max_size=4)
        return _scalars(type_)

    types = {name: declared(TableColumn(name=name, type=type_)).arrow for name, type_ in columns.items()}
    row = st.fixed_dictionaries({name: values(name, type_) for name, type_ in columns.items()})
    rows = st.lists(row, max_size=max_rows)
    return rows.map(lambda drawn: pa.table({n: pa.array([r[n] for r in drawn], t) for n, t in types.items()}))


def _scalars(type_: str) -> SearchStrategy[Any]:
    from hypothesis import strategies as st

    edges = {
        "string": st.sampled_from(["", "a", "A", " ", "0", "é", "日本", "\U0001f600", "a'b\"c\\"])
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
        "boolean": st.booleans(),
        "timestamp": st.builds(
            lambda days, micros: _START + timedelta(days=days, microseconds=micros),
            st.integers(-40_000, 40_000),
            st.sampled_from([0, 1, -1, 999_999]),
        ),
        "date": st.builds(lambda days: (_START + timedelta(days=days)).date(), st.integers(-40_000, 40_000)),
    }
    if type_ in ("int", "bigint"):
        top = 2**31 if type_ == "int" else 2**63
        values: SearchStrategy[Any] = st.sampled_from([0, 1, -1, top - 1, -top]) | st.integers(-50, 50)
    elif type_ in ("float", "double"):
        special = st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf])
        values = special | st.floats(-1e6, 1e6, width=32 if type_ == "float" else 64)
    else:
        values = edges[type_]
    return st.none() | values


def check_operator(
    chain: Selection | Chains, table: pa.Table, *, label: str, spark: SparkSession, seed: int = 0
) -> FittedWorkflow | None:
    """Fit and transform a chain on rows in every way that headrace does, and compare the results.

    - The Arrow engine and the Spark engine learn and return the same, bit for bit.
    - A row's result does not depend on the other rows that are transformed with it, nor on their order.
    - The learned state is JSON, and a workflow that was saved and loaded has the same results.

    Args:
        chain: `columns >> operator`, and operators after it that a model needs (pad, categorify).
        table: rows, for example of `batches`.
        label: the column of 0 and 1.
        spark: a session.
        seed: seed of the order in which rows are transformed again.

    Returns:
        the fitted workflow; None where the table has no row.

    Raises:
        AssertionError: the results differ; the message names column and row.
        UserError: the chain cannot take the columns.
    """
    if not table.num_rows:
        return None
    fitted = Workflow(chain, label=label).fit(table)
    transformed = fitted.transform(table)
    _compare_spark(fitted, table, transformed, spark)
    _compare_rows_alone(fitted, table, transformed, seed)
    _compare_saved(fitted, table, transformed)
    return fitted


def _compare_spark(fitted: FittedWorkflow, table: pa.Table, transformed: pa.Table, spark: SparkSession) -> None:
    # Imported here, so that importing this module does not import Spark.
    from headrace.features.spark.fit import fit
    from headrace.features.spark.transform import transform
    from headrace.features.vocabulary.codes import VocabulariesInMemory

    workflow = fitted.fitted.workflow
    rows = pa.array(range(table.num_rows), pa.int64())
    numbered = table.append_column("_source_line", rows)
    numbered = numbered.append_column("_source_file", pa.repeat("train", table.num_rows))
    types = ", ".join(f"`{c.name}` {c.type}" for c in columns_of(table, table.column_names))
    frame = spark.createDataFrame(numbered.to_pylist(), f"{types}, _source_line bigint, _source_file string")
    learned = fit(workflow, frame, VocabulariesInMemory())
    for i, (left, right) in enumerate(zip(fitted.fitted.states, learned.states, strict=True)):
        assert _json(left) == _json(right), f"chain {i}: Arrow learned {_json(left)}, Spark {_json(right)}"
    for name, vocabulary in learned.vocabularies.items():
        assert vocabulary.table.equals(fitted.vocabularies[name]), f"vocabulary '{name}' differs between the engines"
    by_spark = transform(learned, frame, ["_source_line"]).toArrow().sort_by("_source_line")
    for name in by_spark.column_names[:-1]:
        _assert_same_column(transformed.column(name), by_spark.column(name), name, "by Arrow", "by Spark")


def _compare_rows_alone(fitted: FittedWorkflow, table: pa.Table, transformed: pa.Table, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(table.num_rows)
    for selected, change in (
        (order, "in another order"),
        (order[: max(1, len(order) // 2)], "without some of the rows"),
    ):
        again = fitted.transform(table.take(pa.array(selected)))
        for name in transformed.column_names:
            _assert_same_column(
                transformed.column(name).take(pa.array(selected)), again.column(name), name, "with all rows", change
            )


def _compare_saved(fitted: FittedWorkflow, table: pa.Table, transformed: pa.Table) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="headrace-") as folder:
        fitted.save(f"{folder}/workflow")
        again = FittedWorkflow.load(f"{folder}/workflow").transform(table)
    for name in transformed.column_names:
        _assert_same_column(transformed.column(name), again.column(name), name, "as it was fitted", "saved and loaded")


def _json(states: Sequence[object]) -> str:
    return json.dumps(states, sort_keys=True, default=lambda o: dict(o))


def _assert_same_column(a: pa.ChunkedArray, b: pa.ChunkedArray, name: str, left_name: str, right_name: str) -> None:
    x, y = a.combine_chunks(), b.combine_chunks()
    assert len(x) == len(y), f"column '{name}' has {len(x)} rows {left_name}, {len(y)} {right_name}"
    if x.equals(y) and not pa.types.is_floating(x.type):
        return
    for row, (u, v) in enumerate(zip(x.to_pylist(), y.to_pylist(), strict=True)):
        # Compare texts: they tell -0.0 from 0.0, and NaN equals NaN.
        assert repr(u) == repr(v), f"column '{name}', row {row}: {u!r} {left_name}, {v!r} {right_name}"


def check_table_operator(
    op: TableOp | OpSpec,
    table: pa.Table,
    *,
    label: str,
    time: str,
    spark: SparkSession,
    home: str | os.PathLike[str] = ".",
) -> pa.Table:
    """Check that a table operator does not read the future.

    It runs on all events, then without the rows after an instant, and with the values of these rows exchanged among
    them, labels included. No row up to the instant may change.

    Args:
        op: the operator, or its spec (`OpSpec(op="my_package.ops:Sessions", params={...})`).
        table: events; rows without a time are in every run.
        label: the column of 0 and 1.
        time: the column of the events' time (timestamp or date).
        spark: a session.
        home: folder to which paths of external tables are relative.

    Returns:
        the rows that the operator returns.

    Raises:
        AssertionError: a row changed; the message names the row and the instant.
        UserError: the operator cannot take the columns.
    """
    spec = op if isinstance(op, OpSpec) else OpSpec(op=reference_of(op), params=op.model_dump(exclude_unset=True))
    preparation = Preparation([spec], columns_of(table, table.column_names), label, time)
    rows = table.num_rows
    table = table.append_column(FILE, pa.repeat("events", rows)).append_column(LINE, pa.array(range(rows), pa.int64()))
    all_rows = _run(preparation, table, spark, home)
    instants = sorted({t for t in table.column(time).to_pylist() if t is not None})
    for instant in instants[:: max(1, len(instants) // 3)]:
        # A row without a time counts as not after the instant.
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
    rotated = rows.take(pa.array([*range(1, rows.num_rows), 0]))
    for name in fixed:
        rotated = rotated.set_column(rotated.column_names.index(name), name, rows.column(name))
    return rotated


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
