"""Twins of Spark's column functions, against independent computations (Spark itself: tests/spark)."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.features.ops.numbers import log1p
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)


def rotl(x: int, r: int) -> int:
    return ((x << r) | (x >> (64 - r))) & MASK


def lane(acc: int, word: int) -> int:
    return rotl((acc + word * P2) & MASK, 31) * P1 & MASK


def xxh64(data: bytes, seed: int = 42) -> int:
    """Compute XXH64 in plain Python integers, from the specification."""
    position = 0
    if len(data) >= 32:
        acc = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        while position + 32 <= len(data):
            acc = [
                lane(a, int.from_bytes(data[position + 8 * i : position + 8 * i + 8], "little"))
                for i, a in enumerate(acc)
            ]
            position += 32
        h = sum(rotl(a, r) for a, r in zip(acc, (1, 7, 12, 18), strict=True)) & MASK
        for a in acc:
            h = ((h ^ lane(0, a)) * P1 + P4) & MASK
    else:
        h = (seed + P5) & MASK
    h = (h + len(data)) & MASK
    while position + 8 <= len(data):
        h = (rotl(h ^ lane(0, int.from_bytes(data[position : position + 8], "little")), 27) * P1 + P4) & MASK
        position += 8
    if position + 4 <= len(data):
        h = (rotl(h ^ (int.from_bytes(data[position : position + 4], "little") * P1 & MASK), 23) * P2 + P3) & MASK
        position += 4
    for byte in data[position:]:
        h = rotl(h ^ (byte * P5 & MASK), 11) * P1 & MASK
    h = (h ^ (h >> 33)) * P2 & MASK
    h = (h ^ (h >> 29)) * P3 & MASK
    h ^= h >> 32
    return h - (1 << 64) if h >> 63 else h


@given(st.lists(st.text(max_size=90), min_size=1, max_size=40))
def test_string_hash_is_xxh64(texts: list[str]) -> None:
    padded = pa.array(["skipped", *texts])[1:]  # an array with an offset
    assert xxhash64_strings(padded).tolist() == [xxh64(t.encode()) for t in texts]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
def test_integer_hash_is_xxh64_of_eight_bytes(numbers: list[int]) -> None:
    expected = [xxh64(n.to_bytes(8, "little", signed=True)) for n in numbers]
    assert xxhash64_integers(np.array(numbers, np.int64)).tolist() == expected


def test_each_row_has_its_seed_and_null_is_no_step() -> None:
    texts, seeds = pa.array(["pad", "é1", None, "x" * 40])[1:], np.array([-1, 7, 2**62])
    expected = [xxh64("é1".encode(), 2**64 - 1), 7, xxh64(b"x" * 40, 2**62)]
    assert xxhash64_strings(texts, seeds).tolist() == expected
    assert xxhash64_integers(np.arange(6)[::2], seeds).tolist() == [
        xxh64(n.to_bytes(8, "little"), s % 2**64) for n, s in zip([0, 2, 4], seeds.tolist(), strict=True)
    ]
    assert xxhash64_strings(pa.array([], pa.string())).tolist() == []
    with pytest.raises(ValueError, match="3 values, 2 seeds"):
        xxhash64_strings(texts, seeds[:2])


@given(st.lists(st.floats(min_value=-1, exclude_min=True, allow_nan=False, allow_infinity=False), min_size=1))
def test_log1p_is_within_one_unit_in_the_last_place(numbers: list[float]) -> None:
    with mpmath.workdps(60):
        for x, y in zip(numbers, log1p(np.array(numbers)).tolist(), strict=True):
            true = mpmath.log1p(mpmath.mpf(x))
            assert abs(mpmath.mpf(y) - true) <= math.ulp(y), x


def test_log1p_at_the_edges() -> None:
    x = np.array([0.0, -0.0, -1.0, -1.5, -np.inf, np.nan, np.inf, 5e-324])
    y = log1p(x)
    assert np.signbit(y[1])
    assert y[0] == 0
    assert y[1] == 0
    assert np.isnan(y[2:6]).all()
    assert y[6] == np.inf
    assert y[7] == 5e-324
