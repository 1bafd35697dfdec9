"""The column functions in plain Python, one value at a time; text by Python's own decoder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tests.unit.test_features_kernels import xxh64


def code(hash_: int, buckets: int) -> int:
    return hash_ % buckets + 1


def ids_hash(ids: Sequence[int]) -> int:
    """Spark's xxhash64 of bigint columns."""
    h = 42
    for id_ in ids:
        h = xxh64(id_.to_bytes(8, "little", signed=True), h % 2**64)
    return h


def ngrams(text: bytes | None, n: int, buckets: int, most: int | None) -> list[int] | None:
    if text is None:
        return None
    characters = text.decode("utf-8", "replace")
    grams = [characters[i : i + n] for i in range(max(1, len(characters) - n + 1))] if characters else []
    return [code(xxh64(g.encode()), buckets) for g in grams[:most]]


def cross(row: Sequence[Any], buckets: int, most: int) -> list[int] | None:
    if any(x is None for x in row):
        return None
    lists = [[v for v in (x if isinstance(x, list) else [x]) if v is not None] for x in row]
    return [code(ids_hash(c), buckets) for c in itertools.islice(itertools.product(*lists), most)]


def minhash(ids: list[int | None] | None, hashes: int) -> list[int] | None:
    present = [i for i in ids or [] if i is not None]
    return [min(ids_hash([j, i]) for i in present) for j in range(hashes)] if present else None
