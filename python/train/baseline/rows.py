"""The rows that a Spark task reads of a split: whole row groups, or a sample of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.dataset.parquet.layout import open_split
from headrace.dataset.parquet.lists import by_column
from headrace.errors import UserError
from headrace.schema import DatasetSchema, Feature
from headrace.storage import Location

#: Rows of one Arrow batch between the tasks' processes and the JVM.
_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class RowGroupSample:
    """What is wanted of one row group: all of it, or a sample."""

    path: Location
    #: The row group's place in its file, and in the split.
    index: int
    piece: int
    rows: int
    take: int


@dataclass(frozen=True)
class Rows:
    """Some rows: their features by physical name, their labels float32 [n], other columns by name [n]."""

    features: Mapping[str, NDArray[Any]]
    labels: NDArray[np.float32]
    others: Mapping[str, NDArray[Any]]


def sample_row_groups(
    dataset: Location, split: str, schema: DatasetSchema, max_rows: int | None = None, carried: Sequence[str] = ()
) -> list[RowGroupSample]:
    """The row groups of a split, in order; with `max_rows`, exactly that many rows spread evenly over them.

    Args:
        carried: carried columns that will be read.

    Raises:
        UserError: no such split, or a damaged file; see `headrace.dataset.parquet.layout.open_split`.
    """
    groups = open_split(dataset, split, schema, carried).row_groups
    total = sum(g.rows for g in groups)
    wanted = total if max_rows is None else min(total, max_rows)
    found, seen = [], 0
    for g in groups:
        # Differences of rounded-down cumulative shares: each within one row of its part, the sum exact.
        take = (seen + g.rows) * wanted // total - seen * wanted // total
        seen += g.rows
        if take:
            found.append(RowGroupSample(g.path, g.index, g.piece, g.rows, take))
    return found


def check_lists(groups: Sequence[RowGroupSample], label: str, lists: str, column: str, where: str) -> None:
    """Raise UserError where rows that are learned from have no list.

    Args:
        groups: of a split.
        label: the column that is learned; rows without it are left out anyway.
        lists: the carried column of the lists, by the dataset's name; column: by the lake's.
        where: the key of the spec that names it, for the message.
    """
    missing = 0
    for group in groups:
        file = pq.ParquetFile(group.path.local_path())
        place = file.schema_arrow.names.index(lists)
        statistics = file.metadata.row_group(group.index).column(place).statistics
        if statistics is not None and statistics.has_null_count and not statistics.null_count:
            continue
        table = file.read_row_group(group.index, columns=[label, lists])
        missing += pc.sum(pc.and_(pc.is_null(table[lists]), pc.is_valid(table[label]))).as_py() or 0
    if missing:
        total = sum(group.rows for group in groups)
        raise UserError(
            f"column '{column}', by which {where} makes lists, is null in {missing:,} of {total:,} rows, which then "
            f"belong to no list: leave them out (features.prepare: dropna), or let ingest quarantine them "
            f"(`required: true`)"
        )


def read_rows(
    groups: Sequence[RowGroupSample], features: Sequence[Feature], label: str, others: Sequence[str] = (), seed: int = 0
) -> Iterator[Rows]:
    """The rows of row groups, a batch at a time; those whose label is null are left out.

    Args:
        features: those to read.
        label: the column that is learned.
        others: carried columns and codes to bring along.
        seed: of the samples.
    """
    columns = list(dict.fromkeys([*(f.name for f in features), label, *others]))
    for group in groups:
        table = pq.ParquetFile(group.path.local_path()).read_row_group(group.index, columns=columns)
        if group.take < group.rows:
            rng = np.random.default_rng([seed, group.piece])
            table = table.take(np.sort(rng.choice(group.rows, group.take, replace=False)))
        if table[label].null_count:
            table = table.filter(pc.is_valid(table[label]))
        for start in range(0, table.num_rows, _BATCH_ROWS):
            part = table.slice(start, _BATCH_ROWS)
            yield Rows(
                by_column(part, features, str(group.path)),
                part[label].cast(pa.float32()).to_numpy(),
                {name: part[name].to_numpy() for name in others},
            )
