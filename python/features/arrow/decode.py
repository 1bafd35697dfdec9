"""A cache of decoded lake files: the columns that a pipeline needs, dictionary-encoded, ready to be memory-mapped.

A data file of a Delta table never changes, so what was decoded once can be kept: text columns as the dictionary and
indices that Parquet stores them as, the rest as it is, in Arrow's IPC format, a file for each row group. Fit and write
work on them; the day after, only the new day's files are decoded. A folder of them appears in one rename, and one that
is incomplete is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.dataset.layout import column_bytes
from headrace.errors import UserError
from headrace.features.arrow import kernels
from headrace.features.arrow.kernels import DictionaryColumn, dictionary_columns
from headrace.features.functions.arrays import input_values, one_chunk
from headrace.features.table_ops.preparation import RowPreparation
from headrace.features.types import ValueType
from headrace.stage.manifest import fingerprint
from headrace.storage import Location
from headrace.storage.host_scratch import HostScratch, RunFolder
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

#: Part of the folder's name: raise it when a row group's form changes.
_FORMAT = 2
_META = "pieces.json"
FILE, LINE, HASH = "_source_file", "_source_line", "__hash"
#: Bytes that a task may decode at once, and bytes of a value without a dictionary: enough for 1.7 million rows of
#: Criteo's 41 columns. Values of texts and elements of lists come on top.
_DECODED_BYTES, _CELL_BYTES = 192 << 20, 8
#: Larger row groups are read in parts only.
_HELD_BYTES = 4 * _DECODED_BYTES
#: Bytes of a column's texts in a row group, above which they are read in parts and not as a dictionary: Arrow keeps 2
#: GiB in one, however the row group is cut.
_LONG_TEXTS = 1 << 30
#: Most parts in which such a row group is read, by its rows: long texts may be neighbours.
_STEPS = 64
#: Numbers are dictionary-encoded where so many first rows have at most half as many distinct values.
_SAMPLE = 4_096


@dataclass(frozen=True)
class LakeFile:
    """A data file of the pinned version."""

    path: Location
    size: int
    #: For a file of another writer: the `_source_file` of its rows. `_source_line` is their number in it, from 0.
    #: None: the file has both columns.
    name: str | None = None
    #: Identity of the file's content, where another file may replace it under the same name.
    identity: str = ""
    #: The columns' names in order, where the file has numbers in their place (`numbered_name`). Empty: it has names.
    columns: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Names its folder of row groups."""
        named = str(self.path)
        if self.name is not None:
            named = "\n".join([named, self.name, str(self.size), *([self.identity] if self.identity else [])])
        return hashlib.sha256(named.encode()).hexdigest()[:24]


class LakeRowGroup:
    """One row group of a lake file, or an even part of a large one."""

    def __init__(self, path: Location) -> None:
        self.path = path

    @cached_property
    def batch(self) -> pa.RecordBatch:
        """All columns, memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self.path.local_path()))).get_batch(0)

    @property
    def rows(self) -> int:
        return int(self.batch.num_rows)

    def column(self, name: str) -> DictionaryColumn:
        """Return a column."""
        column = self.batch.column(self.batch.schema.get_field_index(name))
        if pa.types.is_dictionary(column.type):
            return DictionaryColumn(column.dictionary, column.indices.to_numpy(), distinct=True)
        return DictionaryColumn(column)

    @cached_property
    def hashes(self) -> npt.NDArray[np.int64]:
        """xxhash64 of file and line of each row, as Spark's."""
        hashes: npt.NDArray[np.int64] = self.batch.column(self.batch.schema.get_field_index(HASH)).to_numpy()
        return hashes


@dataclass(frozen=True)
class RowGroupLayout:
    """The columns that row groups hold of the lake's rows, and how they are made. Pickled into tasks."""

    #: Name -> type.
    columns: Mapping[str, ValueType]
    #: Row operators before the features; None: the lake's rows as they are.
    preparation: RowPreparation | None = None

    @property
    def key(self) -> str:
        """Names the folder of all row groups of this layout."""
        named = {name: str(t) for name, t in self.columns.items()}
        if self.preparation is None:
            return fingerprint({"format": _FORMAT, "columns": named})
        lake = {name: str(t) for name, t in self.inputs.items()}
        preparation = {"lake": lake, "prepare": self.preparation.key()}
        return fingerprint({"format": _FORMAT, "columns": named, **preparation})

    @property
    def inputs(self) -> Mapping[str, ValueType]:
        """The lake's columns that are read."""
        return self.columns if self.preparation is None else self.preparation.inputs(self.columns)


