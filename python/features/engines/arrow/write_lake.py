"""The Arrow engine's write from row groups of lake files: no row passes through Spark, no text is transformed twice.

First each row group: which part of the dataset its rows belong to, what its distinct values become (a code or a number
each), and of each row, part by part, which of them it has. Then each part: its rows of every row group, which lie there
one behind the other, merged in the order of the rows' hashes.
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
from pyspark.sql import SparkSession

from headrace.dataset.parquet import lists
from headrace.features.engines.arrow import kernels
from headrace.features.engines.arrow.array_file import load_arrays, save_arrays
from headrace.features.engines.arrow.dictionary import DictionaryColumn, apply_op
from headrace.features.engines.arrow.lake_file import LakeFile, LakeRowGroup, RowGroupLayout, row_groups
from headrace.features.engines.arrow.lake_rows import LakeRows, Splitter
from headrace.features.engines.arrow.part_rows import EDGES, HASHES, LABEL, MISSING, ORDER, PartRows, placed
from headrace.features.engines.arrow.row_order import row_order
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
    for _, outputs in placed:  # so that the dataset does not wait for them on its way to the disk
        outputs.remove_quietly()
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
                everything = [(row_group, np.arange(row_group.rows, dtype=np.int32))]
                order, hashes, edges = row_order(row_group.hashes, everything, part, len(self.plans))
                if not len(order):
                    continue
                identity = (
                    self.splitter.train(row_group, split).training_identity if fitted.workflow.out_of_fold else None
                )
                path = self.scratch / f"outputs-{number}-{i}.arrays"
                arrays = in_order(fitted, row_group, outputs_of(fitted, row_group, identity), order)
                arrays |= {
                    ORDER: order,
                    EDGES: edges,
                    HASHES: hashes,
                    MISSING: missing_by_part(fitted, row_group, arrays, order, edges),
                }
                save_arrays(path, arrays)
                out.append([row_group.path.below(self.folder), path.name])
            yield {"file": number, "row_groups": out}


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
    """`outputs_of` with the rows in order, and labels; as `index.NAME`, of an input column, each row's value.

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
    return out


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
        sources: list[PartRows] = []
        for row_group, outputs in self.row_groups:
            arrays = load_arrays(outputs)
            start, end = arrays[EDGES][part : part + 2].tolist()
            if start < end:
                sources.append(PartRows(LakeRowGroup(row_group), part, start, end, arrays))
        if not sources:
            yield {"split": self.plans[part].split, "day": self.plans[part].day, "files": [], "counts": {}}
            return
        hashes = np.concatenate([s.hashes for s in sources])
        order = row_order(hashes, [(s.row_group, s.rows) for s in sources]).rows
        places = np.empty(len(order), np.int32)
        kernels.scatter(np.arange(len(order), dtype=np.int32), None, order, places)
        starts = np.cumsum([0, *(len(s.rows) for s in sources)])
        cut = [places[start:end] for start, end in pairwise(starts)]
        columns: list[pa.Array] = []
        for feature in fitted.features:
            if feature.is_list:
                columns.append(pa.concat_arrays([s.output_lists(feature) for s in sources]).take(pa.array(order)))
            else:
                columns.append(placed([s.output(feature) for s in sources], cut))
        columns.append(placed([s.label(fitted.workflow.label_column) for s in sources], cut))
        taken = pa.array(order)
        stored = stored_schema(fitted.schema.features)
        for name in fitted.workflow.carried_columns:
            # A timestamp becomes its microseconds.
            values = pa.concat_arrays([s.column(name) for s in sources]).cast(stored.field(len(columns)).type)
            columns.append(values.take(taken))
        sets = source_sets(fitted)
        missing = dict(zip(sets, np.sum([s.missing(len(sets)) for s in sources], 0).tolist(), strict=True))
        table = pa.Table.from_arrays(columns, schema=stored)
        yield write_part(fitted.schema, self.plans[part], self.folder, table, missing)
