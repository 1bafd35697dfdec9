"""Drawn negatives, over Arrow tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.table_ops.base import FILE, LINE, QUERY
from headrace.features.table_ops.negatives import _MARK, _WEIGHT_OF_ONE, NEGATIVE, SLOTS, Negatives, _salt
from tests.arrow_table_ops.context import ArrowTableContext
from tests.arrow_table_ops.windows import I64, Past, codes_of, column_array, hashes, newest_at, places, replaced, take


def negatives(op: Negatives, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    schema, train = context.schema, context.train
    assert train is not None
    time = schema.needs_time()
    past = Past(table, [op.item], time, schema.types[time])
    items = column_array(table, op.item)
    label = column_array(table, schema.label).cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
    positive = past.event & (label == 1.0)
    if train.column is not None:
        split = pc.equal(column_array(table, train.column).cast(pa.string()), "train")
        inside = pc.fill_null(split, False).to_numpy(zero_copy_only=False)
    else:
        inside = (past.time >= train.start) & (past.time < train.end)
    inside = inside & past.event

    # The items of the training range: one row of each, their number, their first time.
    codes, first, count = np.unique(past.group[inside], return_index=True, return_counts=True)
    first_rows = np.flatnonzero(inside)[first]
    since = np.full(len(codes), np.iinfo(np.int64).max)
    np.minimum.at(since, np.searchsorted(codes, past.group[inside]), past.time[inside])
    if op.method == "in_batch":
        batches = ArrowBatches(table, np.flatnonzero(inside & positive), op.batch, op.seed)
        rows = np.flatnonzero(positive)
        rows = rows[batches.sizes(rows) > 0]
        row, slot = _slots(op, table, rows, lambda row: batches.sizes(row))
        pick = np.searchsorted(codes, past.group[batches.pool_rows(row, slot)])
    else:
        weight = _weights(op, count)
        order = _order(op, items, first_rows)
        first_rows, codes, since, weight = first_rows[order], codes[order], since[order], weight[order]
        total = int(weight.sum())
        size = min(total, SLOTS)
        rows = np.flatnonzero(positive) if size else np.zeros(0, np.int64)
        row, slot = _slots(op, table, rows, lambda row: max(size, 1))
        to = np.cumsum(weight)
        last_slots = (2 * to * size - total + 2 * total - 1) // max(2 * total, 1)
        pick = np.searchsorted(last_slots, slot, "right")
    good = (codes[pick] != past.group[row]) & (since[pick] < past.time[row]) if len(row) else np.zeros(0, bool)
    if op.exclude_seen:
        assert op.user is not None
        user = codes_of([column_array(table, op.user)], table.num_rows)
        width = int(past.group.max(initial=0)) + 1
        clicked = inside & positive & (user >= 0)
        seen = np.unique(user[clicked] * width + past.group[clicked])
        if len(row):
            good &= ~((user[row] >= 0) & np.isin(user[row] * width + codes[pick], seen))
    matrix = good.reshape(-1, op._draws)
    number = np.cumsum(matrix, axis=1)
    chosen = (matrix & (number <= op.per_positive)).ravel()
    row, pick, number = row[chosen], pick[chosen], number.ravel()[chosen]

    drawn = table.take(pa.array(row))
    drawn = replaced(drawn, op.item, items.take(pa.array(first_rows[pick])))
    zero = pa.array(np.zeros(len(row), np.int8)).cast(schema.types[schema.label].arrow)
    drawn = replaced(drawn, schema.label, zero)
    mark = pa.array(number).cast(pa.string())
    drawn = replaced(drawn, FILE, pc.binary_join_element_wise(column_array(drawn, FILE), pa.scalar(_MARK), mark, ""))
    drawn = replaced(drawn, QUERY, pa.array([NEGATIVE] * len(row), pa.string()))
    if op.item_columns:
        events = past.rows
        versions = newest_at(codes[pick], past.time[row], past.group[events], past.time[events], inclusive=False)
        for c in op.item_columns:
            values = column_array(table, c)
            values_then = (
                take(values, events[np.maximum(versions, 0)], versions >= 0) if len(row) else values.slice(0, 0)
            )
            drawn = replaced(drawn, c, values_then)
    return pa.concat_tables([table, drawn])


def _slots(op: Negatives, table: pa.Table, rows: I64, size: Callable[[I64], I64 | int]) -> tuple[I64, I64]:
    """All draws of rows: the row of each, and the slot of so many that it falls on."""
    row = np.repeat(rows, op._draws)
    j = np.tile(np.arange(op._draws), len(rows))
    files, lines = (
        column_array(table, FILE).take(pa.array(row)),
        column_array(table, LINE).take(pa.array(row)).cast(pa.string()),
    )
    name = pc.binary_join_element_wise(files, lines, pa.array(j).cast(pa.string()), pa.scalar(str(op.seed)), ":")
    slots: I64 = hashes(name) % size(row)
    return row, slots


def _order(op: Negatives, items: pa.Array, rows: I64) -> I64:
    """The items of the rows `rows` in the order in which they take slots: by hash."""
    item_texts = items.take(pa.array(rows))
    text = pc.binary_join_element_wise(item_texts.cast(pa.string()), pa.scalar(str(op.seed)), ":")
    value, _ = places(len(rows), item_texts, pa.array(np.zeros(len(rows), np.int64)))
    order: I64 = np.lexsort((value, hashes(text)))
    return order


def _weights(op: Negatives, count: I64) -> I64:
    """Return the sampling weights of counts, as `_weight` does: int64 [n]."""
    if op.method == "uniform":
        return np.ones(len(count), np.int64)
    c = count.astype(np.float64)
    power = {1.0: c, 0.5: np.sqrt(c), 0.25: np.sqrt(np.sqrt(c)), 0.75: np.sqrt(c) * np.sqrt(np.sqrt(c))}[op.alpha]
    weights: I64 = np.rint(power * float(_WEIGHT_OF_ONE)).astype(np.int64)
    return weights


class ArrowBatches:
    """The same of rows of a table."""

    def __init__(self, table: pa.Table, pool: I64, rows: int, seed: int) -> None:
        """`pool`: rows of the table that are positives of the training range."""
        number = max(1, -(-len(pool) // rows))
        file, line = column_array(table, FILE), column_array(table, LINE)
        name = pc.binary_join_element_wise(file, line.cast(pa.string()), pa.scalar(_salt(seed)[1:]), ":")
        #: By row of the table.
        self._batch: I64 = hashes(name) % number
        first, second = places(table.num_rows, file, line)
        order = np.lexsort((second[pool], first[pool], self._batch[pool]))
        self._pool: I64 = pool[order]
        self._start: I64 = np.searchsorted(self._batch[self._pool], np.arange(number + 1))

    def sizes(self, rows: I64) -> I64:
        """Return how many rows of the pool are in each row's batch: int64 [n]."""
        batch = self._batch[rows]
        sizes_: I64 = self._start[batch + 1] - self._start[batch]
        return sizes_

    def pool_rows(self, rows: I64, slot: I64) -> I64:
        """The row of the pool at a slot of each row's batch."""
        values: I64 = self._pool[self._start[self._batch[rows]] + slot]
        return values
