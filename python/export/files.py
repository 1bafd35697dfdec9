"""Files beside a graph: embedding tables, raw ids and their rows, the vectors of all items; and the record.

A table's rows are in ranges, as float32, float16, or 8-bit codes with a scale and an offset for each row.

Graphs have no search in sorted numbers and no hash table. So a table's raw ids are in buckets by their remainder modulo
a prime, and its rows are in the order of buckets. A lookup reads from the bucket's start as many ids as the fullest
bucket has, and takes the equal one. Ids of the next bucket are never equal, since each id is only in its own bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.embeddings.checkpoint.files import WEIGHT
from headrace.embeddings.checkpoint.shards import local_blocks
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.storage import DTYPES, decode, encode
from headrace.export import record
from headrace.export.network import ExportedNetwork, is_sequence, vectors_name
from headrace.export.record import ITEM, ItemVectorsFile
from headrace.models.inputs import Inputs
from headrace.models.retrieval import further_item_features, item_feature
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location

#: Number format of a table's rows. int8: uint8 codes and two float32 for each row: number = offset + scale * code.
Precision = Literal["fp32", "fp16", "int8"]
#: Largest file of a table, in bytes.
FILE_BYTES = 2 << 30
#: Number of rows in memory at once.
_ROWS = 1 << 16
#: A file's second block begins at a multiple of this, so that it can be mapped.
_PAGE = 4096
#: Bytes of scale and offset, which follow the codes of a stored row.
_GRID = 8
#: File of the vectors of all items.
ITEMS_FILE = "items.npy"
#: Number of items whose vectors are in memory at once.
_ITEMS_AT_ONCE = 1 << 16
#: Largest bucket for which no other prime is tried, and the most primes that are tried.
_MAX_BUCKET, _TRIES = 16, 4


@dataclass(frozen=True)
class FileBlock:
    """A tensor within a file.

    Attributes:
        name: name in the graph.
        file: path of the file below the export's folder.
        offset: first byte in the file.
        dtype: type of the numbers.
        shape: dimensions.
    """

    name: str
    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the file in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class TablePart:
    """Consecutive rows of a table, from `start` on; `grid` has the scales and offsets of int8, float32 [rows, 2]."""

    start: int
    matrix: FileBlock
    grid: FileBlock | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.matrix.shape[0]


@dataclass(frozen=True)
class IdFiles:
    """Files that map raw ids to the rows of their table; see the module.

    Attributes:
        keys: ids in the order of their rows: int64 [rows].
        starts: first row of each bucket: int64 [buckets].
        largest_bucket: number of ids in the fullest bucket.
        absent: vector of an id without a row: float32 [D].
    """

    keys: FileBlock
    starts: FileBlock
    largest_bucket: int
    absent: Tensor


@dataclass(frozen=True)
class TableFiles:
    """Files of a table: its rows and, for a table of raw ids, the rows of ids."""

    parts: Sequence[TablePart]
    ids: IdFiles | None = None

    @property
    def blocks(self) -> list[FileBlock]:
        """All blocks of the table's files."""
        blocks = [b for part in self.parts for b in (part.matrix, part.grid) if b is not None]
        return blocks if self.ids is None else [*blocks, self.ids.keys, self.ids.starts]


def write_tables(
    exported: ExportedNetwork, names: Collection[str], folder: Location, precision: Precision, file_bytes: int
) -> dict[str, TableFiles]:
    """Write tables of a model into files of a folder, a few thousand rows in memory at a time.

    Sorting raw ids takes 24 bytes of memory more for each id.

    Args:
        exported: exported network of a model on one rank; its rows may be mapped and stored in any type.
        names: names of the tables.
        folder: folder of the files.
        precision: number format of the files. Tables that were stored in a coarser one have the model's numbers.
        file_bytes: largest file of a table; it has at least one row.
    """
    stored = stored_rows(exported)
    files: dict[str, TableFiles] = {}
    raw_id_tables = _raw_id_tables(exported.model)
    for number, table in enumerate(sorted(names)):
        name = f"table-{number}"
        if table not in raw_id_tables:
            files[table] = TableFiles(_write_parts(*_rows(stored[table]), precision, folder, name, file_bytes))
            continue
        ids, weight, absent = raw_id_tables[table]
        if not len(ids):  # a table needs a row: id 0 gets the vector of unknown ids
            ids, weight = np.zeros(1, np.int64), absent.unsqueeze(0)
        buckets = bucketed(ids)
        parts = _write_parts(*_ordered(weight, buckets), precision, folder, name, file_bytes)
        files[table] = TableFiles(parts, _write_ids(buckets, absent, folder, number))
    return files


