"""Operators that drop, rename and look back, over Arrow tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.arrays import doubles
from headrace.features.functions.timestamps import DAY_MICROS
from headrace.features.table_ops.base import QUERY
from headrace.features.table_ops.earlier_events import EarlierEventsOp, FilteredEventsOp
from headrace.features.table_ops.predicate import Predicate
from headrace.features.table_ops.sequences import _BETWEEN, _UNITS, History, Lag, Sessions
from headrace.features.table_ops.trailing import TargetEncodingPast, Trailing
from tests.arrow_table_ops.context import ArrowTableContext
from tests.arrow_table_ops.windows import (
    I64,
    Bits,
    Past,
    column_array,
    halves,
    hashes,
    joined,
    micros_of,
    nan_to_null,
    nulled,
    replaced,
    take,
    to_grid,
)

F64 = npt.NDArray[np.float64]


def past_of(op: EarlierEventsOp, table: pa.Table, context: ArrowTableContext) -> Past:
    """The table's events by key."""
    time = context.schema.needs_time()
    return Past(table, op.keys, time, context.schema.types[time])


def chosen(op: FilteredEventsOp, table: pa.Table, context: ArrowTableContext) -> Bits:
    """Return the rows that an operator's condition chooses, as `spark_condition` does: bool [n]."""
    if op.where is None:
        return np.ones(table.num_rows, np.bool_)
    condition = Predicate(op.where, context.schema.types)
    mask: Bits = condition.arrow(lambda name: column_array(table, name)).to_numpy(zero_copy_only=False)
    return mask


def history(op: History, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    past = past_of(op, table, context)
    ok = chosen(op, table, context)
    out = table
    for value in op.values:
        x = nan_to_null(column_array(table, value))
        events = past.select(ok & x.is_valid().to_numpy(zero_copy_only=False))
        end = np.where(past.known, events.counts_before(op.delay), 0)
        start = np.maximum(np.where(past.known, events.start, 0), end - op.length)
        lengths = end - start
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        place_ = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        forward, backward = np.repeat(start, lengths) + place_, np.repeat(end, lengths) - 1 - place_
        event_rows = forward if op.newest == "last" else backward
        elements = x.take(pa.array(events.rows[event_rows]))
        lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), elements)
        out = replaced(out, f"{value}_{op.suffix}", lists)
    return out


