"""The writer of parts: a part's rows become Parquet files of the dataset, and the counts of its columns.

A part's rows come in pieces, each from one row group of the lake and in the order of its rows' hashes, by one of two
transports (`headrace.features.arrow.write_lake`). The writer merges them by hash, file and line. So neither the
transport nor the way in which the lake is cut changes a bit of the files.
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
    """Rows of a part that come from one row group, in the order of their hashes."""

    @property
    def hashes(self) -> npt.NDArray[np.int64]:
        """Hashes of the rows' identities, int64 [rows]."""
        ...

    def output(self, feature: Feature) -> Values:
        """Return a feature's values; of a list feature see `output_lists`."""
        ...

    def output_lists(self, feature: Feature) -> pa.ListArray:
        """Return a list feature's lists, without the zeros at their ends."""
        ...

    def label(self, name: str) -> Values:
        """Return the label's values, float32; NaN of null."""
        ...

    def column(self, name: str) -> DictionaryColumn:
        """Return a carried column, or the rows' source file or line (FILE, LINE)."""
        ...


@dataclass(frozen=True)
class PartWriter:
    """Merge the rows of a part and write its files. Pickled into tasks."""

    plans: tuple[FilePlan, ...]
    #: The dataset's (partial) folder, which all tasks see.
    folder: Location
    #: The fitted workflow, saved.
    workflow: Location

    def fitted(self) -> FittedWorkflow:
        """Return the workflow; no vocabulary is in memory."""
        return _without_values(self.workflow)

    def write(self, part: int, sources: Sequence[PartSource], missing: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Write the files of a part.

        Args:
            part: its index in `plans`.
            sources: its rows, in any order of the pieces.
            missing: by `source_sets`, rows that lack a value of one of these columns. int64 [sets].

        Returns:
            What `written_dataset` puts together: JSON values.
        """
        fitted, plan = self.fitted(), self.plans[part]
        if not sources:
            return {"split": plan.split, "day": plan.day, "files": [], "counts": {}}
        table = _merged(fitted, sources)
        rows = table.num_rows
        groups = plan.groups_of(rows)
        edges = [rows * i // groups for i in range(groups + 1)]
        files = []
        for group, (start, end) in enumerate(pairwise(edges)):
            path = self.folder / plan.file(group)
            # A task may run twice; the last rename wins, and both wrote equal files.
            with (
                path.new_file() as partial,
                pq.ParquetWriter(partial, table.schema, compression="none", use_dictionary=False) as writer,
            ):
                # Parquet may split pages where a column has several chunks.
                writer.write_table(table.slice(start, end - start).combine_chunks(), row_group_size=end - start)
            path.start_writeback()
            files.append({"name": plan.file(group), "rows": end - start, "row_groups": 1, "size": path.size()})
        missing_rows = dict(zip(source_sets(fitted), missing.tolist(), strict=True))
        counts = {name: asdict(c) for name, c in _count(fitted.schema, table, missing_rows).items()}
        return {"split": plan.split, "day": plan.day, "files": files, "counts": counts}


def _merged(fitted: FittedWorkflow, sources: Sequence[PartSource]) -> pa.Table:
    """Return all rows in the order of the dataset, as they are stored (`stored_schema`)."""
    hashes = np.concatenate([s.hashes for s in sources])
    identified = [(s, np.arange(len(s.hashes), dtype=np.int32)) for s in sources]
    order = row_order(hashes, identified).rows
    places = np.empty(len(order), np.int32)
    kernels.scatter(np.arange(len(order), dtype=np.int32), None, order, places)
    starts = np.cumsum([0, *(len(s.hashes) for s in sources)])
    cut = [places[start:end] for start, end in pairwise(starts)]
    columns: list[pa.Array | pa.ChunkedArray] = []
    for feature in fitted.features:
        if feature.is_list:
            columns.append(pa.concat_arrays([s.output_lists(feature) for s in sources]).take(pa.array(order)))
        else:
            columns.append(placed([s.output(feature) for s in sources], cut))
    columns.append(placed([s.label(fitted.workflow.label_column) for s in sources], cut))
    stored = stored_schema(fitted.schema.features)
    for name in fitted.workflow.carried_columns:
        columns.append(gathered([s.column(name) for s in sources], order, stored.field(len(columns)).type))
    return pa.Table.from_arrays(columns, schema=stored)


@lru_cache(maxsize=2)
def _without_values(workflow: Location) -> FittedWorkflow:
    return FittedWorkflow.load(workflow, most_values=0)


def written_dataset(plans: list[FilePlan], parts: Iterable[Mapping[str, Any]]) -> WrittenDataset:
    """Return the parts' files and counts together."""
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


def _count(schema: DatasetSchema, table: pa.Table, missing: Mapping[tuple[str, ...], int]) -> dict[str, ColumnCounts]:
    fed = (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))
    out = {f.name: ColumnCounts(missing=missing[f.sources]) for f in fed}
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
