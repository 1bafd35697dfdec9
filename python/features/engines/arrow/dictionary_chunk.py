"""Column chunks of Parquet as a dictionary and, for each row, the number of its value there, as the file has them.

Arrow's decoder looks up each text of each row anew, and returns integers as they are, to be numbered again. Here the
file's own dictionary is taken (native/cpp/dictionary_chunk.cpp). What is stored otherwise, or in a way that is not read
here, is Arrow's to read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataset import native
from headrace.features.engines.arrow.kernels import address, index_type

#: Parquet's numbers of physical types and of compressions.
_TYPES = {"INT32": (1, pa.int32()), "INT64": (2, pa.int64()), "BYTE_ARRAY": (6, pa.string())}
_CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1}


def dictionary_columns(
    file: pq.ParquetFile, fd: int, group: int, wanted: Mapping[str, pa.DataType]
) -> Mapping[str, pa.DictionaryArray]:
    """Columns of a row group of which each value is kept once; those that are left out are Arrow's to read.

    Args:
        file: the file, for what its footer says.
        fd: the same, to be read from.
        group: the row group.
        wanted: names of columns that may be returned, with the types that they must have there.

    Returns:
        Texts, int32 and int64: no value twice in a dictionary, a null in it (the last) where a row has one, numbers of
        as few bytes as hold them. A dictionary may have values that no row has.
    """
    lib = native.library()
    if lib is None:
        return {}
    footer, found = file.metadata.row_group(group), {}
    schema, stored = file.schema_arrow, file.schema
    for i in range(footer.num_columns):
        name, leaf = stored.column(i).path, stored.column(i)
        # A struct's field has its path as its name.
        if name not in wanted or schema.get_field_index(name) < 0:
            continue
        if leaf.max_repetition_level or leaf.max_definition_level > 1:
            continue
        chunk = footer.column(i)
        number, type_ = _TYPES.get(chunk.physical_type, (0, None))
        declared = schema.field(name).type
        if pa.types.is_dictionary(declared):
            declared = declared.value_type
        if not declared == type_ == wanted[name] or chunk.compression not in _CODECS or not chunk.has_dictionary_page:
            continue
        start, size = chunk.dictionary_page_offset, chunk.total_compressed_size
        optional = leaf.max_definition_level
        read = lib.headrace_chunk_read(fd, start, size, footer.num_rows, number, _CODECS[chunk.compression], optional)
        if read:
            try:
                found[name] = _column(lib, read, footer.num_rows, declared)
            finally:
                lib.headrace_chunk_free(read)
    return found


def _column(lib: ctypes.CDLL, chunk: int, rows: int, type_: pa.DataType) -> pa.DictionaryArray:
    """The column that a chunk was decoded to."""
    counts = np.zeros(2, np.int64)
    values = lib.headrace_chunk_size(chunk, address(counts[:1]), address(counts[1:]))
    size, nulls = counts.tolist()
    index = np.empty(rows, index_type(values + bool(nulls)))
    offsets, data = np.empty(values + 1, np.int32), np.empty(size, np.uint8)
    lib.headrace_chunk_take(chunk, index.itemsize, address(index), address(offsets), address(data))
    parts = [pa.py_buffer(data)] if type_ != pa.string() else [pa.py_buffer(offsets), pa.py_buffer(data)]
    dictionary = pa.Array.from_buffers(type_, values, [None, *parts])
    if nulls:
        dictionary = pa.concat_arrays([dictionary, pa.nulls(1, type_)])
    return pa.DictionaryArray.from_arrays(pa.array(index), dictionary, safe=False)
