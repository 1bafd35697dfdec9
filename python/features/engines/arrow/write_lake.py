"""The Arrow engine's write from row groups of lake files: no row passes through Spark, no text is transformed twice.

First each row group: which part of the dataset its rows belong to, and what its distinct values become (a code or a
number each). Then each part: its rows of every row group, by one gather of those results, in the order of the rows'
hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from headrace.dataset.parquet import lists
from headrace.features.engines.arrow import kernels
from headrace.features.engines.arrow.array_file import load_arrays, save_arrays
from headrace.features.engines.arrow.dictionary import apply_op
from headrace.features.engines.arrow.lake_file import FILE, LINE, LakeFile, LakeRowGroup, RowGroupLayout, row_groups
from headrace.features.engines.arrow.lake_rows import LakeRows, Splitter
from headrace.features.engines.arrow.write_frame import loaded, write_part, written_dataset
from headrace.features.functions.arrays import doubles, is_missing, to_numpy
from headrace.features.layout.files import FilePlan, WrittenDataset, source_sets
from headrace.features.layout.split_rule import day_number
from headrace.features.workflow.fitted import FittedWorkflow, finished
from headrace.features.workflow.schema import stored_schema
from headrace.lake.tasks import cores_of, grouped, run_tasks
from headrace.schema import Feature
from headrace.storage import Location

Array = npt.NDArray[Any]
_ORDER, _EDGES = "order", "edges"
#: Of an input column with a dictionary: the numbers of the values that are none.
_MISSING = "missing."
#: A vocabulary with more values is looked up in its file: in memory each value takes about 60 bytes of every worker.
MOST_VALUES = 20_000_000


def write_lake_rows(
    fitted: FittedWorkflow,
    rows: LakeRows,
    plans: list[FilePlan],
    folder: Location,
    workflow: Location,
    spark: SparkSession | None,
) -> WrittenDataset:
    """Transform the rows of all splits and write them; see `headrace.features.layout.files.write_dataset`.

    The same files as from a frame, bit for bit. A task holds the results of one row group, or the rows of one part.
    """
    for split in {p.split for p in plans}:
        (folder / split).make_dir()
    tasks = grouped(list(enumerate(rows.files)), lambda pair: pair[1].size, cores_of(spark))
    transform_task = _TransformTask(
        tuple(tuple(t) for t in tasks),
        rows.folder,
        rows.layout,
        rows.splitter,
        workflow,
        rows.scratch,
        tuple(plans),
        MOST_VALUES,
    )
    found = sorted(run_tasks(spark, len(tasks), transform_task), key=lambda f: f["file"])
    placed = tuple(
        (rows.folder / row_group, rows.scratch / outputs) for f in found for row_group, outputs in f["row_groups"]
    )
    parts = run_tasks(spark, len(plans), _WriteTask(placed, tuple(plans), folder, workflow))
    return written_dataset(plans, parts)


@dataclass(frozen=True)
class _TransformTask:
    """The second pass, in a task: of each row group the order of its rows by part, and what its values become."""

    tasks: tuple[tuple[tuple[int, LakeFile], ...], ...]
    folder: Location
    layout: RowGroupLayout
    splitter: Splitter
    workflow: Location
    scratch: Location
    plans: tuple[FilePlan, ...]
    most_values: int

    def __call__(self, task: int) -> Iterator[dict[str, Any]]:
        fitted = loaded(self.workflow, self.most_values)
        for number, file in self.tasks[task]:
            out = []
            for i, row_group in enumerate(row_groups(file, self.folder, self.layout)[0]):
                split = self.splitter.split(row_group)
                part = parts_of(
                    split, row_group.hashes, self.splitter.splits, self.plans, self.splitter.days(row_group)
                )
                order, edges = order_by_part(row_group, part, self.plans)
                if not len(order):
                    continue
                identity = (
                    self.splitter.train(row_group, split).training_identity if fitted.workflow.out_of_fold else None
                )
                path = self.scratch / f"outputs-{number}-{i}.arrays"
                arrays: dict[str, Array] = {_ORDER: order, _EDGES: edges}
                for name in {name for of in source_sets(fitted) for name in of}:
                    column = row_group.column(name)
                    if column.indices is not None:
                        arrays[f"{_MISSING}{name}"] = np.flatnonzero(is_missing(column.values))
                save_arrays(path, arrays | outputs_of(fitted, row_group, identity))
                out.append([row_group.path.below(self.folder), path.name])
            yield {"file": number, "row_groups": out}


def parts_of(
    split: npt.NDArray[np.int8],
    hashes: npt.NDArray[np.int64],
    splits: Sequence[str],
    plans: Sequence[FilePlan],
    day: npt.NDArray[np.int64] | None,
) -> npt.NDArray[np.int64]:
    """Each row's part, its index in `plans`; len(plans) for a row of no plan. int64 [rows].

    Args:
        split: of each row, its position in `splits`.
        day: of each row, days since 1970; None where no plan is of a day.
    """
    out = np.full(len(split), len(plans), np.int64)
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


def order_by_part(
    row_group: LakeRowGroup, part: npt.NDArray[np.int64], plans: Sequence[FilePlan]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(order, edges): rows order[edges[k]:edges[k + 1]] are those of part k, by hash, file and line."""
    by_hash = _in_order(row_group.hashes, [(row_group, np.arange(row_group.rows))])
    small = part[by_hash].astype(np.uint16 if len(plans) < 2**16 else np.int64)  # two bytes are sorted by radix
    order = by_hash[np.argsort(small, kind="stable")]
    edges = np.searchsorted(part[order], np.arange(len(plans) + 1))
    return order[: edges[-1]].astype(np.int32), edges


