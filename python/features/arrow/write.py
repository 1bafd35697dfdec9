"""The writer of parts: it writes a part's rows to Parquet files of the dataset, and counts its columns.

A part's rows come in pieces, by one of two transports (`headrace.features.arrow.write_lake`). A piece is of one row
group of the lake, in the order of the rows' hashes. The writer merges the pieces by hash, file and line. So the files'
bytes depend neither on the transport nor on the lake's row groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config.schema import OOV_CODE, DatasetSchema, Feature, Kind
from headrace.features.arrow import kernels
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.arrow.transform import Values, gathered, placed, row_order
from headrace.features.layout.files import ColumnCounts, DatasetFile, FilePlan, WrittenDataset, source_sets
from headrace.features.workflow.fitted import FittedWorkflow, stored_schema
from headrace.storage import Location


class PartSource(Protocol):
    """Rows of a part that one row group has, in the order of their hashes."""

    @property
    def hashes(self) -> npt.NDArray[np.int64]:
        """Hashes of the rows' identities, int64 [rows]."""
        ...

    def output(self, feature: Feature) -> Values:
        """Return a feature's values; for list features see `output_lists`."""
        ...

    def output_lists(self, feature: Feature) -> pa.ListArray:
        """Return a list feature's lists, without their trailing zeros."""
        ...

    def label(self, name: str) -> Values:
        """Return the label's values, float32; NaN where the label is null."""
        ...

    def column(self, name: str) -> DictionaryColumn:
        """Return a carried column, or the rows' source file or line (FILE, LINE)."""
        ...


@dataclass(frozen=True)
class PartWriter:
    """Writer of a part's files from its rows; pickled into tasks."""

    plans: tuple[FilePlan, ...]
    #: The folder of the unfinished dataset, which all tasks see.
    folder: Location
    #: Folder of the saved, fitted workflow.
    workflow: Location

    def fitted(self) -> FittedWorkflow:
        """Return the workflow without its vocabularies in memory."""
        return _load_without_vocabularies(self.workflow)

    def write(self, part: int, sources: Sequence[PartSource], missing: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Write the files of a part.

        Args:
            part: the part's index in `plans`.
            sources: the part's rows, with the pieces in any order.
            missing: for each of `source_sets`, the number of rows that lack a value of one of its columns: int64
                [sets].

        Returns:
            the part's files and counts as JSON values, for `written_dataset`.
        """
        fitted, plan = self.fitted(), self.plans[part]
        if not sources:
            return {"split": plan.split, "day": plan.day, "files": [], "counts": {}}
        table = _merge(fitted, sources)
        rows = table.num_rows
        groups = plan.groups_of(rows)
        edges = [rows * i // groups for i in range(groups + 1)]
        files = []
        for group, (start, end) in enumerate(pairwise(edges)):
            path = self.folder / plan.file(group)
            # A task may run twice: the last rename wins, and both files are equal.
            with (
                path.new_file() as partial,
                pq.ParquetWriter(partial, table.schema, compression="none", use_dictionary=False) as writer,
            ):
                # One chunk a column, since Parquet may split pages at the edges of chunks.
                writer.write_table(table.slice(start, end - start).combine_chunks(), row_group_size=end - start)
            path.start_writeback()
            files.append({"name": plan.file(group), "rows": end - start, "row_groups": 1, "size": path.size()})
        missing_rows = dict(zip(source_sets(fitted), missing.tolist(), strict=True))
        counts = {name: asdict(c) for name, c in _column_counts(fitted.schema, table, missing_rows).items()}
        return {"split": plan.split, "day": plan.day, "files": files, "counts": counts}


def _merge(fitted: FittedWorkflow, sources: Sequence[PartSource]) -> pa.Table:
    """Return the rows of all pieces in the order of the dataset, with the columns of `stored_schema`."""
    hashes = np.concatenate([s.hashes for s in sources])
    identified = [(s, np.arange(len(s.hashes), dtype=np.int32)) for s in sources]
    order = row_order(hashes, identified).rows
    places = np.empty(len(order), np.int32)
    kernels.scatter(np.arange(len(order), dtype=np.int32), None, order, places)
    starts = np.cumsum([0, *(len(s.hashes) for s in sources)])
    piece_places = [places[start:end] for start, end in pairwise(starts)]
    columns: list[pa.Array | pa.ChunkedArray] = []
    for feature in fitted.features:
        if feature.is_list:
            columns.append(pa.concat_arrays([s.output_lists(feature) for s in sources]).take(pa.array(order)))
        else:
            columns.append(placed([s.output(feature) for s in sources], piece_places))
    columns.append(placed([s.label(fitted.workflow.label_column) for s in sources], piece_places))
    stored = stored_schema(fitted.schema.features)
    for name in fitted.workflow.carried_columns:
        columns.append(gathered([s.column(name) for s in sources], order, stored.field(len(columns)).type))
    return pa.Table.from_arrays(columns, schema=stored)


@lru_cache(maxsize=2)
def _load_without_vocabularies(workflow: Location) -> FittedWorkflow:
    return FittedWorkflow.load(workflow, most_values=0)


def written_dataset(plans: list[FilePlan], parts: Iterable[Mapping[str, Any]]) -> WrittenDataset:
    """Combine the files and counts of all parts."""
    files: list[DatasetFile] = []
    counts: dict[str, dict[str, ColumnCounts]] = {p.split: {} for p in plans}
    days: dict[str, tuple[list[DatasetFile], dict[str, ColumnCounts]]] = {p.day: ([], {}) for p in plans if p.day}
    for part in parts:
        part_files = [DatasetFile(**file) for file in part["files"]]
        files += part_files
        sums = [counts[part["split"]]]
        if part["day"]:
            days[part["day"]][0].extend(part_files)
            sums.append(days[part["day"]][1])
        for name, part_counts in part["counts"].items():
            for sum_ in sums:
                sum_[name] = sum_.get(name, ColumnCounts()) + ColumnCounts(**part_counts)
    return WrittenDataset(sorted(files, key=lambda f: f.name), counts, days)


def _column_counts(
    schema: DatasetSchema, table: pa.Table, missing: Mapping[tuple[str, ...], int]
) -> dict[str, ColumnCounts]:
    input_features = (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))
    out = {f.name: ColumnCounts(missing=missing[f.sources]) for f in input_features}
    for feature in schema.of(Kind.CATEGORICAL):
        column = table.column(feature.name).combine_chunks()
        codes = (column.flatten() if feature.is_list else column).to_numpy()
        out[feature.name].coded += int(np.count_nonzero(codes))  # NULL_CODE is 0
        if feature.vocabulary is not None:
            is_oov = codes == OOV_CODE
            if feature.first_code > OOV_CODE + 1:
                is_oov = (codes >= OOV_CODE) & (codes < feature.first_code)
            out[feature.name].oov += int(np.count_nonzero(is_oov))
    return out
