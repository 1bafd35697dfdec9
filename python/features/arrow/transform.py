"""Row groups of lake files as parts of the dataset: which part each row belongs to, codes or numbers of its values.

`transformed` computes arrays of a row group, `PartRows` reads from them the rows of one part. `row_order` is the order
of a part's rows: by the hash of their identity, and those of one hash by file and line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.schema import Feature
from headrace.dataset import lists
from headrace.features.arrow import kernels
from headrace.features.arrow.decode import FILE, LINE, LakeRowGroup
from headrace.features.arrow.kernels import DictionaryColumn, apply_op, ranges_of, text_ranges
from headrace.features.arrow.scan import Splitter
from headrace.features.functions.arrays import doubles, is_missing, to_numpy
from headrace.features.layout.files import FilePlan, day_number, source_sets
from headrace.features.workflow.fitted import FittedWorkflow, finished

Array = npt.NDArray[Any]


def transformed(
    fitted: FittedWorkflow, row_group: LakeRowGroup, splitter: Splitter, plans: Sequence[FilePlan]
) -> dict[str, Array] | None:
    """Return the order of a row group's rows by part, and what its values become, for `PartRows`.

    None: no part has a row.
    """
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
    """Return each row's part, its index in `plans`; len(plans) for a row of no plan.

    [rows], of as few bytes as hold it.

    Args:
        split: of each row, its position in `splits`.
        day: of each row, days since 1970; None where no plan is of a day.
    """
    out = np.full(len(split), len(plans), kernels.index_type(len(plans) + 1))
    alike: dict[tuple[str, str | None], list[int]] = {}
    for i, p in enumerate(plans):
        alike.setdefault((p.split, p.day), []).append(i)
    for (name, day_name), part_numbers in alike.items():
        inside = split == splits.index(name)
        if day_name is not None:
            assert day is not None
            inside &= day == day_number(day_name)
        rows = np.flatnonzero(inside)
        # NumPy's remainder has the sign of the divisor, as Spark's pmod.
        out[rows] = part_numbers[0] + (hashes[rows] % len(part_numbers) if len(part_numbers) > 1 else 0)
    return out


def outputs_of(fitted: FittedWorkflow, row_group: LakeRowGroup, identity: pa.Array | None) -> dict[str, Array]:
    """Return the features of a row group as arrays.

    `value.NAME`: a result for each distinct value of the one input column that the feature is made of, whose index the
    row group has; `row.NAME`: one for each row. Of lists the values, one list behind the other, and as
    value_offsets.NAME or row_offsets.NAME where each begins and the last one ends.
    """
    out: dict[str, Array] = {}
    features = {f.name: f for f in fitted.features}
    for i, (chain, states) in enumerate(zip(fitted.workflow.chains, fitted.states, strict=True)):
        if features.keys().isdisjoint(chain.outputs):
            continue
        columns = {name: row_group.column(name) for name in chain.columns}
        for j, (step, state) in enumerate(zip(chain.steps, states, strict=True)):
            table = partial(_table, fitted, f"{i}.{j}")
            columns = apply_op(step, columns, state, fitted.vocabularies.__getitem__, table, identity)
        for name, output in chain.outputs.items():
            if name not in features:
                continue
            array = finished(columns[name].values, output)
            kind = "row" if columns[name].indices is None else "value"
            if features[name].is_list:
                out[f"{kind}_offsets.{name}"], out[f"{kind}.{name}"] = lists.to_numpy(lists.trim_zeros(array))
            else:
                out[f"{kind}.{name}"] = array.to_numpy(zero_copy_only=False)
    return out


def _table(fitted: FittedWorkflow, scope: str, name: str) -> Any:
    return fitted.tables[f"{scope}.{name}"]


def in_order(
    fitted: FittedWorkflow, row_group: LakeRowGroup, outputs: Mapping[str, Array], order: npt.NDArray[np.int32]
) -> dict[str, Array]:
    """Return `outputs_of` with the rows in order, labels and carried columns.

    `index.NAME`: of an input column, each row's value. `carried.NAME`: a carried column's numbers, where it has one for
    each row.

    Codes that take no more bytes than the numbers of the rows' values stand there instead, as `row.NAME` in as few
    bytes as hold them: to look a row's code up later would miss the caches. Lists that are a list a row are left where
    they are.
    """
    out = dict(outputs)
    features_of: dict[str, list[Feature]] = {}
    for feature in fitted.features:
        if (key := f"row.{feature.name}") in outputs and not feature.is_list:
            out[key] = kernels.take(outputs[key], order)
        elif f"value.{feature.name}" in outputs:
            features_of.setdefault(feature.sources[0], []).append(feature)
    label = row_group.column(fitted.workflow.label_column)
    values = to_numpy(doubles(label.values)).astype(np.float32)
    out[LABEL] = values if label.indices is not None else kernels.take(values, order)
    if label.indices is not None:
        features_of.setdefault(fitted.workflow.label_column, [])
    for name, features in features_of.items():
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
        elif (numbers := _plain_numbers(column.values)) is not None:
            out[f"carried.{name}"] = kernels.take(numbers, order)
    return out


def _plain_numbers(values: pa.Array) -> Array | None:
    """Return numbers of as many bytes each, dates and timestamps as integers, none of them null; else None."""
    kind = values.type
    if values.null_count or not pa.types.is_primitive(kind) or kind.bit_width not in (8, 16, 32, 64):
        return None
    buffer = np.frombuffer(values.buffers()[1], f"i{kind.bit_width // 8}")
    return buffer[values.offset : values.offset + len(values)]


def _narrow_codes(feature: Feature, outputs: Mapping[str, Array], index: kernels.Indices) -> kernels.Indices | None:
    """Return a feature's codes, of each value, in as few bytes as hold them.

    None where they are no codes, or where there are so few values that the caches hold them.
    """
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
    """Return rows that lack a value, for each of `source_sets`, one after the other, and by part.

    Args:
        arrays: see `in_order`.
        order: the rows, and where among them each part begins and the last one ends: `edges`.
    """
    none: dict[str, npt.NDArray[np.bool_] | None] = {}
    counts = []
    for names in source_sets(fitted):
        for name in set(names) - none.keys():
            none[name] = _missing(row_group.column(name), arrays.get(f"index.{name}"), order)
        masks = [mask for name in names if (mask := none[name]) is not None]
        if not masks:
            counts.append(np.zeros(len(edges) - 1, np.int64))
            continue
        mask = np.logical_or.reduce(masks) if len(masks) > 1 else masks[0]
        counts.append(np.array([np.count_nonzero(mask[a:b]) for a, b in pairwise(edges.tolist())], np.int64))
    return np.concatenate(counts) if counts else np.zeros(0, np.int64)


def _missing(
    column: DictionaryColumn, in_order: kernels.Indices | None, order: kernels.Rows
) -> npt.NDArray[np.bool_] | None:
    """Return which of the rows in order have no value; None: all have one. bool [rows].

    Args:
        in_order: the column's indices in that order, where they are there.
    """
    none = is_missing(column.values)
    missing_values = np.flatnonzero(none)
    if not len(missing_values):
        return None
    if column.indices is None:
        return kernels.take(none, order)
    index = column.indices if in_order is None else in_order
    mask = index == missing_values[0] if len(missing_values) == 1 else none[index]
    return kernels.take(mask, order) if in_order is None else mask


#: Names of a transform's outputs, by part (write_lake): the rows' numbers, offsets of the parts and the end, hashes;
#: counts of rows that lack a value, by `source_sets` and part; labels.
ORDER, EDGES, HASHES, MISSING, LABEL = "order", "edges", "hashes", "missing", "label"


def placed(values: Sequence[Values], places: Sequence[kernels.Rows]) -> pa.Array:
    """Return a column of the part: of each source its rows' values, each to its place."""
    out = np.empty(sum(map(len, places)), values[0].values.dtype)
    for source, rows in zip(values, places, strict=True):
        kernels.scatter(source.values, source.index, rows, out)
    return pa.array(out)


