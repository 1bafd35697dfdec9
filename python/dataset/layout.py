"""The files of one split of a dataset, seen as a list of row groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config.schema import DatasetSchema, Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage.manifest import Manifest
from headrace.storage import Location, StoreAway


@dataclass(frozen=True)
class RowGroup:
    """Place of a row group. `piece` is its position among all row groups of the split, in path order."""

    piece: int
    path: Location
    index: int
    rows: int
    #: Its share of the file's bytes.
    bytes: int = 0


@dataclass(frozen=True)
class SplitLayout:
    """One split: its files in path order and their non-empty row groups, numbered as Petastorm numbers them."""

    name: str
    files: tuple[Location, ...]
    row_groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        return sum(g.rows for g in self.row_groups)

    def stream(self, stream: int, streams: int) -> tuple[RowGroup, ...]:
        """Return the row groups of one of `streams` streams: Petastorm's shard, every `streams`-th row group."""
        return tuple(g for g in self.row_groups if g.piece % streams == stream)


#: The split that no choice depends on: it is evaluated once, at the end of training.
TEST = "test"
#: In a dataset's folder: its files with their sizes, rows and row groups. A reader plans shards with it alone.
LISTING = "_files.json"


def open_split(dataset: Location, name: str, schema: DatasetSchema, carried: Sequence[str] = ()) -> SplitLayout:
    """Open a split: its row groups from the dataset's listing, no Parquet file opened; without one, from footers.

    Args:
        dataset: the folder that holds a folder for each split.
        carried: carried columns that will be read besides the schema's features.

    Raises:
        UserError: no such split, a damaged file, or a file that lacks a column.
    """
    folder = dataset / name
    files = tuple(f for f in folder.entries() if f.suffix == ".parquet")
    if not files:
        raise UserError(
            f"dataset {dataset} has no split '{name}' (no {folder}/*.parquet); run the features stage again"
        )
    columns = stored_columns(schema, carried)
    listed = _listed(dataset, name, files)
    if listed is not None:
        return SplitLayout(name, files, listed)
    row_groups: list[RowGroup] = []
    piece = 0
    for path in files:
        try:
            footer = pq.read_metadata(path.local_path())
        except StoreAway:
            raise
        except (pa.ArrowException, OSError) as e:
            raise UserError(f"{path} is not a whole Parquet file ({' '.join(str(e).split())}). " + _AGAIN) from None
        missing = sorted(set(columns) - set(footer.schema.to_arrow_schema().names))
        if missing:
            raise UserError(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}. " + _AGAIN)
        size = path.size()
        for index in range(footer.num_row_groups):
            rows = footer.row_group(index).num_rows
            if rows:
                row_groups.append(RowGroup(piece, path, index, rows, size // footer.num_row_groups))
            piece += 1
    return SplitLayout(name, files, tuple(row_groups))


def _listed(dataset: Location, split: str, files: Sequence[Location]) -> tuple[RowGroup, ...] | None:
    """Return the row groups as the listing has them.

    None without a listing, or where a file has more or fewer row groups than one.

    Raises:
        UserError: a file is missing, not listed, or of another size.
    """
    try:
        listed = {f["name"]: f for f in json.loads((dataset / LISTING).read_text())}
    except (FileNotFoundError, ValueError):
        return None
    listed_files = {name: f for name, f in listed.items() if name.startswith(f"{split}/")}
    present_files = {f"{split}/{path.name}": path for path in files}
    for name in sorted(listed_files.keys() ^ present_files.keys()):
        raise UserError(
            f"{dataset / name} is {'gone' if name in listed_files else 'no file of the dataset'}. " + _AGAIN
        )
    if any(f["row_groups"] != 1 for f in listed_files.values()):
        return None
    sizes = (dataset / split).sizes()
    for name, path in present_files.items():
        if sizes.get(path.name) != listed_files[name]["size"]:
            raise UserError(f"{path} is not the whole Parquet file that was written. " + _AGAIN)
    rows = [(path, int(listed_files[name]["rows"])) for name, path in present_files.items()]
    return tuple(RowGroup(piece, path, 0, n, sizes[path.name]) for piece, (path, n) in enumerate(rows) if n)


_AGAIN = "Delete the dataset's folder and run the features stage again"


def split_of(
    manifest: Manifest, ws: Workspace, split: str, carried: Sequence[str] = ()
) -> tuple[SplitLayout, DatasetSchema]:
    """Return a split of the dataset that a features manifest names, and the dataset's schema.

    Raises:
        UserError: the dataset is gone or damaged.
    """
    if manifest.dataset_schema is None:
        raise UserError(f"the manifest of stage '{manifest.stage}' for {manifest.ds} describes no dataset")
    folder = ws.locate(manifest.output("dataset").name)
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


def stored_columns(schema: DatasetSchema, carried: Sequence[str] = ()) -> tuple[str, ...]:
    """Return names of the Parquet columns of a batch: continuous, categorical, label, then the requested carried ones.

    A list is one column.

    Raises:
        UserError: a carried column that the dataset does not have.
    """
    known = [f.name for f in schema.of(Kind.CARRIED)]
    for name in carried:
        if name not in known:
            raise UserError(
                f"the dataset carries no column '{name}' (it has: {', '.join(known) or 'none'}); "
                f"name it in features.carried"
            )
    return (
        *[f.name for f in schema.of(Kind.CONTINUOUS)],
        *[f.name for f in schema.of(Kind.CATEGORICAL)],
        schema.label.name,
        *carried,
    )


def column_bytes(footer: pq.FileMetaData, column: str) -> list[int]:
    """Return bytes of a column's pages before they were compressed, by row group; 0 where the file lacks it."""
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    chunks = ([group.column(i) for i in range(group.num_columns)] for group in groups)
    return [
        sum(c.total_uncompressed_size for c in group_chunks if c.path_in_schema == column) for group_chunks in chunks
    ]