def stored_rows(exported: ExportedNetwork) -> dict[str, Tensor]:
    """Return the rows of each table of codes as stored [N, stored width], in the order of codes: views."""
    embeddings = exported.model.embeddings
    rows: dict[str, Tensor] = {}
    for block in local_blocks(embeddings, WEIGHT):
        if block.columns is not None or block.rows != range(embeddings.plan.by_name[block.table].rows):
            raise ValueError(f"table '{block.table}' is not whole on this rank")
        rows[block.table] = embeddings.weights[block.fused][block.first : block.first + len(block.rows)]
    return rows | dict(exported.tables)


def _raw_id_tables(model: ShardedModel) -> dict[str, tuple[NDArray[np.int64], Tensor, Tensor]]:
    """Return by table of raw ids: ids int64 [N], their rows as stored [N, D], and the vector of unknown ids [D]."""
    if model.dynamic is None or model.absent is None:
        return {}
    tables = zip(model.dynamic.tables, model.absent, strict=True)
    return {t.spec.name: (np.asarray(t.ids), t.weight, absent.detach()) for t, absent in tables}


#: Function that returns rows a .. b - 1 of a table, float32.
_Rows = Callable[[int, int], Tensor]


def _rows(stored: Tensor) -> tuple[int, int, _Rows]:
    """Return the number of rows, their width, and a reader of them."""
    width = stored.shape[1] - _GRID if stored.dtype is torch.uint8 else stored.shape[1]
    return len(stored), width, lambda a, b: decode(stored[a:b])


def _ordered(weight: Tensor, buckets: Buckets) -> tuple[int, int, _Rows]:
    return len(weight), weight.shape[1], lambda a, b: weight[torch.from_numpy(buckets.order[a:b])].float()