def gathered(
    sources: Sequence[DictionaryColumn], order: kernels.Rows, type_: pa.DataType
) -> pa.Array | pa.ChunkedArray:
    """Return rows of columns that stand one behind the other, as the dataset stores them.

    Args:
        sources: the columns, of one type.
        order: numbers of rows, through all sources.
        type_: what they become: of timestamps their microseconds.

    Returns:
        Where they are many texts several arrays, of which each is small: one holds 2 GiB of them at most.
    """
    sizes = np.concatenate([s.text_bytes() for s in sources]) if pa.types.is_string(type_) else np.zeros(0, np.int64)
    ranges = ranges_of(sizes[order]) if len(sizes) else []
    if len(ranges) <= 1:
        return pa.concat_arrays([s.decode().cast(type_) for s in sources]).take(pa.array(order))
    return pa.chunked_array([_taken(sources, order[a:b]) for a, b in ranges], type_)


def _taken(sources: Sequence[DictionaryColumn], rows: kernels.Rows) -> pa.Array:
    """Return some rows, numbered through the sources."""
    pieces, places, start = list[pa.Array](), list[npt.NDArray[np.intp]](), 0
    for source in sources:
        row_places = np.flatnonzero((rows >= start) & (rows < start + len(source)))
        pieces.append(source.take(rows[row_places] - start))
        places.append(row_places)
        start += len(source)
    return pa.concat_arrays(pieces).take(pa.array(np.argsort(np.concatenate(places))))


