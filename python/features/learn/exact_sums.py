"""Sums of doubles and of their squares as whole numbers: the same bits in any order, any grouping, either engine.

A double is cut into signed digits to the base 2**27, at fixed places: x = sum of d[k] * 2**(27 k), with d[k] whole and
|d[k]| < 2**27. Digits are summed as 64-bit integers, so the order does not matter, and sums of parts merge exactly into
the sum of all (a superaccumulator: Kulisch, "Computer Arithmetic and Validity", 2013). Fixed places make it plain
column arithmetic, which Spark runs on CPUs and GPUs. The product of two digits has 54 bits, so squares are exact too,
and a variance is right to the last bit even if it is tiny beside the mean. Sums of 2**31 rows fit.

Two other modules sum differently. table_ops.trailing rounds each number to 2**-20 and has no squares. The sums of
doubles in drift.column_statistics depend in their last bits on the parts. Here both engines must give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pyspark.sql import Column

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

BITS = 27
_BASE = 1 << BITS
#: Larger magnitudes, which float32 cannot hold, do not count in statistics; magnitudes below SMALLEST count as 0.
LARGEST = 3.4e38
SMALLEST = 2.0**-126


def usable(x: F64) -> F64:
    """Return the numbers, NaN where they do not count in statistics, without negative zeros. float64 [n] -> [n]."""
    with np.errstate(invalid="ignore"):
        size = np.abs(x)
        return np.where(size <= LARGEST, np.where(size < SMALLEST, 0.0, x), np.nan)


def spark_usable(x: Column) -> Column:
    """Return the numbers, null where they do not count in statistics, without negative zeros."""
    from pyspark.sql import functions as F

    x = x.cast("double")
    size = F.abs(x)
    return F.when(size <= F.lit(LARGEST), F.when(size < F.lit(SMALLEST), F.lit(0.0)).otherwise(x))


def rounded(x: F64, bits: int) -> F64:
    """Round to `bits` significant bits (Veltkamp's splitting), to nearest. float64 [n] -> float64 [n]."""
    if bits >= 53:
        return x
    scaled = x * (2.0 ** (53 - bits) + 1.0)
    return scaled - (scaled - x)


def spark_rounded(x: Column, bits: int) -> Column:
    """Return `rounded` as a double column."""
    from pyspark.sql import functions as F

    if bits >= 53:
        return x
    scaled = x * F.lit(2.0 ** (53 - bits) + 1.0)
    return scaled - (scaled - x)


def places(smallest: float, largest: float, integral: bool = False) -> range:
    """Return the digits' places of numbers whose magnitudes, unless 0, are from `smallest` to `largest`.

    Args:
        smallest: the smallest magnitude above 0.
        largest: the largest magnitude; 0: all numbers are 0.
        integral: whether all are whole numbers.
    """
    if not largest:
        return range(0, 1)
    lowest = math.frexp(smallest)[1] - 53
    if integral:
        lowest = max(lowest, 0)
    return range(lowest // BITS, (math.frexp(largest)[1] - 1) // BITS + 1)


def square_places(places: range) -> range:
    """Return places of the digits of the squares of numbers with digits at `places`."""
    return range(2 * places.start, 2 * places.stop)


def places_of(x: F64) -> range:
    """Return `places` of usable numbers, NaN left out."""
    size = np.abs(x[~np.isnan(x)])
    size = size[size > 0]
    if not len(size):
        return range(0, 1)
    return places(float(size.min()), float(size.max()))


def digits(x: F64, places: range) -> dict[int, I64]:
    """Return digits by place of usable numbers without NaN. float64 [n] -> int64 [n] each."""
    out = {}
    rest = x * 2.0 ** (-BITS * (places.stop - 1))
    for place in reversed(places):
        part = np.trunc(rest)
        out[place] = part.astype(np.int64)
        rest = (rest - part) * _BASE
    return out


def square_digits(digits: Mapping[int, I64], places: range) -> dict[int, I64]:
    """Return digits by place (less than 2**32 in size) of the squares of numbers with `digits` at `places`."""
    out = {place: np.zeros_like(digits[places.start]) for place in square_places(places)}
    for place, pairs in _pairs(places).items():
        # At most a dozen products of 54 bits, all of one sign.
        added = sum((digits[i] * digits[j] * weight for i, j, weight in pairs), np.int64(0))
        out[place] += added & (_BASE - 1)
        out[place + 1] += added >> BITS
    return out


def _pairs(places: range) -> dict[int, list[tuple[int, int, int]]]:
    """Return by place of a square's digit the (i, j, factor) of the digits whose products it sums."""
    out: dict[int, list[tuple[int, int, int]]] = {}
    for i in places:
        for j in range(i, places.stop):
            out.setdefault(i + j, []).append((i, j, 1 if i == j else 2))
    return out


def sql_digits(x: str, places: range) -> dict[int, str]:
    """Return `digits` as Spark SQL expressions, bigint. `x` is the name of a column of usable doubles.

    They are texts, since each operation on a `Column` is a call to the JVM, and these would be thousands.
    """

    def truncated(place: int) -> str:
        y = f"({x} * {2.0 ** (-BITS * place)!r}D)"
        # From 2**53 on every double is whole, and beyond 2**63 no bigint holds it.
        return f"(CASE WHEN abs{y} < {2.0**53!r}D THEN double(bigint{y}) ELSE {y} END)"

    out = {}
    for place in places:
        part = truncated(place)
        if place + 1 < places.stop:
            part += f" - {truncated(place + 1)} * {float(_BASE)!r}D"
        out[place] = f"bigint({part})"
    return out


def sql_square_digits(digits: Mapping[int, str], places: range) -> dict[int, str]:
    """Return `square_digits` as Spark SQL expressions, bigint. `digits` are names of columns."""
    terms: dict[int, list[str]] = {}
    for place, pairs in _pairs(places).items():
        added = " + ".join(f"{digits[i]} * {digits[j]} * {weight}L" for i, j, weight in pairs)
        terms.setdefault(place, []).append(f"(({added}) & {_BASE - 1}L)")
        terms.setdefault(place + 1, []).append(f"shiftright({added}, {BITS})")
    return {place: " + ".join(parts) for place, parts in terms.items()}


def normalized(sums: Mapping[int, I64]) -> dict[int, I64]:
    """Carry the sums of digits, so that each digit is from -2**26 to 2**26 - 1. This form is unique.

    Places where all digits are 0 are left out. int64 [n] each.
    """
    if not sums:
        return {}
    out, place, last = {}, min(sums), max(sums)
    carry = np.zeros_like(next(iter(sums.values())))
    while place <= last or carry.any():
        total = sums.get(place, 0) + carry
        carry = (total + _BASE // 2) >> BITS
        digit = total - (carry << BITS)
        if digit.any():
            out[place] = digit
        place += 1
    return out


def integers(sums: Mapping[int, I64], n: int) -> tuple[npt.NDArray[Any], int]:
    """Return (numbers, e): the values are numbers * 2**e, exactly.

    int64 [n] where that holds them, else Python's int [n].
    """
    if not sums:
        return np.zeros(n, np.int64), 0
    low, high = min(sums), max(sums)
    if high == low:
        return sums[low], BITS * low
    out = np.zeros(n, object)
    for place in range(high, low - 1, -1):
        out = out * _BASE + (sums[place].astype(object) if place in sums else 0)
    return out, BITS * low


def fraction(sums: Mapping[int, I64]) -> Fraction:
    """Return the number whose digits are sums of a single group."""
    return sum((Fraction(int(digit[0])) * Fraction(2) ** (BITS * place) for place, digit in sums.items()), Fraction())


def means(sums: Mapping[int, I64], counts: I64) -> F64:
    """Return sum / count, rounded once; NaN where the count is 0. [n] -> float64 [n]."""
    numbers, exponent = integers(sums, len(counts))
    return _ratio(numbers, np.maximum(counts, 1), exponent, counts > 0)


def deviations(sums: Mapping[int, I64], squares: Mapping[int, I64], counts: I64) -> F64:
    """Return standard deviations with the divisor n - 1; 0 for one number, NaN for none. [n] -> float64 [n]."""
    n = counts.astype(object)
    first, low = integers(sums, len(counts))
    second, low2 = integers(squares, len(counts))
    first, second = first.astype(object), second.astype(object)
    exponent = min(2 * low, low2)
    spread = n * (second << (low2 - exponent)) - ((first * first) << (2 * low - exponent))
    denominators = np.maximum(n * (n - 1), 1)
    return np.sqrt(_ratio(spread, denominators, exponent, counts > 0))


def floats(sums: Mapping[int, I64], n: int) -> F64:
    """Return the sums, each rounded once. [n] -> float64 [n]."""
    numbers, exponent = integers(sums, n)
    return np.ldexp(numbers.astype(np.float64), exponent)


def _ratio(
    numerators: npt.NDArray[Any], denominators: npt.NDArray[Any], exponent: int, is_defined: npt.NDArray[np.bool_]
) -> F64:
    # Python divides whole numbers of any length with one rounding.
    ratio = numerators.astype(object) / denominators.astype(object) if len(numerators) else numerators
    return np.where(is_defined, np.ldexp(ratio.astype(np.float64), exponent), np.nan)


def total(x: F64, places: range, squares: bool, weights: I64 | None = None) -> tuple[dict[int, int], dict[int, int]]:
    """Return sums of the digits of usable numbers without NaN and, with `squares`, of their squares.

    `weights`: how many times each number counts; None: once.
    """
    first = dict.fromkeys(places, 0)
    second = dict.fromkeys(square_places(places), 0) if squares else {}
    step = 1 << 15  # numbers that fit a core's cache
    for start in range(0, len(x), step):
        digits_of_step = digits(x[start : start + step], places)
        w = None if weights is None else weights[start : start + step]
        for sums, parts in (
            (first, digits_of_step),
            (second, square_digits(digits_of_step, places) if squares else {}),
        ):
            for place, part in parts.items():
                sums[place] += int(part.sum() if w is None else (part * w).sum())
    return first, second


def grouped(
    x: F64, groups: npt.NDArray[np.intp], n: int, places: range, squares: bool
) -> tuple[dict[int, I64], dict[int, I64]]:
    """Return `total` by group: usable numbers without NaN, each with its group 0..n-1. -> int64 [n] each."""
    first = {place: np.zeros(n, np.int64) for place in places}
    second = {place: np.zeros(n, np.int64) for place in square_places(places)} if squares else {}
    step = 1 << 20  # 2**20 digits of at most 2**32 add up to less than 2**53: exact as doubles
    for start in range(0, len(x), step):
        digits_of_step, g = digits(x[start : start + step], places), groups[start : start + step]
        for sums, parts in (
            (first, digits_of_step),
            (second, square_digits(digits_of_step, places) if squares else {}),
        ):
            for place, part in parts.items():
                sums[place] += np.bincount(g, weights=part, minlength=n).astype(np.int64)
    return first, second