def _in_order(hashes: npt.NDArray[np.int64], sources: Sequence[tuple[LakeRowGroup, Array]]) -> npt.NDArray[np.int64]:
    """The order of rows by hash; rows of one hash (there are hardly any) by file and line.

    `hashes` are those of the given rows of the row groups, one row group behind the other.
    """
    # Rows of several row groups are runs in order, which the stable sort merges.
    order = np.argsort(hashes, kind="stable" if len(sources) > 1 else None)
    sorted_ = hashes[order]
    ties = np.flatnonzero(sorted_[1:] == sorted_[:-1])
    if not len(ties):
        return order
    tied = np.unique(np.concatenate([ties, ties + 1]))
    rows = order[tied]
    file, line = _identities(sources, rows)
    order[tied] = rows[np.lexsort((rows, line, file, hashes[rows]))]
    return order


def _identities(sources: Sequence[tuple[LakeRowGroup, Array]], rows: Array) -> tuple[Array, Array]:
    """(rank of its source file, source line) of rows, numbered through the row groups' given rows. int64 [n], twice."""
    starts = np.cumsum([0, *(len(mine) for _, mine in sources)])
    files, lines, places = [], [], []
    for (row_group, mine), start, end in zip(sources, starts[:-1], starts[1:], strict=True):
        place = np.flatnonzero((rows >= start) & (rows < end))
        at = mine[rows[place] - start]
        files.append(row_group.column(FILE).take(at).cast(pa.string()))
        lines.append(row_group.column(LINE).take(at).cast(pa.int64()))
        places.append(place)
    # Arrow orders texts by their UTF-8 bytes.
    encoded = pc.fill_null(pa.chunked_array(files), "").combine_chunks().dictionary_encode()
    rank = np.empty(len(encoded.dictionary), np.int64)
    rank[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(rank))
    back = np.argsort(np.concatenate(places))
    line = pc.fill_null(pa.chunked_array(lines), -1).to_numpy()
    return rank[encoded.indices.to_numpy()][back], line[back]


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