def by_part(arrays: Mapping[str, Array], label: str) -> dict[str, Array]:
    """Return those arrays [rows] of a transformed row group that are in the order of the parts.

    Args:
        arrays: see `headrace.features.arrow.transform.transformed`.
        label: the label's column.
    """
    kinds = ("index", "row", "carried")
    lists = {f"row.{name.split('.', 1)[1]}" for name in arrays if name.startswith("row_offsets.")}
    names = {ORDER, HASHES} | {name for name in arrays if name.split(".", 1)[0] in kinds} - lists
    if f"index.{label}" not in arrays:
        names.add(LABEL)
    return {name: array for name, array in arrays.items() if name in names}


@dataclass(frozen=True)
class Values:
    """A column's values of a part's rows of a row group: one for each number of `index`, or (None) for each row."""

    values: Array
    index: kernels.Indices | None


class PartRows:
    """The rows of a part that one row group has, in the order of their hashes."""

    def __init__(self, row_group: LakeRowGroup, part: int, start: int, end: int, arrays: Mapping[str, Array]) -> None:
        """Select a part. `arrays`: of `transformed`; `by_part` arrays have the rows from `start` to `end`."""
        self.row_group, self._part, self._arrays = row_group, part, arrays
        self._start, self._slice = start, slice(start, end)
        self.rows: kernels.Rows = arrays[ORDER][self._slice]
        self.hashes: npt.NDArray[np.int64] = arrays[HASHES][self._slice]

    def output(self, feature: Feature) -> Values:
        """Return a feature's values; of lists see `output_lists`."""
        by_value = self._arrays.get(f"value.{feature.name}")
        if by_value is None:
            codes = self._arrays[f"row.{feature.name}"][self._slice]
            # Codes are stored in the narrowest type, which may be unsigned.
            return Values(codes.astype(np.int32) if codes.dtype.kind == "u" else codes, None)
        return Values(by_value, self._index(feature.sources[0]))

    def label(self, name: str) -> Values:
        """Return the label's values, float32; NaN of null."""
        if f"index.{name}" in self._arrays:
            return Values(self._arrays[LABEL], self._index(name))
        return Values(self._arrays[LABEL][self._slice], None)

    def output_lists(self, feature: Feature) -> pa.ListArray:
        """Return a list feature's lists, without the zeros at their ends."""
        rows, kind = self.rows.astype(np.intp), "row"
        if f"value.{feature.name}" in self._arrays:
            rows, kind = self._index(feature.sources[0]).astype(np.intp), "value"
        offsets, values = (self._arrays[f"{k}.{feature.name}"] for k in (f"{kind}_offsets", kind))
        return lists.from_arrays(*lists.take(offsets, values, rows))

    def column(self, name: str) -> DictionaryColumn:
        """Return an input column's values."""
        column = self.row_group.column(name)
        if f"carried.{name}" in self._arrays:
            values = pa.py_buffer(self._arrays[f"carried.{name}"][self._slice])
            return DictionaryColumn(pa.Array.from_buffers(column.values.type, len(self.rows), [None, values]))
        if column.indices is None:
            return DictionaryColumn(column.values, self.rows)
        row_index = self._index(name) if f"index.{name}" in self._arrays else column.indices[self.rows]
        return DictionaryColumn(column.values, row_index)

    def pieces(self, columns: Sequence[str]) -> Iterator[PartRows]:
        """Yield the rows in pieces, of each of which the texts of some input columns can be decoded."""
        for a, b in text_ranges(map(self.column, columns), len(self.rows)):
            yield PartRows(self.row_group, self._part, self._start + a, self._start + b, self._arrays)

    def missing(self, sets: int) -> npt.NDArray[np.int64]:
        """Return rows that lack a value, for each of so many `source_sets`. int64 [sets]."""
        return self._arrays[MISSING].reshape(sets, -1)[:, self._part]

    def _index(self, name: str) -> kernels.Indices:
        return self._arrays[f"index.{name}"][self._slice]