def row_groups(
    file: LakeFile, folder: Location | HostFolder, layout: RowGroupLayout
) -> tuple[list[LakeRowGroup], bool]:
    """Return the row groups of a lake file, made where they are not there; and whether they were."""
    if not isinstance(folder, Location):
        folder = folder.on_this_host()
    existing = _complete(folder / file.key, file)
    if existing is not None:
        return existing, True
    encode(file, folder, layout)
    created = _complete(folder / file.key, file)
    if created is None:
        raise RuntimeError(f"the decoded row groups of {file.path} vanished from {folder} while they were made")
    return created, False


def encode(file: LakeFile, folder: Location, layout: RowGroupLayout) -> None:
    """Decode a lake file into `folder`, in one step."""
    columns = layout.inputs
    numbers = {name: numbered_name(i) for i, name in enumerate(file.columns)}
    names = {number: name for name, number in numbers.items()}
    stored_columns = {numbers.get(name, name): type_ for name, type_ in columns.items()}
    # A task may run twice: both write the same.
    with (folder / file.key).new_folder(alone=False) as partial_folder, open(file.path.local_path(), "rb") as stored:
        place = tuple(numbers.get(name, name) for name in (FILE, LINE)) if file.name is None else ()
        footer = pq.read_metadata(file.path.local_path())
        stored_names = set(footer.schema.to_arrow_schema().names)
        texts = {*place[:1], *(name for name, t in stored_columns.items() if str(t) == "string")}
        long = {name for name in texts & stored_names if max(column_bytes(footer, name), default=0) > _LONG_TEXTS}
        parquet = pq.ParquetFile(
            file.path.local_path(),
            metadata=footer,
            memory_map=True,
            coerce_int96_timestamp_unit="us",
            read_dictionary=sorted(texts & stored_names - long),
        )
        read_columns = [name for name in (*stored_columns, *place) if name in stored_names]
        written: list[int] = []
        rows_before = 0
        # Operators make rows of Arrow's arrays.
        numbered = {} if layout.preparation is not None else _numbered_types(stored_columns, place)
        numbered = {name: type_ for name, type_ in numbered.items() if name not in long}
        for group in range(parquet.num_row_groups):
            for table, ready in _decoded(parquet, stored.fileno(), group, read_columns, numbered, long):
                if names:
                    table = table.rename_columns([names[number] for number in table.column_names])
                    ready = {names[number]: column for number, column in ready.items()}
                if file.name is not None:
                    table, rows_before = _placed(table, file.name, rows_before), rows_before + table.num_rows
                if layout.preparation is not None:
                    table = _prepared(table, columns, layout.preparation)
                if table.num_rows:
                    written.append(
                        _write(_encoded(table, ready, layout.columns), partial_folder / f"{len(written)}.arrow")
                    )
        (partial_folder / _META).put_text(json.dumps({"size": file.size, "pieces": written}))


def numbered_name(index: int) -> str:
    """Return the name of a column in a file that has numbers for names (`LakeFile.columns`)."""
    return f"c{index}"


