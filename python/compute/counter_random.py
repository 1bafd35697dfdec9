"""Counter-based random numbers: each is a hash of (seed, purpose, row or entity), so there is no generator state.

Any row of any day can be generated alone. A day's bytes therefore depend neither on the rows and days generated before
it nor on the number of processes. The hash is SplitMix64's finaliser (Steele, Lea and Flood, *Fast splittable
pseudorandom number generators*, OOPSLA 2014), applied twice.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

UInts = NDArray[np.uint64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: SplitMix64's increment.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HEX = np.frombuffer(b"".join(b"%02x" % i for i in range(256)), dtype="S2")


def stream(seed: int, purpose: str) -> int:
    """Return the 64-bit key of one purpose ("user", "label", ...): streams of different purposes are independent."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "little")


def mix(x: UInts) -> UInts:
    """Apply SplitMix64's finaliser (Steele et al., 2014) to each number: uint64 of the same shape."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def bits(key: int, counter: UInts | Ints) -> UInts:
    """Draw 64 random bits for each counter: uint64 of the counter's shape."""
    return mix(mix(counter.astype(np.uint64) * GOLDEN + np.uint64(key)) ^ np.uint64(key))


def uniform(key: int, counter: UInts | Ints) -> Floats:
    """Draw uniform numbers in [0, 1): float64 of the counter's shape."""
    return (bits(key, counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(key: int, counter: UInts | Ints, high: int) -> Ints:
    """Draw uniform integers in [0, high): int64 of the counter's shape.

    `high` is up to 2^40: the bias is then below 2^-13 of a share.
    """
    return np.minimum((uniform(key, counter) * high).astype(np.int64), high - 1)


def normal(key: int, counter: UInts | Ints, columns: int = 1) -> Floats:
    """Draw standard normal numbers: float64 [n, columns] for a counter of [n] (Box and Muller, 1958)."""
    pairs = (columns + 1) // 2
    wide = counter.astype(np.uint64)[:, None] * np.uint64(2 * pairs) + np.arange(2 * pairs, dtype=np.uint64)[None, :]
    u = uniform(key, wide)
    radius = np.sqrt(-2.0 * np.log1p(-u[:, :pairs]))
    angle = 2.0 * np.pi * u[:, pairs:]
    normals: Floats = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return normals[:, :columns]


def scatter_ids(key: int, index: Ints, width: int) -> Ints:
    """Map [0, 2^width) one to one onto itself, low ids spread over the whole range: int64 [n], all of them >= 0.

    Odd multipliers and right xor-shifts are each invertible modulo 2^width, so no two indices share an id.
    """
    mask = np.uint64((1 << width) - 1)
    half = np.uint64((width + 1) // 2)
    x = (index.astype(np.uint64) + np.uint64(key)) & mask
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = (x * np.uint64(multiplier)) & mask
        x ^= x >> half
    return x.astype(np.int64)


def hexadecimal(values: UInts) -> NDArray[np.bytes_]:
    """Format each value as 16 hex digits: bytes `S16` [n]."""
    high_first = np.ascontiguousarray(values.astype(">u8")).view(np.uint8)
    return np.ascontiguousarray(_HEX[high_first]).view("S16")


def scatter_64(key: int, counter: UInts | Ints) -> UInts:
    """Map the 64-bit integers one to one onto themselves, by one pass of the finaliser: uint64, same shape."""
    return mix(counter.astype(np.uint64) ^ np.uint64(key))
