"""Hashes of ids and initial values of rows by torch on any device, bit for bit those of NumPy (id_map, storage).

torch has no arithmetic of unsigned 64-bit numbers: int64 wraps alike, and shifts are masked.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LOW = 0xFFFFFFFF


def _signed(x: int) -> int:
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _finish(x: Tensor) -> Tensor:
    """Apply SplitMix64's finisher."""
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def mix(ids: Tensor, salt: int = 0) -> Tensor:
    """Hash ids int64 [N] like headrace.embeddings.kernels.id_map.mix: its 64 bits as int64."""
    return _finish(ids + _signed((salt + 1) * _GOLDEN))


def remainder(hashes: Tensor, divisor: int) -> Tensor:
    """Return hashes, as unsigned numbers, modulo a divisor below 2^31."""
    high, low = _shifted(hashes, 32), hashes & _LOW
    return (high % divisor * (2**32 % divisor) + low % divisor) % divisor


def uniform(hashes: Tensor) -> Tensor:
    """Return hashes, as unsigned numbers, over 2^64: float64 in [0, 1]."""
    return (_shifted(hashes, 32).double() * 2.0**32 + (hashes & _LOW).double()) / 2.0**64


def initial_values(table: str, ids: Tensor, columns: int, seed: int, bound: float) -> Tensor:
    """Compute headrace.embeddings.storage.initial_values of the rows `ids` int64 [N]: float32 [N, columns]."""
    text = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    key = _signed(int.from_bytes(text[:8], "little"))
    pairs = torch.arange((columns + 1) // 2, device=ids.device) * _signed(_GOLDEN)
    hashed = _finish(_finish(ids * _signed(_GOLDEN) + key).unsqueeze(1) + pairs)
    halves = torch.stack([hashed & _LOW, _shifted(hashed, 32)], dim=2).view(len(ids), 2 * len(pairs))[:, :columns]
    # As float32 numbers, one operation after the other.
    scale, start = (torch.tensor(x, dtype=torch.float32, device=ids.device) for x in (bound / 2**23, bound))
    return (halves >> 8).float().mul_(scale).sub_(start)


def lexsort(*keys: Tensor) -> Tensor:
    """Return the order by the last key, ties by the key before it, and so on, as numpy.lexsort: int64 [N]."""
    order = torch.argsort(keys[0], stable=True)
    for key in keys[1:]:
        order = order[torch.argsort(key[order], stable=True)]
    return order
