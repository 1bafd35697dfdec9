"""Statistics of parts of the rows, merged into the statistic of the whole: the same bits in any order, any grouping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.features.functions.arrays import one_chunk
from headrace.features.learn.exact_sums import I64
from headrace.features.learn.statistics import Partial, Partials, assemble


def merge_all(parts: Iterable[Partials]) -> dict[str, Partial]:
    """The statistics of all parts' rows together; the parts' statistics have the same names."""
    by_name: dict[str, list[Partial]] = {}
    for part in parts:
        for name, partial in part.items():
            by_name.setdefault(name, []).append(partial)
    return {name: merge(partials) for name, partials in by_name.items()}


def merge(parts: Sequence[Partial]) -> Partial:
    """The statistic of the rows of one or more parts (of one statistic) together; groups in any order."""
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(name for part in parts for name in part.column_names))
    rows = [part.num_rows for part in parts]
    keys = [name for name in ("key", "fold") if name in names]
    groups, n, kept = groups_of({k: _dictionary(parts, k) for k in keys}, sum(rows))
    out: dict[str, pa.Array] = dict(kept)
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    for name in names:
        if name in keys:
            continue
        number, _, rest = name.partition(".")
        measure, _, place = rest.partition(".")
        if measure in ("min", "max"):
            values = pa.concat_arrays([one_chunk(p.column(name)) for p in parts])
            out[name] = _least(values, groups, n, measure == "max")
            continue
        whole = np.concatenate(
            [_numpy(p.column(name)) if name in p.column_names else np.zeros(p.num_rows, np.int64) for p in parts]
        )
        if name == "day":
            out[name] = pa.array(extreme(whole, groups, n, np.minimum, np.iinfo(np.int64).max))
            continue
        added = np.zeros(n, np.int64)
        np.add.at(added, groups, whole)
        if place:
            sums.setdefault((number, measure), {})[int(place)] = added
        else:
            out[name] = pa.array(added)
    return assemble(out, sums)


def canonical(partial: Partial) -> Partial:
    """The same groups in order of key and fold, the same columns in order: equal statistics are equal tables."""
    partial = partial.select(sorted(partial.column_names)).combine_chunks()
    keys = [(name, "ascending") for name in ("key", "fold") if name in partial.column_names]
    return partial.sort_by(keys).combine_chunks() if keys else partial


def groups_of(keys: Mapping[str, pa.Array], n: int) -> tuple[npt.NDArray[np.intp], int, dict[str, pa.Array]]:
    """Each row's group 0..size-1, the size, and the groups' keys, texts for `key` unless it is numbers."""
    if not keys:
        return np.zeros(n, np.intp), 1, {}
    groups, possible = np.zeros(n, np.intp), 1
    dictionaries: dict[str, pa.Array] = {}
    for name, key in keys.items():
        # Integers are grouped as integers, and each distinct one is spelled once.
        encoded = _encoded(key)
        dictionaries[name] = encoded.dictionary
        size = len(encoded.dictionary)
        groups, possible = groups * size + encoded.indices.to_numpy(zero_copy_only=False), possible * size
    out: dict[str, pa.Array] = {}
    if len(keys) > 1:
        if possible <= 8 * n:  # a counter for each is cheaper than a sort
            there = np.flatnonzero(np.bincount(groups, minlength=possible))
            number = np.zeros(possible, np.intp)
            number[there] = np.arange(len(there))
            groups = number[groups]
        else:
            there, groups = np.unique(groups, return_inverse=True)
        size = len(there)
        for name, dictionary in reversed(dictionaries.items()):
            out[name] = dictionary.take(pa.array(there % len(dictionary)))
            there = there // len(dictionary)
    else:
        out = dict(dictionaries)
    if "key" in out and not pa.types.is_floating(out["key"].type):
        out["key"] = out["key"].cast(pa.string())
    return groups, size, out


def _encoded(key: pa.Array) -> pa.DictionaryArray:
    if pa.types.is_dictionary(key.type):
        return key
    if pa.types.is_boolean(key.type):  # Arrow's encoder spells no booleans
        key = key.cast(pa.string())
    return key.dictionary_encode()


def _dictionary(parts: Sequence[Partial], name: str) -> pa.DictionaryArray:
    """A column of all parts. Not of one array: Arrow has 2 GiB of texts there, and most are in several parts."""
    chunks = [chunk for part in parts for chunk in part.column(name).chunks]
    return pa.chunked_array(chunks, parts[0].schema.field(name).type).dictionary_encode().combine_chunks()


def _numpy(column: pa.ChunkedArray) -> Any:
    return column.to_numpy()


def extreme(x: Any, groups: npt.NDArray[np.intp], n: int, ufunc: Any, start: float) -> Any:
    """`ufunc` (minimum or maximum) over each of n groups; `start` of one without rows. [rows] -> [n]."""
    out = np.full(n, start, x.dtype)
    ufunc.at(out, groups, x)
    return out


def _least(values: pa.Array, groups: npt.NDArray[np.intp], n: int, greatest: bool) -> pa.Array:
    """The least or greatest of each group; null of none."""
    there = values.is_valid().to_numpy(zero_copy_only=False)
    x = values.drop_null().to_numpy(zero_copy_only=False)
    start = -np.inf if greatest else np.inf
    out = extreme(x, groups[there], n, np.maximum if greatest else np.minimum, start)
    # Only finite numbers are in statistics.
    return pa.array(out, mask=np.isinf(out))
