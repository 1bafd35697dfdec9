"""Checks that a row operator gives one result in both engines, row by row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.features.ops.selection import Chains, Selection
from headrace.library.frames import columns_of
from headrace.library.workflow import FittedWorkflow, Workflow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def check_operator(
    chain: Selection | Chains, table: pa.Table, *, label: str, spark: SparkSession, seed: int = 0
) -> FittedWorkflow | None:
    """Fit and transform a chain on rows, in every way that headrace does, and compare.

    - The Arrow engine and the Spark engine learn the same and give the same, bit for bit.
    - A row's result does not depend on the other rows that are transformed with it, nor on their order.
    - What was learned is JSON, and a workflow that was saved and loaded transforms as before.

    Args:
        chain: `columns >> operator`, with what must follow so that a model can take it (pad, categorify).
        table: rows; `headrace.testing.batches` makes them.
        label: the column of 0 and 1.
        spark: a session.
        seed: of the order in which rows are transformed again.

    Returns:
        the fitted workflow; None where the table has no row.

    Raises:
        AssertionError: something differs; says what, and in which row.
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
    # Late: whoever checks on Arrow alone needs no Spark.
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
        _same(transformed.column(name), by_spark.column(name), name, "by Arrow", "by Spark")


def _compare_rows_alone(fitted: FittedWorkflow, table: pa.Table, transformed: pa.Table, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(table.num_rows)
    for chosen, change in ((order, "in another order"), (order[: max(1, len(order) // 2)], "without some of the rows")):
        again = fitted.transform(table.take(pa.array(chosen)))
        for name in transformed.column_names:
            _same(transformed.column(name).take(pa.array(chosen)), again.column(name), name, "with all rows", change)


def _compare_saved(fitted: FittedWorkflow, table: pa.Table, transformed: pa.Table) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="headrace-") as folder:
        fitted.save(f"{folder}/workflow")
        again = FittedWorkflow.load(f"{folder}/workflow").transform(table)
    for name in transformed.column_names:
        _same(transformed.column(name), again.column(name), name, "as it was fitted", "saved and loaded")


def _json(states: Sequence[object]) -> str:
    return json.dumps(states, sort_keys=True, default=lambda o: dict(o))


def _same(a: pa.ChunkedArray, b: pa.ChunkedArray, name: str, left_name: str, right_name: str) -> None:
    x, y = a.combine_chunks(), b.combine_chunks()
    assert len(x) == len(y), f"column '{name}' has {len(x)} rows {left_name}, {len(y)} {right_name}"
    if x.equals(y) and not pa.types.is_floating(x.type):
        return
    for row, (u, v) in enumerate(zip(x.to_pylist(), y.to_pylist(), strict=True)):
        # Text tells -0.0 from 0.0, and NaN is NaN.
        assert repr(u) == repr(v), f"column '{name}', row {row}: {u!r} {left_name}, {v!r} {right_name}"
