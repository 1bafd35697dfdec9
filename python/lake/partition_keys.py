"""Keys by which Spark's hash partitioning puts rows where they are wanted."""

from __future__ import annotations


def partition_keys(partitions: int) -> list[int]:
    """For each partition an int that Spark's hash partitioning puts there: so that each part has a task of its own.

    Without it parts share tasks at random, and the longest task decides. The result is the same either way.
    """
    keys: dict[int, int] = {}
    candidate = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(candidate) % partitions, candidate)
        candidate += 1
    return [keys[i] for i in range(partitions)]


def _murmur3(x: int) -> int:
    """Spark's `hash` of an int: Murmur3 x86 32 (Appleby), seed 42; a signed number."""
    mask = 0xFFFFFFFF

    def rotl(v: int, r: int) -> int:
        return ((v << r) | (v >> (32 - r))) & mask

    k = rotl(x * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotl(42 ^ k, 13) * 5 + 0xE6546B64) & mask
    h ^= 4
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h