@dataclass(frozen=True)
class _WriteTask:
    """The third pass, in a task: one part, its rows from every row group."""

    #: Paths of row groups and of what `_TransformTask` left of them.
    row_groups: tuple[tuple[Location, Location], ...]
    plans: tuple[FilePlan, ...]
    folder: Location
    workflow: Location

    def __call__(self, part: int) -> Iterator[dict[str, Any]]:
        fitted = loaded(self.workflow, 0)  # no value is looked up any more
        sources: list[_PartRows] = []
        for row_group, outputs in self.row_groups:
            arrays = load_arrays(outputs)
            start, end = arrays[_EDGES][part : part + 2]
            if start < end:
                sources.append(_PartRows(LakeRowGroup(row_group), arrays[_ORDER][start:end], arrays))
        if not sources:
            yield {"split": self.plans[part].split, "day": self.plans[part].day, "files": [], "counts": {}}
            return
        hashes = np.concatenate([s.row_group.hashes[s.rows] for s in sources])
        order = _in_order(hashes, [(s.row_group, s.rows) for s in sources])
        places = np.empty(len(order), np.int32)
        places[order] = np.arange(len(order), dtype=np.int32)
        starts = np.cumsum([0, *(len(s.rows) for s in sources)])
        cut = [places[start:end] for start, end in pairwise(starts)]
        columns: list[pa.Array] = []
        for feature in fitted.features:
            if feature.is_list:
                columns.append(pa.concat_arrays([s.output_lists(feature) for s in sources]).take(pa.array(order)))
            else:
                columns.append(_placed([s.output(feature) for s in sources], sources, cut))
        columns.append(_placed([s.label(fitted.workflow.label_column) for s in sources], sources, cut))
        taken = pa.array(order)
        stored = stored_schema(fitted.schema.features)
        for name in fitted.workflow.carried_columns:
            # A timestamp becomes its microseconds.
            values = pa.concat_arrays([s.column(name) for s in sources]).cast(stored.field(len(columns)).type)
            columns.append(values.take(taken))
        missing = {of: sum(s.missing(of) for s in sources) for of in source_sets(fitted)}
        table = pa.Table.from_arrays(columns, schema=stored)
        yield write_part(fitted.schema, self.plans[part], self.folder, table, missing)


def _placed(values: Sequence[_Values], sources: Sequence[_PartRows], places: Sequence[kernels.Rows]) -> pa.Array:
    """A column of the part: of each source its rows' values, each to its place."""
    out = np.empty(sum(len(s.rows) for s in sources), values[0].values.dtype)
    for found, source, mine in zip(values, sources, places, strict=True):
        kernels.scatter(found.values, found.index, source.rows, mine, out)
    return pa.array(out)


@dataclass(frozen=True)
class _Values:
    """A row group's values of a column: one for each number of `index`, or (None) for each row."""

    values: Array
    index: kernels.Indices | None


class _PartRows:
    """The rows of a part that one row group has, in the order of their hashes."""

    def __init__(self, row_group: LakeRowGroup, rows: kernels.Rows, arrays: Mapping[str, Array]) -> None:
        """`arrays`: what `_TransformTask` left of the row group."""
        self.row_group, self.rows, self._arrays = row_group, rows, arrays

    def output(self, feature: Feature) -> _Values:
        """A feature's values; of lists see `output_lists`."""
        by_value = self._arrays.get(f"value.{feature.name}")
        if by_value is None:
            return _Values(self._arrays[f"row.{feature.name}"], None)
        return _Values(by_value, self.row_group.column(feature.sources[0]).indices)

    def label(self, name: str) -> _Values:
        """The label's, float32; NaN of null."""
        column = self.row_group.column(name)
        return _Values(to_numpy(doubles(column.values)).astype(np.float32), column.indices)

    def output_lists(self, feature: Feature) -> pa.ListArray:
        """A list feature's lists, without the zeros at their ends."""
        rows, kind = self.rows.astype(np.intp), "row"
        if f"value.{feature.name}" in self._arrays:
            index = self.row_group.column(feature.sources[0]).indices
            assert index is not None
            rows, kind = index[rows].astype(np.intp), "value"
        offsets, values = (self._arrays[f"{k}.{feature.name}"] for k in (f"{kind}_offsets", kind))
        return lists.from_arrays(*lists.take(offsets, values, rows))

    def column(self, name: str) -> pa.Array:
        """An input column's values, a value a row."""
        return self.row_group.column(name).take(self.rows)

    def missing(self, names: Sequence[str]) -> int:
        """Rows without a value in one of the columns."""
        gone = self._arrays.get(f"{_MISSING}{names[0]}")
        if len(names) == 1 and gone is not None:
            index = self.row_group.column(names[0]).indices if len(gone) else None
            return 0 if index is None else sum(kernels.count_rows(index, self.rows, int(value)) for value in gone)
        return int(np.count_nonzero(np.logical_or.reduce([self._missing(name) for name in names])))

    def _missing(self, name: str) -> npt.NDArray[np.bool_]:
        column = self.row_group.column(name)
        none = is_missing(column.values)
        return none[self.rows if column.indices is None else column.indices[self.rows]]
