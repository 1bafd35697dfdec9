"""Column functions of Spark's, written again for NumPy so that both engines of an operator agree to the last bit.

Only operations that IEEE 754 or integer arithmetic define exactly are used, so the results do not depend on the
machine's mathematical library or vector width either (NumPy's own log1p does: it has an AVX-512 version).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

# Coefficients of fdlibm's s_log1p.c (Sun Microsystems, 1993); Java's StrictMath, hence Spark's log1p, is that code.
_LN2_HI = 6.93147180369123816490e-01
_LN2_LO = 1.90821492927058770002e-10
_LP = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)


def log1p(x: F64) -> F64:
    """log(1 + x), bit for bit StrictMath.log1p of Java. float64 [n] -> float64 [n]; NaN where x <= -1 or x is NaN."""
    with np.errstate(all="ignore"):
        high = (x.view(np.int64) >> 32).astype(np.int32)
        reduced = (high >= 0x3FDA827A) | (
            (high < 0) & (high > 0xBFD2BEC3 - 2**32)
        )  # else k = 0, f = x: -0.29 < x < 0.41
        huge = high >= 0x43400000  # 2**53: 1 + x is x
        u = np.where(huge, x, 1.0 + x)
        bits = u.view(np.int64)
        u_high = bits >> 32
        k = (u_high >> 20) - 1023
        c = np.where(k > 0, 1.0 - (u - x), x - (u - 1.0)) / u
        c = np.where(huge, 0.0, c)
        fraction = u_high & 0x000FFFFF
        lower = fraction < 0x6A09E
        # u scaled into [sqrt(1/2), sqrt(2)): the exponent of 1.0, or of 0.5 and k one more.
        low_word = bits & 0xFFFFFFFF
        exponent = np.where(lower, 0x3FF00000, 0x3FE00000)
        scaled = (((fraction | exponent) << 32) | low_word).view(np.float64)
        k = np.where(lower, k, k + 1)
        hu = np.where(lower, fraction, (0x00100000 - fraction) >> 2)
        k = np.where(reduced, k, 0).astype(np.float64)
        f = np.where(reduced, scaled - 1.0, x)
        hu = np.where(reduced, hu, 1)
        c = np.where(reduced, c, 0.0)

        hfsq = 0.5 * f * f
        s = f / (2.0 + f)
        z = s * s
        r = _LP[6]
        for coefficient in reversed(_LP[:6]):
            r = coefficient + z * r
        r = z * r
        far = k * _LN2_HI - ((hfsq - (s * (hfsq + r) + (k * _LN2_LO + c))) - f)
        near = f - (hfsq - s * (hfsq + r))
        out = np.where(k == 0, near, far)

        # |f| < 2**-20 after scaling.
        tiny = hfsq * (1.0 - 0.66666666666666666 * f)
        flat = np.where(k == 0, f - tiny, k * _LN2_HI - ((tiny - (k * _LN2_LO + c)) - f))
        flat = np.where(f == 0, np.where(k == 0, 0.0, k * _LN2_HI + (c + k * _LN2_LO)), flat)
        out = np.where(hu == 0, flat, out)

        size = high & 0x7FFFFFFF
        out = np.where(size < 0x3E200000, x - x * x * 0.5, out)  # |x| < 2**-29
        out = np.where(size < 0x3C900000, x, out)  # |x| < 2**-54
        out = np.where(x == np.inf, np.inf, out)
        return np.where(x > -1, out, np.nan)


_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(p)
    for p in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
#: Spark's `xxhash64` starts here.
_SEED = np.uint64(42)


def _rotl(x: U64, bits: int) -> U64:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


def _mix(h: U64) -> U64:
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


def _word(h: U64, word: U64) -> U64:
    return _rotl(h ^ (_rotl(word * _P2, 31) * _P1), 27) * _P1 + _P4


def xxhash64_integers(
    values: npt.NDArray[np.int64], seed: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Spark's `xxhash64` of a bigint column. int64 [n] -> int64 [n].

    `seed`: of each row the hash of the columns before this one, int64 [n].
    """
    with np.errstate(over="ignore"):
        start = (np.full(values.shape, _SEED) if seed is None else seed.view(np.uint64)) + (_P5 + np.uint64(8))
        return _mix(_word(start, values.view(np.uint64))).view(np.int64)


def xxhash64_strings(values: pa.StringArray, seed: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """Spark's `xxhash64` (XXH64, Collet, seed 42) of a string column without nulls. pa.string [n] -> int64 [n].

    Strings of one length are hashed together, as the rows of a byte matrix. `seed`: see `xxhash64_integers`.
    """
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets)
    out = np.empty(len(values), np.int64)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        matrix = data[starts[rows, None] + np.arange(length)] if length else np.empty((len(rows), 0), np.uint8)
        seeds = np.full(len(rows), _SEED) if seed is None else seed[rows].view(np.uint64)
        out[rows] = _xxhash64_rows(np.ascontiguousarray(matrix), seeds)
    return out


def _xxhash64_rows(rows: npt.NDArray[np.uint8], seed: U64) -> npt.NDArray[np.int64]:
    """XXH64 of each row of a byte matrix, each with its seed. uint8 [n, L], uint64 [n] -> int64 [n]."""
    length = rows.shape[1]
    at = 0

    def word() -> U64:
        nonlocal at
        at += 8
        return np.ascontiguousarray(rows[:, at - 8 : at]).view("<u8")[:, 0]

    with np.errstate(over="ignore"):
        if length >= 32:
            v = [seed + _P1 + _P2, seed + _P2, seed, seed - _P1]
            while at + 32 <= length:
                v = [_rotl(lane + word() * _P2, 31) * _P1 for lane in v]
            h = _rotl(v[0], 1) + _rotl(v[1], 7) + _rotl(v[2], 12) + _rotl(v[3], 18)
            for lane in v:
                h = (h ^ (_rotl(lane * _P2, 31) * _P1)) * _P1 + _P4
        else:
            h = seed + _P5
        h = h + np.uint64(length)
        while at + 8 <= length:
            h = _word(h, word())
        if at + 4 <= length:
            four = np.ascontiguousarray(rows[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64)
            h = _rotl(h ^ (four * _P1), 23) * _P2 + _P3
            at += 4
        for i in range(at, length):
            h = _rotl(h ^ (rows[:, i].astype(np.uint64) * _P5), 11) * _P1
        return _mix(h).view(np.int64)