def _write_parts(
    count: int, width: int, rows: _Rows, precision: Precision, folder: Location, name: str, file_bytes: int
) -> list[TablePart]:
    row_bytes = width + _GRID if precision == "int8" else width * DTYPES[precision].itemsize
    part_rows = max(1, file_bytes // row_bytes)
    return [
        _write_part(rows, start, min(start + part_rows, count), width, precision, folder, f"{name}-{part}")
        for part, start in enumerate(range(0, max(1, count), part_rows))
    ]


def _write_part(
    rows: _Rows, start: int, end: int, width: int, precision: Precision, folder: Location, name: str
) -> TablePart:
    dtype, file = DTYPES[precision], f"{name}.bin"
    matrix = FileBlock(name, file, 0, dtype, (end - start, width))
    with (folder / file).new_file() as path, open(path, "wb") as out:
        if precision != "int8":
            for chunk in _chunks(rows, start, end):
                _write(out, chunk.to(dtype))
            return TablePart(start, matrix)
        grid = FileBlock(f"{name}.grid", file, _next_page(matrix.bytes), torch.float32, (end - start, 2))
        for chunk in _chunks(rows, start, end):
            _write(out, encode(chunk, dtype)[:, :width])
        out.seek(grid.offset)
        for chunk in _chunks(rows, start, end):
            _write(out, encode(chunk, dtype)[:, width:].contiguous().view(torch.float32))
    return TablePart(start, matrix, grid)


def _write_ids(buckets: Buckets, absent: Tensor, folder: Location, number: int) -> IdFiles:
    file = f"keys-{number}.bin"
    keys = FileBlock(f"keys-{number}", file, 0, torch.int64, (len(buckets.keys),))
    starts = FileBlock(f"keys-{number}.starts", file, _next_page(keys.bytes), torch.int64, (len(buckets.starts),))
    with (folder / file).new_file() as path, open(path, "wb") as out:
        buckets.keys.tofile(out)
        out.seek(starts.offset)
        buckets.starts.tofile(out)
    return IdFiles(keys, starts, buckets.largest_bucket, absent)


def _next_page(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _chunks(rows: _Rows, start: int, end: int) -> Iterator[Tensor]:
    for first in range(start, end, _ROWS):
        yield rows(first, min(first + _ROWS, end))


def _write(out: BinaryIO, numbers: Tensor) -> None:
    out.write(numbers.contiguous().numpy().tobytes())


def total_bytes(tables: Mapping[str, TableFiles]) -> int:
    """Return the bytes of all tables."""
    return sum(b.bytes for table in tables.values() for b in table.blocks)


@dataclass(frozen=True)
class Buckets:
    """Ids in the order of buckets.

    Attributes:
        keys: ids in this order: int64 [N].
        order: position of each among the original ids: int64 [N].
        starts: first id of each bucket: int64 [buckets]; their number is a prime.
        largest_bucket: number of ids in the fullest bucket, at least 1.
    """

    keys: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    largest_bucket: int


def bucketed(ids: NDArray[np.int64]) -> Buckets:
    """Sort distinct ids int64 [N], N >= 1, into buckets of about one id."""
    best: Buckets | None = None
    buckets = len(ids)
    for _ in range(_TRIES):
        buckets = next_prime(buckets)
        division = _by_remainder(ids, buckets)
        if best is None or division.largest_bucket < best.largest_bucket:
            best = division
        if best.largest_bucket <= _MAX_BUCKET:
            break
        buckets += len(ids) // 8 + 1
    assert best is not None
    return best


def _by_remainder(ids: NDArray[np.int64], buckets: int) -> Buckets:
    bucket = ids % buckets  # never negative, as ONNX's Mod and torch's remainder
    order = np.argsort(bucket, kind="stable")
    sizes = np.bincount(bucket, minlength=buckets)
    starts = np.cumsum(sizes) - sizes
    return Buckets(ids[order], order, starts.astype(np.int64), int(sizes.max()))


def next_prime(n: int) -> int:
    """Return the smallest prime that is not below n."""
    return next(p for p in count(max(n, 2)) if all(p % d for d in range(2, int(p**0.5) + 1)))


def write_items(exported: ExportedNetwork, folder: Location, precision: Precision) -> ItemVectorsFile | None:
    """Write the vectors of all codes, as the graph `item` computes them from rows of the same precision.

    Returns None, and writes nothing, for a model without such vectors: one without retrieval form, or whose items have
    no vocabulary, or have further features, from which the graph computes their vectors.
    """
    if ITEM not in exported.graphs or further_item_features(exported.network):
        return None
    if exported.features[str(exported.network.item)].dynamic:
        return None
    feature = item_feature(exported.network, exported.model.schema, "an export of vectors")
    count, width = feature.cardinality or 0, 0
    stored = stored_rows(exported)
    with (folder / ITEMS_FILE).new_file() as path, open(path, "wb") as out:
        for first in range(0, count, _ITEMS_AT_ONCE):
            vectors = _vectors(exported, stored, range(first, min(first + _ITEMS_AT_ONCE, count)), precision)
            if not first:
                width = vectors.shape[1]
                header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
                np.lib.format.write_array_header_1_0(out, header)  # type: ignore[no-untyped-call]
            out.write(vectors.contiguous().numpy().tobytes())
    return ItemVectorsFile(
        file=ITEMS_FILE,
        feature=feature.name,
        vocabulary=feature.vocabulary or feature.name,
        rows=count,
        columns=width,
        first_code=feature.first_code,
    )


def _vectors(exported: ExportedNetwork, stored: dict[str, Tensor], codes: range, precision: Precision) -> Tensor:
    """Return the vectors of items by code: float32 [codes, D]."""
    network, item, rows = exported.network, str(exported.network.item), len(codes)
    embeddings: dict[str, Tensor | JaggedTensor] = {}
    for w in exported.lookups:
        if w.feature == item and w.ids == "batch":
            table_rows = decode(stored[exported.table_of(w)][codes.start : codes.stop])
            embeddings[w.name] = table_rows if precision == "fp32" else decode(encode(table_rows, DTYPES[precision]))
        elif is_sequence(w):
            embeddings[w.name] = JaggedTensor(torch.zeros(0, w.dim), torch.zeros(rows + 1, dtype=torch.int64))
        else:
            embeddings[w.name] = torch.zeros(rows, w.dim)
    ids: dict[str, Tensor | JaggedTensor] = {item: torch.arange(codes.start, codes.stop)}
    inputs = exported.model.inputs
    item_inputs = Inputs(
        inputs, torch.zeros(rows, inputs.continuous_columns), torch.zeros(rows, 0, 0), embeddings=embeddings, ids=ids
    )
    with torch.no_grad():
        vectors: Tensor = network.items(item_inputs)  # type: ignore[operator]
    return vectors.float()


def tables_read(exported: ExportedNetwork, used: Iterable[set[str]]) -> set[str]:
    """Return the names of the tables that graphs read, from the names of their arguments."""
    read = set[str]().union(*used)
    return {exported.table_of(w) for w in exported.lookups if vectors_name(w.name) in read}


def write_items_and_record(
    exported: ExportedNetwork,
    card: ModelCard,
    folder: Location,
    form: Literal["onnx", "torch"],
    precision: Precision,
    graphs: Mapping[str, record.ExportedGraph],
) -> None:
    """Write the items' vectors, if there are any, and then the record of an otherwise complete folder."""
    items = write_items(exported, folder, precision)
    record.write_record(
        folder,
        record.ExportRecord(
            format=form,
            kind=card.kind,
            pipeline=card.pipeline,
            ds=card.ds,
            key=card.key,
            tables=precision,
            outputs=exported.outputs(record.MODEL),
            graphs=graphs,
            items=items,
            files=record.file_sizes(folder),
            dataset_schema=card.dataset_schema,
        ),
    )
