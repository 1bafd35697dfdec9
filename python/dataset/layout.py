"""The files of one split of a dataset, seen as a list of row groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.workspace import Workspace


@dataclass(frozen=True)
class RowGroup:
    """Where a row group is. `piece` is its position among all row groups of the split, in path order."""

    piece: int
    path: Path
    index: int
    rows: int


@dataclass(frozen=True)
class SplitLayout:
    """One split: its files in path order and their non-empty row groups, numbered as Petastorm numbers them."""

    name: str
    files: tuple[Path, ...]
    row_groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        return sum(g.rows for g in self.row_groups)

    def stream(self, stream: int, streams: int) -> tuple[RowGroup, ...]:
        """The row groups of one of `streams` streams: Petastorm's shard, every `streams`-th row group."""
        return tuple(g for g in self.row_groups if g.piece % streams == stream)


def open_split(dataset: Path, name: str, schema: DatasetSchema, carried: Sequence[str] = ()) -> SplitLayout:
    """Read the footers of a split's Parquet files.

    Args:
        dataset: the folder that holds a folder for each split.
        carried: carried columns that will be read besides the schema's features.

    Raises:
        UserError: no such split, a damaged file, or a file that lacks a column.
    """
    folder = dataset / name
    files = tuple(sorted(folder.glob("*.parquet")))
    if not files:
        raise UserError(
            f"dataset {dataset} has no split '{name}' (no {folder}/*.parquet); run the features stage again"
        )
    wanted = physical_columns(schema, carried)
    row_groups: list[RowGroup] = []
    piece = 0
    for path in files:
        try:
            footer = pq.read_metadata(path)
        except (pa.ArrowException, OSError) as e:
            raise UserError(f"{path} is not a whole Parquet file ({' '.join(str(e).split())}). " + _AGAIN) from None
        missing = sorted(set(wanted) - set(footer.schema.names))
        if missing:
            raise UserError(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}. " + _AGAIN)
        for index in range(footer.num_row_groups):
            rows = footer.row_group(index).num_rows
            if rows:
                row_groups.append(RowGroup(piece, path, index, rows))
            piece += 1
    return SplitLayout(name, files, tuple(row_groups))


_AGAIN = "Delete the dataset's folder and run the features stage again"


def split_of(
    manifest: Manifest, ws: Workspace, split: str, carried: Sequence[str] = ()
) -> tuple[SplitLayout, DatasetSchema]:
    """A split of the dataset that a features manifest names, and the dataset's schema.

    Raises:
        UserError: the dataset is gone or damaged.
    """
    if manifest.dataset_schema is None:
        raise UserError(f"the manifest of stage '{manifest.stage}' for {manifest.ds} describes no dataset")
    folder = ws.home / Path(manifest.output("dataset").name)
    return open_split(folder, split, manifest.dataset_schema, carried), manifest.dataset_schema


def check_streams(layout: SplitLayout, streams: int) -> None:
    """Raise UserError unless every stream of a training split has rows."""
    empty = [i for i in range(streams) if not layout.stream(i, streams)]
    if empty:
        raise UserError(
            f"split '{layout.name}' in {layout.files[0].parent} has {len(layout.row_groups)} row groups "
            f"({layout.rows} rows), fewer than train.streams ({streams}): set features.min_row_groups to at least "
            f"{streams} and run the features stage again, or lower train.streams (and train.ranks)"
        )


def physical_columns(schema: DatasetSchema, carried: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the Parquet columns of a batch: continuous, categorical, label, then the carried ones asked for.

    Raises:
        UserError: a carried column that the dataset does not have.
    """
    known = [f.name for f in schema.of(Kind.CARRIED)]
    for name in carried:
        if name not in known:
            raise UserError(f"the dataset carries no column '{name}' (it has: {', '.join(known) or 'none'}); "
                            f"name it in features.carried")  # fmt: skip
    return (
        *columns_of(schema.of(Kind.CONTINUOUS)),
        *columns_of(schema.of(Kind.CATEGORICAL)),
        schema.label.name,
        *carried,
    )


def columns_of(features: Sequence[Feature]) -> tuple[str, ...]:
    """Physical columns of several features, in order."""
    return tuple(column for f in features for column in f.physical)