def _numbered_types(columns: Mapping[str, ValueType], place: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the columns that row groups keep as a dictionary, where the file does so.

    Args:
        columns: the file's names, with their types.
        place: the file's names of FILE and LINE; empty where it lacks them.
    """
    types = {name: t.arrow for name, t in columns.items() if not t.is_list and (t.is_integer or str(t) == "string")}
    return types | dict.fromkeys(place[:1], pa.string())


def _decoded(
    parquet: pq.ParquetFile,
    fd: int,
    group: int,
    columns: list[str],
    numbered: Mapping[str, pa.DataType],
    long: Collection[str],
) -> Iterator[tuple[pa.Table, Mapping[str, pa.DictionaryArray]]]:
    """Yield the rows of a row group, in parts of about _DECODED_BYTES where it has more: a table and further columns.

    Args:
        numbered: columns that may come as a dictionary, apart from the table, with their types.
        long: columns whose texts count as decoded; without any, parts are even.
    """
    rows = parquet.metadata.row_group(group).num_rows
    if not rows or not columns:
        return
    # They stay in memory until the last part: at most half a cell's bytes each.
    held = rows * len(columns) * _CELL_BYTES <= _HELD_BYTES
    ready = dictionary_columns(parquet, fd, group, numbered) if held else {}
    rest = [name for name in columns if name not in ready] or columns[:1]
    # Each part takes its values from the whole's dictionaries: half the cost of decoding them.
    decoded = rows * len(rest) * _CELL_BYTES + sum(column.indices.nbytes for column in ready.values())
    decoded += sum(column_bytes(parquet.metadata, name)[group] for name in long)
    parts = -(-decoded // _DECODED_BYTES)
    if parts == 1:
        yield parquet.read_row_group(group, columns=rest, use_threads=False), ready
        return
    start = 0
    step = max(1, -(-rows // parts) // (_STEPS if long else 1))
    for part in _parts(parquet.iter_batches(step, row_groups=[group], columns=rest, use_threads=False), long):
        part_columns = {name: _part(column.slice(start, part.num_rows)) for name, column in ready.items()}
        start += part.num_rows
        yield part, part_columns


def _parts(batches: Iterable[pa.RecordBatch], long: Collection[str]) -> Iterator[pa.Table]:
    """Yield batches as they are; where columns of them are long, joined as long as they have at most _DECODED_BYTES."""
    waiting, size = list[pa.RecordBatch](), 0
    for batch in batches:
        cells = _CELL_BYTES * batch.num_rows * batch.num_columns
        cells += sum(batch.column(name).nbytes for name in batch.schema.names if name in long)
        if waiting and size + cells > _DECODED_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
        # A dictionary covers several batches: keep the values that this one uses.
        arrays = [kernels.used(c) if pa.types.is_dictionary(c.type) else c for c in batch.columns]
        joined = pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
        if not long:
            yield pa.Table.from_batches([joined])
            continue
        waiting.append(joined)
        size += cells
    if waiting:
        yield pa.Table.from_batches(waiting)


def _part(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return a part of a column; without the values that no row of it has, where they are many."""
    if 8 * len(column.dictionary) <= len(column):
        return column
    compact = kernels.used(column)
    index = kernels.narrow(compact.indices, 0, len(compact.dictionary))
    return pa.DictionaryArray.from_arrays(pa.array(index), compact.dictionary, safe=False)


def prune(folder: Location, keys: Iterable[str]) -> None:
    """Remove the row groups of all files but those of these keys, and what killed tasks left."""
    keep = set(keys)
    folder.discard_unfinished()
    for entry in folder.entries():
        if entry.name not in keep:
            entry.remove_quietly()


def _placed(table: pa.Table, name: str, rows_before: int) -> pa.Table:
    """Return the table with the file and line of its rows; `rows_before` rows of the file precede them."""
    rows = table.num_rows
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([name]))
    lines = pa.array(np.arange(rows_before, rows_before + rows, dtype=np.int64))
    return pa.table([*table.columns, names, lines], names=[*table.column_names, FILE, LINE])


def _complete(folder: Location, file: LakeFile) -> list[LakeRowGroup] | None:
    try:
        meta = json.loads((folder / _META).read_text())
        sizes = meta["pieces"]
        paths = [folder / f"{i}.arrow" for i in range(len(sizes))]
        if meta["size"] != file.size or [p.size() for p in paths] != sizes:
            return None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return [LakeRowGroup(p) for p in paths]


