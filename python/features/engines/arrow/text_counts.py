"""Counts of texts, merged by parts of their hash: each part's table fits a core's cache, and no text is hashed twice.

Tasks leave their counts in the order of the parts, and say where each begins; the driver merges part by part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headrace.features.engines.arrow.kernels import counted_texts
from headrace.features.functions.arrays import one_chunk
from headrace.features.learn.statistics import Partial
from headrace.udfs.xxhash64 import xxhash64_strings

#: Parts by the highest bits of the hash.
_BITS = 5
#: So few texts are left as they are by tasks.
_FEW = 4_096
#: In the schema's metadata: where each part begins and the last one ends, a JSON list.
_EDGES = b"edges"


def in_parts(counts: Partial, few: int = _FEW) -> Partial:
    """Counts (`key` text, `rows`, `day`) in the order of parts of the keys' hash; at most `few` as they are."""
    if counts.num_rows <= few:
        return counts
    hashes = xxhash64_strings(one_chunk(counts.column("key"))).view(np.uint64)
    part = (hashes >> np.uint64(64 - _BITS)).astype(np.uint8)
    edges = [0, *np.cumsum(np.bincount(part, minlength=1 << _BITS)).tolist()]
    # One byte is sorted by radix.
    ordered = counts.take(pa.array(np.argsort(part, kind="stable")))
    return ordered.replace_schema_metadata({_EDGES: json.dumps(edges)})


def counted(counts: Sequence[Partial], least: int) -> pa.Table | None:
    """(key, rows, day): each text, its rows and its first day; those with at least `least` rows, in any order.

    Args:
        counts: results of `in_parts`.
        least: rows that a text must have.

    Returns:
        None where the native library is not there.
    """
    if not any(_edges(c) for c in counts):
        return counted_texts([_columns(c) for c in counts], least)
    counts = [c if _edges(c) else in_parts(c, 0) for c in counts if c.num_rows]
    columns = [_columns(c) for c in counts]
    edges = [list(pairwise(_edges(c))) for c in counts]
    found = []
    for part in range(1 << _BITS):
        mine = [
            (key[start:end], rows[start:end], day[start:end])
            for (key, rows, day), (start, end) in zip(columns, (e[part] for e in edges), strict=True)
            if start < end
        ]
        if mine:
            merged = counted_texts(mine, least)
            if merged is None:
                return None
            found.append(merged)
    return pa.concat_tables(found).combine_chunks()


def _edges(counts: Partial) -> list[int]:
    """Where parts begin; empty where the counts are not in parts."""
    text = (counts.schema.metadata or {}).get(_EDGES)
    return [] if text is None else json.loads(text)


def _columns(counts: Partial) -> tuple[pa.Array, pa.Array, pa.Array]:
    return one_chunk(counts.column("key")), one_chunk(counts.column("rows")), one_chunk(counts.column("day"))
