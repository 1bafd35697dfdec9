"""Spark's log1p, written again for NumPy so that both engines of an operator agree to the last bit.

Only operations that IEEE 754 defines exactly are used, so the results do not depend on the machine's mathematical
library or vector width either (NumPy's own log1p does: it has an AVX-512 version).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

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