def _write(batch: pa.RecordBatch, path: Location) -> int:
    with (
        path.new_file() as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    return path.size()


def _prepared(table: pa.Table, columns: Mapping[str, ValueType], preparation: RowPreparation) -> pa.Table:
    """Return the rows that the operators make of the lake's."""
    n = table.num_rows
    typed = {
        name: _declared(table.column(name), t.arrow, name) if name in table.column_names else pa.nulls(n, t.arrow)
        for name, t in columns.items()
    }
    rows = preparation.apply(
        pa.table({**typed, FILE: _declared(table.column(FILE), pa.string(), FILE), LINE: table.column(LINE)})
    )
    if rows.num_rows == n:
        return rows
    # Dictionaries must not keep values of dropped rows.
    arrays = [_used(x) if pa.types.is_dictionary(x.type) else x for x in rows.columns]
    return pa.table(arrays, names=rows.schema.names)


def _used(column: pa.ChunkedArray) -> pa.Array:
    """Return texts in a dictionary of those that a row has."""
    return kernels.used(_declared(column, pa.string(), ""))


def _encoded(
    table: pa.Table, ready: Mapping[str, pa.DictionaryArray], columns: Mapping[str, ValueType]
) -> pa.RecordBatch:
    n = table.num_rows
    arrays, names = [], []
    for name, type_ in columns.items():
        if name in ready:
            arrays.append(ready[name])
        elif name in table.column_names:
            arrays.append(_cells(table.column(name), type_, name))
        else:  # the file is older than the column
            arrays.append(_cells(pa.chunked_array([pa.nulls(n, type_.arrow)]), type_, name))
        names.append(name)
    source = ready[FILE] if FILE in ready else _single_array(table.column(FILE), pa.string())
    lines = _single_array(table.column(LINE), pa.int64())
    for name, array in ((FILE, source), (LINE, lines), (HASH, pa.array(row_hashes(source, lines)))):
        arrays.append(array)
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def row_hashes(source: pa.DictionaryArray, lines: pa.Array) -> npt.NDArray[np.int64]:
    """Return Spark's `xxhash64(_source_file, _source_line)`: the hash of the first is the seed of the second.

    Null: no step.

    int64 [rows].
    """
    seeds = xxhash64_strings(source.dictionary)
    # Most files have one name.
    seed = np.full(len(source), seeds[0]) if len(seeds) == 1 else seeds[source.indices.to_numpy()]
    if not lines.null_count:
        return xxhash64_integers(lines.to_numpy(), seed)
    line = pc.fill_null(lines, 0).to_numpy(zero_copy_only=False)
    return np.where(lines.is_valid().to_numpy(zero_copy_only=False), xxhash64_integers(line, seed), seed)


def _cells(column: pa.ChunkedArray, type_: ValueType, name: str) -> pa.Array:
    """Return a column as operators see it (workflow.workflow): NaN is null, a null list is empty.

    Texts and integers with each value once.
    """
    array = input_values(_single_array(column, type_.arrow, name))
    if type_.is_integer and not type_.is_list:
        sample = array.slice(0, _SAMPLE)
        if 2 * pc.count_distinct(sample, mode="all").as_py() > len(sample):
            return array
        return kernels.dictionary_encode(array)
    return array


def _single_array(column: pa.ChunkedArray, type_: pa.DataType, name: str = "") -> pa.Array:
    """Return `_declared`; texts as a dictionary with a null in it where a row has one."""
    array = _declared(column, type_, name)
    if not pa.types.is_dictionary(array.type):
        return array
    index, values = array.indices, array.dictionary.cast(pa.string())
    null = len(values)
    if index.null_count:
        values = pa.concat_arrays([values, pa.nulls(1, pa.string())])
    return pa.DictionaryArray.from_arrays(pa.array(kernels.narrow(index, null, len(values))), values, safe=False)


def _declared(column: pa.ChunkedArray, type_: pa.DataType, name: str) -> pa.Array:
    """Return one array of a column read from Parquet, in its declared type; texts as a dictionary."""
    if pa.types.is_dictionary(column.type) or pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        if not pa.types.is_string(type_):
            raise UserError(f"column '{name}' is text in the lake and cannot be read as {type_}")
        if column.num_chunks > 1:
            column = pa.chunked_array([pa.concat_arrays(column.unify_dictionaries().chunks)])
        texts = column.chunk(0) if column.num_chunks else pa.array([], pa.string()).dictionary_encode()
        if pa.types.is_large_string(texts.dictionary.type):
            return pa.DictionaryArray.from_arrays(texts.indices, texts.dictionary.cast(pa.string()))
        return texts
    array = one_chunk(column)
    if array.type == type_:
        return array
    try:
        return array.cast(type_)
    except pa.ArrowException as e:
        raise UserError(f"column '{name}' is {array.type} in the lake and cannot be read as {type_}: {e}") from None


@dataclass(frozen=True)
class HostFolder:
    """The row groups of one layout on each host, and what a run leaves there for its own tasks."""

    scratch: HostScratch
    #: Key of the row groups' layout.
    key: str
    run: str
    #: Keys of the files that the run reads: row groups of other files are removed.
    files: tuple[str, ...]

    @staticmethod
    def for_files(scratch: HostScratch, key: str, run: str, files: Sequence[LakeFile]) -> HostFolder:
        return HostFolder(scratch, key, run, tuple(file.key for file in files))

    def on_this_host(self) -> Location:
        """Return the folder of the row groups on this host, which has been tidied up by the run's first task there."""
        return self.of_run().parent / self.key

    def of_run(self) -> Location:
        """Return a folder on this host for this run alone: the next one removes it."""
        return RunFolder(self.scratch, self.run, (self.key,)).of_run(self._prune)

    def _prune(self) -> None:
        groups_folder = self.scratch.resolve() / self.key
        prune(groups_folder, self.files)
        groups_folder.make_dir()


def of_run_here(place: Location | HostFolder) -> Location:
    """Return a folder of a run alone: the one that all its tasks see, or this host's own."""
    return place if isinstance(place, Location) else place.of_run()
