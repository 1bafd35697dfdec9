"""Spark's `xxhash64` of integers by ONNX's operators: the bits of headrace.udfs.xxhash64."""

from __future__ import annotations

import numpy as np

from headrace.export.features.graph import INT64, UINT64, GraphWriter

#: XXH64 (Collet); Spark's seed.
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_SEED, _BYTES, _BITS = 42, 8, 64


def xxhash64_integers(graph: GraphWriter, x: str, seed: str | None = None) -> str:
    """Of int64 [..]: int64 [..]. `seed`: the hash of the columns before this one."""
    p1, p2, p3, p4, p5 = (_signed(p) for p in _PRIMES)
    started = _add(graph, seed if seed is not None else graph.constant(_SEED, np.int64), p5 + _BYTES)
    word = _times(graph, _rotated(graph, _times(graph, x, p2), 31), p1)
    found = graph.add("BitwiseXor", started, word)
    found = _add(graph, _times(graph, _rotated(graph, found, 27), p1), p4)
    for bits, prime in ((33, p2), (29, p3), (32, None)):
        found = graph.add("BitwiseXor", found, _shifted(graph, found, bits, "RIGHT"))
        found = found if prime is None else _times(graph, found, prime)
    return found


def bucket(graph: GraphWriter, hashes: str, buckets: int) -> str:
    """1 .. buckets of hashes."""
    left = graph.add("Mod", hashes, graph.constant(buckets, np.int64))
    return graph.add("Add", left, graph.constant(1, np.int64))


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _times(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Mul", x, graph.constant(number, np.int64))


def _add(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Add", x, graph.constant(number, np.int64))


def _shifted(graph: GraphWriter, x: str, bits: int, direction: str) -> str:
    moved = graph.add("BitShift", graph.cast(x, UINT64), graph.constant(bits, np.uint64), direction=direction)
    return graph.cast(moved, INT64)


def _rotated(graph: GraphWriter, x: str, bits: int) -> str:
    return graph.add("BitwiseOr", _shifted(graph, x, bits, "LEFT"), _shifted(graph, x, _BITS - bits, "RIGHT"))
