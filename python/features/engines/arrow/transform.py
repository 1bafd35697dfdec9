"""What becomes of a row group: the part of the dataset that each row belongs to, codes or numbers of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataset.parquet import lists
from headrace.features.engines.arrow import kernels
from headrace.features.engines.arrow.dictionary import DictionaryColumn, apply_op
from headrace.features.engines.arrow.lake_file import LakeRowGroup
from headrace.features.engines.arrow.lake_rows import Splitter
from headrace.features.engines.arrow.part_rows import EDGES, HASHES, LABEL, MISSING, ORDER
from headrace.features.engines.arrow.row_order import row_order
from headrace.features.functions.arrays import doubles, is_missing, to_numpy
from headrace.features.layout.files import FilePlan, source_sets
from headrace.features.layout.split_rule import day_number
from headrace.features.workflow.fitted import FittedWorkflow, finished
from headrace.schema import Feature

Array = npt.NDArray[Any]


def transformed(
    fitted: FittedWorkflow, row_group: LakeRowGroup, splitter: Splitter, plans: Sequence[FilePlan]
) -> dict[str, Array] | None:
    """The order of a row group's rows by part, and what its values become, for `PartRows`; None: no part has a row."""
    split = splitter.split(row_group)
    part = parts_of(split, row_group.hashes, splitter.splits, plans, splitter.days(row_group))
    everything = [(row_group, np.arange(row_group.rows, dtype=np.int32))]
    order, hashes, edges = row_order(row_group.hashes, everything, part, len(plans))
    if not len(order):
        return None
    identity = splitter.train(row_group, split).training_identity if fitted.workflow.out_of_fold else None
    arrays = in_order(fitted, row_group, outputs_of(fitted, row_group, identity), order)
    return arrays | {
        ORDER: order,
        EDGES: edges,
        HASHES: hashes,
        MISSING: missing_by_part(fitted, row_group, arrays, order, edges),
    }


def parts_of(
    split: npt.NDArray[np.int8],
    hashes: npt.NDArray[np.int64],
    splits: Sequence[str],
    plans: Sequence[FilePlan],
    day: npt.NDArray[np.int64] | None,
) -> kernels.Indices:
    """Each row's part, its index in `plans`; len(plans) for a row of no plan. [rows], of as few bytes as hold it.

    Args:
        split: of each row, its position in `splits`.
        day: of each row, days since 1970; None where no plan is of a day.
    """
    out = np.full(len(split), len(plans), kernels.index_type(len(plans) + 1))
    alike: dict[tuple[str, str | None], list[int]] = {}
    for i, p in enumerate(plans):
        alike.setdefault((p.split, p.day), []).append(i)
    for (name, of), mine in alike.items():
        inside = split == splits.index(name)
        if of is not None:
            assert day is not None
            inside &= day == day_number(of)
        rows = np.flatnonzero(inside)
        # NumPy's remainder has the sign of the divisor, as Spark's pmod.
        out[rows] = mine[0] + (hashes[rows] % len(mine) if len(mine) > 1 else 0)
    return out


def outputs_of(fitted: FittedWorkflow, row_group: LakeRowGroup, identity: pa.Array | None) -> dict[str, Array]:
    """What a row group's columns become, by feature.

    `value.NAME`: a result for each distinct value of the one input column that the feature is made of, whose index the
    row group has; `row.NAME`: one for each row. Of lists the values, one list behind the other, and as
    `value_offsets.NAME` or `row_offsets.NAME` where each begins and the last one ends.
    """
    out: dict[str, Array] = {}
    wanted = {f.name: f for f in fitted.features}
    for i, (chain, states) in enumerate(zip(fitted.workflow.chains, fitted.states, strict=True)):
        if wanted.keys().isdisjoint(chain.outputs):
            continue
        columns = {name: row_group.column(name) for name in chain.columns}
        for j, (step, state) in enumerate(zip(chain.steps, states, strict=True)):
            table = partial(_table, fitted, f"{i}.{j}")
            columns = apply_op(step, columns, state, fitted.vocabularies.__getitem__, table, identity)
        for name, output in chain.outputs.items():
            if name not in wanted:
                continue
            array = finished(columns[name].values, output)
            kind = "row" if columns[name].indices is None else "value"
            if wanted[name].is_list:
                out[f"{kind}_offsets.{name}"], out[f"{kind}.{name}"] = lists.to_numpy(lists.trim_zeros(array))
            else:
                out[f"{kind}.{name}"] = array.to_numpy(zero_copy_only=False)
    return out


def _table(fitted: FittedWorkflow, scope: str, name: str) -> Any:
    return fitted.tables[f"{scope}.{name}"]