class Identified(Protocol):
    """Rows that have the columns FILE and LINE."""

    def column(self, name: str) -> DictionaryColumn:
        """Return one of them."""
        ...


class RowOrder(NamedTuple):
    """Rows in order: those of part k are `rows[edges[k]:edges[k + 1]]`."""

    rows: kernels.Rows
    #: Hash of each of `rows`.
    hashes: npt.NDArray[np.int64]
    #: int64 [parts + 1].
    edges: npt.NDArray[np.int64]


def row_order(
    hashes: npt.NDArray[np.int64],
    sources: Sequence[tuple[Identified, Array]],
    part: kernels.Indices | None = None,
    parts: int = 1,
) -> RowOrder:
    """Return rows by part, hash, file and line.

    Args:
        hashes: of the given rows of the row groups, one row group behind the other.
        sources: row groups, and numbers of rows of each.
        part: of each row; rows of other parts than 0..parts-1 are left out. None: all are of part 0.
    """
    rows, sorted_, edges = kernels.row_order(hashes, part, parts)
    ties = np.flatnonzero(sorted_[1:] == sorted_[:-1])
    if len(ties):  # rare, but for rows that an operator made of one
        tied = np.unique(np.concatenate([ties, ties + 1]))
        these = rows[tied]
        file, line = _identities(sources, these)
        keys = (these, line, file, hashes[these], *([] if part is None else [part[these]]))
        rows[tied] = these[np.lexsort(keys)]
    return RowOrder(rows, sorted_, edges)


def _identities(sources: Sequence[tuple[Identified, Array]], rows: Array) -> tuple[Array, Array]:
    """Return (rank of its source file, source line) of rows, numbered through the row groups' given rows.

    int64 [n], twice.
    """
    starts = np.cumsum([0, *(len(given_rows) for _, given_rows in sources)])
    files, lines, places = [], [], []
    for (row_group, given_rows), start, end in zip(sources, starts[:-1], starts[1:], strict=True):
        place = np.flatnonzero((rows >= start) & (rows < end))
        picked_rows = given_rows[rows[place] - start]
        files.append(row_group.column(FILE).take(picked_rows).cast(pa.string()))
        lines.append(row_group.column(LINE).take(picked_rows).cast(pa.int64()))
        places.append(place)
    # Arrow orders texts by their UTF-8 bytes.
    encoded = pc.fill_null(pa.chunked_array(files), "").combine_chunks().dictionary_encode()
    rank = np.empty(len(encoded.dictionary), np.int64)
    rank[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(rank))
    back = np.argsort(np.concatenate(places))
    line = pc.fill_null(pa.chunked_array(lines), -1).to_numpy()
    return rank[encoded.indices.to_numpy()][back], line[back]
