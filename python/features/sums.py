"""Sums of doubles that do not depend on the order in which Spark adds them.

A sum of doubles in another order has another last bit, and Spark's order is whichever task ends first; then a rerun
writes other bits. Here every value is cut into a few slices on fixed grids, each so coarse that the sum of all rows is
exact whatever the order (Demmel and Nguyen, "Parallel Reproducible Summation", 2015, the 1-reduction; here with a bound
known before, in three slices). Plain column arithmetic, so it runs wherever Spark's does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

_SLICES = 3
#: Grids below this are not normal numbers any more; what is smaller is dropped.
_LOWEST = -900


def grids(rows: int, bound: float) -> tuple[float, ...]:
    """Constants that round values of magnitude up to `bound` to a grid on which `rows` of them sum exactly.

    With n rows the slices keep at least 3 * (52 - log2 n - 1) bits below `bound`: 66 for a thousand million rows.
    """
    exponent = math.frexp(bound)[1]
    spare = rows.bit_length() + 1
    out = []
    for _ in range(_SLICES):
        top = max(exponent + spare, _LOWEST)
        out.append(1.5 * 2.0**top)
        exponent = top - 53  # what is left is at most half a step of this grid
    return tuple(out)


def slices(name: str, x: Column, constants: tuple[float, ...]) -> dict[str, Column]:
    """Aggregates that `total` puts together. `x` is double; nulls are left out."""
    from pyspark.sql import functions as F

    out = {}
    rest = x
    for i, constant in enumerate(constants):
        # Adding and taking away the constant rounds to its grid. Catalyst reorders integer sums only.
        part = (rest + F.lit(constant)) - F.lit(constant)
        out[f"{name}.{i}"] = F.sum(part)
        rest = rest - part
    return out


def total(name: str, answer: Mapping[str, float | None], count: int) -> Fraction:
    """The exact sum of all slices."""
    return sum((Fraction(answer[f"{name}.{i}"] or 0.0) for i in range(count)), Fraction())
