"""Inputs of a request as blocks: those that follow each other, of one type and shape, as one array [inputs, rows, ...].

Merging requests and looking for NaNs then cost a call of NumPy's for each block and not for each input: a DLRM's 26
codes, which a client sends one behind the other, are one block, a view of the request's body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from headrace.serve.tensors import Array

Blocks = Sequence[Array]
#: Of each block how many inputs it has, and their shape behind their rows.
ShapeKey = tuple[tuple[int, ...], ...]


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def blocks_of(inputs: Iterable[Array]) -> list[Array]:
    """Each input as a block of its own."""
    return [x[np.newaxis] for x in inputs]


def inputs_of(blocks: Blocks) -> list[Array]:
    """The inputs in order: views."""
    found: list[Array] = []
    for block in blocks:
        # Numbers of a block of one dimension would be no arrays.
        found.extend(block if block.ndim > 1 else [block.reshape(())])
    return found


def key_of(blocks: Iterable[_Shaped]) -> ShapeKey:
    """Requests of the same one can be merged."""
    return tuple(x.shape[:1] + x.shape[2:] for x in blocks)


def merged(requests: Sequence[Blocks]) -> list[Array]:
    """Blocks of the rows of all requests, one request behind the other; all have the same `key_of`."""
    return [np.concatenate(parts, axis=1) for parts in zip(*requests, strict=True)]