def in_order(
    fitted: FittedWorkflow, row_group: LakeRowGroup, outputs: Mapping[str, Array], order: npt.NDArray[np.int32]
) -> dict[str, Array]:
    """`outputs_of` with the rows in order, labels and carried columns.

    `index.NAME`: of an input column, each row's value. `carried.NAME`: a carried column's numbers, where it has one for
    each row.

    Codes that take no more bytes than the numbers of the rows' values stand there instead, as `row.NAME` in as few
    bytes as hold them: to look a row's code up later would miss the caches. Lists that are a list a row are left where
    they are.
    """
    out = dict(outputs)
    made: dict[str, list[Feature]] = {}
    for feature in fitted.features:
        if (key := f"row.{feature.name}") in outputs and not feature.is_list:
            out[key] = kernels.take(outputs[key], order)
        elif f"value.{feature.name}" in outputs:
            made.setdefault(feature.sources[0], []).append(feature)
    label = row_group.column(fitted.workflow.label_column)
    values = to_numpy(doubles(label.values)).astype(np.float32)
    out[LABEL] = values if label.indices is not None else kernels.take(values, order)
    if label.indices is not None:
        made.setdefault(fitted.workflow.label_column, [])
    for name, features in made.items():
        index = row_group.column(name).indices
        assert index is not None
        codes = None
        if len(features) == 1 and name != fitted.workflow.label_column:
            codes = _narrow_codes(features[0], outputs, index)
        if codes is None:
            out[f"index.{name}"] = kernels.take(index, order)
        else:
            del out[f"value.{features[0].name}"]
            out[f"row.{features[0].name}"] = kernels.take(kernels.take(codes, index), order)
    for name in fitted.workflow.carried_columns:
        column = row_group.column(name)
        if column.indices is not None:
            if f"index.{name}" not in out:
                out[f"index.{name}"] = kernels.take(column.indices, order)
        elif (numbers := _numbers(column.values)) is not None:
            out[f"carried.{name}"] = kernels.take(numbers, order)
    return out


def _numbers(values: pa.Array) -> Array | None:
    """Numbers of as many bytes each, dates and timestamps as integers, none of them null; else None."""
    kind = values.type
    if values.null_count or not pa.types.is_primitive(kind) or kind.bit_width not in (8, 16, 32, 64):
        return None
    whole = np.frombuffer(values.buffers()[1], f"i{kind.bit_width // 8}")
    return whole[values.offset : values.offset + len(values)]


def _narrow_codes(feature: Feature, outputs: Mapping[str, Array], index: kernels.Indices) -> kernels.Indices | None:
    """A feature's codes, of each value, in as few bytes as hold them; None where they are no codes, or where there are
    so few values that the caches hold them."""
    codes = outputs[f"value.{feature.name}"]
    if feature.is_list or codes.dtype != np.int32 or index.dtype != np.int32 or not len(codes) or codes.min() < 0:
        return None
    return codes.astype(kernels.index_type(int(codes.max()) + 1))


def missing_by_part(
    fitted: FittedWorkflow,
    row_group: LakeRowGroup,
    arrays: Mapping[str, Array],
    order: kernels.Rows,
    edges: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Of each of `source_sets`, one behind the other, and by part: rows that lack a value of one of its columns.

    Args:
        arrays: see `in_order`.
        order: the rows, and where among them each part begins and the last one ends: `edges`.
    """
    none: dict[str, npt.NDArray[np.bool_] | None] = {}
    found = []
    for names in source_sets(fitted):
        for name in set(names) - none.keys():
            none[name] = _missing(row_group.column(name), arrays.get(f"index.{name}"), order)
        masks = [mask for name in names if (mask := none[name]) is not None]
        if not masks:
            found.append(np.zeros(len(edges) - 1, np.int64))
            continue
        mask = np.logical_or.reduce(masks) if len(masks) > 1 else masks[0]
        found.append(np.array([np.count_nonzero(mask[a:b]) for a, b in pairwise(edges.tolist())], np.int64))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _missing(
    column: DictionaryColumn, in_order: kernels.Indices | None, order: kernels.Rows
) -> npt.NDArray[np.bool_] | None:
    """Which of the rows in order have no value; None: all have one. bool [rows].

    Args:
        in_order: the column's indices in that order, where they are there.
    """
    none = is_missing(column.values)
    gone = np.flatnonzero(none)
    if not len(gone):
        return None
    if column.indices is None:
        return kernels.take(none, order)
    index = column.indices if in_order is None else in_order
    mask = index == gone[0] if len(gone) == 1 else none[index]
    return kernels.take(mask, order) if in_order is None else mask