def lag(op: Lag, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    past = past_of(op, table, context)
    end = past.all.counts_before()
    has_event = past.known & (end - op.shift >= past.all.start)
    last = np.zeros(table.num_rows, np.int64)
    last[has_event] = past.rows[end[has_event] - op.shift]
    out = table
    for v in op.values:
        x = doubles(nan_to_null(column_array(table, v)))
        earlier_values = take(x, last, has_event)
        both_valid = x.is_valid().to_numpy(zero_copy_only=False) & earlier_values.is_valid().to_numpy(
            zero_copy_only=False
        )
        with np.errstate(all="ignore"):
            difference = x.to_numpy(zero_copy_only=False) - earlier_values.to_numpy(zero_copy_only=False)
        out = replaced(out, op._name(f"{v}_difference"), nulled(difference, both_valid, pa.float64()))
    if op.since is not None:
        passed = (past.time - past.time[last]).astype(np.float64) / float(_UNITS[op.since])
        out = replaced(out, op._name("since"), nulled(passed, has_event, pa.float64()))
    return out


def sessions(op: Sessions, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    past = past_of(op, table, context)
    events = past.all
    # Sessions of the events, in their order: the time before is that of the instant before.
    t = past.time[events.rows]
    end = events.counts_before()
    has = past.known & (end > events.start)
    earlier_counts = np.zeros(table.num_rows, np.int64)
    earlier_counts[has] = past.time[events.rows[end[has] - 1]]
    new = ~has | (past.time - earlier_counts > op._gap)
    begins = new[events.rows]
    # The place of the newest beginning at or before each event (an instant's events all begin, or none does).
    firsts = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
    inside = past.known & ~new
    start = past.time.copy()
    start[inside] = t[firsts[end[inside] - 1]]
    # An instant at which several events begin a session is one beginning: count from its first event.
    position = np.zeros(table.num_rows, np.int64)
    position[inside] = (end - events.counts_at(past.group, start))[inside]
    text = [part for k in op.keys for part in (column_array(table, k).cast(pa.string()), pa.scalar(_BETWEEN))]
    joined = pc.binary_join_element_wise(*text, pa.array(start).cast(pa.string()), "")
    ids = hashes(joined)
    p = op.prefix
    out = replaced(table, f"{p}_id", nulled(ids, past.known, pa.int64()))
    out = replaced(out, f"{p}_position", pa.array(position, pa.int64()))
    age = (past.time - start).astype(np.float64) / 1e6
    return replaced(out, f"{p}_age", nulled(age, past.known, pa.float64()))


def trailing(op: Trailing, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    types = context.schema.types
    past = past_of(op, table, context)
    ok = chosen(op, table, context)
    events = past.select(ok)
    numbers = {v: to_grid(column_array(table, v), types[v]) for v in op.values}
    out = table
    for w, length in enumerate(op._micros):
        end = events.counts_before(op.delay)
        start = events.start if length is None else events.counts_before(op.delay + length)
        if "count" in op.stats:
            count = np.where(past.known, end - start, 0)
            out = replaced(out, op._name("count", None, w), pa.array(count, pa.int64()))
        for value in op.values:
            q, has_value = numbers[value]
            n = events.sums(has_value.astype(np.int64), start, end)
            for stat in op.stats:
                if stat == "count":
                    continue
                if stat == "rate":
                    unit = 1 << 20 if types[value].element in ("float", "double") else 1
                    x = events.sums((has_value & (q == unit)).astype(np.int64), start, end).astype(np.float64)
                else:
                    high, low = halves(np.where(has_value, q, 0))
                    x = joined(events.sums(high, start, end), events.sums(low, start, end), types[value])
                if stat != "sum":
                    with np.errstate(all="ignore"):
                        x = x / n.astype(np.float64)
                column = pa.array(x, pa.float64(), mask=(n == 0) if stat != "sum" else None)
                out = replaced(out, op._name(stat, value, w), column)
    return out


def target_encoding_past(op: TargetEncodingPast, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    types = context.schema.types
    target = op.target or context.schema.label
    past = past_of(op, table, context)
    q, has_value = to_grid(column_array(table, target), types[target])
    high, low = halves(np.where(has_value, q, 0))
    events = past.all
    end, start = events.counts_before(op.delay), events.start
    n = events.sums(has_value.astype(np.int64), start, end).astype(np.float64)
    y = joined(events.sums(high, start, end), events.sums(low, start, end), types[target])
    m = float(op.smoothing)
    prior: F64 = np.full(table.num_rows, np.nan if op.prior is None else float(op.prior))
    if op.prior is None:
        prior = _prior(op, table, context, has_value, high, low)
    with np.errstate(all="ignore"):
        smooth = np.where(n + m > 0, (y + m * prior) / (n + m), np.nan)
        means = np.where(n > 0, y / n, np.nan)
    encoded = np.where(np.isnan(prior), means, smooth)
    return replaced(table, op._name, pa.array(encoded, pa.float64(), from_pandas=True))


def _prior(
    op: TargetEncodingPast, table: pa.Table, context: ArrowTableContext, has_value: Bits, high: I64, low: I64
) -> F64:
    """Return each row's prior, as `_with_prior` does; NaN where there is none."""
    time = context.schema.needs_time()
    t, timed = micros_of(column_array(table, time), context.schema.types[time])
    event = timed & has_value & ~column_array(table, QUERY).is_valid().to_numpy(zero_copy_only=False)
    known = (t[event] + op.delay) // DAY_MICROS
    order = np.argsort(known, kind="stable")
    earlier_days = np.searchsorted(known[order], t // DAY_MICROS)

    def total(values: I64) -> I64:
        sums: I64 = np.concatenate([np.zeros(1, np.int64), np.cumsum(values[event][order])])
        return np.asarray(sums[earlier_days])

    target = op.target or context.schema.label
    y = joined(total(high), total(low), context.schema.types[target])
    with np.errstate(all="ignore"):
        prior: F64 = np.where((earlier_days > 0) & timed, y / earlier_days.astype(np.float64), np.nan)
    return prior
